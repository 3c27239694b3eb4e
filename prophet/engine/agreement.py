"""Whether all ranks are about to do the same: placements and splits, compared by their digests.

Every rank plans by itself from the same integers. Where one of them comes to something else, by another version or
configuration or by an own planner that is not deterministic, this is the error that says so, instead of a hang.

Shape legend: L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prophet.errors import PlanMismatch, SpecError
from prophet.ranks.collective import Collective, Operation
from prophet.spec import Placement, PlanContext, odd_ones_out


def check_placement(placement: Placement, context: PlanContext, who: str) -> None:
    """Raise `SpecError` where a planner has not kept to its context: an own planner may be wrong.

    who: the planner and the layer, for the message.
    """
    shape = (placement.experts, placement.ranks)
    if shape != (context.experts, context.ranks):
        raise SpecError(f"{who}: placed {shape} experts and ranks, expected {(context.experts, context.ranks)}")
    if not np.array_equal(placement.home, context.home):
        raise SpecError(f"{who}: the placement moves homes; expected those of the context")
    copies, limits = placement.copies_per_rank(), context.slot_limits()
    if (copies > limits).any():
        raise SpecError(f"{who}: {copies.tolist()} replicas by rank; slots_per_rank and memory allow {limits.tolist()}")


def compare_placements(digests: Sequence[int], step: int, collective: Collective, device: torch.device) -> None:
    """Raise `PlanMismatch` unless all ranks are about to use the same placements, by their digests [L]; collective.

    It has to happen before the first Trans: a backend that receives more than was announced may end the process.
    On the weights channel, so that a rank which does not begin a step meets a time limit and no other message.
    """
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    found = collective.all_gather(mine, op=Operation("comparison of placements"), channel="weights").cpu()
    for layer, column in enumerate(found.unbind(1)):
        differ = odd_ones_out(column.numpy())
        if differ:
            raise placements_differ(layer, step, differ)


def placements_differ(layer: int, step: int, ranks: Sequence[int]) -> PlanMismatch:
    """The error where `ranks` have another placement for a layer than the rest."""
    return PlanMismatch(
        f"MoE layer {layer}, step {step}: the placement of rank(s) {ranks} differs from the other "
        f"ranks'; all ranks must run the same configuration and versions"
    )


def compare_splits(digest: int, layer: int, step: int, collective: Collective, device: torch.device) -> None:
    """Raise `PlanMismatch` unless all ranks split a layer's tokens the same way; collective."""
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    found = collective.all_gather(mine, op=Operation("comparison of splits", layer)).cpu().flatten()
    differ = odd_ones_out(found.numpy())
    if differ:
        raise PlanMismatch(f"MoE layer {layer}, step {step}: the split of rank(s) {differ} differs from the others'")
