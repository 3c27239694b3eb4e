"""Which replicas of an expert are a group: the rule against the seconds of whole exchanges, and what it saves."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.planner.model.cost import exchange_seconds, transfer_seconds
from prophet.spec import FORM_NAMES, Cover, Link, Placement, Topology, by_node, grouped, transfer_pairs

S = 1000.0  # bytes of an expert
PORT = 100.0


def two_nodes(near_over_port: float) -> Topology:
    """Nodes of four ranks with a shared port, whose links inside are so many times as fast."""
    near = Link(bytes_per_s=near_over_port * PORT)
    inter = Link(bytes_per_s=PORT)
    return Topology.uniform(8, ranks_per_node=4, intra=near, inter=inter, port_bytes_per_s=PORT)


def copies(near: int, far: int) -> Placement:
    """Expert 0 is at home on rank 0, with copies on so many ranks of its node and of the other one."""
    ranks = [*range(1, 1 + near), *range(4, 4 + far)]
    return Placement.with_replicas(range(8), 8, [(0, r) for r in ranks])


def taken(placement: Placement, topology: Topology, groups: dict[int, tuple[tuple[int, ...], ...]]) -> float:
    """Seconds of both phases, the naive way: whole exchanges, without latencies."""
    _, *phases = transfer_pairs(placement, groups, S, S)
    return sum(exchange_seconds(pairs, topology) for pairs in phases)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    per_node = draw(st.integers(1, 4))
    nodes = draw(st.integers(1, 4))
    last = draw(st.integers(1, per_node))
    port = draw(st.sampled_from([None, 0.5, 1.0, 1.5, 3.0, 8.0]))
    return Topology.uniform(
        (nodes - 1) * per_node + last,
        ranks_per_node=per_node,
        intra=Link(bytes_per_s=PORT * draw(st.sampled_from([0.5, 1.0, 3.0, 8.0]))),
        inter=Link(bytes_per_s=PORT),
        port_bytes_per_s=None if port is None else PORT * port,
    )


@settings(max_examples=300, deadline=None)
@given(machines(), st.data())
def test_the_groups_are_those_that_cross_in_less_time(topology: Topology, data: st.DataObject) -> None:
    """On any machine: one node, one rank per node, an uneven last node, ports slower and faster than their ranks."""
    ranks = topology.ranks
    home = data.draw(st.integers(0, ranks - 1))
    held = data.draw(st.sets(st.integers(0, ranks - 1)))
    placement = Placement.with_replicas([home], ranks, [(0, r) for r in held])
    found = grouped(placement, topology)
    if placement.is_static or not topology.has_levels:
        assert found == {}, "the forms that there were, bit by bit"
        assert transfer_seconds(placement, topology, S).once_first == math.inf
        return
    receivers = placement.receivers()[0]
    apart = {0: by_node(receivers, topology)}
    assert [r for group in apart[0] for r in group] == receivers
    assert all(len({topology.node_of(r) for r in group}) == 1 for group in apart[0])
    assert found in (apart, {})
    if max(map(len, apart[0])) == 1:
        assert found == {}, "a copy for every node: that is the direct form"
        return
    between = dataclasses.replace(topology, intra=Link(bytes_per_s=1e30))
    crossing = [taken(placement, between, groups) for groups in (apart, {}, found)]
    assert crossing[2] == pytest.approx(min(crossing[:2]))
    # and where links within nodes count, it is the layer that takes the best form
    seconds = transfer_seconds(placement, topology, S)
    best_s = min(seconds.seconds(form) for form in FORM_NAMES)
    assert seconds.seconds(seconds.form(Cover(), 0.0)) == best_s <= taken(placement, topology, {})


@pytest.mark.parametrize(
    ("near", "far", "near_over_port", "at_most"),
    [
        (3, 3, 8.0, 0.60),
        (3, 3, 3.0, 0.70),
        (3, 4, 8.0, 0.53),
        (3, 4, 3.0, 0.60),
        (1, 3, 8.0, 0.75),
        (0, 3, 8.0, 1.0),  # one group has crossed once all along
        (0, 3, 3.0, 1.0),
    ],
)
def test_what_crossing_once_saves(near: int, far: int, near_over_port: float, at_most: float) -> None:
    """Trans and Agg over the better of the direct form and of one group, through a shared port."""
    topology, placement = two_nodes(near_over_port), copies(near, far)
    direct, *_ = transfer_pairs(placement, {}, S, S)
    before_s = min(exchange_seconds(direct, topology), taken(placement, topology, {}))
    now = [transfer_seconds(placement, topology, S), transfer_seconds(placement, topology, S, sum_bytes=S)]
    assert sum(min(map(t.seconds, FORM_NAMES)) for t in now) <= at_most * 2 * before_s * (1 + 1e-12)


def test_each_node_is_sent_an_expert_once() -> None:
    placement, topology = copies(3, 3), two_nodes(8.0)
    _, scatter, gather = transfer_pairs(placement, grouped(placement, topology), S, S)
    assert scatter[0, 4:].sum() == pytest.approx(S)
    assert scatter[0, 1:4].sum() == pytest.approx(S)
    assert gather[:4, 4:].sum() == gather[4:, :4].sum() == 0.0
