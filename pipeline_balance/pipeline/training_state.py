"""Training state of a pipeline as pieces of a space: parameters, buffers, gradients, what optimizers keep.

Names are the unsplit model's: `3.mlp.weight` is a parameter or buffer, `3.mlp.weight#grad` its gradient,
`3.mlp.weight@exp_avg` an entry of its optimizer state. Every rank describes what it holds in JSON; the union is the
space. Optimizer entries that are plain numbers travel in the description.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.optimizers import Optimizers
from pipeline_balance.pipeline.ownership import Ownership, local
from pipeline_balance.spec import StageMap
from prophet.errors import LayoutError, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.layout import Layout, layout_from
from prophet.state.space import ITEM_BYTES, Box, Space, StateKind, TensorSpec

MAX_DESCRIPTION_BYTES = 1 << 28


@dataclass
class Held:
    """What one rank holds: tensors with their description, and what is not a tensor."""

    specs: list[TensorSpec] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | float | bool | None] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, kind: StateKind, unit: int) -> None:
        """Take in a tensor of `unit`; `LayoutError` for a kind of tensor that cannot be moved."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or tensor.layout != torch.strided:
            raise LayoutError(f"{name}: a {tensor.layout} tensor of {dtype} cannot be moved")
        self.specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind, layer=unit))
        self.tensors[name] = local(tensor.detach())

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


def collect(owned: Ownership, optimizers: Optimizers, units: Collection[int], *, gradients: bool = True) -> Held:
    """Everything that belongs to `units`, which run on this rank.

    Without `gradients`, those are left out: a backward pass may be filling them in at this moment.
    """
    held = Held()
    state = optimizers.state()
    for name in owned.of(units):
        parameter, unit = owned.parameters[name], owned.units_of[name][0]
        if parameter.is_meta:
            raise LayoutError(f"{name} has no memory on this rank, which runs layer {unit}: load its state first")
        held.add(name, parameter, "parameter", unit)
        if gradients and parameter.grad is not None:
            held.add(f"{name}#grad", parameter.grad, "gradient", unit)
        for entry, value in state.get(id(parameter), {}).items():
            held.add_state(name, entry, value, parameter.device, unit)
    for name, buffer in owned.buffers.items():
        if not set(buffer.units).isdisjoint(units):
            held.add(name, buffer.tensor, "buffer", buffer.units[0])
    return held


def gather_json(value: Any, collective: Collective, device: torch.device, op: Operation) -> list[Any]:
    """Every rank's `value` (anything JSON can say), by rank."""
    text = json.dumps(value).encode()
    sizes = collective.all_gather(torch.tensor([len(text)], device=device), op=op).cpu().reshape(-1).tolist()
    if max(sizes) > MAX_DESCRIPTION_BYTES:
        raise LayoutError(f"{op}: a rank sends {max(sizes)} bytes, more than {MAX_DESCRIPTION_BYTES}")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = collective.all_gather(padded.to(device), op=op).cpu()
    return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]


def agree(problem: str, collective: Collective, device: torch.device, op: Operation, after: str) -> None:
    """Raise `TransitionError` on every rank if any has a `problem` (empty: none), naming rank and problem."""
    every = gather_json(problem, collective, device, op)
    refuse([(r, said) for r, said in enumerate(every) if said], after)


def refuse(problems: list[tuple[int, str]], after: str) -> None:
    """Raise `TransitionError` for what ranks have said, if they have."""
    if problems:
        raise TransitionError("; ".join(f"rank {r}: {said}" for r, said in problems[:3]) + f"; {after}")


def share(held: Held | str, collective: Collective, device: torch.device, after: str) -> tuple[Space, dict[str, Any]]:
    """The space of all ranks' tensors and all scalars by name. A rank that could not collect gives the reason.

    Raises `TransitionError` on every rank then, with `after` for how things stand.
    """
    mine = {
        "problem": held if isinstance(held, str) else "",
        "tensors": []
        if isinstance(held, str)
        else [[s.name, list(s.shape), s.dtype, s.kind, s.layer] for s in held.specs],
        "scalars": {} if isinstance(held, str) else held.scalars,
    }
    tensors: dict[str, TensorSpec] = {}
    scalars: dict[str, Any] = {}
    every = gather_json(mine, collective, device, Operation("describing state"))
    refuse([(r, s["problem"]) for r, s in enumerate(every) if s["problem"]], after)
    for row in every:
        for name, shape, dtype, kind, unit in row["tensors"]:
            tensors[name] = TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind, layer=unit)
        for name, value in row["scalars"].items():
            scalars.setdefault(name, value)  # of the lowest rank that has it
    return Space(tuple(sorted(tensors.values(), key=lambda t: (t.layer or 0, t.name)))), scalars


def base_name(name: str) -> str:
    """The parameter or buffer that a piece of state belongs to."""
    return name.split("#", 1)[0].split("@", 1)[0]


def by_layer(
    space: Space, stage_map: StageMap, ranks: int, tied: Mapping[str, tuple[int, ...]] | None = None
) -> Layout:
    """Whole tensors on the rank that runs their layer; tensors without a layer on all ranks.

    What belongs to a `tied` parameter is on the ranks of all its layers.
    """
    home = stage_map.assignment()
    rows: dict[int, list[tuple[str, Box]]] = {r: [] for r in range(ranks)}
    for tensor in space.tensors:
        if tensor.layer is not None and not 0 <= tensor.layer < stage_map.layers:
            raise LayoutError(f"{tensor.name} is of layer {tensor.layer}, outside 0..{stage_map.layers - 1}")
        units = (tied or {}).get(base_name(tensor.name), (tensor.layer,) if tensor.layer is not None else ())
        for rank in range(ranks) if tensor.layer is None else sorted({home[u] for u in units}):
            if rank >= ranks:
                raise LayoutError(f"{tensor.name} is to live on rank {rank} of {ranks}")
            rows[rank].append((tensor.name, tensor.box))
    return layout_from(space, ranks, rows)


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
