"""ZB-H1 as data, a published schedule that the simulator is checked with, and one that a user might write.

Shape legend: P ranks, M microbatches. Source: ZB-H1 (Qi et al., 2023).
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
