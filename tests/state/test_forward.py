"""Boxes that few hold and many miss: ranks that receive them send them on."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

from prophet.ranks.threads import ThreadWorld
from prophet.spec import IntArray
from prophet.state import forward
from prophet.state.layout import Piece, layout_from
from prophet.state.route import Route, route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.sources import Rows, _least_loaded, balanced
from prophet.state.space import Box, Space, TensorSpec
from prophet.state.streams import Measures, window_of
from prophet.state.transition import transition


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_new_copy_for_many_is_sent_once_and_passed_on(ranks: int) -> None:
    space = Space((TensorSpec(name="w", shape=(16 * (ranks - 1), 5)),))
    whole = [("w", space["w"].box)]
    way = route(layout_from(space, ranks, {0: whole}), layout_from(space, ranks, dict.fromkeys(range(ranks), whole)))
    values = torch.arange(80.0 * (ranks - 1)).reshape(-1, 5)
    states: list[dict[Piece, Tensor]] = [{Piece(*whole[0]): values}, *({} for _ in range(ranks - 1))]
    options = {"budget_bytes": 1 << 20, "chunk_bytes": 32}
    moved = ThreadWorld(ranks).run(lambda c: transition(way, states[c.rank], c, **options))  # type: ignore[arg-type]
    assert len(way.rows) == (ranks - 1) ** 2  # each passes on one part: neighbours that go the same ways are one
    size = values.numel() * 4
    assert moved[0].sent_bytes == size
    assert all(m.received_bytes == size for m in moved[1:])
    assert max(m.sent_bytes for m in moved) == size
    for m in moved:
        assert torch.equal(next(iter(m.state.values())), values)


@pytest.mark.parametrize(("most_rows", "copies_sent"), [(64, 1), (63, 2)])
def test_a_route_of_too_many_rows_is_direct(most_rows: int, copies_sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MOST_ROWS", most_rows)
    space = Space((TensorSpec(name="w", shape=(64,)),))
    whole = [("w", space["w"].box)]
    way = route(layout_from(space, 3, {0: whole}), layout_from(space, 3, dict.fromkeys(range(3), whole)))
    # two ranks miss it, and a full port's tensor is planned in 32 parts or more
    assert way.sent_bytes()[0] == copies_sent * 64 * 4


@pytest.mark.parametrize("longer", [1, 3])
def test_what_is_passed_on_goes_while_more_comes(longer: int) -> None:
    # two ranks of one node get a tensor; two others move another one, which takes as many rounds, or more
    space = Space((TensorSpec(name="w", shape=(640,)), TensorSpec(name="z", shape=(320 * longer,))))
    whole, other = [("w", space["w"].box)], [("z", space["z"].box)]
    before = layout_from(space, 5, {0: whole, 3: other})
    after = layout_from(space, 5, {**dict.fromkeys(range(3), whole), 4: other})
    way = route(before, after, nodes=[0, 1, 1, 2, 3])
    window = window_of(1 << 20, 64, 2, Measures.of(way, None))

    def numbers(source: int, peer: int) -> list[int]:
        going = RouteSchedule(way, source).rounds(window, in_place=False).going
        return [number for number, row in sorted(going.items()) for to, _ in row if to == peer]

    direct, passed_on = numbers(0, 1), numbers(1, 2)
    assert direct == list(range(0, 20 * longer, longer))
    assert passed_on == [number + window.depth for number in direct]


def test_a_small_tensor_for_many_is_not_cut_in_as_many_parts_as_ranks() -> None:
    # both ranks of a node get a large row from the next node; 240 ranks get a small tensor that 16 hold
    ranks, width = 256, 1 << 17
    space = Space((TensorSpec(name="large", shape=(ranks // 2, width)), TensorSpec(name="small", shape=(ranks,))))
    small = ("small", space["small"].box)
    large = [("large", Box((node, 0), (node + 1, width))) for node in range(ranks // 2)]
    before = {rank: [large[rank // 2 - 1]] * (rank % 2 == 0) + [small] * (rank < 16) for rank in range(ranks)}
    after = {rank: [large[rank // 2], small] for rank in range(ranks)}
    nodes = [rank // 2 for rank in range(ranks)]
    way = route(layout_from(space, ranks, before), layout_from(space, ranks, after), nodes=nodes)
    assert max(way.sent_bytes()) < 1.6 * width * 4, "large rows are passed on inside a node"
    assert sum(t.name == "small" for t in way.transfers) <= 32 * (ranks - 16), "in 32 parts, not in 225"


def _between_nodes(way: Route) -> list[int]:
    """Bytes that every rank sends to other nodes."""
    links = way.link_bytes.items()
    return [sum(n for (a, b), n in links if a == r and way.nodes[a] != way.nodes[b]) for r in range(way.ranks)]


def test_what_is_passed_on_inside_a_node_takes_no_time_of_its_port() -> None:
    # two of three ranks hold each tensor, and all ranks of the next node get both
    space = Space(tuple(TensorSpec(name=name, shape=(1200,)) for name in "vw"))
    v, w = ("v", space["v"].box), ("w", space["w"].box)
    before = layout_from(space, 6, {0: [v, w], 1: [v], 2: [w]})
    after = layout_from(space, 6, {0: [v, w], 1: [v, w], 2: [v, w], 3: [v, w], 4: [v, w], 5: [v, w]})
    way = route(before, after, nodes=[0, 0, 0, 1, 1, 1])
    assert _between_nodes(way) == [3200, 3200, 3200, 0, 0, 0], "both cross once, a third of them from each rank"


def test_a_node_that_is_busy_inside_still_sends_what_crosses_once() -> None:
    # links inside count as eight times as fast: what moves there, twelve times as much, is not what takes longest
    space = Space((TensorSpec(name="small", shape=(64,)), TensorSpec(name="large", shape=(12 * 64,))))
    small, large = ("small", space["small"].box), ("large", space["large"].box)
    before = layout_from(space, 4, {0: [small, large]})
    after = layout_from(space, 4, {0: [small, large], 1: [large], 2: [small], 3: [small]})
    way = route(before, after, nodes=[0, 0, 1, 1])
    assert _between_nodes(way) == [256, 0, 0, 0]


def _rows(lo: IntArray, hi: IntArray, relay: IntArray, outside: IntArray, values: IntArray) -> Rows:
    none, box = np.zeros(len(lo), np.int64), np.zeros((len(lo), 1), np.int64)
    return Rows(none, none, none, none + 1, box, box + 1, none, lo, hi, outside, none + 1, relay, values)


def test_the_least_loaded_port_of_every_row() -> None:
    rng = np.random.default_rng(0)
    ranks, many = 12, 400
    for _ in range(20):
        values = rng.integers(0, ranks, 30)
        lo = rng.integers(0, 20, many)
        hi = lo + rng.integers(1, 5, many)
        relay, outside = rng.integers(-1, ranks, many), rng.integers(0, 2, many)
        load = rng.integers(0, 4, 2 * ranks).astype(np.float64)
        some = np.flatnonzero(rng.random(many) < 0.7)
        found = _least_loaded(_rows(lo, hi, relay, outside, values), some, load)
        for m, port in zip(some.tolist(), found.tolist(), strict=True):
            senders = [*values[lo[m] : hi[m]].tolist(), *relay[m : m + 1][relay[m : m + 1] >= 0].tolist()]
            ports = [outside[m] * ranks + sender for sender in senders]
            places = range(len(ports))
            assert port == ports[min(places, key=lambda k: (load[ports[k]], (k - m) % len(ports)))]


def test_rows_of_one_list_take_memory_once_for_all_of_them() -> None:
    many = 2000  # rows, and ranks that could send each
    every, none = np.arange(many), np.zeros(many, np.int64)
    rows = _rows(none, none + many, none - 1, none, every)
    fixed = np.where(np.arange(2 * many) % 2 == 0, 2.0, 0.0)
    tracemalloc.start()
    try:
        source = balanced(rows, np.full(2 * many, 2.0), fixed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (fixed[:many] + np.bincount(source, minlength=many) <= 2).all()
    assert peak < many * many, "less than a byte for every row and rank that could send it"
