"""The port model: who serves whom, what is sent on, and that no port does two things at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.elastic.predict.bound import Rates, demand_of, least_direct_s, least_s
from pipeline_balance.elastic.predict.simulate import host_s, simulate
from prophet.state.layout import Layout, layout_from
from prophet.state.route import Route, route
from prophet.state.sources import SLACK
from prophet.state.space import Box, Space, TensorSpec
from tests.helpers.pipeline_support import random_layout, random_space

ONE = Rates(intra_bytes_per_s=1.0, inter_bytes_per_s=1.0)


def moving(*moves: tuple[int, int, int], nodes: list[int] | None = None) -> Route:
    """A route of exactly these moves: source, destination, bytes."""
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(n,), dtype="uint8") for i, (*_, n) in enumerate(moves)))
    ranks = 1 + max(max(s, d) for s, d, _ in moves)

    def layout(end: int) -> Layout:
        rows: dict[int, list] = {}  # type: ignore[type-arg]
        for tensor, move in zip(space.tensors, moves, strict=True):
            rows.setdefault(move[end], []).append((tensor.name, tensor.box))
        return layout_from(space, ranks, rows)

    return route(layout(0), layout(1), nodes=nodes)


def spread_from_one(ranks: int, n_bytes: int, nodes: list[int] | None = None) -> Route:
    """Rank 0 holds a tensor, and all get it."""
    space = Space((TensorSpec(name="t", shape=(n_bytes,), dtype="uint8"),))
    whole = [("t", space["t"].box)]
    every = layout_from(space, ranks, dict.fromkeys(range(ranks), whole))
    return route(layout_from(space, ranks, {0: whole}), every, nodes=nodes)


def test_a_free_sender_serves_the_receiver_with_most_left() -> None:
    # 3 bytes are to come to rank 5: another receiver served first takes a second more
    way = moving((2, 5, 1), (1, 5, 2), (2, 4, 1), (1, 3, 1))
    assert simulate(way, ONE, chunk_bytes=1).seconds == 3.0


def test_a_freed_receiver_takes_from_the_sender_with_most_left() -> None:
    # found by trial: a freed receiver that takes from the first sender, or from the one with least left, ends at 7 s
    way = moving((1, 6, 5), (3, 5, 2), (2, 5, 3), (3, 6, 1), (2, 4, 2), (0, 5, 1))
    assert simulate(way, ONE, chunk_bytes=3).seconds == 6.0


@pytest.mark.parametrize(("nodes", "each"), [(None, 10.0 + 2.0), ([0, 1], 100.0 + 1.0)])
def test_every_chunk_has_its_links_latency_and_is_told(nodes: list[int] | None, each: float) -> None:
    rates = Rates(intra_bytes_per_s=1.0, inter_bytes_per_s=2.0, intra_latency_s=10.0, inter_latency_s=100.0)
    seen: list[tuple[float, ...]] = []
    found = simulate(moving((0, 1, 4), nodes=nodes), rates, chunk_bytes=2, seen=lambda *chunk: seen.append(chunk))
    assert found.seconds == 2 * each
    assert seen == [(0, 1, 2, 0.0, each), (0, 1, 2, each, 2 * each)]


def test_what_is_sent_on_must_have_come() -> None:
    # one chunk for each of three ranks; then each sends its own to the other two
    way = spread_from_one(4, 300)
    assert way.sent_bytes() == (300, 200, 200, 200)
    assert simulate(way, ONE, chunk_bytes=100).seconds > 300
    assert simulate(way, ONE, chunk_bytes=1).seconds == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize("ranks", [3, 8, 16])
@pytest.mark.parametrize("apart", [False, True])
def test_a_box_that_many_need_leaves_its_holder_once(ranks: int, apart: bool) -> None:
    size = 100 * (ranks - 1)
    way = spread_from_one(ranks, size, list(range(ranks)) if apart else None)
    demand = demand_of(way.atoms, way.space.item_bytes)
    assert way.sent_bytes()[0] == size
    assert max(way.sent_bytes()) <= size
    assert way.wire_bytes == (ranks - 1) * size
    assert least_direct_s(demand, way.nodes, ONE) == pytest.approx((ranks - 1) * size)
    found = simulate(way, ONE)
    assert found.port_s == pytest.approx(size)
    assert found.seconds <= 1.4 * size
    if apart:
        assert least_s(demand, way.nodes, ONE) == pytest.approx(size)


def test_a_box_enters_each_node_once() -> None:
    way = spread_from_one(16, 1200, [r // 4 for r in range(16)])
    rates = Rates(intra_bytes_per_s=8.0, inter_bytes_per_s=1.0)
    found = simulate(way, rates)
    assert found.inter_bytes == 3 * 1200
    assert found.busiest_inter_bytes <= SLACK * 1200
    assert found.intra_bytes == 12 * 1200 + 3 * 1200 - 3 * 1200
    assert found.seconds <= 1.15 * found.port_s


def test_forwarding_is_for_boxes_that_few_hold() -> None:
    space = Space((TensorSpec(name="t", shape=(840,), dtype="uint8"),))
    whole = [("t", space["t"].box)]
    for holders, forwards in ((1, True), (2, True), (3, True), (4, False), (7, False)):
        before = layout_from(space, 8, dict.fromkeys(range(holders), whole))
        way = route(before, layout_from(space, 8, dict.fromkeys(range(8), whole)))
        assert bool((way.feed >= 0).any()) == forwards
        assert max(way.sent_bytes()) <= 1.05 * 840


@given(st.integers(0, 2**32 - 1), st.integers(2, 7), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_all_is_there_and_no_port_is_faster_than_its_rate(seed: int, ranks: int, chunk_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    before, after = (random_layout(rng, space, ranks, complete=True) for _ in range(2))
    nodes = rng.integers(0, 3, size=ranks)
    rates = Rates(intra_bytes_per_s=8.0, inter_bytes_per_s=2.0)
    way = route(before, after, nodes=nodes.tolist())
    found = simulate(way, rates, chunk_bytes=chunk_bytes)
    demand = demand_of(way.atoms, space.item_bytes)
    assert found.intra_bytes + found.inter_bytes == way.wire_bytes
    assert least_s(demand, nodes, rates) <= found.port_s * (1 + 1e-9) <= found.seconds * (1 + 1e-9) + 1e-12
    assert found.messages >= way.wire_bytes / chunk_bytes


def test_the_hosts_time_comes_first_and_is_of_boxes_and_of_what_stays_in_another_piece() -> None:
    way = moving((0, 1, 5), (0, 1, 3), (2, 1, 1), (2, 0, 4))
    busy = Rates(intra_bytes_per_s=1.0, inter_bytes_per_s=1.0, box_s=10.0)
    assert host_s(way, busy) == 30.0  # rank 0 sends two and gets one, rank 1 gets three
    moved, alone = simulate(way, busy), simulate(way, ONE)
    assert (moved.seconds, moved.host_s, alone.host_s) == (alone.seconds + 30.0, 30.0, 0.0)

    space = Space(tuple(TensorSpec(name=n, shape=(8,), dtype="float32") for n in "ab"))
    whole, parts = space["a"].box, [Box((0,), (2,)), Box((2,), (8,))]
    before = layout_from(space, 2, {0: [("a", whole), ("b", whole)], 1: [("a", parts[0])]})
    after = layout_from(space, 2, {0: [("a", parts[0]), ("a", parts[1]), ("b", whole)], 1: [("a", whole)]})
    copies = Rates(intra_bytes_per_s=1.0, inter_bytes_per_s=1.0, copied_byte_s=1.0)
    assert host_s(route(before, after), copies) == 32.0  # all of a on rank 0, where b is handed over
    assert host_s(route(after, before), copies) == 32.0
    assert host_s(route(before, before), copies) == 0.0
    grown = layout_from(space, 2, {0: [("a", whole), ("b", whole)], 1: [("a", whole)]})
    assert host_s(route(before, grown), copies) == 8.0  # what rank 1 gets is no copy
