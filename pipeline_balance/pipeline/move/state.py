"""Training state of a pipeline as pieces of a space: parameters, buffers, gradients, what optimizers keep.

Names are the unsplit model's: `3.mlp.weight` is a parameter or buffer, `3.mlp.weight#grad` its gradient,
`3.mlp.weight@exp_avg` an entry of its optimizer state, `3.mlp.weight%ema` what is registered for it. Every rank
describes what it holds in JSON; the union is the space. Optimizer entries that are plain numbers travel in the
description.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.ownership import Ownership, local
from pipeline_balance.pipeline.model.registered import MARK, registered
from pipeline_balance.pipeline.run.optimizers import Optimizers
from pipeline_balance.pipeline.run.zero1 import Owners
from pipeline_balance.spec import StageMap
from prophet.errors import LayoutError
from prophet.state.layout import Layout, layout_from, slice_box, whole_tensors
from prophet.state.space import ITEM_BYTES, Box, Space, StateKind, TensorSpec

_OF = " of replica "


@dataclass
class Held:
    """What one rank holds.

    Attributes:
        specs: The tensors' descriptions.
        tensors: The tensors by name; of a `DTensor` this rank's shard.
        scalars: What is not a tensor, by name.
    """

    specs: list[TensorSpec] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | float | bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Sequence[Item], cut: Mapping[str, int] | None = None) -> Held:
        """Describe what was found; any thread may ask, as no step changes the form of what is there.

        Args:
            found: The tensors and entries.
            cut: Parameters of which every rank has some rows, with the rows of all ranks.

        Raises:
            LayoutError: Something cannot be moved, such as a state that is not of the rows' shape.
        """
        held = cls()
        for item in found:
            if item.parameter is None:
                held.add(item.name, item.value, item.kind, item.unit)
            else:
                held.add_state(item.name, item.entry, item.value, item.parameter.device, item.unit)
        # the part that is here, which expected gradients show without their parameter
        own = {
            base_name(n): held.tensors[n].shape
            for n in (*(f"{n}#grad" for n in cut or {}), *(cut or {}))
            if n in held.tensors
        }
        for i, spec in enumerate(held.specs):
            name = base_name(spec.name)
            if cut and name in own:
                # moments are cut as their parameter is; of anything else nobody knows what other ranks have
                refuse_odd(spec.name, spec.shape, own[name])
                if spec.shape == tuple(own[name]):
                    held.specs[i] = replace(spec, shape=(cut[name], *spec.shape[1:]))
        return held

    def with_(self, other: Held) -> Held:
        """Return what both hold."""
        return Held(self.specs + other.specs, self.tensors | other.tensors, self.scalars | other.scalars)

    def dense(self, owned: Ownership) -> Held:
        """Describe the same in the form of checkpoints; see `Ownership`.

        Args:
            owned: The model's parameters and buffers.
        """
        found = Held(scalars=self.scalars)
        for spec in self.specs:
            tensor = self.tensors[spec.name]
            other = owned.dense_state(base_name(spec.name), tensor)
            if other is tensor:
                found.specs.append(spec)
                found.tensors[spec.name] = tensor
            else:
                assert spec.layer is not None
                found.add(spec.name, other, spec.kind, spec.layer)
        return found

    def of_replica(self, owners: Owners, pipeline_rank: int, replica: int) -> Held:
        """Describe the same where all replicas move in one route, because optimizer state has owners.

        What a replica has for itself is named after it. What owners keep for all replicas has one name, and what others
        keep of it is left out.

        Args:
            owners: Those in force.
            pipeline_rank: This rank in its replica.
            replica: The replica.
        """
        names: dict[str, str] = {}
        kinds: dict[str, StateKind] = {spec.name: spec.kind for spec in self.specs}
        for name in (*self.tensors, *self.scalars):
            of, optimizer = base_name(name), kinds.get(name, "optimizer") == "optimizer"
            if not optimizer or owners.updates(of, pipeline_rank, replica):
                names[name] = name if optimizer and not owners.parted(of) else f"{name}{_OF}{replica}"
        return Held(
            specs=[replace(spec, name=names[spec.name]) for spec in self.specs if spec.name in names],
            tensors={names[name]: tensor for name, tensor in self.tensors.items() if name in names},
            scalars={names[name]: value for name, value in self.scalars.items() if name in names},
        )

    def add(self, name: str, tensor: Tensor, kind: StateKind, unit: int) -> None:
        """Take in a tensor.

        Args:
            name: Its name in the space.
            tensor: The tensor, a shard of a `DTensor` included.
            kind: What it is.
            unit: The unit that holds it.

        Raises:
            LayoutError: It is of a kind that cannot be moved, such as a sparse tensor.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        # a box is a part along dimensions, which the memory of a sparse tensor does not follow
        if dtype not in ITEM_BYTES or tensor.layout != torch.strided:
            raise LayoutError(f"{name}: a {tensor.layout} tensor of {dtype} cannot be moved")
        # the whole shape: which box of it this rank has is a matter of the layout
        self.specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind, layer=unit))
        self.tensors[name] = local(tensor).detach()

    def add_state(self, key: str, entry: str, value: Any, device: torch.device, unit: int) -> None:
        """Take in one entry of an optimizer's state.

        Args:
            key: The parameter's name.
            entry: The entry's name, such as `exp_avg`.
            value: A tensor, a number, or None.
            device: Where the parameter lies.
            unit: The unit that holds the parameter.

        Raises:
            LayoutError: The value is of another kind.
        """
        if isinstance(value, Tensor) and (value.dim() > 0 or value.device == device):
            self.add(f"{key}@{entry}", value, "optimizer", unit)
        elif isinstance(value, Tensor):
            # on another device than the parameter, as Adam's `step` on the host: it travels as a number, and its type
            # with its name
            self.scalars[f"{key}@{entry}:{str(value.dtype).removeprefix('torch.')}"] = value.item()
        elif value is None or isinstance(value, int | float):
            self.scalars[f"{key}@{entry}"] = value
        else:
            raise LayoutError(f"{key}: optimizer state {entry!r} is a {type(value).__name__}, cannot be moved")


