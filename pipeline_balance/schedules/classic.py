"""GPipe (Huang et al., 2019), 1F1B (PipeDream-Flush, Narayanan et al., 2021), interleaved 1F1B (Megatron-LM, 2021).

Shape legend: P ranks, V stages per rank, M microbatches.
"""

from __future__ import annotations

from pipeline_balance.schedules.actions import Action, Schedule, ScheduleError, build, check_shape


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order; stage r on rank r."""
    check_shape(ranks, microbatches)
    order = range(microbatches)
    rows = [[Action(r, "F", m) for m in order] + [Action(r, "B", m) for m in order] for r in range(ranks)]
    return build(rows, ranks, microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs P - 1 - r forwards ahead, then one forward and one backward in turn; stage r on rank r."""
    check_shape(ranks, microbatches)
    rows = []
    for r in range(ranks):
        ahead = min(ranks - 1 - r, microbatches)
        row = [Action(r, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            # towards the end no forwards are left: the rest are backwards
            if m + ahead < microbatches:
                row.append(Action(r, "F", m + ahead))
            row.append(Action(r, "B", m))
        rows.append(row)
    return build(rows, ranks, microbatches)


def interleaved(ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B: stage s on rank s mod P; microbatches pass every rank's V stages in rounds.

    A round has M / max(1, M // P) microbatches.

    Args:
        ranks: P.
        stages_per_rank: V.
        microbatches: M, a multiple of the number of rounds.
    """
    check_shape(ranks, microbatches)
    if stages_per_rank < 1:
        raise ScheduleError(f"stages_per_rank must be at least 1, got {stages_per_rank}")
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        shape = f"{rounds} rounds on {ranks} ranks"
        raise ScheduleError(f"{microbatches} microbatches do not divide into {shape}: use a multiple of {ranks}")
    size = microbatches // rounds
    total = stages_per_rank * microbatches
    rows = []
    for r in range(ranks):
        # k-th forward (or backward) of a rank -> chunk and microbatch
        turns = [(k // size % stages_per_rank, k // (size * stages_per_rank) * size + k % size) for k in range(total)]
        forward = [Action(c * ranks + r, "F", m) for c, m in turns]
        backward = [Action((stages_per_rank - 1 - c) * ranks + r, "B", m) for c, m in turns]
        # a single stage per rank needs no extra round: this is then 1F1B
        ahead = (stages_per_rank - 1) * size + (2 if stages_per_rank > 1 else 1) * (ranks - 1 - r)
        ahead = min(ahead, total)
        row = forward[:ahead]
        for k in range(total):
            row += forward[ahead + k : ahead + k + 1]
            row.append(backward[k])
        rows.append(row)
    return build(rows, ranks * stages_per_rank, microbatches)
