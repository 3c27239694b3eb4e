"""What links and means over replicas add to a step, and where layers go for it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline_balance.control.decide import ControllerConfig, MoveCost, decide
from pipeline_balance.control.learn import Learner
from pipeline_balance.maps.compare import bottleneck_s, least_step_s, predicted_makespan_s
from pipeline_balance.maps.diffusion import diffuse
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.schedules.classic import one_f_one_b
from pipeline_balance.schedules.links import among, between_stages, checked_transfers, grown, message_s, pace_s
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.errors import SpecError
from prophet.spec import FloatArray

EVEN = StageMap.contiguous((0, 6, 12, 18, 24))
LAYERS = [LayerCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)] * 24
LIMITS = RankLimits.uniform(4)
FREE = ControllerConfig(move_cost=MoveCost(fixed_s=0.0, bytes_per_s=1e12))


def _slow(a: int, b: int, seconds: float, others: float = 0.1) -> FloatArray:
    links = np.full((4, 4), others)
    links[a, b] = links[b, a] = seconds
    return links


def test_links_are_looked_up_by_ranks() -> None:
    links = _slow(1, 3, 7.0)
    assert between_stages(links, (0, 1, 3, 3, 1)).tolist() == [0.1, 7.0, 0.0, 7.0]
    assert between_stages(0.5, (0, 0, 1)).tolist() == [0.0, 0.5]
    kept = among(links, (1, 3))
    assert np.asarray(kept).tolist() == [[0.1, 7.0], [7.0, 0.1]]
    assert among(0.5, (1, 3)) == 0.5
    more = np.asarray(grown(links, 5))
    assert more.shape == (5, 5)
    assert (more[1, 3], more[4, 0]) == (7.0, 0.1)


def test_links_of_other_ranks_or_of_no_seconds_are_refused() -> None:
    with pytest.raises(SpecError, match=r"\[3, 3\], got \[4, 4\]"):
        checked_transfers(_slow(0, 1, 1.0), 3)
    with pytest.raises(SpecError, match="finite seconds"):
        checked_transfers(_slow(0, 1, float("nan")), 4)


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 2), (2, 3)])
def test_the_pace_is_what_the_simulator_comes_to(a: int, b: int) -> None:
    loads, links = [18.0, 18.0, 18.0, 18.0], between_stages(_slow(a, b, 5.0), range(4)).tolist()
    stages = Durations.of_stages(LAYERS, EVEN, transfer_s=_slow(a, b, 5.0))
    steps = [simulate(one_f_one_b(4, m), stages).makespan_s for m in (64, 128)]
    assert (steps[1] - steps[0]) / 64 == pytest.approx(pace_s(loads, links), rel=1e-9)
    # a balanced load at both ends of the slow link is the mean over those two stages and twice the link
    assert pace_s(loads, links) == pytest.approx((18 + 18 + 2 * 5) / 2)


def test_both_ends_of_a_link_have_half_of_it() -> None:
    assert message_s(_slow(1, 2, 5.0, 0.0), 4).tolist() == [0.0, 5.0, 5.0, 0.0]
    assert message_s(1.0, 3).tolist() == [1.0, 2.0, 1.0]
    assert message_s(1.0, 1).tolist() == [0.0]


@pytest.mark.parametrize("microbatches", [8, 24])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 3)])
def test_a_map_for_a_slow_link_is_the_best_of_all(a: int, b: int, microbatches: int) -> None:
    links = _slow(a, b, 6.0)
    known = {"microbatches": microbatches, "transfer_s": links}
    made = decide(LAYERS, LIMITS, EVEN, microbatches=microbatches, horizon_steps=50, config=FREE, transfer_s=links)
    assert made.move
    every = [
        StageMap.contiguous((0, *inner, 24)) for inner in itertools.product(*[range(n, n + 6) for n in (4, 10, 16)])
    ]
    best_s = min(predicted_makespan_s(LAYERS, m, LIMITS, **known) for m in every)  # type: ignore[arg-type]
    assert made.best_makespan_s <= 1.01 * best_s
    assert made.current_makespan_s > 1.02 * best_s
    # where the same link is as fast as the others, the even map stays
    assert not decide(
        LAYERS, LIMITS, EVEN, microbatches=microbatches, horizon_steps=50, config=FREE, transfer_s=_slow(a, b, 0.1)
    ).move


def test_a_move_that_pays_is_found_where_a_link_sets_the_pace() -> None:
    """With few microbatches a step depends on more than its pace, which no map changes here."""
    links = np.array([[0.0, 3.0, 0.2, 0.0], [3.0, 0.0, 0.05, 3.0], [0.2, 0.05, 0.0, 0.05], [0.0, 3.0, 0.05, 0.0]])
    costs = [LayerCost(forward_s=0.3, backward_input_s=0.3, backward_weight_s=0.3)] * 7
    uneven = StageMap.contiguous((0, 1, 2, 3, 7))
    found = decide(costs, LIMITS, uneven, microbatches=4, horizon_steps=100, config=FREE, transfer_s=links)
    assert found.move
    assert found.gain_s > 0.1 * found.current_makespan_s


def test_no_step_is_shorter_than_the_least() -> None:
    rng, close = np.random.default_rng(0), 0
    for _ in range(150):
        stages, microbatches = int(rng.integers(1, 6)), int(rng.integers(1, 18))
        layers = stages + int(rng.integers(0, 5))
        costs = [
            LayerCost(forward_s=f, backward_input_s=i, backward_weight_s=w)
            for f, i, w in rng.random((layers, 3)).tolist()
        ]
        limits = [RankLimits(memory_bytes=1 << 60, speed=s) for s in rng.choice([0.5, 1.0, 2.0], stages).tolist()]
        cuts = np.sort(rng.choice(np.arange(1, layers), stages - 1, replace=False)).tolist()
        stage_map = StageMap((0, *cuts, layers), tuple(rng.permutation(stages).tolist()))
        links = np.triu(rng.choice([0.0, 0.2, 1.0, 3.0], (stages, stages)), 1)
        known: dict[str, Any] = {"microbatches": microbatches, "transfer_s": links + links.T}
        least, step = (f(costs, stage_map, limits, **known) for f in (least_step_s, predicted_makespan_s))
        assert least <= step * (1 + 1e-9)
        close += step < 1.05 * least
    # and not far below it, or it would rule nothing out
    assert close > 75


def test_diffusion_takes_layers_from_both_ends_of_a_slow_link() -> None:
    links = _slow(2, 3, 6.0, 0.0)
    after = diffuse(LAYERS, LIMITS, EVEN, microbatches=8, transfer_s=links)[-1]
    assert after.boundaries[2] > EVEN.boundaries[2]
    assert bottleneck_s(LAYERS, after, LIMITS, links) < bottleneck_s(LAYERS, EVEN, LIMITS, links)
    assert diffuse(LAYERS, LIMITS, EVEN, microbatches=8)[-1] == EVEN
    # parameters have no seconds
    sized = [replace(c, parameter_bytes=1) for c in LAYERS]
    assert diffuse(sized, LIMITS, EVEN, microbatches=8, load="parameters", transfer_s=links)[-1] == EVEN


def test_a_partition_with_links_is_even_where_links_are_alike() -> None:
    assert partition_by_time(LAYERS, LIMITS, microbatches=8, transfer_s=0.01) == EVEN


def test_a_learner_keeps_what_it_knows_of_a_link() -> None:
    learner = Learner(LIMITS, 8, replace(FREE, transfer_s=0.5))
    assert learner.transfer_s == 0.5
    learner.learn_links(np.full((4, 4), np.nan))
    assert learner.transfer_s == 0.5, "nothing was measured"
    links = np.full((4, 4), np.nan)
    links[0, 1] = links[1, 0] = 1.0
    links[1, 2] = links[2, 1] = 3.0
    learner.learn_links(links)
    now = np.asarray(learner.transfer_s)
    assert (now[0, 1], now[1, 2], now[2, 3]) == (1.0, 3.0, 2.0), "an unknown link is like the typical one"
    later = np.full((4, 4), np.nan)
    later[2, 3] = later[3, 2] = 9.0
    learner.learn_links(later)
    now = np.asarray(learner.transfer_s)
    assert (now[0, 1], now[1, 2], now[2, 3]) == (1.0, 3.0, 9.0)


def test_links_take_as_much_longer_as_messages_grow_until_they_are_measured() -> None:
    learner = Learner(LIMITS, 8, replace(FREE, transfer_s=0.5))
    learner.count(16)
    assert learner.transfer_s == 0.5, "what the user gives is of no size"
    links = np.full((4, 4), np.nan)
    links[0, 1] = links[1, 0] = 1.0
    links[1, 2] = links[2, 1] = 3.0
    learner.learn_links(links)
    # from two slices of every microbatch to one
    learner.count(8)
    now = np.asarray(learner.transfer_s)
    assert (now[0, 1], now[1, 2], now[2, 3]) == (2.0, 6.0, 4.0)
    later = np.full((4, 4), np.nan)
    later[0, 1] = later[1, 0] = 1.5
    learner.learn_links(later)
    now = np.asarray(learner.transfer_s)
    assert (now[0, 1], now[1, 2]) == (1.5, 6.0)


def test_means_over_replicas_follow_a_stages_last_backward() -> None:
    costs = [LayerCost(forward_s=1.0, backward_input_s=1.0, all_reduce_s=s) for s in (0.5, 0.25, 4.0)]
    plain = Durations.of_stages(costs, StageMap.contiguous((0, 2, 3)))
    done = simulate(one_f_one_b(2, 4), plain)
    ends = [max(done.end_s[a] for a in row) for row in one_f_one_b(2, 4).actions]
    assert done.reduced_s == (ends[0] + 0.75, ends[1] + 4.0)
    assert done.makespan_s == max(done.reduced_s)
    # without any, nothing ends later
    alone = simulate(one_f_one_b(2, 4), replace(plain, all_reduce_s=np.zeros(0)))
    assert (alone.makespan_s, alone.reduced_s) == (max(ends), (0.0, 0.0))


def test_stages_of_a_rank_take_turns_at_their_means() -> None:
    costs = [LayerCost(forward_s=1.0, all_reduce_s=10.0)] * 2
    both = StageMap((0, 1, 2), (0, 0))
    durations = Durations.of_stages(costs, both)
    schedule = one_f_one_b(1, 1)
    assert simulate(schedule, Durations.of_stages(costs, StageMap.contiguous((0, 2)))).makespan_s == 2 + 20
    assert durations.all_reduce_s.tolist() == [10.0, 10.0]
    assert predicted_makespan_s(costs, both, RankLimits.uniform(1), microbatches=1) == 2 + 20
