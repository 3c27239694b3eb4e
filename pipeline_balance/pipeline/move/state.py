"""Training state of a pipeline as pieces of a space: parameters, buffers, gradients, what optimizers keep.

Names are the unsplit model's: `3.mlp.weight` is a parameter or buffer, `3.mlp.weight#grad` its gradient,
`3.mlp.weight@exp_avg` an entry of its optimizer state, `3.mlp.weight%ema` what is registered for it. Every rank
describes what it holds in JSON; the union is the space. Optimizer entries that are plain numbers travel in the
description.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.ownership import Ownership, local
from pipeline_balance.pipeline.model.registered import MARK, registered
from pipeline_balance.pipeline.run.optimizers import Optimizers
from pipeline_balance.spec import StageMap
from prophet.errors import LayoutError
from prophet.state.layout import Layout, whole_tensors
from prophet.state.space import ITEM_BYTES, Space, StateKind, TensorSpec


@dataclass
class Held:
    """What one rank holds: tensors with their description, and what is not a tensor."""

    specs: list[TensorSpec] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | float | bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Sequence[Item]) -> Held:
        """These with their description; any thread may ask, as no step changes the form of what is there."""
        held = cls()
        for item in found:
            if item.parameter is None:
                held.add(item.name, item.value, item.kind, item.unit)
            else:
                held.add_state(item.name, item.entry, item.value, item.parameter.device, item.unit)
        return held

    def add(self, name: str, tensor: Tensor, kind: StateKind, unit: int) -> None:
        """Take in a tensor of `unit`; `LayoutError` for a kind of tensor that cannot be moved."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or tensor.layout != torch.strided:
            raise LayoutError(f"{name}: a {tensor.layout} tensor of {dtype} cannot be moved")
        self.specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind, layer=unit))
        self.tensors[name] = local(tensor).detach()

    def add_state(self, key: str, entry: str, value: Any, device: torch.device, unit: int) -> None:
        """Take in one entry of an optimizer's state for parameter `key`."""
        if isinstance(value, Tensor) and (value.dim() > 0 or value.device == device):
            self.add(f"{key}@{entry}", value, "optimizer", unit)
        elif isinstance(value, Tensor):
            self.scalars[f"{key}@{entry}:{str(value.dtype).removeprefix('torch.')}"] = value.item()
        elif value is None or isinstance(value, int | float):
            self.scalars[f"{key}@{entry}"] = value
        else:
            raise LayoutError(f"{key}: optimizer state {entry!r} is a {type(value).__name__}, cannot be moved")


class Item(NamedTuple):
    """A tensor, or what an optimizer keeps as its `entry` for `parameter`, as it was found; `unit` holds it."""

    name: str
    value: Any
    kind: StateKind
    unit: int
    entry: str = ""
    parameter: Tensor | None = None


def items(owned: Ownership, optimizers: Optimizers, units: Collection[int], *, gradients: bool = True) -> list[Item]:
    """Everything that belongs to `units`, which run on this rank; quick, for `Held.of` to look at closer.

    Without `gradients`, those are left out: a backward pass may be filling them in at this moment.
    """
    found: list[Item] = []
    state = optimizers.state()
    for name in owned.of(units):
        parameter, unit = owned.parameters[name], owned.units_of[name][0]
        if parameter.is_meta:
            raise LayoutError(f"{name} has no memory on this rank, which runs layer {unit}: load its state first")
        found.append(Item(name, parameter, "parameter", unit))
        if gradients and parameter.grad is not None:
            found.append(Item(f"{name}#grad", parameter.grad, "gradient", unit))
        for entry, value in state.get(id(parameter), {}).items():
            found.append(Item(name, value, "optimizer", unit, entry, parameter))
        for key, handle in registered(name, parameter):
            found.append(Item(key, handle.tensor, "registered", unit))
    for name, buffer in owned.buffers.items():
        if not set(buffer.units).isdisjoint(units):
            found.append(Item(name, buffer.tensor, "buffer", buffer.units[0]))
    return found


def collect(owned: Ownership, optimizers: Optimizers, units: Collection[int], *, gradients: bool = True) -> Held:
    """The same `items` with their description."""
    return Held.of(items(owned, optimizers, units, gradients=gradients))


def space_of(rows: Sequence[Sequence[Any]]) -> Space:
    """The space of the tensors that ranks have described, each as [name, shape, dtype, kind, layer], layer by layer."""
    found = {row[0]: row for row in rows}  # copies say the same
    specs = [
        TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind, layer=layer)
        for name, shape, dtype, kind, layer in found.values()
    ]
    return Space(tuple(sorted(specs, key=lambda t: (t.layer or 0, t.name))))


def spec_rows(specs: Sequence[TensorSpec]) -> list[list[Any]]:
    """Tensors as `space_of` takes them, in what JSON can say."""
    return [[s.name, s.shape, s.dtype, s.kind, s.layer] for s in specs]


def specs_of(held: Held | str) -> tuple[TensorSpec, ...]:
    """The description of what a rank holds; empty where it could not be found."""
    return tuple(held.specs) if isinstance(held, Held) else ()


def refuse_odd(name: str, shape: Sequence[int], parameter: Sequence[int]) -> None:
    """Raise `LayoutError` for a tensor kept for a parameter that cannot be cut as it is, nor is one number."""
    if tuple(shape) not in (tuple(parameter), (), (1,)):
        raise LayoutError(f"{name} is {list(shape)}, of neither its parameter's shape nor one number")


def base_name(name: str) -> str:
    """The parameter or buffer that a piece of state belongs to."""
    return name.split("#", 1)[0].split("@", 1)[0].split(MARK, 1)[0]


def by_layer(
    space: Space, stage_map: StageMap, ranks: int, tied: Mapping[str, tuple[int, ...]] | None = None
) -> Layout:
    """Whole tensors on the rank that runs their layer; tensors without a layer on all ranks.

    What belongs to a `tied` parameter is on the ranks of all its layers.
    """
    home = stage_map.assignment()
    holders: list[Sequence[int]] = []
    for tensor in space.tensors:
        if tensor.layer is None:
            holders.append(range(ranks))
            continue
        if not 0 <= tensor.layer < stage_map.layers:
            raise LayoutError(f"{tensor.name} is of layer {tensor.layer}, outside 0..{stage_map.layers - 1}")
        units = tied.get(base_name(tensor.name), (tensor.layer,)) if tied else (tensor.layer,)
        holders.append(sorted({home[u] for u in units}))
        if holders[-1][-1] >= ranks:
            raise LayoutError(f"{tensor.name} is to live on rank {holders[-1][-1]} of {ranks}")
    return whole_tensors(space, ranks, holders)


def state_entries(values: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name, from moved tensors and what travelled in words."""
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in values.items():
        if "@" in name:
            key, entry = name.split("@", 1)
            entries.setdefault(key, {})[entry] = tensor
    for name, value in scalars.items():
        key, entry = name.split("@", 1)
        entry, _, dtype = entry.partition(":")
        entries.setdefault(key, {})[entry] = torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
    return entries
