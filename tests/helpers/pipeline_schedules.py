"""ZB-H1 and ZB-V as data, published schedules that the simulator is checked with, and one that a user might write.

Shape legend: P ranks, M microbatches. Sources: ZB-H1 (Qi et al., 2023), ZB-V (Qi et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_balance.schedules.actions import Action, Schedule, build, check_shape


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the backward split in two: rank r defers r weight gradients, which fill its final wait.

    Memory: at most P microbatches in flight on any rank, as in 1F1B's first. Stage r on rank r.
    """
    check_shape(ranks, microbatches)
    rows = []
    for r in range(ranks):
        ahead = min(ranks - 1 - r, microbatches)
        row = [Action(r, "F", m) for m in range(ahead)]
        done = 0
        for m in range(microbatches):
            if m + ahead < microbatches:
                row.append(Action(r, "F", m + ahead))
            row.append(Action(r, "I", m))
            if m >= r:
                row.append(Action(r, "W", done))
                done += 1
        row += [Action(r, "W", m) for m in range(done, microbatches)]
        rows.append(row)
    return build(rows, ranks, microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: 2P stages folded into a V, stages r and 2P - 1 - r on rank r; backward split in two.

    Drawn for at least 2P - 1 microbatches and cut to M. Source: Qi et al., 2024 (controllable memory), Figure
    of ZB-V.
    """
    check_shape(ranks, microbatches)
    drawn = max(2 * ranks - 1, microbatches)
    rows = []
    for r in range(ranks):
        row = _zb_v_row(down=r, up=2 * ranks - 1 - r, ranks=ranks, drawn=drawn)
        rows.append([a for a in row if a.microbatch < microbatches])
    return build(rows, 2 * ranks, microbatches)


def _zb_v_row(*, down: int, up: int, ranks: int, drawn: int) -> list[Action]:
    """One rank's row: `down` is its stage on the way down the V (and its rank), `up` the one on the
    way back.
    """
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


def in_pairs(stage_ranks: Sequence[int], microbatches: int) -> list[list[str]]:
    """As a user writes one: all forwards, then all backwards in pairs, the later of a pair first; for any map."""
    stages, order = len(stage_ranks), sorted(range(microbatches), key=lambda m: (m // 2, -m))
    rows: list[list[str]] = []
    for rank in range(max(stage_ranks) + 1):
        mine = [s for s, r in enumerate(stage_ranks) if r == rank]
        forward = sorted((m + s, s, m) for s in mine for m in range(microbatches))
        backward = sorted((i + stages - s, -s, m) for s in mine for i, m in enumerate(order))
        rows.append([f"{s}F{m}" for _, s, m in forward] + [f"{-s}B{m}" for _, s, m in backward])
    return rows
