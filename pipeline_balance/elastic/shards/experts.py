"""Experts of `prophet.MoE` layers in a job: each of a stage's ep ranks has a part of them, in every layer.

A parameter of experts is stacked: [E x rows, ...] in the unsplit model, [E / ep x rows, ...] on a process. It is the
same object in every layout; on processes where the layer is not, it has the part's shape on `meta`. Routes speak of
boxes of the whole tensor, so a change of ep moves experts to their new homes as it moves anything else.

Shape legend: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from pipeline_balance.elastic.layouts.boxes import Block
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.model.ownership import Ownership, put
from pipeline_balance.pipeline.move.state import Held, base_name, refuse_odd
from pipeline_balance.pipeline.run.stages import RankAssignment, alone
from prophet.engine.regroup import check_regroupable, check_unsplit, has_experts, regroup, stacked_experts
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from prophet.state.layout import slice_box
from prophet.state.space import Box

Shape = tuple[int, ...]

__all__ = [
    "Stack",
    "as_boxes",
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
    """A parameter of experts.

    Attributes:
        shape: In the unsplit model.
        experts: How many it has there, E.
        first: The first of its rows that this process has.
    """

    shape: Shape
    experts: int
    first: int

    @property
    def block(self) -> Block:
        """How ep cuts it: along dimension 0, experts whole."""
        return Block(length=self.shape[0], units=self.experts)

    def part(self, index: int, ep: int) -> Box:
        """The box that the rank with this `index` among `ep` ranks has."""
        return slice_box(self.shape, 0, ep, index)


def stacks(model: nn.Module) -> dict[str, Stack]:
    """The stacked parameters of experts by name, as they are shared out now."""
    stacked, found = stacked_experts(model), {}
    named = dict(model.named_parameters()) if stacked else {}
    for name, bank in stacked.items():
        # a part is [experts here x rows, ...]
        rows = named[name].shape[0] // bank.experts
        shape = (rows * bank.total_experts, *named[name].shape[1:])
        found[name] = Stack(shape=shape, experts=bank.total_experts, first=rows * bank.first_expert)
    return found


def share_out(model: nn.Module, rank_assignment: RankAssignment) -> None:
    """Keep, of a whole model's experts, those that are this process's in `rank_assignment`."""
    if rank_assignment.experts is None:
        return
    ranks, rank = rank_assignment.experts.size, rank_assignment.experts.rank
    named = dict(model.named_parameters())
    for name in stacked_experts(model):
        whole = named[name].detach()
        # a view would keep the memory of all experts
        part = whole.tensor_split(ranks)[rank].clone()
        put(named[name], nn.Parameter(part, requires_grad=named[name].requires_grad))
    # the layers must exchange tokens with these ranks from now on
    regroup(model, rank_assignment.experts, rank_assignment.copies, rank_assignment.alike)


def nobody(ep: int) -> Collective:
    """A stand-in for the group of a process without a place, which holds no experts and runs none."""
    # it has the size that layers ask for; nothing is ever sent in it
    return ThreadWorld(ep).collective(0)


def as_boxes(held: Held, owned: Ownership, stacked: Mapping[str, Stack]) -> Held:
    """What is held, described as boxes of whole tensors.

    Args:
        held: What a process holds.
        owned: Its parameters, parts of experts among them.
        stacked: The stacks of experts, by name.

    Raises:
        LayoutError: For what is kept for a part of experts and is neither of its shape nor one number.
    """
    specs = []
    for spec in held.specs:
        name = base_name(spec.name)
        part = tuple(owned.parameters[name].shape) if name in stacked else None
        # moments are cut like their parameter
        if part is not None and spec.shape == part:
            specs.append(replace(spec, shape=stacked[name].shape))
            continue
        if part is not None:
            refuse_odd(spec.name, spec.shape, part)
        specs.append(spec)
    return Held(specs=specs, tensors=held.tensors, scalars=held.scalars)
