"""Training state of pipeline layers as pieces of a space: parameters, buffers, gradients, moments, random streams.

Names: `3/mlp.weight` is a parameter or buffer of layer 3, `3/mlp.weight#grad` its gradient, `3/mlp.weight@exp_avg` an
entry of its optimizer state, `3!rng` the layer's random stream. Every rank describes what it holds in JSON; the union
is the space. Optimizer entries that are plain numbers travel in the description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.control.measure import PipelineLayer
from pipeline_balance.spec import StageMap
from prophet.errors import LayoutError
from prophet.ranks.collective import Collective, Operation
from prophet.state.layout import Layout, Piece, layout_from
from prophet.state.space import ITEM_BYTES, Box, Space, StateKind, TensorSpec

MAX_DESCRIPTION_BYTES = 1 << 28


@dataclass
class Held:
    """What one rank holds: tensors with their description, and what is not a tensor."""

    specs: list[TensorSpec] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | float | bool | None] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, kind: StateKind, layer: int) -> None:
        """Take in a tensor of `layer`; `LayoutError` for a kind of tensor that cannot be moved."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or tensor.layout != torch.strided:
            raise LayoutError(f"{name}: a {tensor.layout} tensor of {dtype} cannot be moved")
        self.specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind, layer=layer))
        self.tensors[name] = tensor.detach()


def collect(
    layers: Mapping[int, PipelineLayer], optimizer: torch.optim.Optimizer | None, *, gradients: bool = True
) -> Held:
    """Everything that belongs to the layers of this rank. Parameters shared between layers are refused.

    Without `gradients`, those are left out: a backward pass may be filling them in at this moment.
    """
    held = Held()
    owner: dict[int, int] = {}
    for index in sorted(layers):
        layer = layers[index]
        for name, parameter in layer.module.named_parameters():
            if owner.setdefault(id(parameter), index) != index:
                raise LayoutError(
                    f"layers {owner[id(parameter)]} and {index} share the parameter {name}: "
                    f"they could not be on different ranks; untie them"
                )
            key = f"{index}/{name}"
            held.add(key, parameter, "parameter", index)
            if not parameter.requires_grad:
                held.frozen.append(key)
            if gradients and parameter.grad is not None:
                held.add(f"{key}#grad", parameter.grad, "gradient", index)
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for entry, value in state.items():
                if isinstance(value, Tensor) and (value.dim() > 0 or value.device == parameter.device):
                    held.add(f"{key}@{entry}", value, "optimizer", index)
                elif isinstance(value, Tensor):
                    held.scalars[f"{key}@{entry}:{str(value.dtype).removeprefix('torch.')}"] = value.item()
                elif value is None or isinstance(value, int | float):
                    held.scalars[f"{key}@{entry}"] = value
                else:
                    raise LayoutError(f"{key}: optimizer state {entry!r} is a {type(value).__name__}, cannot be moved")
        for name, buffer in layer.module.named_buffers():
            held.add(f"{index}/{name}", buffer, "buffer", index)
        if layer.has_stream:
            device = next((p.device for p in layer.parameters()), torch.device("cpu"))
            held.add(f"{index}!rng", layer.rng_state.to(device), "rng", index)
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


def share(held: Held, collective: Collective, device: torch.device) -> tuple[Space, dict[str, Any], set[str]]:
    """The space of all ranks' tensors, all scalars by name, and the names of all frozen parameters."""
    mine = {
        "tensors": [[s.name, list(s.shape), s.dtype, s.kind, s.layer] for s in held.specs],
        "scalars": held.scalars,
        "frozen": held.frozen,
    }
    tensors: list[TensorSpec] = []
    scalars: dict[str, Any] = {}
    frozen: set[str] = set()
    for said in gather_json(mine, collective, device, Operation("describing state")):
        tensors += [
            TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind, layer=layer)
            for name, shape, dtype, kind, layer in said["tensors"]
        ]
        scalars.update(said["scalars"])
        frozen.update(said["frozen"])
    return Space(tuple(sorted(tensors, key=lambda t: (t.layer or 0, t.name)))), scalars, frozen


def apply(
    layers: Mapping[int, PipelineLayer],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    state: Mapping[Piece, Tensor],
    scalars: Mapping[str, Any],
    frozen: set[str],
) -> torch.optim.Optimizer | None:
    """Put moved state into the layers that this rank now runs; returns its optimizer, with the state it had elsewhere.

    Tensors are handed over, not copied: a layer that stays keeps its memory.
    """
    values = {piece.name: tensor for piece, tensor in state.items()}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in values.items():
        if "@" in name:
            key, entry = name.split("@", 1)
            entries.setdefault(key, {})[entry] = tensor
    for name, value in scalars.items():
        key, entry = name.split("@", 1)
        entry, _, dtype = entry.partition(":")
        entries.setdefault(key, {})[entry] = torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
    named: dict[str, nn.Parameter] = {}
    for index in sorted(layers):
        layer = layers[index]
        for name, parameter in layer.module.named_parameters():
            key = f"{index}/{name}"
            named[key] = parameter
            if parameter.data_ptr() != values[key].data_ptr() or parameter.shape != values[key].shape:
                parameter.data = values[key]
            parameter.requires_grad_(key not in frozen)
            parameter.grad = values.get(f"{key}#grad")
        for module_name, module in layer.module.named_modules():
            for name in list(module._buffers):
                key = f"{index}/{module_name}.{name}" if module_name else f"{index}/{name}"
                if module._buffers[name] is not None:
                    module._buffers[name] = values[key]
        if layer.has_stream:
            object.__setattr__(layer, "rng_state", values[f"{index}!rng"].cpu())
    if not named:
        return None
    optimizer = make_optimizer(list(named.values()))
    for key, parameter in named.items():
        if key in entries:
            optimizer.state[parameter] = entries[key]
    return optimizer


def by_layer(space: Space, stage_map: StageMap, ranks: int) -> Layout:
    """Whole tensors on the rank that runs their layer; tensors without a layer on all ranks."""
    home = stage_map.assignment()
    rows: dict[int, list[tuple[str, Box]]] = {r: [] for r in range(ranks)}
    for tensor in space.tensors:
        if tensor.layer is not None and not 0 <= tensor.layer < stage_map.layers:
            raise LayoutError(f"{tensor.name} is of layer {tensor.layer}, outside 0..{stage_map.layers - 1}")
        for rank in range(ranks) if tensor.layer is None else (home[tensor.layer],):
            if rank >= ranks:
                raise LayoutError(f"{tensor.name} is to live on rank {rank} of {ranks}")
            rows[rank].append((tensor.name, tensor.box))
    return layout_from(space, ranks, rows)
