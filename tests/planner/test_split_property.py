"""The exact split against linear programming (an independent oracle) and against its naive twin."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.planner import PLANNER_NAMES, get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.policies.splits import local_split
from prophet.planner.search.prophet import ProphetPlanner
from prophet.planner.split.exact import exact_flows, exact_split
from prophet.planner.split.naive import naive_bottleneck, naive_split
from prophet.spec import Placement, Split, Topology
from tests.helpers.planner_cases import Case, cases

linprog = pytest.importorskip("scipy.optimize").linprog
MANY = settings(max_examples=120, deadline=None)


def remote_tokens(split: Split, topology: Topology) -> tuple[int, int]:
    """Tokens between nodes, tokens between ranks."""
    pairs = split.tokens.sum(axis=1)
    node = topology.node_ids()
    return int(pairs[node[:, None] != node[None, :]].sum()), int(pairs.sum() - np.trace(pairs))


class Program:
    """The split as a linear program over tokens[r, e, d]; the last variable is the bottleneck."""

    def __init__(self, case: Case) -> None:
        load, placement = case.load, case.placement
        self.speed = case.context.topology.relative_speed()
        self.node = case.context.topology.node_ids()
        self.keys = [(r, e, d) for r, e in np.argwhere(load > 0) for d in np.flatnonzero(placement.holds[e])]
        sources = {(int(r), int(e)): i for i, (r, e) in enumerate(np.argwhere(load > 0))}
        self.equal = np.zeros((len(sources), len(self.keys) + 1))
        self.below = np.zeros((placement.ranks, len(self.keys) + 1))
        for i, (r, e, d) in enumerate(self.keys):
            self.equal[sources[int(r), int(e)], i] = 1
            self.below[d, i] = 1
        self.load = [int(load[s]) for s in sources]

    def bottleneck(self) -> float:
        below = self.below.copy()
        below[:, -1] = -self.speed
        price = np.zeros(len(self.keys) + 1)
        price[-1] = 1
        solved = linprog(price, below, np.zeros(len(below)), self.equal, self.load, method="highs")
        return float(solved.fun)

    def cheapest(self, cap: np.ndarray) -> tuple[int, int]:
        """Fewest tokens between nodes, then ranks, with at most `cap` on each rank."""
        cross = np.array([self.node[r] != self.node[d] for r, _, d in self.keys] + [0], dtype=float)
        moved = np.array([r != d for r, _, d in self.keys] + [0], dtype=float)
        solved = linprog(1e4 * cross + moved, self.below, cap, self.equal, self.load, method="highs")
        return round(float(cross @ solved.x)), round(float(moved @ solved.x))


@MANY
@given(cases())
def test_split_is_the_optimum_of_the_linear_program(case: Case) -> None:
    topology = case.context.topology
    split = exact_split(case.load, case.placement, topology)
    split.check(case.load, case.placement)
    if not case.load.any():
        return
    program = Program(case)
    speed = topology.relative_speed()
    lowest = program.bottleneck()
    reached = float((split.rank_load() / speed).max())
    if (speed == 1).all():
        assert reached == np.ceil(lowest - 1e-6)
    else:
        assert reached <= lowest + 1 / speed.min() + 1e-6
    flows = exact_flows(case.load, case.placement, node=topology.node_ids(), speed=speed)
    assert flows.bottleneck >= reached - 1e-6
    cap = np.floor(flows.bottleneck * speed + 1e-6)
    assert remote_tokens(split, topology) == program.cheapest(cap)


@settings(max_examples=40, deadline=None)
@given(cases(max_ranks=4, max_tokens=8))
def test_split_agrees_with_its_naive_twin(case: Case) -> None:
    topology = case.context.topology
    fast = exact_split(case.load, case.placement, topology)
    slow = naive_split(case.load, case.placement, topology)
    slow.check(case.load, case.placement)
    level = float(naive_bottleneck(case.load, case.placement, topology))
    flows = exact_flows(case.load, case.placement, node=topology.node_ids(), speed=topology.relative_speed())
    assert flows.bottleneck == pytest.approx(level)
    assert remote_tokens(fast, topology) == remote_tokens(slow, topology)
    assert (fast.rank_load() <= np.floor(level * topology.relative_speed() + 1e-6)).all()


@MANY
@given(cases(), st.sampled_from(PLANNER_NAMES))
def test_every_split_conserves_tokens_and_repeats(case: Case, name: str) -> None:
    split = get_planner(name).split(case.load, case.placement, case.context)
    split.check(case.load, case.placement)
    again = get_planner(name).split(case.load.copy(), case.placement, case.context)
    assert split == again
    assert split.digest() == again.digest()


@MANY
@given(cases())
def test_sparse_and_dense_split_agree(case: Case) -> None:
    topology = case.context.topology
    flows = exact_flows(case.load, case.placement, node=topology.node_ids(), speed=topology.relative_speed())
    dense = Split(flows.tokens)
    assert np.array_equal(dense.rank_load(), flows.rank_load())
    assert dense.max_mean() == pytest.approx(flows.max_mean())
    assert (flows.rows[:, 3] > 0).all()


@MANY
@given(cases())
def test_local_split_is_its_definition(case: Case) -> None:
    split = local_split(case.load, case.placement)
    split.check(case.load, case.placement)
    for r, e in np.argwhere(case.load > 0):
        target = r if case.placement.holds[e, r] else case.placement.home[e]
        assert split.tokens[r, e, target] == case.load[r, e]


@MANY
@given(cases())
def test_without_replicas_everything_goes_home(case: Case) -> None:
    homes = Placement.with_replicas(case.placement.home, case.placement.ranks, ())
    assert exact_split(case.load, homes, case.context.topology) == local_split(case.load, homes)


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from([1e-6, 0.03, 10.0]))
def test_a_timed_split_is_never_slower_than_using_no_replica(case: Case, effort: float) -> None:
    """Whatever the placement: replicas that were planned for other routing are left alone where they only cost."""
    planner = ProphetPlanner(split_effort=effort)
    timed = step_cost(planner.split(case.load, case.placement, case.context), case.placement, case.context)
    home = step_cost(Split.to_homes(case.load, case.placement), case.placement, case.context)
    assert timed.total_s <= home.total_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.03, 10.0]))
def test_replicas_of_experts_that_get_no_tokens(case: Case, effort: float) -> None:
    load = case.load.copy()
    load[:, case.placement.holds.sum(axis=1) > 1] = 0
    split = ProphetPlanner(split_effort=effort).split(load, case.placement, case.context)
    assert split == Split.to_homes(load, case.placement)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(20, 40))
def test_counts_of_any_size_on_ranks_of_any_speed(seed: int, bits: int) -> None:
    """The bottleneck of so many tokens has no digits left for one token more."""
    rng = np.random.default_rng(seed)
    speed = (10 ** rng.uniform(11, 13, 3)).tolist()
    topology = dataclasses.replace(Topology.uniform(3), flops_per_s=tuple(speed))
    placement = Placement.with_replicas((0, 1, 2), 3, [(0, 1), (1, 2), (2, 0)])
    load = rng.integers(0, 1 << bits, (3, 3))
    exact_split(load, placement, topology).check(load, placement)
