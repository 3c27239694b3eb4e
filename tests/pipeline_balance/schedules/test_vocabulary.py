"""Schedules of a vocabulary that is split: all ranks share every unit in one order, and none waits in a circle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.schedules.actions import SHARED, Action, Schedule, ScheduleError, build
from pipeline_balance.schedules.classic import one_f_one_b
from pipeline_balance.schedules.named import schedule_for
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.schedules.sliced import sliced
from pipeline_balance.schedules.transfers import forward_rows, with_messages
from pipeline_balance.schedules.vocabulary import schedule_with_head, shared_rows, sharing


def _check(schedule: Schedule) -> None:
    """Everything can run, with and without messages, and reads back from its text."""
    simulate(schedule, Durations.uniform(schedule.stages))
    rows = with_messages(schedule.actions, schedule.stage_ranks)
    for rank, row in enumerate(rows):
        assert [step for step in row if isinstance(step, Action)] == list(schedule.actions[rank])
        assert sum(isinstance(a, Action) and a.kind in SHARED for a in row) == 4 * schedule.units
    assert Schedule.parse(str(schedule), schedule.slices) == schedule
    assert not schedule.passes().shares


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 6), st.booleans())
def test_any_map_shares_in_one_order(homes: list[int], microbatches: int, split: bool) -> None:
    used = sorted(set(homes))
    ranks = [used.index(r) for r in homes]
    made = schedule_with_head("flexible", ranks, microbatches, split_backward=split)
    _check(sharing(made))
    rows = shared_rows(forward_rows(ranks, microbatches), len(ranks))
    assert all(sum((a.kind, a.microbatch) == ("S", 0) for a in row) == 1 for row in rows)
    with_messages(rows, ranks)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["minimal", "aligned"])
)
def test_slices_share_in_one_order(ranks: int, each: int, microbatches: int, n: int, order: str) -> None:
    slices = n * ranks
    _check(sharing(sliced(ranks, each, microbatches, slices, order)))  # type: ignore[arg-type]
    if order == "aligned" and slices > 1:
        helped = sharing(sliced(ranks, each, microbatches, slices, "aligned", helped=True))
        _check(helped)
        # what all ranks do in a slot stays in one slot
        assert len({len(row) for row in helped.passes().actions}) == 1


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved"])
def test_named_schedules_share(name: str) -> None:
    homes = (0, 1, 2, 3, 0, 1, 2, 3) if name == "interleaved" else (0, 1, 2, 3)
    _check(sharing(schedule_with_head(name, homes, 8, split_backward=False)))


def _rows(schedule: Schedule) -> list[list[Action]]:
    return [list(row) for row in schedule.actions]


def test_a_rank_that_skips_a_head_pass_is_found_when_the_schedule_is_built() -> None:
    good = sharing(one_f_one_b(3, 4))
    for kind in SHARED:
        rows = _rows(good)
        rows[1] = [a for a in rows[1] if (a.kind, a.microbatch) != (kind, 2)]
        with pytest.raises(ScheduleError, match=f"rank 1 skips {kind} of microbatch 2"):
            build(rows, 3, 4)


def test_another_order_is_found_when_the_schedule_is_built() -> None:
    rows = _rows(sharing(one_f_one_b(2, 3)))
    at = [i for i, a in enumerate(rows[1]) if a.kind == "T"]
    rows[1][at[0]], rows[1][at[1]] = rows[1][at[1]], rows[1][at[0]]
    with pytest.raises(ScheduleError, match="rank 1 runs T1 where rank 0 runs T0"):
        build(rows, 2, 3)
    text = "0E0,0F0,0S0,0T0,0G0,0B0"
    with pytest.raises(ScheduleError, match="0G0 comes before 0B0"):
        Schedule.parse(text)
    with pytest.raises(ScheduleError, match="0B0 comes before 0T0"):
        Schedule.parse("0E0,0F0,0S0,0B0,0T0,0G0")


def test_a_users_schedule_has_no_shared_actions() -> None:
    def made(ranks: tuple[int, ...], microbatches: int) -> Schedule:
        return sharing(one_f_one_b(len(ranks), microbatches))

    with pytest.raises(ScheduleError, match="split vocabulary"):
        schedule_for(made, (0, 1), 2)


def test_the_head_costs_each_rank_the_same_and_is_hidden_but_for_the_ends() -> None:
    ranks, microbatches, s, t = 4, 32, 0.3, 0.6
    ran = simulate(
        sharing(schedule_with_head("1f1b", range(ranks), microbatches, split_backward=False)),
        Durations(
            forward_s=[1.0] * ranks,  # type: ignore[arg-type]
            input_s=[1.0] * ranks,  # type: ignore[arg-type]
            weight_s=[1.0] * ranks,  # type: ignore[arg-type]
            vocabulary_s=(s, t),
        ),
    )
    work = microbatches * (3.0 + s + t)
    assert ran.busy_s == pytest.approx((work,) * ranks)
    # little more than the ranks' own start and end
    assert ran.makespan_s < work + 2 * (ranks + 1) * (3.0 + s + t)


def test_a_simulation_asks_once_whether_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer reads a whole row, so one for each action would take a time that grows with its square."""
    asked: list[Schedule] = []
    monkeypatch.setattr(Schedule, "shares", property(lambda one: bool(asked.append(one))))  # type: ignore[func-returns-value]
    schedule = sliced(4, 1, 4, 8)
    simulate(schedule, Durations.uniform(schedule.stages))
    assert len(asked) == 1
