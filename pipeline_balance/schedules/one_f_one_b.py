"""1F1B as data (PipeDream-Flush, Narayanan et al., 2021).

Shape legend: P ranks, M microbatches.
"""

from __future__ import annotations

from pipeline_balance.schedules.actions import Action, Schedule, build, check_shape


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs P - 1 - r forwards ahead, then one forward and one backward in turn; stage r on rank r."""
    check_shape(ranks, microbatches)
    rows = []
    for r in range(ranks):
        ahead = min(ranks - 1 - r, microbatches)
        row = [Action(r, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            if m + ahead < microbatches:
                row.append(Action(r, "F", m + ahead))
            row.append(Action(r, "B", m))
        rows.append(row)
    return build(rows, ranks, microbatches)
