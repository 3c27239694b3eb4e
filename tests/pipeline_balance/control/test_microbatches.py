"""Which number of microbatches is chosen from two that were tried; values only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline_balance.control.decide import ControllerConfig
from pipeline_balance.control.microbatches import Stretch, Trial
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.errors import SpecError

ROWS, LAYERS = 16, 8
HALVES = StageMap.contiguous((0, 4, 8))


def line(fixed_s: float, row_s: float, noise: float = 0.0) -> Callable[[int, int], Stretch]:
    """What `microbatches` show at the n-th stretch, where a layer takes `fixed_s` and `row_s` for each row."""

    def at(microbatches: int, n: int) -> Stretch:
        rows = ROWS / microbatches
        seconds = (fixed_s + row_s * rows) * (1 + noise * (-1) ** n)
        cost = LayerCost(forward_s=seconds / 3, backward_input_s=2 * seconds / 3, activation_bytes=round(100 * rows))
        return Stretch(microbatches=microbatches, costs=[cost] * LAYERS)

    return at


def tried(
    at: Callable[[int, int], Stretch], *, now: int = 8, most: int = 8, memory_bytes: int = 1 << 40, rows: int = ROWS
) -> Trial | None:
    limits = RankLimits.uniform(2, memory_bytes=memory_bytes)
    trial = Trial(stage_map=HALVES, limits=limits, now=now, most=most)
    order = []
    while not trial.done:
        order.append(trial.microbatches)
        trial.stretches.append(at(trial.microbatches, len(trial.stretches)))
        if len(order) == 1 and not trial.go_on(rows):
            return None
    assert order == [now, trial.other, trial.other, now]
    return trial


def chosen(trial: Trial | None) -> int:
    assert trial is not None
    return trial.choose(step=30, min_gain=0.02).after


def test_without_a_cost_of_their_own_as_many_microbatches_as_now_stay() -> None:
    assert chosen(tried(line(0.0, 1.0))) == 8


def test_fewer_where_each_costs_something() -> None:
    # layer units of 9 x 4 x (1 + 2 x 0.1), 5 x 4 x (1 + 4 x 0.1), 3 x 4 x (1 + 8 x 0.1)
    trial = tried(line(1.0, 0.1))
    assert trial is not None
    choice = trial.choose(step=30, min_gain=0.02)
    assert (choice.before, choice.after) == (8, 2)
    assert choice.step_s == pytest.approx(9 * 4 * 1.2)
    assert choice.gain_s == pytest.approx(9 * 4 * 1.2 - 3 * 4 * 1.8)
    assert choice.error_s == pytest.approx(0.0, abs=1e-9)
    assert str(choice).startswith("step 30: 2 microbatches in place of 8; gain per step 21600.0 ms predicted")


def test_the_best_number_is_that_of_the_line_between_both_costs() -> None:
    # 9 x (1 + 2), 5 x (1 + 4), 3 x (1 + 8): a fixed cost of one row's makes four the best
    assert chosen(tried(line(1.0, 1.0))) == 4


def test_a_gain_within_the_error_changes_nothing() -> None:
    trial = tried(line(1.0, 1.0, noise=0.2))
    assert trial is not None
    choice = trial.choose(step=30, min_gain=0.02)
    assert choice.after == 8
    assert 0 < choice.gain_s < choice.error_s
    assert "8 microbatches stay; the best other number is 4" in choice.reason


def test_a_gain_below_what_counts_as_noise_changes_nothing() -> None:
    trial = tried(line(1.0, 1.0))
    assert trial is not None
    # 27 and 25
    assert trial.choose(step=0, min_gain=0.07).after == 4
    assert trial.choose(step=0, min_gain=0.08).after == 8


def test_memory_bounds_what_is_tried_and_chosen() -> None:
    # two microbatches of 4 layers on the first rank: of 2 rows they keep 1600 bytes, of 4 rows twice as much
    assert tried(line(1.0, 0.1), memory_bytes=3199) is None
    assert chosen(tried(line(1.0, 0.1), memory_bytes=3200)) == 4
    assert chosen(tried(line(1.0, 0.1), memory_bytes=6400)) == 2


def test_numbers_divide_the_batch_keep_ranks_busy_and_are_no_more_than_the_first() -> None:
    assert tried(line(1.0, 0.1), rows=11) is None
    # one microbatch leaves the second rank idle
    assert tried(line(1.0, 0.1), now=2, most=2) is None
    # back towards the first number where fewer were too few
    trial = tried(line(0.0, 1.0), now=2, most=8)
    assert trial is not None
    assert trial.other == 4
    assert chosen(trial) == 8
    assert chosen(tried(line(0.0, 1.0), now=2, most=4)) == 4


def test_a_line_is_not_believed_far_from_what_was_tried() -> None:
    # 16 rows: 16 and 8 are tried; 2 would be best by the line
    trial = tried(line(1.0, 0.0), now=16, most=16)
    assert trial is not None
    assert trial.other == 8
    assert chosen(trial) == 4


def test_links_and_what_the_runtime_takes_count_for_every_microbatch() -> None:
    def at(microbatches: int, n: int) -> Stretch:
        plain = line(0.0, 1.0)(microbatches, n)
        return Stretch(microbatches=microbatches, costs=plain.costs, transfer_s=0.5, between_s=8.0)

    assert chosen(tried(at)) < 8


def test_choosing_needs_moves_to_fewer_ranks() -> None:
    with pytest.raises(SpecError, match="choose_microbatches needs repack_slowdown"):
        ControllerConfig(choose_microbatches=True)
