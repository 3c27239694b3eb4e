"""Replay of a trace: placement from the iteration before, split by present counts, cost per layer and step."""

from __future__ import annotations

import numpy as np
import pytest

from prophet.errors import SpecError
from prophet.planner import get_planner
from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.spec import LayerShape, Placement, PlanContext, Split, Topology
from prophet.traces.npz import RoutingTrace
from prophet.traces.replay import choose_iterations, predicted_load, replay, routed_per_rank


def context(ranks: int = 2, experts: int = 4) -> PlanContext:
    return PlanContext(
        topology=Topology.uniform(ranks),
        shape=LayerShape.feed_forward(dim=8, hidden=16),
        home=tuple(e * ranks // experts for e in range(experts)),
    )


def trace(iterations: tuple[int, ...] = (0, 0, 1, 1, 2, 2), ranks: int = 2, experts: int = 4) -> RoutingTrace:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 100, (len(iterations), 2, ranks, experts))
    return RoutingTrace(counts, np.asarray(iterations, dtype=np.int32))


class Spy(Planner):
    """Remembers what it was asked, and keeps everything at home."""

    name = "spy"

    def __init__(self) -> None:
        self.planned: list[np.ndarray] = []
        self.split_loads: list[np.ndarray] = []

    def place(self, load: np.ndarray, context: PlanContext) -> Placement:
        self.planned.append(load)
        return context.homes_only()

    def split(self, load: np.ndarray, placement: Placement, context: PlanContext) -> Split:
        self.split_loads.append(load)
        return Split.to_homes(load, placement)


def test_plans_from_the_iteration_before_and_splits_the_present() -> None:
    t, spy = trace(), Spy()
    replay(t, spy, context(), choose_iterations(t, 99))
    # iterations 1 and 2, two layers each; two microbatches per iteration
    assert len(spy.planned) == 4
    expected = (t.counts[0, 1].astype(int) + t.counts[1, 1] + 1) // 2
    assert np.array_equal(spy.planned[1], expected)
    assert [x.tolist() for x in spy.split_loads[:2]] == [t.load(2, 0).tolist(), t.load(3, 0).tolist()]
    assert len(spy.split_loads) == 8


def test_static_is_priced_as_the_cost_model_says() -> None:
    t, c = trace(), context()
    result = replay(t, get_planner("static"), c, choose_iterations(t, 99))
    costs, ratios = [], []
    for step in range(2, 6):
        for layer in range(2):
            placement = c.homes_only()
            split = Split.to_homes(t.load(step, layer), placement)
            costs.append(step_cost(split, placement, c).total_s)
            ratios.append(split.max_mean())
    assert result.layer_s == pytest.approx(np.mean(costs))
    assert result.max_mean_median == pytest.approx(np.median(ratios))
    assert result.max_mean_p95 == pytest.approx(np.percentile(ratios, 95))
    assert result.copies_per_rank == 0
    assert result.exposed_s == 0
    assert not result.copies.any()
    assert result.rank_load.sum() == pytest.approx(t.counts[2:].sum() / 4)
    np.testing.assert_allclose(result.rank_load[1], t.counts[2:, 1].sum(axis=1).mean(axis=0).reshape(2, 2).sum(axis=1))


def test_balancing_helps_a_skewed_trace() -> None:
    counts = np.full((4, 1, 4, 8), 10)
    counts[..., 0] = 4000
    t = RoutingTrace(counts, np.arange(4, dtype=np.int32))
    pairs = choose_iterations(t, 3)
    c = context(4, 8)
    static, balanced = (replay(t, get_planner(p), c, pairs) for p in ("static", "prophet"))
    assert static.max_mean_median > 3.5
    assert balanced.max_mean_median < 1.1
    assert balanced.layer_s < static.layer_s
    assert balanced.copies_on_fullest_rank >= 1
    assert balanced.copies.shape == (3, 1, 8)
    assert balanced.copies[:, 0, 0].tolist() == [3, 3, 3]  # the hot expert, on all ranks
    assert balanced.copies.sum() / 3 / 4 == pytest.approx(balanced.copies_per_rank)
    assert balanced.rank_load.sum() == pytest.approx(static.rank_load.sum())


def test_iterations_are_spread_and_bounded() -> None:
    t = trace(tuple(range(30)))
    assert len(choose_iterations(t, 99)) == 29
    chosen = choose_iterations(t, 3)
    assert [now.start for _, now in chosen] == [1, 15, 29]
    assert all(now.start - before.start == 1 for before, now in chosen)


def test_mean_load_is_rounded() -> None:
    counts = np.array([[[[1, 2]]], [[[2, 2]]]])
    t = RoutingTrace(counts, np.zeros(2, dtype=np.int32))
    assert predicted_load(t, slice(0, 2), 0).tolist() == [[2, 2]]
    assert routed_per_rank(t) == 3.5


def test_errors() -> None:
    with pytest.raises(SpecError, match="1 iteration"):
        choose_iterations(trace((7, 7)), 5)
    with pytest.raises(SpecError, match="at least one iteration"):
        choose_iterations(trace(), 0)
    with pytest.raises(SpecError, match="2 ranks and 4 experts"):
        replay(trace(), get_planner("static"), context(4, 8), choose_iterations(trace(), 1))
    empty = RoutingTrace(np.zeros((0, 1, 1, 1), int), np.zeros(0, dtype=np.int32))
    with pytest.raises(SpecError, match="no steps"):
        routed_per_rank(empty)
