"""Schedules of other systems as data for the simulator: TeraPipe, ZB-V, V-Half and V-Min.

Shape legend: P ranks, M microbatches, N slices. A V has 2P stages, r and 2P - 1 - r on rank r, and splits its backward.
Sources: TeraPipe (Li et al., 2021); ZB-V, V-Half and V-Min (Qi et al., 2024, "controllable memory"). Chimera is not
among them: its microbatches pass one of two copies of the model, and those of a `Schedule` pass every stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_balance.schedules.actions import Action, Kind, Schedule, build, check_shape

# Parts of a microbatch on one rank: F, I and W of two stages
_ROUND = 6


def terapipe(ranks: int, microbatches: int, slices: int) -> Schedule:
    """GPipe over slices: all forwards, then all backwards from the last slice to the first; stage r on rank r.

    Args:
        ranks: P.
        microbatches: M.
        slices: N.
    """
    check_shape(ranks, microbatches)
    units = range(microbatches * slices)
    rows = [[*(Action(r, "F", u) for u in units), *(Action(r, "B", u) for u in reversed(units))] for r in range(ranks)]
    return build(rows, ranks, microbatches, slices)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half of 1F1B's activations: a part's time from rank to rank on the way up the V, and two on the way down."""
    p, wait = ranks, 0 if ranks % 2 else 3
    block = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + wait + 2 * r, 6 * p - 2 + wait - r) for r in range(p)]
    return _repeated(block, microbatches)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's activations: a part's time from rank to rank."""
    p, wait = ranks, 0 if ranks % 3 else 2
    block = [(r, 2 * p - 1 - r, 2 * p + wait + r, 4 * p - 1 + wait - r) for r in range(p)]
    return _repeated(block, microbatches)


def _repeated(block: Sequence[Sequence[int]], microbatches: int) -> Schedule:
    """Every microbatch runs like the one before, six parts later.

    Args:
        block: When each rank begins F down, F up, I down and I up the V, in parts, for the first microbatch [P, 4].
        microbatches: M.
    """
    check_shape(len(block), microbatches)
    rows = []
    for rank, begins in enumerate(block):
        first, last = rank, 2 * len(block) - 1 - rank
        parts: list[tuple[int, Kind, int]] = [
            (stage, kind, begin) for stage, kind, begin in zip((first, last, last, first), "FFII", begins, strict=True)
        ]
        taken = {begin % _ROUND for begin in begins}
        for stage, _, begin in parts[2:]:
            # a weight gradient takes the next time that is free in every round
            free = next(t for t in range(begin + 1, begin + 1 + _ROUND) if t % _ROUND not in taken)
            taken.add(free % _ROUND)
            parts.append((stage, "W", free))
        timed = [(begin + _ROUND * m, Action(s, kind, m)) for m in range(microbatches) for s, kind, begin in parts]
        rows.append([action for _, action in sorted(timed)])
    return build(rows, 2 * len(block), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: as many activations as 1F1B, and no wait in the middle where all parts take as long.

    Drawn for at least 2P - 1 microbatches and cut to M.
    """
    check_shape(ranks, microbatches)
    drawn = max(2 * ranks - 1, microbatches)
    rows = []
    for r in range(ranks):
        row = _zb_v_row(down=r, up=2 * ranks - 1 - r, ranks=ranks, drawn=drawn)
        rows.append([a for a in row if a.microbatch < microbatches])
    return build(rows, 2 * ranks, microbatches)


def _zb_v_row(*, down: int, up: int, ranks: int, drawn: int) -> list[Action]:
    """One rank's row: `down` is its stage on the way down the V (and its rank), `up` the one on the way back."""
    row: list[Action] = []
    done = {(stage, kind): 0 for stage in (down, up) for kind in ("F", "I", "W")}

    def run(stage: int, kinds: str) -> None:
        for kind in kinds:
            row.append(Action.parse(f"{stage}{kind}{done[stage, kind]}"))
            done[stage, kind] += 1

    for _ in range(2 * (ranks - down) - 1):
        run(down, "F")
    for _ in range(down):
        run(up, "F")
        run(down, "F")
    for _ in range(ranks - down):
        run(up, "FIW")
    while done[up, "F"] < done[down, "F"] or done[down, "F"] < drawn:
        run(down, "FIW" if done[down, "F"] < drawn else "IW")
        run(up, "FIW")
    for _ in range(down):
        run(down, "I")
        run(up, "I")
    for _ in range(ranks - down):
        run(down, "IW")
    for stage in (up, down):
        while done[stage, "W"] < drawn:
            run(stage, "W")
    return row
