"""Re-homing proposes swaps only where they pay."""

from __future__ import annotations

import numpy as np
import pytest

from prophet.errors import SpecError
from prophet.planner import get_planner
from prophet.planner.search.rehome import propose, swap_seconds
from prophet.spec import LayerShape, Link, PlanContext, Topology

SHAPE = LayerShape.feed_forward(dim=32, hidden=64)
CONTEXT = PlanContext(
    topology=Topology.uniform(4, ranks_per_node=2, flops_per_s=1e9, intra=Link(bytes_per_s=1e9)),
    shape=SHAPE,
    home=(0, 0, 1, 1, 2, 2, 3, 3),
    slots_per_rank=0,
)
CROWDED = np.tile(np.array([400, 400, 10, 10, 10, 10, 10, 10], dtype=np.int64), (4, 1))  # both hot ones on rank 0


def test_two_hot_experts_on_one_rank_are_parted() -> None:
    plan = propose(CROWDED, CONTEXT, get_planner("static"), steps_ahead=10_000)
    assert plan.home[0] != plan.home[1]
    assert sorted(plan.home) == sorted(CONTEXT.home)
    assert 0 < plan.break_even_steps < 10_000
    assert plan.saving_s > 0


def test_nothing_is_moved_where_it_does_not_pay() -> None:
    static = get_planner("static")
    assert propose(CROWDED, CONTEXT, static, steps_ahead=0).swaps == ()
    even = np.full((4, 8), 50, dtype=np.int64)
    assert propose(even, CONTEXT, static, steps_ahead=10_000).swaps == ()
    assert propose(even, CONTEXT, static, steps_ahead=10_000).break_even_steps == float("inf")


def test_a_swap_costs_what_its_link_takes() -> None:
    near = swap_seconds(0, 1, CONTEXT.topology, SHAPE, 16)
    assert near == pytest.approx(SHAPE.expert_params * 16 / 1e9)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(SpecError, match="must not be negative"):
        propose(CROWDED, CONTEXT, get_planner("static"), steps_ahead=-1)
    with pytest.raises(SpecError, match="load must be"):
        propose(CROWDED[:2], CONTEXT, get_planner("static"), steps_ahead=1)
