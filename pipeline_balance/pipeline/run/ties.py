"""Tied parameters: one Parameter object in several units of a pipeline, such as an embedding and the head.

Every rank holds all modules, so every rank sees all ties. A tied parameter lives on each rank that runs one of its
units, its holders. Each holder's gradient is its own units' part. The sum of the parts, in the order of the stages, is
the gradient in one process, and has the same bits on all holders. So weights and moments stay equal, and a digest of
them is compared before layers move.

Shape legend: L units, R ranks, T ties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.ownership import Ownership, digest_of, local
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.spec import StageMap
from prophet.errors import TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Tie:
    """A parameter that several units share.

    Attributes:
        name: The name that the unsplit model gives it.
        parameter: The parameter.
        units: The units that share it, ascending.
    """

    name: str
    parameter: nn.Parameter
    units: tuple[int, ...]

    def holders(self, stage_map: StageMap) -> tuple[int, ...]:
        """Return the pipeline ranks that hold it, in the order of their first stages with it."""
        home = stage_map.assignment()
        # two units on a rank share one gradient already, so they count once
        return tuple(dict.fromkeys(home[unit] for unit in self.units))


def ties_of(owned: Ownership) -> tuple[Tie, ...]:
    """Find the parameters that several units hold, in the order of the unsplit model's names."""
    tied = [(name, units) for name, units in owned.tied().items() if name in owned.parameters]
    return tuple(Tie(name=name, parameter=owned.parameters[name], units=units) for name, units in tied)


@torch.no_grad()
def sum_tied_gradients(ties: Sequence[Tie], stage_map: StageMap, pipeline: Collective) -> None:
    """Give every holder the sum of all holders' gradients; collective over each tie's holders.

    Call it once gradients are complete, and averaged over replicas where there are any. A holder without a gradient
    gets that of the others; where none has one, none gets one. Frozen ones are left out.

    Args:
        ties: The tied parameters; their `requires_grad` must be the same on all ranks.
        stage_map: Which rank runs which layers.
        pipeline: Over the ranks of one replica.
    """
    sends: list[tuple[int, Tensor]] = []
    recvs: list[tuple[int, Tensor]] = []
    parts: list[tuple[Tie, dict[int, Tensor]]] = []
    for tie in ties:
        holders = tie.holders(stage_map)
        # exchanges are among holders only, so other ranks go on
        if pipeline.rank not in holders or len(holders) == 1 or not tie.parameter.requires_grad:
            continue
        mine = _with_presence(tie.parameter)
        by_rank = {r: mine if r == pipeline.rank else torch.empty_like(mine) for r in holders}
        others = [r for r in holders if r != pipeline.rank]
        sends += [(r, mine) for r in others]
        recvs += [(r, by_rank[r]) for r in others]
        parts.append((tie, by_rank))
    if not parts:
        return
    pipeline.exchange(sends, recvs, op=Operation("sum of tied parameters' gradients")).wait()
    for tie, by_rank in parts:
        # in the order of the stages on every holder, so that all find the same bits
        first, *rest = by_rank.values()
        total = first.clone()
        for part in rest:
            total += part
        # how many holders have a gradient
        if total[0] > 0:
            p = tie.parameter
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            local(p.grad).copy_(total[1:].view(local(p.grad).shape))


def _with_presence(p: nn.Parameter) -> Tensor:
    """Whether there is a gradient, one or zero, and then its elements."""
    # in one tensor: whether there is one needs no message by itself
    here = local(p)
    flat = here.new_zeros(1 + here.numel())
    if p.grad is not None:
        flat[0] = 1.0
        flat[1:] = local(p.grad).reshape(-1)
    return flat


@torch.no_grad()
def share_tied_weights(ties: Sequence[Tie], stage_map: StageMap, pipeline: Collective) -> None:
    """Give every holder the weights of the first, in place; collective over holders. For the start of a run.

    Args:
        ties: The tied parameters.
        stage_map: Which rank runs which layers.
        pipeline: Over the ranks of one replica.
    """
    sends: list[tuple[int, Tensor]] = []
    recvs: list[tuple[int, Tensor]] = []
    arrived: list[tuple[nn.Parameter, Tensor]] = []
    for tie in ties:
        first, *others = tie.holders(stage_map)
        if pipeline.rank == first:
            sends += [(r, tie.parameter.detach().contiguous()) for r in others]
        elif pipeline.rank in others:
            arrived.append((tie.parameter, torch.empty_like(tie.parameter, memory_format=torch.contiguous_format)))
            recvs.append((first, arrived[-1][1]))
    if sends or recvs:
        pipeline.exchange(sends, recvs, op=Operation("tied parameters of their first holder")).wait()
    for p, weights in arrived:
        # in place: the object stays tied in all its modules
        p.copy_(weights)


def tie_digests(
    ties: Sequence[Tie],
    stage_map: StageMap,
    pipeline_rank: int,
    state: Mapping[int, Mapping[str, Any]],
    weights: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, int]]:
    """Digest a rank's tied weights and their optimizer state, by name; ranks compare them with `refuse_untied`.

    Args:
        ties: The tied parameters.
        stage_map: Which rank runs which layers.
        pipeline_rank: The rank whose ties count.
        state: What optimizers keep per parameter, by its id.
        weights: Digests of parameters that are known already.
    """
    known = weights or {}
    return {
        tie.name: (
            known[tie.name] if tie.name in known else digest_of([(tie.name, tie.parameter)]),
            digest_of(state.get(id(tie.parameter), {}).items()),
        )
        for tie in ties
        if pipeline_rank in tie.holders(stage_map)
    }


def refuse_untied(
    ties: Sequence[Tie], stage_map: StageMap, grid: Grid, digests: Sequence[Mapping[str, Sequence[int]]]
) -> None:
    """Refuse to move where holders of a tie, in all replicas, have other digests.

    Args:
        ties: The tied parameters.
        stage_map: Which rank runs which layers.
        grid: The processes' places.
        digests: Every process's `tie_digests`.

    Raises:
        TransitionError: Names the parameter, the processes, and whether weights or optimizer state have come apart.
    """
    for tie, rows in product(ties, grid.every):
        # also of other replicas: they were equal at the start, and so were their updates
        holders = sorted(row[rank] for rank in tie.holders(stage_map) for row in rows)
        first, *_ = (digests[process][tie.name] for process in holders)
        for i, what in enumerate(("weights", "optimizer state")):
            differ = [process for process in holders if digests[process][tie.name][i] != first[i]]
            if differ:
                raise TransitionError(
                    f"the tied parameter {tie.name!r} has other {what} on rank(s) {differ} than on rank {holders[0]}: "
                    f"change it on all ranks that hold it, or through the optimizer; nothing has moved"
                )
