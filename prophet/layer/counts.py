"""The one message of a layer's forward pass: every rank's counts, and what ranks have to agree on before they act.

It comes before the all-to-alls, whose lengths it decides, so a rank that is elsewhere must be found out here: a backend
that receives more than was announced may end the process. `prophet.ranks.messages` compares where the ranks are, by
layer and number of the forward pass; a `Row` has the rest.

Every rank plans and splits by itself from the same integers. Where one comes to another result, by its version, its
configuration or a planner that is not deterministic, an error here says so, instead of a hang. Most of what is compared
travels with the counts and costs no message. What cannot wait for counts has a comparison here too.

Shape legend: R ranks, E experts, L layers, W windows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prophet.errors import OutOfStep, PlanMismatch, RoutingError
from prophet.experts.gate import Routing
from prophet.ranks.collective import Collective
from prophet.ranks.messages import COUNTS, PASSES, gather_numbers
from prophet.ranks.operation import Operation
from prophet.scheduler.windows import Stopwatch
from prophet.spec import IntArray, odd_ones_out

# one integer of every rank
_SINGLE = ("tokens", "step", "updates", "averaged", "placement", "split", "stale", "finite", "dropped", "structure")
UNKNOWN = -1  # the digest of a placement that is still being planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a rank says beside its counts. Every field is as long on all ranks, and in every pass.

    A field that only one of the layers says is empty in the others' rows.

    forward: how many passes the layer has run, this one included, but none that was recomputed. kind: what this one is
    for, one of `prophet.ranks.messages.PASSES`. step: of training. updates: how often the optimizer has run. averaged:
    whether DistributedDataParallel is going to average the gradients of this pass. placement, split: digests of the
    placement in force and of the last split; structure: of what replicas compute. stale: whether home parameters have
    changed since they were sent to replicas. window_us: [W] lengths of the block's windows. placements: [L] digests of
    all layers' placements, with the first layer's counts; upcoming: [1] that of the first layer's next one or UNKNOWN,
    with the last layer's. gradients: [G] int64 on the device, a digest of what the last optimizer step used, with the
    first counts after it; zeros with others. experts: [X] int64 on the device, what `prophet.layer.expert_watch`
    compares; in training passes of several ranks.
    """

    forward: int = 0
    kind: str = ""
    step: int = 0
    updates: int = 0
    averaged: bool = False
    placement: int = 0
    split: int = 0
    structure: int = 0
    stale: bool = False
    window_us: Sequence[int] = ()
    placements: Sequence[int] = ()
    upcoming: Sequence[int] = ()
    gradients: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """What all ranks have said, by rank.

    finite: [R] whether the gate's scores are. tokens: [R] routed. dropped: [R] choices dropped for lack of capacity.
    step, updates, averaged, placement, split, structure, stale: [R]; window_us: [R, W]; placements: [R, L] or [R, 0];
    upcoming: [R, 1] or [R, 0]; gradients: [R, G], experts: [R, X], or None: as in `Row`. load: [R, E] choices by
    source rank and expert. extra: [R, E] choices before any drop, or with `first_choices` every token's first choice;
    None where the load says both.
    """

    finite: IntArray
    dropped: IntArray
    tokens: IntArray
    step: IntArray
    updates: IntArray
    averaged: IntArray
    placement: IntArray
    split: IntArray
    structure: IntArray
    stale: IntArray
    window_us: IntArray
    placements: IntArray
    upcoming: IntArray
    load: IntArray
    extra: IntArray | None
    gradients: IntArray | None
    experts: IntArray | None
    first_choices: bool

    def judged(self) -> IntArray:
        """[R, E] the choices that the auxiliary loss is about."""
        return self.load if self.extra is None else self.extra

    def undropped(self) -> IntArray:
        """[R, E] choices before any drop, where the gate needs to know; the load elsewhere."""
        return self.load if self.extra is None or self.first_choices else self.extra

    def check(self, rank: int, label: str) -> None:
        """Raise `RoutingError` for scores that cannot be routed, `PlanMismatch` where ranks are about to differ.

        That is `OutOfStep` where they have not done the same so far.

        rank: the one that asks. label: how messages call the layer.
        """
        step = int(self.step[rank])
        broken = np.flatnonzero(self.finite == 0).tolist()
        if broken:
            raise RoutingError(
                f"{label}, step {step}: the gate's scores are NaN or infinite on rank(s) {broken}, "
                f"or a router of the model's own chose experts that do not exist; expected finite scores"
            )
        where = f"{label}, step {step}"
        _check_in_step(where, "step", self.step)
        _check_in_step(where, "number of optimizer steps", self.updates)
        apart = odd_ones_out(self.averaged)
        if apart:
            raise OutOfStep(
                f"{where}: rank(s) {apart} differ from the others in whether DistributedDataParallel averages the "
                f"gradients of this pass ({self.averaged.tolist()} by rank): call the wrapped model on every rank, "
                f"and no_sync() on all or none"
            )
        _check_equal(where, "placement", self.placement)
        _check_equal(where, "previous split", self.split)
        changed = odd_ones_out(self.structure)
        if changed:
            raise PlanMismatch(
                f"{where}: experts of rank(s) {changed} were changed, and the other ranks' copies of them were not "
                f"(other modules, hooks or settings, or parameters that were thawed): do the same to every expert on "
                f"every rank, by the block's list (for expert in block.experts: ...), or before prophet.convert"
            )
        check_placements(self.placements, step)


