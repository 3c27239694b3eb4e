"""The one message of a layer's forward pass: every rank's counts, and what ranks have to agree on before they act.

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

from prophet.errors import PlanMismatch, RoutingError
from prophet.experts.gate import Routing
from prophet.ranks.collective import Collective, Operation
from prophet.scheduler.windows import Stopwatch
from prophet.spec import IntArray, odd_ones_out

_SINGLE = ("finite", "dropped", "tokens", "step", "placement", "split", "stale")  # one integer of every rank
UNKNOWN = -1  # the digest of a placement that is still being planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a rank says beside its counts. Every field is as long on all ranks, and in every pass.

    step: of training. placement, split: digests of the placement in force and of the last split. stale: whether home
    parameters have changed since they were sent to replicas. window_us: [W] lengths of the block's windows.
    placements: [L] digests of all layers' placements, with the first layer's counts; upcoming: [1] that of the first
    layer's next one or UNKNOWN, with the last layer's.
    """

    step: int = 0
    placement: int = 0
    split: int = 0
    stale: bool = False
    window_us: Sequence[int] = ()
    placements: Sequence[int] = ()
    upcoming: Sequence[int] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """What all ranks have said, by rank.

    finite: [R] whether the gate's scores are. tokens: [R] routed. dropped: [R] choices dropped for lack of capacity.
    step, placement, split, stale: [R]; window_us: [R, W]; placements: [R, L] or [R, 0]; upcoming: [R, 1] or [R, 0]: as
    in `Row`. load: [R, E] choices by source rank and expert. extra: [R, E] choices before any drop, or with
    `first_choices` every token's first choice; None where the load says both.
    """

    finite: IntArray
    dropped: IntArray
    tokens: IntArray
    step: IntArray
    placement: IntArray
    split: IntArray
    stale: IntArray
    window_us: IntArray
    placements: IntArray
    upcoming: IntArray
    load: IntArray
    extra: IntArray | None
    first_choices: bool

    def judged(self) -> IntArray:
        """[R, E] the choices that the auxiliary loss is about."""
        return self.load if self.extra is None else self.extra

    def undropped(self) -> IntArray:
        """[R, E] choices before any drop, where the gate needs to know; the load elsewhere."""
        return self.load if self.extra is None or self.first_choices else self.extra

    def check(self, rank: int, label: str) -> None:
        """Raise `RoutingError` for scores that cannot be routed, `PlanMismatch` where ranks are about to differ.

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
        _check_equal(where, "step", self.step, show=True)
        _check_equal(where, "placement", self.placement)
        _check_equal(where, "previous split", self.split)
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
) -> Counts:
    """Tell all ranks this one's `row` and counts, and hear theirs; collective.

    tokens: how many `routing` is of. extra, first_choices: as of `Counts`, of this rank; alike on all ranks.
    """
    said: dict[str, Sequence[int]] = {
        "finite": (0,),  # the device alone knows this and the next: they are written there
        "dropped": (0,),
        "tokens": (tokens,),
        "step": (row.step,),
        "placement": (row.placement,),
        "split": (row.split,),
        "stale": (row.stale,),
        "window_us": row.window_us,
        "placements": row.placements,
        "upcoming": row.upcoming,
    }
    numbers = [number for values in said.values() for number in values]
    head = torch.tensor(numbers, dtype=torch.int64).to(routing.ids.device, non_blocking=True)
    head[0] = routing.finite
    head[1] = routing.dropped()
    load = routing.counts()
    parts = [head, load] + ([] if extra is None else [extra])
    op = Operation("exchange of counts", layer)
    with stopwatch("counts"):
        table = collective.all_gather(torch.cat(parts), op=op).cpu().numpy()
    widths = {name: len(values) for name, values in said.items()} | {"load": load.numel(), "extra": load.numel()}
    found: dict[str, Any] = {}
    start = 0
    for name, width in widths.items():
        found[name] = table[:, start] if name in _SINGLE else table[:, start : start + width]
        start += width
    found["load"] = np.ascontiguousarray(found["load"], dtype=np.int64)
    if extra is None:
        found["extra"] = None
    return Counts(**found, first_choices=first_choices)


def compare_placements(digests: Sequence[int], step: int, collective: Collective, device: torch.device) -> None:
    """Raise `PlanMismatch` unless all ranks are about to use the same placements, by their digests [L]; collective.

    It has to happen before the first Trans: a backend that receives more than was announced may end the process.
    On the weights channel, so that a rank which does not begin a step meets a time limit and no other message.
    """
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    found = collective.all_gather(mine, op=Operation("comparison of placements"), channel="weights").cpu()
    check_placements(found.numpy(), step)


def check_placements(digests_RL: IntArray, step: int) -> None:
    """Raise `PlanMismatch` where ranks have different placements, by their digests [R, L]."""
    for layer, column in enumerate(digests_RL.T):
        _check_equal(f"MoE layer {layer}, step {step}", "placement", column)


def compare_splits(digest: int, layer: int, step: int, collective: Collective, device: torch.device) -> None:
    """Raise `PlanMismatch` unless all ranks split a layer's tokens the same way; collective."""
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    found = collective.all_gather(mine, op=Operation("comparison of splits", layer)).cpu().flatten()
    _check_equal(f"MoE layer {layer}, step {step}", "split", found.numpy())


def _check_equal(where: str, what: str, by_rank: IntArray, *, show: bool = False) -> None:
    differ = odd_ones_out(by_rank)
    if differ:
        shown = f" ({by_rank.tolist()} by rank)" if show else ""
        raise PlanMismatch(
            f"{where}: the {what} of rank(s) {differ} differs from the other ranks'{shown}; all ranks must run the "
            f"same configuration and versions"
        )
