"""Schedules are valid, simulate to the closed forms, and are what torch's runtime accepts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.slices.peers import zb_v
from pipeline_balance.schedules.actions import Action, Schedule, ScheduleError
from pipeline_balance.schedules.classic import gpipe, interleaved, one_f_one_b
from pipeline_balance.schedules.closed_forms import (
    chimera_bubble_ratio,
    interleaved_idle_s,
    one_f_one_b_idle_s,
    zb_h1_idle_s,
    zb_v_idle_s,
)
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.spec import LayerCost, StageMap, in_flight
from prophet.errors import SpecError
from tests.helpers.pipeline_schedules import zb_h1

SHAPES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (p, p + 1, 2 * p, 3 * p + 1)]


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_closed_forms(ranks: int, microbatches: int) -> None:
    f, i, w = 3.0, 4.0, 2.0
    even = Durations.uniform(ranks, forward_s=f, input_s=i, weight_s=w)
    for make in (gpipe, one_f_one_b):
        ran = simulate(make(ranks, microbatches), even)
        idle = one_f_one_b_idle_s(ranks, f, i + w)
        assert ran.idle_s == pytest.approx((idle,) * ranks)
        assert ran.bubble_ratio == pytest.approx(idle / (idle + microbatches * (f + i + w)))
    ran = simulate(zb_h1(ranks, microbatches), even)
    assert ran.idle_s == pytest.approx((zb_h1_idle_s(ranks, f, i, w),) * ranks)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 3), (2, 2), (3, 2), (4, 1), (4, 3)])
def test_interleaved_closed_form(ranks: int, rounds: int, stages_per_rank: int) -> None:
    v, m = stages_per_rank, ranks * rounds
    ran = simulate(
        interleaved(ranks, v, m),
        Durations.uniform(ranks * v, forward_s=2 / v, input_s=2 / v, weight_s=2 / v),
    )
    assert ran.idle_s == pytest.approx((interleaved_idle_s(ranks, v, 2.0, 4.0),) * ranks)
    assert ran.idle_s[0] / (m * 6.0) == pytest.approx((ranks - 1) / (v * m))


def test_one_stage_per_rank_interleaved_is_1f1b() -> None:
    assert interleaved(4, 1, 8) == one_f_one_b(4, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_zb_v_closed_form(ranks: int) -> None:
    ran = simulate(zb_v(ranks, 2 * ranks + 1), Durations.uniform(2 * ranks))
    assert ran.idle_s == pytest.approx((zb_v_idle_s(ranks, 1.0),) * ranks)
    # as much activation memory as 1F1B's first rank: P microbatches through both of its stages
    assert ran.peak_activation_bytes == (2 * ranks,) * ranks


def test_activation_memory_by_rank() -> None:
    assert peak_activation_bytes(gpipe(3, 6), (1, 1, 1)) == (6, 6, 6)
    assert peak_activation_bytes(one_f_one_b(3, 6), (1, 1, 1)) == (3, 2, 1)
    assert peak_activation_bytes(one_f_one_b(3, 2), (1, 1, 1)) == (2, 2, 1)
    assert peak_activation_bytes(zb_h1(3, 6), (1, 1, 1)) == (3, 3, 3)


def test_chimera_agrees_with_its_own_paper() -> None:
    # Li and Hoefler: (D - 2) / (3N/2 + D - 2) with backward = 2 forward and N = D microbatches
    for d in (2, 4, 8, 16):
        assert chimera_bubble_ratio(d, 1.0, 2.0) == pytest.approx((d - 2) / (1.5 * d + d - 2))
    assert chimera_bubble_ratio(8, 1.0, 2.0, 0.5) > chimera_bubble_ratio(8, 1.0, 2.0)
    with pytest.raises(ScheduleError, match="even"):
        chimera_bubble_ratio(3, 1.0, 2.0)


def test_transfers_and_uneven_microbatches_by_hand() -> None:
    durations = Durations(
        forward_s=np.array([[1.0, 2.0], [3.0, 1.0]]),
        input_s=np.array([1.0, 1.0]),
        weight_s=np.array([0.5, 1.0]),
        forward_transfer_s=np.array([0.25]),
        backward_transfer_s=np.array([0.5]),
        activation_bytes=(10, 20),
    )
    ran = simulate(one_f_one_b(2, 2), durations)
    # rank 1: F0 1.25-4.25, B0 -6.25, F1 (ready 3.25) -7.25, B1 -9.25; rank 0: B0 6.75-8.25, B1 9.75-11.25
    assert ran.start_s[Action(1, "F", 0)] == 1.25
    assert ran.end_s[Action(1, "B", 0)] == 6.25
    assert ran.start_s[Action(0, "B", 0)] == 6.75
    assert ran.makespan_s == 11.25
    assert ran.busy_s == (6.0, 8.0)
    assert ran.peak_activation_bytes == (20, 20)


def test_stages_on_one_rank_do_not_transfer() -> None:
    schedule = flexible((0, 0), 2)
    slow = Durations.uniform(2, transfer_s=100.0)
    assert simulate(schedule, slow).makespan_s == 12.0


def test_durations_of_stages() -> None:
    costs = [LayerCost(forward_s=1.0, backward_input_s=2.0, backward_weight_s=3.0, activation_bytes=4)] * 3
    durations = Durations.of_stages(costs, StageMap.contiguous((0, 1, 3)), speeds=(1.0, 2.0), transfer_s=0.5)
    assert durations.forward_s.tolist() == [1.0, 1.0]
    assert durations.weight_s.tolist() == [3.0, 3.0]
    assert durations.activation_bytes == (4, 8)
    assert durations.forward_transfer_s.tolist() == [0.5]


def test_deadlock_is_named() -> None:
    crossed = Schedule.parse("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1")
    assert simulate(crossed, Durations.uniform(2)).makespan_s > 0
    stuck = Schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError, match=r"rank 0: 0B0, rank 1: 1F1"):
        simulate(stuck, Durations.uniform(2))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0B0,0F0", "twice"),
        ("0B0,0F0", "comes before F"),
        ("0F0,0W0,0I0", "comes before I"),
        ("0F0", "runs F"),
        ("0F0,0B0\n0F1,0B1", "ranks 0 and 1"),
        ("0F0,0X0", "reads like 2F0"),
        ("", "at least one action"),
        ("0F0,0I0,0W0,0B0", "runs FIWB"),
    ],
)
def test_invalid_schedules_are_refused(text: str, error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        Schedule.parse(text)


def test_invalid_durations_are_refused() -> None:
    with pytest.raises(SpecError, match="forward_s must have shape"):
        simulate(one_f_one_b(2, 2), Durations.uniform(3))
    with pytest.raises(SpecError, match="not negative"):
        simulate(one_f_one_b(2, 2), Durations.uniform(2, weight_s=-1.0))
    with pytest.raises(ScheduleError, match="multiple of 4"):
        interleaved(4, 2, 9)
    with pytest.raises(ScheduleError, match=r"without a stage: \[1\]"):
        flexible((0, 2), 2)


def test_printed_schedules_parse_as_torch_actions() -> None:
    from torch.distributed.pipelining.schedules import _Action

    for schedule in (one_f_one_b(2, 3), zb_v(2, 3)):
        for row in schedule.actions:
            assert [str(_Action.from_str(str(a))) for a in row] == [str(a) for a in row]


@pytest.mark.parametrize("split", [False, True])
def test_flexible_matches_1f1b_or_better(split: bool) -> None:
    for ranks, microbatches in SHAPES:
        schedule = flexible(range(ranks), microbatches, split_backward=split)
        even = Durations.uniform(ranks)
        known = simulate(one_f_one_b(ranks, microbatches), even).makespan_s
        assert simulate(schedule, even).makespan_s <= known
        if not split:
            assert schedule == one_f_one_b(ranks, microbatches)
        peaks = peak_activation_bytes(schedule, (1,) * ranks)
        assert all(p <= in_flight(s, ranks, microbatches) for s, p in enumerate(peaks))


def test_what_the_runtime_takes_hides_where_a_rank_waits() -> None:
    plain = Durations.uniform(1)
    slow = replace(plain, between_s=0.5)
    # one rank: three forwards, three backwards of two seconds, five pauses
    assert simulate(one_f_one_b(1, 3), plain).makespan_s == 9.0
    assert simulate(one_f_one_b(1, 3), slow).makespan_s == 9.0 + 5 * 0.5
    # two ranks, one microbatch: the first rank waits for the second anyway
    assert simulate(one_f_one_b(2, 1), replace(Durations.uniform(2), between_s=0.5)).makespan_s == 6.5
    with pytest.raises(SpecError, match="between_s"):
        simulate(one_f_one_b(1, 1), replace(plain, between_s=-1.0))


def test_a_frozen_prefix_keeps_the_robust_order() -> None:
    # forward and backward of four stages as freezing leaves them: taking what is ready first ends later than 1F1B
    frozen = Durations(
        forward_s=np.array([34.4, 20.3, 7.6, 9.1]) * 1e-3,
        input_s=np.array([0.0, 12.3, 11.7, 14.4]) * 1e-3,
        weight_s=np.zeros(4),
    )
    made = flexible(range(4), 6, durations=frozen)
    assert made == one_f_one_b(4, 6)


def test_another_order_is_taken_where_it_is_clearly_shorter() -> None:
    rng = np.random.default_rng(0)
    others = 0
    for _ in range(200):
        uneven = Durations(
            forward_s=rng.lognormal(sigma=1.2, size=4), input_s=rng.lognormal(sigma=1.2, size=4), weight_s=np.zeros(4)
        )
        plain, made = one_f_one_b(4, 6), flexible(range(4), 6, durations=uneven)
        assert simulate(made, uneven).makespan_s <= simulate(plain, uneven).makespan_s
        if made != plain:
            others += 1
            assert simulate(made, uneven).makespan_s < simulate(plain, uneven).makespan_s / 1.049
    assert others > 0
