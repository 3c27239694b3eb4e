"""Experts of `prophet.MoE` layers in a job: each of a stage's ep ranks has a part of them, in every layer.

A parameter of experts is stacked: [E x rows, ...] in the unsplit model, [E / ep x rows, ...] on a process. It is the
same object in every layout; on processes where the layer is not, it has the part's shape on `meta`. Routes speak of
boxes of the whole tensor, so a change of ep moves experts to their new homes as it moves anything else.

Shape legend: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipeline_balance.elastic.layouts import Block
from pipeline_balance.elastic.parallelism import Parallelism
from pipeline_balance.pipeline.experts import StageExperts
from pipeline_balance.pipeline.ownership import Ownership, put
from pipeline_balance.pipeline.rebuild import Change
from pipeline_balance.pipeline.registered import registered
from pipeline_balance.pipeline.reseat import Arrangement, Reseater
from pipeline_balance.pipeline.stages import Seats, alone
from pipeline_balance.pipeline.training_state import Held, Item, base_name, refuse_odd
from prophet.engine.regroup import check_regroupable, check_unsplit, has_experts, regroup, stacked_experts
from prophet.errors import LayoutError, SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from prophet.state.layout import Layout, layout_from, slice_box
from prophet.state.space import Box, Space
from prophet.state.transition import Moved

Shape = tuple[int, ...]

__all__ = [
    "ExpertReseater",
    "check_experts",
    "check_unsplit",
    "has_experts",
    "nobody",
    "one_rank",
    "share_out",
    "stacks",
]


def one_rank() -> Collective:
    """The group that a layer is given so that it has all its experts: `prophet.MoE(..., group=elastic.one_rank())`."""
    return alone()


def check_experts(model: nn.Module, layout: Parallelism) -> None:
    """Raise `SpecError` unless the experts of `model` can be trained in this layout.

    Of a model without experts, layouts that share them are refused.
    """
    if not has_experts(model):
        if layout.ep > 1:
            raise SpecError(f"{layout}: a job cannot train ep{layout.ep} with a model that has no prophet.MoE layer")
        return
    layout.check_trainable(experts=True)
    check_regroupable(model, layout.ep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A parameter of experts: its shape in the unsplit model, and how many experts that has. `first`: row held here."""

    shape: Shape
    experts: int
    first: int

    @property
    def block(self) -> Block:
        """How it is cut."""
        return Block(length=self.shape[0], units=self.experts)

    def part(self, index: int, ep: int) -> Box:
        """What one of `ep` ranks has."""
        return slice_box(self.shape, 0, ep, index)


def stacks(model: nn.Module) -> dict[str, Stack]:
    """The stacked parameters of experts by name, as they are shared out now."""
    stacked, found = stacked_experts(model), {}
    named = dict(model.named_parameters()) if stacked else {}
    for name, bank in stacked.items():
        rows = named[name].shape[0] // bank.experts
        shape = (rows * bank.total_experts, *named[name].shape[1:])
        found[name] = Stack(shape=shape, experts=bank.total_experts, first=rows * bank.first_expert)
    return found


def share_out(model: nn.Module, seats: Seats) -> None:
    """Leave of a whole model's experts what this process has with these seats."""
    if seats.experts is None:
        return
    ranks, rank = seats.experts.size, seats.experts.rank
    named = dict(model.named_parameters())
    for name in stacked_experts(model):
        whole = named[name].detach()
        part = whole.tensor_split(ranks)[rank].clone()
        put(named[name], nn.Parameter(part, requires_grad=named[name].requires_grad))
    regroup(model, seats.experts, seats.copies)


def nobody(ep: int) -> Collective:
    """Stands for the group of a process without a place, which holds no experts and runs none."""
    return ThreadWorld(ep).collective(0)


@dataclass
class Regroup(Change):
    """Also other groups that share the experts of all layers."""

    model: nn.Module | None = None
    shared: StageExperts | None = None
    group: Collective | None = None
    copies: Collective | None = None

    def make(self) -> None:
        super().make()
        assert self.model is not None
        assert self.shared is not None
        self.shared.release()
        regroup(self.model, self.group if self.group is not None else alone(), self.copies)


