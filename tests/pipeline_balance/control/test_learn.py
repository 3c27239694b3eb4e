"""When a controller decides, and how long it believes in gains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline_balance.control.decide import ControllerConfig, MoveCost
from pipeline_balance.control.learn import DecisionTimer, Learner, MoveTime, without_frozen
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.errors import SpecError

HALVES = StageMap.contiguous((0, 4, 8))


def layers(*times_s: float) -> list[LayerCost]:
    return [LayerCost(forward_s=t / 3, backward_input_s=t / 3, backward_weight_s=t / 3) for t in times_s]


EVEN, LATE, EARLY = layers(*[1.0] * 8), layers(1, 1, 1, 1, 5, 5, 5, 5), layers(5, 5, 5, 5, 1, 1, 1, 1)


def decisions(config: ControllerConfig, steps: int, quiet: bool, changed: int = -1) -> tuple[list[int], list[int]]:
    """(steps after which a decision was made, steps that were measured)."""
    timer, made, measured = DecisionTimer(config), [], []
    for step in range(steps):
        if step == changed:
            timer.loads_changed()
        if timer.measuring:
            measured.append(step)
        due = timer.due
        timer.step += 1
        if due:
            made.append(step)
            timer.decided(quiet=quiet)
    return made, measured


def test_decisions_come_at_an_interval() -> None:
    assert decisions(ControllerConfig(every_steps=4, measure_steps=2), 12, True) == ([3, 7, 11], [2, 3, 6, 7, 10, 11])
    every = ControllerConfig(every_steps=1, measure_steps=1, prepare_in_backward=True)
    assert decisions(every, 3, True) == ([0, 1, 2], [0, 1, 2])
    # beside a step, which is not measured itself
    beside = ControllerConfig(every_steps=4, measure_steps=2, prepare_in_backward=True)
    assert decisions(beside, 12, True) == ([3, 7, 11], [1, 2, 5, 6, 9, 10])


def test_decisions_become_rare_while_nothing_is_to_gain() -> None:
    config = ControllerConfig(every_steps=4, measure_steps=1, max_every_steps=16)
    assert decisions(config, 50, True)[0] == [3, 11, 27, 43]
    assert decisions(config, 16, False)[0] == [3, 7, 11, 15]


def test_a_known_change_is_decided_on_as_soon_as_it_is_measured() -> None:
    config = ControllerConfig(every_steps=4, measure_steps=2, max_every_steps=64)
    made, measured = decisions(config, 30, True, changed=14)
    assert made == [3, 11, 15, 23]
    assert {14, 15} <= set(measured)
    # one that was due anyway is not put off
    assert decisions(config, 12, True, changed=3)[0] == [3, 11]
    beside = replace(config, prepare_in_backward=True)
    assert decisions(beside, 30, True, changed=14) == ([3, 11, 16, 24], [1, 2, 9, 10, 14, 15, 22, 23])


def test_a_change_whose_costs_are_known_is_decided_on_at_once() -> None:
    timer = DecisionTimer(ControllerConfig(every_steps=4, measure_steps=2, prepare_in_backward=True))
    timer.step = timer.due_at = 4
    timer.decided(quiet=True)
    timer.loads_changed(known=True)
    assert timer.due
    assert not timer.measuring, "nobody would ask for its times"


def test_a_step_without_times_has_no_decision_and_is_measured() -> None:
    timer = DecisionTimer(ControllerConfig(every_steps=4, measure_steps=2, prepare_in_backward=True))
    timer.step, timer.timed_from = 3, 4
    assert timer.measuring
    assert not timer.due
    timer.step += 1
    assert timer.due


def _learner(**options: object) -> Learner:
    config = ControllerConfig(every_steps=10, move_cost=MoveCost(fixed_s=1e6), **options)  # type: ignore[arg-type]
    return Learner(RankLimits.uniform(2), 8, config)


def test_gains_that_last_count_for_more_steps() -> None:
    learner = _learner()
    first = learner.lasting_steps()
    assert first < 10
    for _ in range(6):
        assert not learner.decide(LATE, HALVES).move
    assert learner.trust > 0.95
    assert first < learner.lasting_steps() <= 40
    assert learner.missed_s > 0


def test_gains_that_vanish_count_for_fewer() -> None:
    learner = _learner()
    for i in range(6):
        learner.decide(LATE if i % 2 else EARLY, HALVES)
    assert learner.trust < 0.05
    assert learner.lasting_steps() == 1


def test_a_gain_in_other_slices_says_nothing_of_loads() -> None:
    learner = _learner()
    learner.decide(LATE, HALVES)
    before = learner.trust
    learner.count(16)
    # half as much in each of twice as many units: even loads, of which nothing is known
    learner.decide(layers(*[0.5] * 8), HALVES)
    assert learner.trust == before


def test_a_given_horizon_is_believed_at_first() -> None:
    learner = _learner(horizon_steps=200)
    assert learner.lasting_steps() == 200
    learner.decide(LATE, HALVES)
    learner.decide(EVEN, HALVES)
    assert learner.lasting_steps() < 20
    assert learner.missed_s == 0.0


def test_a_move_that_took_long_is_expected_to_again() -> None:
    learner = _learner()
    learner.move_cost = MoveCost(fixed_s=1.0, bytes_per_s=100.0)
    decision = learner.decide(EVEN, HALVES)
    learner.learn(decision, MoveTime(seconds=5.0, busiest_bytes=200.0))
    assert learner.move_cost.fixed_s == 2.0


def test_the_interval_is_checked() -> None:
    with pytest.raises(SpecError, match="max_every_steps must be at least every_steps"):
        ControllerConfig(every_steps=10, max_every_steps=5)


def test_what_frozen_layers_cost_is_known_before_it_is_measured() -> None:
    whole = LayerCost(
        forward_s=1.0,
        backward_input_s=2.0,
        backward_weight_s=3.0,
        all_reduce_s=4.0,
        activation_bytes=5,
        parameter_bytes=6,
        gradient_bytes=7,
        optimizer_bytes=8,
    )
    alone = LayerCost(forward_s=1.0, parameter_bytes=6)
    passing = replace(whole, backward_weight_s=0.0, all_reduce_s=0.0, gradient_bytes=0, optimizer_bytes=0)
    first = replace(whole, backward_input_s=0.0)
    every = (True,) * 4
    found = without_frozen([whole] * 4, every, (False, True, False, True))
    assert found == [alone, first, passing, whole]
    # once more, from what was worked out
    assert without_frozen(found or [], (False, True, False, True), (False, False, False, True)) == [alone] * 3 + [first]
    assert without_frozen([whole] * 2, (True, False), (False, True)) is None, "its gradients were never timed"
