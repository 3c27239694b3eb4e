"""What strikes one rank while training state moves, for every mover: a named error in time, and one whole state.

Before the decision the old state is in force on every rank that is left, after it the new one. In place the old state
is given up on the way: then none is left, on any rank, and `load` goes on. `-k layout-killed` picks rows of the table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.launch import run_gloo
from tests.helpers.move_faults import ALLOCATE, BEFORE, LIMIT_S, LOST, MOVERS, SEAMS, TOO_HOT, VICTIM, End, Row, strike

MOST_S = 2 * LIMIT_S + 4.0  # a wait, one in which ranks hear why it has failed, and what they ask the store for
NAMED = ("SpecError", "BudgetError", "TransitionError", "StageFailed", "PeerLost", "CollectiveTimeout")
GIVEN_UP = ("moving", "building", "deciding")
"""Phases in which a move in place has no state that is whole."""
# these leave ranks in step, so they share one launch
TOGETHER = {
    "stages": ("asks-agreeing", "memory-preparing", "raises-moving", "raises-building"),
    "owners": ("asks-agreeing", "memory-preparing", "raises-building"),
    "experts": ("asks-agreeing", "memory-preparing", "raises-balancing"),
    "layout": ("asks-agreeing", "memory-preparing", "raises-building"),
    "in_place": ("raises-moving", "raises-building"),
    "own": ("asks-agreeing", "memory-preparing", "raises-building"),
}
PIPELINES = ("stages", "owners", "experts")
"""Movers that have no `load`: they end with `StageFailed`."""
SOON = ("layout-killed-moving", "owners-killed-moving")
"""Rows that have a launch to themselves, and are not slow."""


def _rows() -> Iterator[Row]:
    for mover in MOVERS:
        yield Row(mover, "asks", "agreeing")
        yield Row(mover, "room", "agreeing")
        yield from (Row(mover, "memory", phase) for phase in ALLOCATE[mover])
        yield from (
            Row(mover, fault, phase)
            for fault in ("raises", "breaks", "killed", "stopped", "late")
            for phase in SEAMS[mover]
        )
        yield Row(mover, "halved", "deciding")


def _shared(row: Row) -> bool:
    return f"{row.fault}-{row.phase}" in TOGETHER[row.mover]


def _table() -> list[Any]:
    found = []
    for row in _rows():
        marks: list[Any] = [] if _shared(row) or str(row) in SOON else [pytest.mark.slow]
        found.append(pytest.param(row, id=str(row), marks=marks))
    return found


@functools.cache
def _launched(rows: tuple[Row, ...]) -> list[list[End] | None]:
    lost = [VICTIM] if rows[0].fault in LOST else []
    return run_gloo(strike, MOVERS[rows[0].mover].ranks, list(rows), timeout_s=100.0, silent=lost)


def _ends(row: Row) -> list[End | None]:
    """How the move ended, by rank; None of a rank that is lost."""
    ranks = MOVERS[row.mover].ranks
    rows = tuple(r for r in _rows() if _shared(r) and MOVERS[r.mover].ranks == ranks) if _shared(row) else (row,)
    return [ends[rows.index(row)] if ends is not None else None for ends in _launched(rows)]


def _in_force(row: Row) -> list[tuple[str, str]]:
    """What all ranks that are left may have, and call theirs."""
    new, old = ("new", "new"), ("lost" if row.mover == "in_place" and row.phase in GIVEN_UP else "old", "old")
    if row.fault == "halved":  # whoever gives the first word decides
        return [old, new]
    return [old] if row.phase in BEFORE else [new]


@pytest.mark.parametrize("row", _table())
def test_one_state_is_whole_and_all_ranks_are_told(row: Row) -> None:
    ends = _ends(row)
    print(f"\n{row}")
    for rank, end in enumerate(ends):
        print(f"  rank {rank}: {end}")
    in_force = _in_force(row)
    assert len({(end.state, end.says) for end in ends if end is not None}) == 1, ends
    for rank, end in enumerate(ends):
        if end is None:
            assert rank == VICTIM
            continue
        assert (end.state, end.says) in in_force, f"rank {rank}: {end}"
        # all others had its word; where experts are balanced they wait for another one
        if row.fault == "late" and row.phase == "decided" and row.mover != "experts":
            assert end.error == "", f"rank {rank}: {end}"
        elif row.mover == "own" and row.phase == "decided" and rank == VICTIM:  # it brings the new model
            assert end.error == "ReshardedError", f"rank {rank}: {end}"
        else:
            assert end.error in NAMED, f"rank {rank}: {end}"
        if row.mover in PIPELINES and row.fault in ("raises", "breaks", "memory"):
            assert TOO_HOT in end.said, f"rank {rank} is not told why: {end}"
        if row.fault != "late" or rank != VICTIM:
            assert end.took_s < MOST_S, f"rank {rank}: {end}"
        if row.fault not in LOST:
            ended = row.mover in PIPELINES and end.error == "StageFailed"
            assert end.goes_on == ("no" if ended else "yes"), f"rank {rank}: {end}"