def exchange_counts(
    row: Row,
    routing: Routing,
    tokens: int,
    *,
    extra: Tensor | None,
    first_choices: bool,
    collective: Collective,
    layer: int | None,
    stopwatch: Stopwatch,
    place: int | None = None,
) -> Counts:
    """Tell all ranks this one's `row` and counts, and hear theirs; collective.

    Raises `OutOfStep` on all ranks where one is in another layer or another pass. layer: its place in the order of
    execution, None where nobody balances it; place: stands for it then. tokens: how many `routing` is of. extra,
    first_choices: as of `Counts`, of this rank; alike on all ranks.
    """
    said: dict[str, Sequence[int]] = {
        "tokens": (tokens,),
        "step": (row.step,),
        "updates": (row.updates,),
        "averaged": (row.averaged,),
        "placement": (row.placement,),
        "split": (row.split,),
        "structure": (row.structure,),
        "stale": (row.stale,),
        "window_us": row.window_us,
        "placements": row.placements,
        "upcoming": row.upcoming,
    }
    # the device alone knows these
    known = {"finite": routing.finite.long().view(1), "dropped": routing.dropped().view(1), "load": routing.counts()}
    if extra is not None:
        known["extra"] = extra
    if row.gradients is not None:
        known["gradients"] = row.gradients
    if row.experts is not None:
        known["experts"] = row.experts
    collective.frames.forward, collective.frames.kind = row.forward, PASSES.index(row.kind)
    numbers = [int(number) for values in said.values() for number in values]
    op, device = Operation(COUNTS, layer), routing.ids.device
    with stopwatch("counts"):
        table = gather_numbers(collective, numbers, tuple(known.values()), op=op, device=device, place=place)
    widths = {name: len(values) for name, values in said.items()} | {n: t.numel() for n, t in known.items()}
    found: dict[str, Any] = {"extra": None, "gradients": None, "experts": None}
    start = 0
    for name, width in widths.items():
        found[name] = table[:, start] if name in _SINGLE else table[:, start : start + width]
        start += width
    found["load"] = np.ascontiguousarray(found["load"], dtype=np.int64)
    return Counts(**found, first_choices=first_choices)


def compare_placements(digests: Sequence[int], step: int, collective: Collective, device: torch.device) -> None:
    """Raise `PlanMismatch` unless all ranks are about to use the same placements, by their digests [L]; collective.

    It has to happen before the first Trans, as what that brings is as long as the placements say. A rank that does not
    begin a step is found out as well: it tells something else instead.
    """
    found = gather_numbers(collective, digests, op=Operation("comparison of placements"), device=device)
    check_placements(found, step)


def check_placements(digests_RL: IntArray, step: int) -> None:
    """Raise `PlanMismatch` where ranks have different placements, by their digests [R, L]."""
    for layer, column in enumerate(digests_RL.T):
        _check_equal(f"MoE layer {layer}, step {step}", "placement", column)


def compare_splits(digest: int, layer: int, step: int, collective: Collective, device: torch.device) -> None:
    """Raise `PlanMismatch` unless all ranks split a layer's tokens the same way; collective."""
    found = gather_numbers(collective, [digest], op=Operation("comparison of splits", layer), device=device)
    _check_equal(f"MoE layer {layer}, step {step}", "split", found[:, 0])


def _check_in_step(where: str, what: str, by_rank: IntArray) -> None:
    differ = odd_ones_out(by_rank)
    if differ:
        raise OutOfStep(
            f"{where}: the {what} of rank(s) {differ} differs from the other ranks' ({by_rank.tolist()} by rank). Did "
            f"they skip or repeat a step?"
        )


def _check_equal(where: str, what: str, by_rank: IntArray) -> None:
    differ = odd_ones_out(by_rank)
    if differ:
        raise PlanMismatch(
            f"{where}: the {what} of rank(s) {differ} differs from the other ranks'; all ranks must run the "
            f"same configuration and versions"
        )