class Item(NamedTuple):
    """A tensor, or an entry of an optimizer's state, as it was found.

    Attributes:
        name: The tensor's name, or the parameter's for an entry.
        value: The tensor, or whatever the optimizer keeps.
        kind: What it is.
        unit: The unit that holds it.
        entry: The entry's name; empty for a tensor.
        parameter: The parameter that the entry is of; None for a tensor.
    """

    name: str
    value: Any
    kind: StateKind
    unit: int
    entry: str = ""
    parameter: Tensor | None = None


def items(owned: Ownership, optimizers: Optimizers, units: Collection[int], *, gradients: bool = True) -> list[Item]:
    """List everything that belongs to units which run on this rank; quick, for `Held.of` to look at closer.

    Args:
        owned: The model's parameters and buffers.
        optimizers: What keeps state for them.
        units: The units that run here.
        gradients: Whether to list gradients: a backward pass may be filling them in at this moment.

    Raises:
        LayoutError: A parameter has no memory here.
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
        # under the parameter's unit, so it is where the parameter is
        for key, handle in registered(name, parameter):
            found.append(Item(key, handle.tensor, "registered", unit))
    for name, buffer in owned.buffers.items():
        if not set(buffer.units).isdisjoint(units):
            found.append(Item(name, buffer.tensor, "buffer", buffer.units[0]))
    return found


def expected_gradients(owned: Ownership, units: Collection[int]) -> list[Item]:
    """List the gradients that a backward pass is going to leave, with the parameters in their place.

    Args:
        owned: The model's parameters and buffers.
        units: The units that run here.
    """
    return [
        Item(f"{name}#grad", parameter, "gradient", owned.units_of[name][0])
        for name in owned.of(units)
        if (parameter := owned.parameters[name]).requires_grad
    ]


def collect(owned: Ownership, optimizers: Optimizers, units: Collection[int], *, gradients: bool = True) -> Held:
    """Describe everything that belongs to `units`.

    Args:
        owned: The model's parameters and buffers.
        optimizers: What keeps state for them.
        units: The units that run here.
        gradients: Whether gradients count.
    """
    return Held.of(items(owned, optimizers, units, gradients=gradients), owned.cut())


def space_of(rows: Sequence[Sequence[Any]]) -> Space:
    """Make the space of the tensors that ranks have described, each as [name, shape, dtype, kind, layer], layer by
    layer.
    """
    # copies of a tensor, on replicas or of ties, describe it alike
    found = {row[0]: row for row in rows}
    specs = [
        TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind, layer=layer)
        for name, shape, dtype, kind, layer in found.values()
    ]
    return Space(tuple(sorted(specs, key=lambda t: (t.layer or 0, t.name))))


def spec_rows(specs: Sequence[TensorSpec]) -> list[list[Any]]:
    """Turn tensors' descriptions into rows that JSON can hold, as `space_of` takes them."""
    return [[s.name, s.shape, s.dtype, s.kind, s.layer] for s in specs]


def specs_of(held: Held | str) -> tuple[TensorSpec, ...]:
    """The description of what a rank holds; empty where it could not be found."""
    return tuple(held.specs) if isinstance(held, Held) else ()


def refuse_odd(name: str, shape: Sequence[int], parameter: Sequence[int]) -> None:
    """Refuse a tensor kept for a parameter that cannot be cut as the parameter is, nor is one number.

    Args:
        name: The tensor's name.
        shape: Its shape.
        parameter: The parameter's shape.

    Raises:
        LayoutError: It has neither the parameter's shape nor one element.
    """
    if tuple(shape) not in (tuple(parameter), (), (1,)):
        raise LayoutError(f"{name} is {list(shape)}, of neither its parameter's shape nor one number")


def base_name(name: str) -> str:
    """Return the name of the parameter or buffer that a piece of state belongs to, one replica's own included."""
    name = without_replica(name)[0]
    return name.split("#", 1)[0].split("@", 1)[0].split(MARK, 1)[0]


