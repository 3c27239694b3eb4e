"""The whole model's `state_dict` on one rank, in the unsplit model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.model.skeleton import copy_of
from pipeline_balance.pipeline.run.agreement import write_alone
from pipeline_balance.pipeline.run.stages import PipelineConfig
from prophet.errors import SpecError
from prophet.ranks.collective import Collective


def root_state(
    owned: Ownership,
    found: Mapping[str, Tensor],
    prepare: Callable[[nn.Module], None] = lambda root: None,
    state_dict_of: Callable[[nn.Module], dict[str, Any]] = nn.Module.state_dict,
) -> dict[str, Tensor]:
    """Take the root's `state_dict` in the host's memory, without touching the root.

    Args:
        owned: Parameters and buffers of the unsplit model.
        found: Their values by name, gathered from all ranks.
        prepare: Changes the copy first: modules may save parameters under other names, or in parts.
        state_dict_of: Takes the `state_dict` of the copy.

    Returns:
        The entries by their names, with what is no tensor as it is.

    Raises:
        SpecError: An entry has no memory.
    """
    root, names = owned.model.root, {id(p): n for n, p in owned.parameters.items()}
    values = {name: tensor.detach().cpu() for name, tensor in found.items()}
    parameters = {n: nn.Parameter(values[n], requires_grad=False) for n in names.values() if n in values}

    # by object and not by name: a tied parameter comes under several names
    def slot(_: str, p: Tensor) -> Tensor:
        return parameters.get(names.get(id(p), ""), p)

    # a copy: the model's parameters are on `meta` here, and must stay so
    copy = copy_of(root, slot, {}, hooks=lambda kind: None)
    for (path, _), part in zip(root.named_modules(), copy.modules(), strict=True):
        part._buffers.update({k: values.get(f"{path}.{k}" if path else k, b) for k, b in part._buffers.items()})
    prepare(copy)
    state = {name: t.detach().cpu() if isinstance(t, Tensor) else t for name, t in state_dict_of(copy).items()}
    lacking = [name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta]
    if lacking:
        raise SpecError(
            f"{lacking[0]} was not gathered: it belongs to no layer of the pipeline, and has no memory here"
        )
    return state


def write_pretrained(
    model: nn.Module,
    state: dict[str, Tensor],
    folder: str | Path,
    options: dict[str, Any],
    collective: Collective,
    config: PipelineConfig,
) -> None:
    """Write a model by its class's `save_pretrained`, with `state` as what it holds, on rank 0; collective.

    Returns when everything is written.

    Args:
        model: The unsplit model.
        state: Its whole `state_dict`; only rank 0 needs it.
        folder: Where to write.
        options: Options of `save_pretrained`.
        collective: Over all ranks.
        config: How the pipeline trains, for its device.

    Raises:
        SpecError: On all ranks where writing fails.
    """
    # of the class: a converted model's method would gather what is in `state` already
    write: Any = getattr(type(model), "save_pretrained", None)

    def save() -> None:
        if write is None:
            raise SpecError(f"a {type(model).__name__} has no save_pretrained: torch.save its state_dict() instead")
        write(model, folder, state_dict=state, **options)

    write_alone(save, f"writing {folder}", collective)
