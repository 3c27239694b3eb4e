"""State dicts of a converted layer as Tutel's own layer has them: this rank's experts, stacked, under Tutel's names.

Shape legend: m experts of this rank, D model dim, H hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prophet.convert import RoutedExperts


def keep_original_layout(layer: RoutedExperts) -> None:
    """Translate what `state_dict` of a converted layer gives and what `load_state_dict` is given.

    What it gives are copies, not the parameters themselves. Checkpoints of prophet's own layout load as before.
    """
    module: Any = layer  # whose hooks torch has not annotated
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def _save(layer: RoutedExperts, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the layer's entries by the original ones. Not collective: a rank keeps the experts that it had."""
    for key in [k for k in state_dict if k.startswith(prefix)]:
        del state_dict[key]
    for name, value in layer.here().items():
        state_dict[prefix + name] = value


def _load(layer: RoutedExperts, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Replace original entries by the layer's; what is not there or does not fit leaves the experts as they are."""
    _metadata, _strict, missing_keys, _unexpected_keys, error_msgs = rest
    shapes = {name: tuple(p.shape) for name, p in layer.origin.skeleton.named_parameters()}
    inner = f"{prefix}experts."
    here = inner if layer.keys_prefix("") == "" else prefix  # whose keys the layer has moved already
    given = {name: state_dict.pop(here + name) for name in shapes if here + name in state_dict}
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
            given[name] = value.view(shape)  # Tutel takes flat ones, too
    state_dict |= {inner + key: value for key, value in layer.entries_of(given if usable else layer.here()).items()}