@dataclass
class ExpertReseater(Reseater):
    """Takes a pipeline whose layers have experts from one arrangement to another, whatever their ep."""

    moves_experts = True

    @property
    def _owned(self) -> Ownership:
        return self.mover.owned

    def __post_init__(self) -> None:
        self.stacked = stacks(self._owned.model.root)

    def described(self, found: list[Item] | str) -> Held | str:
        held = super().described(found)
        if isinstance(held, Held):
            whole: Held | str = self.mover.attempt(lambda: self._as_boxes(held))
            return whole
        return held

    def shapes(self) -> dict[str, Shape]:
        return super().shapes() | {name: stack.shape for name, stack in self.stacked.items()}

    def _as_boxes(self, held: Held) -> Held:
        """What is held as boxes of whole tensors."""
        stacked, specs = self.stacked, []
        for spec in held.specs:
            name = base_name(spec.name)
            part = tuple(self._owned.parameters[name].shape) if name in stacked else None
            if part is not None and spec.shape == part:
                specs.append(replace(spec, shape=stacked[name].shape))
                continue
            if part is not None:
                refuse_odd(spec.name, spec.shape, part)
            specs.append(spec)
        return Held(specs=specs, tensors=held.tensors, scalars=held.scalars)

    def layout(self, space: Space, target: Arrangement | None, processes: int) -> Layout:
        grid = self.mover.groups.grid if target is None else target.seats.grid
        owners = self.passes.owners if target is None else target.owners
        stage_map = self.now.stage_map if target is None else target.stage_map
        home, tied = stage_map.assignment(), self._owned.tied()
        stacked = self.stacked
        found: dict[int, list[tuple[str, Box]]] = {}
        for tensor in space.tensors:
            name = base_name(tensor.name)
            assert tensor.layer is not None
            cut = stacked.get(name)
            parts = grid.ep if cut is not None and tensor.shape == cut.shape else 1
            for p in sorted({home[unit] for unit in tied.get(name, (tensor.layer,))}):
                column = grid.column(p)
                holders = owners.updaters(name, p) if tensor.kind == "optimizer" else column
                if tensor.kind == "buffer" and target is None:
                    holders = column[:1]
                for process in holders:
                    box = slice_box(tensor.shape, 0, parts, column.index(process) % parts) if parts > 1 else tensor.box
                    found.setdefault(process, []).append((tensor.name, box))
        return layout_from(space, processes, found)

    def _change(self, target: Arrangement, moved: Moved, scalars: Mapping[str, Any], place: int) -> Change:
        change = super()._change(target, moved, scalars, place)
        seats, root = target.seats, self._owned.model.root
        given: dict[str, Any] = {**vars(change), "model": root, "shared": self.passes.experts}
        made = Regroup(**given, group=seats.experts, copies=seats.copies)
        contents = {id(parameter): k for k, (parameter, _) in enumerate(change.contents)}
        values = {piece.name: tensor for piece, tensor in moved.state.items()}
        for name, stack in self.stacked.items():
            parameter, part = self._owned.parameters[name], stack.part(0, seats.grid.ep).shape
            memory = values.get(name)
            if memory is None:
                memory = torch.empty(part, dtype=parameter.dtype, device="meta")
                mine = {id(handle) for _, handle in registered(name, parameter)}
                made.settings = [(h, t.new_empty(part) if id(h) in mine else t) for h, t in made.settings]
            if tuple(memory.shape) != part:
                raise LayoutError(f"{name} has come as {list(memory.shape)}, expected {list(part)}")
            put_in = (parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
            if id(parameter) in contents:
                made.contents[contents[id(parameter)]] = put_in
            elif tuple(parameter.shape) != part:
                made.contents.append(put_in)
                made.grads.append((parameter, None))
        made.check()
        return made

    def unsplit(self, root: nn.Module) -> None:
        regroup(root, alone(), None)
