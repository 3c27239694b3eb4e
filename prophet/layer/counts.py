"""The one message of a layer's forward pass: every rank's counts, and what ranks have to agree on before they act.

It comes before the all-to-alls, whose lengths it decides, so a rank that is elsewhere must be found out here: a backend
that receives more than was announced may end the process. `prophet.ranks.messages` compares where the ranks are, by
layer and number of the forward pass; a `Row` has the rest.

Every rank plans and splits by itself from the same integers. A rank may come to another result, by its version, its
configuration or a planner that is not deterministic. An error here then says so, instead of a hang. Most of what is
compared travels with the counts and costs no message. What cannot wait for counts has a comparison here too.

Shape legend: R ranks, E experts, L layers, W windows of a block, G numbers of a digest of gradients, X numbers of a
digest of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from prophet.errors import OutOfStep, PlanMismatch, RoutingError
from prophet.experts.gate import Routing
from prophet.layer.gradient_watch import nothing
from prophet.ranks.collective import Collective
from prophet.ranks.messages import COUNTS, PASSES, gather_numbers
from prophet.ranks.operation import Operation
from prophet.scheduler.windows import Stopwatch
from prophet.spec import IntArray, odd_ones_out

# the fields that are one integer of every rank: columns of the table, where the others are slices
_SINGLE = ("tokens", "step", "updates", "averaged", "placement", "split", "stale", "finite", "dropped", "structure")
# the digest of a placement that is still being planned
UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a rank sends beside its counts.

    Every field is as long on all ranks, and in every pass. A field that only one of the layers fills is empty in the
    others' rows.

    Attributes:
        forward: How many passes the layer has run, this one included, but none that was recomputed.
        kind: What this pass is for, one of `prophet.ranks.messages.PASSES`.
        step: Number of the training step.
        updates: How often the optimizer has run.
        averaged: Whether DistributedDataParallel is going to average the gradients of this pass.
        placement: Digest of the placement in force.
        split: Digest of the last split.
        structure: Digest of what replicas compute.
        stale: Whether home parameters have changed since they were sent to replicas.
        window_us: Lengths of the block's windows [W], in microseconds.
        placements: Digests [L] of all layers' placements, with the first layer's counts.
        upcoming: Digest [1] of the first layer's next placement, or UNKNOWN; with the last layer's counts.
        gradients: Digest [G], int64 on the device, of what the last optimizer step used, with the first counts after
            it; zeros with later ones.
        experts: Digest [X], int64 on the device, that `prophet.layer.expert_watch` compares; in training passes of
            several ranks.
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
    """What all ranks have sent, by rank.

    Attributes:
        finite: Whether the gate's scores are finite, [R].
        dropped: Choices dropped for lack of capacity, [R].
        tokens: Tokens routed, [R].
        step, updates, averaged, placement, split, structure, stale: As in `Row`, [R] each.
        window_us: As in `Row`, [R, W].
        placements: As in `Row`, [R, L] or [R, 0].
        upcoming: As in `Row`, [R, 1] or [R, 0].
        load: Choices by source rank and expert, [R, E].
        extra: Choices before any drop, [R, E], or with `first_choices` every token's first choice; None where the load
            says both.
        gradients, experts: As in `Row`, [R, G] and [R, X], or None.
        first_choices: What `extra` counts.
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
        """Return the choices that the auxiliary loss is about, [R, E]."""
        return self.load if self.extra is None else self.extra

    def undropped(self) -> IntArray:
        """Return choices before any drop, [R, E], where the gate needs to know; the load in other cases."""
        return self.load if self.extra is None or self.first_choices else self.extra

    def check(self, rank: int, label: str) -> None:
        """Raise the same error on all ranks unless they can go on together.

        Args:
            rank: The rank that asks.
            label: How messages call the layer.

        Raises:
            RoutingError: Scores cannot be routed.
            OutOfStep: Ranks have not done the same so far.
            PlanMismatch: Ranks are about to differ.
        """
        step = int(self.step[rank])
        # every rank sees the same table, so all raise: none goes on alone into an all-to-all
        broken = np.flatnonzero(self.finite == 0).tolist()
        if broken:
            raise RoutingError(
                f"{label}, step {step}: the gate's scores are NaN or infinite on rank(s) {broken}, "
                f"or a router of the model's own chose experts that do not exist; expected finite scores"
            )
        where = f"{label}, step {step}"
        # before placements and splits, which differ as well on a rank that is a step apart: the first error names the
        # cause
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
        # a replica computes by the receiving rank's modules: where these differ, its answers would be wrong without a
        # sign
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
    """Exchange this rank's `row` and counts for those of all ranks; collective.

    Args:
        row: What this rank sends beside its counts.
        routing: This rank's routing decisions, whose counts are sent.
        tokens: How many tokens `routing` is of.
        extra: This rank's row of `Counts.extra`, [E]; None on all ranks or on none.
        first_choices: As in `Counts`; equal on all ranks.
        collective: The ranks that share the layer's experts.
        layer: The layer's place in the order of execution; None where nobody balances it.
        stopwatch: Counts the time as "counts".
        place: Stands for `layer` in the comparison of places where that is None.

    Returns:
        All ranks' numbers, on the host.

    Raises:
        OutOfStep: A rank is in another layer or another pass; on all ranks.
    """
    fields: dict[str, Sequence[int]] = {
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
    # the device alone knows these; they stay there until all ranks' numbers come to the host in one copy
    on_device = {
        "finite": routing.finite.long().view(1),
        "dropped": nothing(1, routing.ids.device) if routing.kept is None else routing.dropped().view(1),
        "load": routing.counts(),
    }
    if extra is not None:
        on_device["extra"] = extra
    if row.gradients is not None:
        on_device["gradients"] = row.gradients
    if row.experts is not None:
        on_device["experts"] = row.experts
    # the head of the message: `prophet.ranks.messages` compares it on all ranks before anything in the table is read
    collective.frames.forward, collective.frames.kind = row.forward, PASSES.index(row.kind)
    numbers = [int(number) for values in fields.values() for number in values]
    with stopwatch("counts"):
        table = gather_numbers(collective, numbers, tuple(on_device.values()), op=Operation(COUNTS, layer), place=place)
    # the table's columns lie in the order in which numbers and tensors were handed over
    widths = {name: len(values) for name, values in fields.items()} | {n: t.numel() for n, t in on_device.items()}
    found: dict[str, Any] = {"extra": None, "gradients": None, "experts": None}
    start = 0
    for name, width in widths.items():
        found[name] = table[:, start] if name in _SINGLE else table[:, start : start + width]
        start += width
    # the planner's core takes contiguous arrays, and a slice keeps the strides of the whole table
    found["load"] = np.ascontiguousarray(found["load"], dtype=np.int64)
    return Counts(**found, first_choices=first_choices)


def compare_placements(digests: Sequence[int], step: int, collective: Collective) -> None:
    """Check that all ranks are about to use the same placements; collective.

    It has to happen before the first Trans, as what that brings is as long as the placements say. A rank that does not
    begin a step is found out as well: its message is another one.

    Args:
        digests: This rank's placements, one digest per layer, [L].
        step: Number of the step that begins, for messages.
        collective: The ranks that compare.

    Raises:
        PlanMismatch: Placements differ.
        OutOfStep: A rank is doing something else.
    """
    found = gather_numbers(collective, digests, op=Operation("comparison of placements"))
    check_placements(found, step)


def check_placements(digests_RL: IntArray, step: int) -> None:
    """Raise `PlanMismatch` where ranks have different placements, by their digests [R, L]."""
    # the case of every step
    if (digests_RL == digests_RL[:1]).all():
        return
    # one check per layer, so that the error names the layer that was planned differently
    for layer, column in enumerate(digests_RL.T):
        _check_equal(f"MoE layer {layer}, step {step}", "placement", column)


def compare_splits(digest: int, layer: int, step: int, collective: Collective) -> None:
    """Check that all ranks split a layer's tokens the same way; collective.

    Args:
        digest: Of this rank's split.
        layer: The layer's place in the order of execution.
        step: Number of the step, for messages.
        collective: The ranks that compare.

    Raises:
        PlanMismatch: Splits differ.
        OutOfStep: A rank is doing something else.
    """
    found = gather_numbers(collective, [digest], op=Operation("comparison of splits", layer))
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
