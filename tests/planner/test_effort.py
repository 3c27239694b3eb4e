"""What `effort` buys: tries, as many as it says, the same ones on every rank and in every run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from prophet.errors import SpecError
from prophet.planner import planner_with
from prophet.spec import IntArray, LayerShape, Link, Placement, PlanContext, Topology, Windows

RANKS, EXPERTS, CALLS = 16, 64, 80


def context() -> PlanContext:
    """Exchanges take long, so there is something to search for."""
    links = {"intra": Link(bytes_per_s=1e9), "inter": Link(bytes_per_s=2e8)}
    return PlanContext(
        topology=Topology.uniform(RANKS, ranks_per_node=4, flops_per_s=1e12, **links),
        shape=LayerShape.feed_forward(dim=256, hidden=512),
        home=tuple(e * RANKS // EXPERTS for e in range(EXPERTS)),
        windows=Windows(fnec_s=0.04, bnec_s=0.08),
        slots_per_rank=2,
    )


def loads(tokens: int = 4000) -> list[IntArray]:
    """Steady routing with the noise of a step, [R, E] each."""
    rng = np.random.default_rng(0)
    popularity = rng.permutation(1.0 / np.arange(1, EXPERTS + 1))
    popularity /= popularity.sum()
    return [rng.multinomial(tokens, popularity, size=RANKS).astype(np.int64) for _ in range(CALLS)]


def placed(effort: float, routing: list[IntArray]) -> list[Placement]:
    """The placements of calls that each go on from the one before."""
    planner, found, in_force = planner_with("prophet", effort=effort), [], None
    for load in routing:
        in_force = planner.place(load, replace(context(), previous=in_force))
        found.append(in_force)
    return found


def changes(placements: list[Placement]) -> int:
    return sum(a != b for a, b in pairwise(placements))


def test_an_effort_changes_placements_and_the_same_in_every_run() -> None:
    routing = loads()
    found = placed(1.0, routing)
    assert changes(found) >= 5
    assert found == placed(1.0, routing)


def test_the_effort_says_how_often_a_change_is_tried() -> None:
    """All find the same kinds of changes; with a try in every call they come sooner. No effort, no change."""
    routing = loads()
    none, least, some, most = (changes(placed(effort, routing)) for effort in (0.0, 5e-5, 5e-4, 1.0))
    assert none == 0 < least < some < most


@pytest.mark.parametrize("effort", [-0.1, float("nan")])
def test_an_effort_that_is_none(effort: float) -> None:
    with pytest.raises(SpecError, match="effort must not be negative"):
        planner_with("prophet", effort=effort)
