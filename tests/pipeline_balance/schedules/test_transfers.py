"""Messages between stages have one order on both ends, for any map of stages to ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.schedules.actions import Action, ScheduleError
from pipeline_balance.schedules.closed_forms import sliced_peak_units
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.sliced import Order, sliced
from pipeline_balance.schedules.transfers import Message, Step, forward_rows, received_ahead, with_messages
from tests.helpers.received import most_received


def _play(rows: list[list[Step]], homes: list[int]) -> int:
    """Run all ranks in their orders, with messages that block both ends; the number of messages."""
    stages, sent = len(homes), 0
    left = [list(reversed(row)) for row in rows]
    here = {("F", 0, m) for row in rows for m in range(len(row))}  # inputs that are where they are needed

    def act(action: Action, rank: int) -> None:
        s, m, kind = action.stage, action.microbatch, action.kind
        if kind == "F" or (kind in "BI" and s < stages - 1):
            assert ("F" if kind == "F" else "B", s, m) in here, f"rank {rank} has no input for {action}"
        follower = s + 1 if kind == "F" else s - 1
        if kind != "W" and 0 <= follower < stages and homes[follower] == rank:
            here.add(("F" if kind == "F" else "B", follower, m))

    while any(left):
        before = sum(map(len, left))
        for rank, row in enumerate(left):
            step = row[-1] if row else None
            if isinstance(step, Action):
                act(step, rank)
                row.pop()
            elif step is not None and step.what == "send":
                other = left[step.peer][-1] if left[step.peer] else None
                if isinstance(other, Message) and (other.what, other.peer) == ("receive", rank):
                    assert replace(other, what="send", peer=step.peer) == step
                    stage = step.boundary if step.forward else step.boundary - 1
                    here.add(("F" if step.forward else "B", stage, step.microbatch))
                    row.pop()
                    left[step.peer].pop()
                    sent += 1
        assert sum(map(len, left)) < before, "the ranks wait for each other"
    return sent


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 5), st.booleans())
def test_blocking_messages_never_wait_in_a_circle(homes: list[int], microbatches: int, split: bool) -> None:
    used = sorted(set(homes))
    ranks = [used.index(r) for r in homes]
    crossing = sum(a != b for a, b in pairwise(ranks))
    schedule = flexible(ranks, microbatches, split_backward=split)
    rows = with_messages(schedule.actions, ranks)
    assert _play(rows, ranks) == 2 * crossing * microbatches
    assert [[s for s in row if isinstance(s, Action)] for row in rows] == [list(row) for row in schedule.actions]
    forward = with_messages(forward_rows(ranks, microbatches), ranks)
    assert _play(forward, ranks) == crossing * microbatches


def test_messages_read_well_and_circles_are_named() -> None:
    rows = with_messages(forward_rows([0, 1], 1), [0, 1])
    assert [str(s) for s in rows[0]] == ["0F0", "send 0>1 of 0"]
    assert [str(s) for s in rows[1]] == ["receive 0>1 of 0", "1F0"]
    with pytest.raises(ScheduleError, match="wait for each other: 1B0"):
        with_messages([[Action(0, "F", 0)], [Action(1, "B", 0), Action(1, "F", 0)]], [0, 1])


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("order", ["minimal", "aligned"])
def test_receives_begin_early_and_need_one_buffer_more_than_a_rank_holds(stages_per_rank: int, order: Order) -> None:
    for ranks, times, microbatches in product(range(2, 6), (1, 2, 4), (1, 2, 3)):
        slices = times * ranks
        schedule = sliced(ranks, stages_per_rank, microbatches, slices, order)
        rows = with_messages(schedule.actions, schedule.stage_ranks)
        for rank, row in enumerate(rows):
            ahead = received_ahead(row)
            assert [s for s in ahead if not _receive(s)] == [s for s in row if not _receive(s)]
            for peer in range(ranks):
                assert _from(peer, ahead) == _from(peer, row)
            # what the next action reads was asked for before the last one, unless others from there come first
            late = [s for s, then in pairwise(ahead) if _receive(s) and isinstance(then, Action) and _reads(then, s)]
            first = next(i for i, s in enumerate(ahead) if isinstance(s, Action))
            assert all(s in ahead[:first] for s in late) or stages_per_rank > 1
            together, activations, gradients = most_received(ahead)
            units = sliced_peak_units(rank, ranks, stages_per_rank, microbatches, slices, order)
            assert activations <= units + 1
            assert gradients <= (2 if stages_per_rank == 1 else 4)
            assert together <= units + (2 if stages_per_rank == 1 else 5)


def test_messages_of_one_rank_are_not_overtaken() -> None:
    first, second = Action(0, "F", 0), Action(2, "F", 1)
    for peer in (1, 3):
        later = Message("receive", 2, True, 2, 1)
        needed = Message("receive", 2, True, 1, peer)
        rest: list[Step] = [first, later] if peer == 3 else [first, later, needed]
        assert received_ahead([first, later, needed, second]) == [*([needed] if peer == 3 else []), *rest, second]


def _receive(step: Step) -> bool:
    return isinstance(step, Message) and step.what == "receive"


def _from(peer: int, steps: list[Step]) -> list[Message]:
    return [s for s in steps if isinstance(s, Message) and s.what == "receive" and s.peer == peer]


def _reads(action: Action, message: Step) -> bool:
    assert isinstance(message, Message)
    stage, kind = (message.boundary, "F") if message.forward else (message.boundary - 1, "B")
    return (action.stage, action.kind, action.microbatch) == (stage, kind, message.microbatch)
