"""Which replicas of an expert are a group: the rule against the seconds of whole exchanges, and what it saves."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.planner.model.cost import exchange_seconds, transfer_seconds
from prophet.spec import (
    FORM_NAMES,
    Cover,
    Link,
    Placement,
    Route,
    Routes,
    Topology,
    by_node,
    relayed,
    routes_of,
    transfer_pairs,
)

S = 1000.0  # bytes of an expert
PORT = 100.0


def two_nodes(near_over_port: float, *, shared: bool = True) -> Topology:
    """Nodes of four ranks, whose links inside are so many times as fast as a port, which they share or have each."""
    near = Link(bytes_per_s=near_over_port * PORT)
    inter = Link(bytes_per_s=PORT)
    return Topology.uniform(8, ranks_per_node=4, intra=near, inter=inter, port_bytes_per_s=PORT if shared else None)


def copies(near: int, far: int) -> Placement:
    """Expert 0 is at home on rank 0, with copies on so many ranks of its node and of the other one."""
    ranks = [*range(1, 1 + near), *range(4, 4 + far)]
    return Placement.with_replicas(range(8), 8, [(0, r) for r in ranks])


def taken(placement: Placement, topology: Topology, routes: Routes) -> float:
    """Seconds of both phases, the naive way: whole exchanges, without latencies."""
    _, exchanges = transfer_pairs(placement, routes, S)
    return sum(exchange_seconds(pairs, topology) for pairs in exchanges)


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
def test_the_routes_are_those_that_cross_in_less_time(topology: Topology, data: st.DataObject) -> None:
    """On any machine: one node, one rank per node, an uneven last node, ports slower and faster than their ranks."""
    ranks = topology.ranks
    home = data.draw(st.integers(0, ranks - 1))
    held = data.draw(st.sets(st.integers(0, ranks - 1)))
    placement = Placement.with_replicas([home], ranks, [(0, r) for r in held])
    found = routes_of(placement, topology)
    if placement.is_static or not topology.has_levels:
        assert found == {"node-once": {}, "spread": {}}, "the forms that there were, bit by bit"
        seconds = transfer_seconds(placement, topology, S)
        assert seconds.once_first == seconds.spread_first == math.inf
        return
    receivers = placement.receivers()[0]
    apart = {0: Route(by_node(receivers, topology))}
    groups = apart[0].groups
    assert [r for group in groups for r in group] == receivers
    assert all(len({topology.node_of(r) for r in group}) == 1 for group in groups)
    once = found["node-once"]
    assert once in (apart, {})
    between = dataclasses.replace(topology, intra=Link(bytes_per_s=1e30))
    alone = [taken(placement, between, routes) for routes in (apart, {}, once)]
    if max(map(len, groups)) == 1:
        assert once == {}, "a copy for every node: that is the direct form"
    else:
        assert alone[2] == pytest.approx(min(alone[:2]))
    relays = {0: relayed(home, receivers, topology)}
    assert found["spread"] in (relays, {})
    by_relays = taken(placement, between, relays)
    if found["spread"]:
        assert by_relays < min(alone[:2])
        assert topology.port_share < 1.0
    elif len(groups) > 1 or topology.node_of(receivers[0]) != topology.node_of(home):
        assert by_relays >= min(alone[:2]) * (1 - 1e-12)
    # and where links within nodes count, it is the layer that takes the best form
    seconds = transfer_seconds(placement, topology, S)
    best_s = min(seconds.seconds(form) for form in FORM_NAMES)
    assert seconds.seconds(seconds.form(Cover(), 0.0)) == best_s <= taken(placement, topology, {})


@settings(max_examples=300, deadline=None)
@given(machines(), st.data())
def test_relays_send_every_node_one_copy(topology: Topology, data: st.DataObject) -> None:
    """A naive count of what every rank has after each exchange, and of what crosses."""
    ranks = topology.ranks
    home = data.draw(st.integers(0, ranks - 1))
    receivers = sorted(data.draw(st.sets(st.integers(0, ranks - 1))) - {home})
    if not receivers:
        return
    route = relayed(home, receivers, topology)
    node = topology.node_ids().tolist()
    assert list(route.relays) == [r for r in range(ranks) if node[r] == node[home]]
    placement = Placement.with_replicas([home], ranks, [(0, r) for r in receivers])
    _, (spread, scatter, gather) = transfer_pairs(placement, {0: route}, S)
    parts = len(route.relays)
    has: dict[int, set[int]] = {r: {j} for j, r in enumerate(route.relays)}
    has[home] = set(range(parts))
    for group, carriers in zip(route.groups, route.carriers, strict=True):
        assert len({node[r] for r in (*group, *carriers)}) == 1
        for j, carrier in enumerate(carriers):
            if node[carrier] == node[home]:
                assert carrier == route.relays[j]
            has.setdefault(carrier, set()).add(j)
        for rank in group:
            came = has.get(rank, set()) if rank in carriers else set()
            assert gather[:, rank].sum() == pytest.approx((parts - len(came)) * S / parts), "the rest of it, once"
    beyond = {node[r] for r in receivers} - {node[home]}
    assert spread.sum() == spread[home].sum() == pytest.approx((parts - 1) * S / parts)
    assert scatter.sum() == pytest.approx(len(beyond) * S)
    assert all(scatter[:, np.array(node) == v].sum() == pytest.approx(S) for v in beyond)
    across = np.not_equal.outer(node, node)
    assert (spread * across).sum() == (gather * across).sum() == (scatter * ~across).sum() == 0.0


@pytest.mark.parametrize(
    ("near", "far", "near_over_port", "shared", "at_most"),
    [
        (3, 3, 8.0, True, 0.60),
        (3, 3, 3.0, True, 0.70),
        (3, 4, 8.0, True, 0.53),
        (3, 4, 3.0, True, 0.60),
        (1, 3, 8.0, True, 0.75),
        (0, 3, 8.0, True, 1.0),  # one group has crossed once all along
        (0, 3, 3.0, True, 1.0),
        (0, 3, 8.0, False, 0.41),  # four cards carry what crosses
        (0, 3, 3.0, False, 0.62),
        (1, 3, 8.0, False, 0.30),
        (3, 3, 8.0, False, 0.44),
        (3, 3, 3.0, False, 0.75),
        (3, 4, 8.0, False, 0.39),
        (0, 1, 8.0, False, 0.44),
    ],
)
def test_what_crossing_once_saves(near: int, far: int, near_over_port: float, shared: bool, at_most: float) -> None:
    """Trans and Agg over the better of the direct form and of one group, through a shared port and through cards."""
    topology, placement = two_nodes(near_over_port, shared=shared), copies(near, far)
    direct, _ = transfer_pairs(placement, {}, S)
    before_s = min(exchange_seconds(direct, topology), taken(placement, topology, {}))
    now = [transfer_seconds(placement, topology, S), transfer_seconds(placement, topology, S, sum_bytes=S)]
    assert sum(min(map(t.seconds, FORM_NAMES)) for t in now) <= at_most * 2 * before_s * (1 + 1e-12)


def test_a_layer_whose_homes_fill_all_cards_is_no_slower() -> None:
    """One expert of each of the node's four homes: relays add nothing to their cards, and take their links inside."""
    topology = two_nodes(8.0, shared=False)
    placement = Placement.with_replicas(range(8), 8, [(e, r) for e in range(4) for r in range(8) if r != e])
    seconds = transfer_seconds(placement, topology, S)
    assert seconds.seconds("node-once") < seconds.seconds("spread")
    assert seconds.form(Cover(), 0.0) == "node-once"


def test_each_node_is_sent_an_expert_once() -> None:
    placement, topology = copies(3, 3), two_nodes(8.0)
    _, (scatter, gather) = transfer_pairs(placement, routes_of(placement, topology)["node-once"], S)
    assert scatter[0, 4:].sum() == pytest.approx(S)
    assert scatter[0, 1:4].sum() == pytest.approx(S)
    assert gather[:4, 4:].sum() == gather[4:, :4].sum() == 0.0