def without_replica(name: str) -> tuple[str, int | None]:
    """Return a name from before `Held.of_replica`, and the replica that has it for itself."""
    before, mark, replica = name.rpartition(_OF)
    return (before, int(replica)) if mark else (name, None)


def by_layer(
    space: Space,
    stage_map: StageMap,
    ranks: int,
    tied: Mapping[str, tuple[int, ...]] | None = None,
    cut: Mapping[str, int] | None = None,
) -> Layout:
    """Place whole tensors on the rank that runs their layer; tensors without a layer on all ranks.

    Args:
        space: All tensors.
        stage_map: Which rank runs which layer.
        ranks: P.
        tied: The layers of each tied parameter, by name: what belongs to it is on the ranks of all of them.
        cut: Parameters of which every rank has some rows, with the rows of all ranks.

    Raises:
        LayoutError: A tensor's layer or rank does not exist.
    """
    # asked once: the map builds it anew on every call
    home = stage_map.assignment()
    holders: list[Sequence[int]] = []
    for tensor in space.tensors:
        if tensor.layer is None or base_name(tensor.name) in (cut or {}):
            holders.append(range(ranks))
            continue
        if not 0 <= tensor.layer < stage_map.layers:
            raise LayoutError(f"{tensor.name} is of layer {tensor.layer}, outside 0..{stage_map.layers - 1}")
        units = tied.get(base_name(tensor.name), (tensor.layer,)) if tied else (tensor.layer,)
        holders.append(sorted({home[u] for u in units}))
        if holders[-1][-1] >= ranks:
            raise LayoutError(f"{tensor.name} is to live on rank {holders[-1][-1]} of {ranks}")
    if cut:
        return _in_rows(space, ranks, holders, cut, [[rank] for rank in range(ranks)])
    return whole_tensors(space, ranks, holders)


def _in_rows(
    space: Space,
    ranks: int,
    holders: Sequence[Sequence[int]],
    cut: Mapping[str, int],
    columns: Sequence[Sequence[int]],
) -> Layout:
    """Place tensors on their holders, and of those that are cut the k-th part on those of them in the k-th column.

    Args:
        space: All tensors.
        ranks: Number of ranks in the layout.
        holders: Ranks that hold each tensor, in the order of the space.
        cut: Parameters of which every column has some rows, with the rows of all.
        columns: The ranks of each part.
    """
    found: dict[int, list[tuple[str, Box]]] = {}
    for tensor, mine in zip(space.tensors, holders, strict=True):
        whole = cut.get(base_name(tensor.name))
        for k, column in enumerate(columns):
            apart = whole is not None and tensor.shape[:1] == (whole,)
            box = slice_box(tensor.shape, 0, len(columns), k) if apart else tensor.box
            for rank in set(column).intersection(mine):
                found.setdefault(rank, []).append((tensor.name, box))
    return layout_from(space, ranks, found)


def layout_over(
    space: Space,
    rows: Sequence[Sequence[int]],
    stage_map: StageMap,
    owners: Owners,
    tied: Mapping[str, tuple[int, ...]],
    processes: int,
    *,
    first: bool = False,
    cut: Mapping[str, int] | None = None,
) -> Layout:
    """Place whole tensors on processes.

    What optimizers keep lives where its parameter is updated, and what a replica has for itself in that replica.

    Args:
        space: All tensors.
        rows: [R][P] the processes of every replica.
        stage_map: Which pipeline rank runs which layers.
        owners: Who updates which tensor.
        tied: The layers of each tied parameter, by name.
        processes: N.
        first: Whether buffers count as the first replica's alone, since replicas may differ in them.
        cut: Parameters of which every pipeline rank has some rows, with the rows of all.
    """
    pipeline_ranks = range(len(rows[0]))
    home = stage_map.assignment()
    holders: list[list[int]] = []
    for tensor in space.tensors:
        name, replica = base_name(tensor.name), without_replica(tensor.name)[1]
        assert tensor.layer is not None
        holders.append([])
        # a tied parameter is on the ranks of all its units
        everywhere = cut is not None and name in cut
        for p in pipeline_ranks if everywhere else sorted({home[unit] for unit in tied.get(name, (tensor.layer,))}):
            column = tuple(row[p] for row in rows)
            if replica is not None:
                column = column[replica : replica + 1]
            elif tensor.kind == "optimizer":
                # with zero 1 one process of a column keeps the moments, else all do
                column = owners.updaters(name, p)
            elif tensor.kind == "buffer" and first:
                column = column[:1]
            holders[-1] += column
    if cut:
        return _in_rows(space, processes, holders, cut, [[row[p] for row in rows] for p in pipeline_ranks])
    return whole_tensors(space, processes, holders)


def state_entries(values: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort optimizer state by parameter name, from moved tensors and numbers that travelled in the description."""
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in values.items():
        if "@" in name:
            key, entry = name.split("@", 1)
            entries.setdefault(key, {})[entry] = tensor
    for name, value in scalars.items():
        key, entry = name.split("@", 1)
        entry, _, dtype = entry.partition(":")
        # see `add_state`: a number that was a tensor has its type behind a colon
        entries.setdefault(key, {})[entry] = torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
    return entries
