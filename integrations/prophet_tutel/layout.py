"""State dicts of a converted layer as Tutel's own layer has them: this rank's experts, stacked, under Tutel's names.

Shape legend: m experts of this rank, D model dim, H hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prophet.convert import RoutedExperts


def keep_original_layout(layer: RoutedExperts) -> None:
    """Translate what `state_dict` of a converted layer returns and what `load_state_dict` is given.

    What it returns are copies, not the parameters themselves. Checkpoints in this library's layout load as before.
    """
    # torch has not annotated these methods
    module: Any = layer
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def _save(layer: RoutedExperts, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the layer's entries by the original ones. Not collective: a rank keeps the experts that it had."""
    for key in [k for k in state_dict if k.startswith(prefix)]:
        del state_dict[key]
    for name, value in layer.here().items():
        state_dict[prefix + name] = value


def _load(layer: RoutedExperts, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Replace original entries by the layer's; where some are missing or do not fit, the experts stay as they are."""
    _metadata, _strict, missing_keys, _unexpected_keys, error_msgs = rest
    shapes = {name: tuple(p.shape) for name, p in layer.origin.skeleton.named_parameters()}
    inner = f"{prefix}experts."
    # Such a layer has moved these keys already
    here = inner if layer.keys_prefix("") == "" else prefix
    given = {name: state_dict.pop(here + name) for name in shapes if here + name in state_dict}
    # A checkpoint in this library's own layout: nothing to translate
    if not given and any(key.startswith(inner) for key in state_dict):
        return
    usable = True
    for name, shape in shapes.items():
        value = given.get(name)
        if value is None:
            missing_keys.append(prefix + name)
            usable = False
        elif not isinstance(value, Tensor) or value.numel() != torch.Size(shape).numel():
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            error_msgs.append(f"{prefix}{name}: expected a tensor of shape {list(shape)}, got {got}")
            usable = False
        else:
            # Tutel takes flat ones, too
            given[name] = value.view(shape)
    # Where something is wrong, what the layer has is loaded again: torch raises for the messages afterwards.
    state_dict |= {inner + key: value for key, value in layer.entries_of(given if usable else layer.here()).items()}
