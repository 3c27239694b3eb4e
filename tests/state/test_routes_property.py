"""Routes as arrays against masks: what travels was missing, none of it twice, and all of it comes from a holder."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.errors import LayoutError
from prophet.state import table
from prophet.state.layout import Layout, layout_from
from prophet.state.route import Route, route
from prophet.state.space import Box, Space, TensorSpec, flat_boxes
from prophet.state.table import flat_ranges, numbered, numbered_lists
from tests.helpers.pipeline_support import missing_bytes, random_boxes, random_layout, random_space


def masks(layout: Layout, rank: int) -> dict[str, np.ndarray]:
    """Which elements of every tensor `rank` holds."""
    found = {t.name: np.zeros(t.shape, dtype=bool) for t in layout.space.tensors}
    for piece in layout.pieces[rank]:
        found[piece.name][piece.box.slices(layout.space[piece.name].box)] = True
    return found


def check(way: Route, nodes: list[int]) -> None:
    """The whole contract of a route, element by element."""
    ranks, space = way.ranks, way.space
    held = [masks(way.before, r) for r in range(ranks)]
    arrived = [{t.name: np.zeros(t.shape, dtype=np.int64) for t in space.tensors} for _ in range(ranks)]
    got = {(t.name, t.box, t.destination): t.hop for t in way.transfers}
    for t in way.transfers:
        box = t.box.slices(space[t.name].box)
        assert t.box.elements > 0
        if t.hop:
            assert got[t.name, t.box, t.source] == t.hop - 1, "sent on by a rank that has got it before"
        else:
            assert held[t.source][t.name][box].all(), "sent by a rank that holds it"
        on_node = [r for r in range(ranks) if nodes[r] == nodes[t.destination] and held[r][t.name][box].any()]
        assert nodes[t.source] == nodes[t.destination] or not on_node, "taken from the node if that is possible"
        arrived[t.destination][t.name][box] += 1
    for r in range(ranks):
        wanted = masks(way.after, r)
        for spec in space.tensors:
            missing = wanted[spec.name] & ~held[r][spec.name]
            assert (arrived[r][spec.name] == missing).all(), "what was missing arrives, once, and nothing else"
    assert way.wire_bytes == sum(way.n_bytes(t) for t in way.transfers) == missing_bytes(way.before, way.after)
    for r in range(ranks):
        assert sum(map(way.n_bytes, way.sends(r))) == way.sent_bytes()[r]
        assert sum(map(way.n_bytes, way.receives(r))) == way.received_bytes()[r]
        for peer in range(ranks):
            sent = [t for t in way.sends(r) if t.destination == peer]
            assert sent == [t for t in way.receives(peer) if t.source == r], "one order at both ends"
    waves = np.arange(len(space.tensors)) % 3
    by_stream: dict[tuple[int, ...], int] = {}
    for t in way.transfers:
        key = (t.source, t.destination, t.hop, int(waves[space.number[t.name]]))
        by_stream[key] = by_stream.get(key, 0) + way.n_bytes(t)
    keys, n_bytes = way.streams(waves)
    assert dict(zip(map(tuple, keys.tolist()), n_bytes.tolist(), strict=True)) == by_stream
    keys, n_bytes = way.streams()
    assert len(keys) == len({key[:3] for key in by_stream})
    assert n_bytes.sum() == way.wire_bytes
    assert way.widest_item_bytes() == max((space[t.name].item_bytes for t in way.transfers), default=1)
    listed = [t for r in range(ranks) for t in way.sends(r)]
    assert sorted(map(str, listed)) == sorted(map(str, way.transfers))


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_what_travels_was_missing_and_travels_once(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    before = random_layout(rng, space, ranks, complete=True)
    after = random_layout(rng, space, ranks, complete=bool(rng.integers(2)))
    nodes = rng.integers(0, 3, size=ranks).tolist()
    check(route(before, after, nodes=nodes), nodes)


def ragged(rng: np.random.Generator, space: Space, ranks: int) -> Layout:
    """Every rank cuts every tensor in its own way, so boxes of different ranks overlap in part."""
    rows = {}
    for rank in range(ranks):
        boxes = [(t.name, box) for t in space.tensors for box in random_boxes(rng, t.box)]
        rows[rank] = [piece for piece in boxes if rng.random() < 0.6]
    return layout_from(space, ranks, rows)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_boxes_may_overlap_in_part(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng, max_length=6)
    before, after = ragged(rng, space, ranks), ragged(rng, space, ranks)
    nodes = rng.integers(0, 2, size=ranks).tolist()
    there = {t.name: sum(masks(before, r)[t.name].astype(int) for r in range(ranks)) > 0 for t in space.tensors}
    if any((masks(after, r)[t.name] & ~there[t.name]).any() for r in range(ranks) for t in space.tensors):
        with pytest.raises(LayoutError, match="which no rank holds"):
            route(before, after, nodes=nodes)
    else:
        check(route(before, after, nodes=nodes), nodes)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_a_table_is_the_layout(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, random_space(rng), ranks, complete=False)
    again = Layout.of(layout.table)
    assert [sorted(again.on(r)) for r in range(ranks)] == [sorted(row) for row in layout.pieces]
    held = [sum(p.box.elements * layout.space[p.name].item_bytes for p in row) for row in layout.pieces]
    assert layout.table.rank_bytes().tolist() == held


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99))))
@settings(max_examples=150, deadline=None)
def test_many_flat_ranges_at_once(shape: list[int], ranges: list[tuple[int, int]]) -> None:
    total = math.prod(shape)
    pairs = [sorted((a % (total + 1), b % (total + 1))) for a, b in ranges]
    begin, end = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    of, low, high = flat_ranges(np.tile(np.array(shape), (len(pairs), 1)), begin, end)
    for k, (a, b) in enumerate(pairs):
        found = {
            Box(tuple(lo), tuple(hi)) for lo, hi in zip(low[of == k].tolist(), high[of == k].tolist(), strict=True)
        }
        assert found == set(flat_boxes(shape, a, b))
        assert len(found) == (of == k).sum()


def test_equal_tensors_are_planned_once_and_shared_among_holders() -> None:
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(64, 8)) for i in range(100)))
    every = [(t.name, t.box) for t in space.tensors]
    before = layout_from(space, 8, dict.fromkeys(range(4), every))
    after = layout_from(space, 8, dict.fromkeys(range(8), every))
    way = route(before, after)
    assert len(way.atoms.klass) == 1
    assert len(way.rows) <= 32
    assert set(way.sent_bytes()[:4]) == {100 * 64 * 8 * 4}, "each of four holders sends as much as one rank receives"


def test_one_tensor_comes_in_parts_from_several_holders() -> None:
    space = Space((TensorSpec(name="t", shape=(64, 8)),))
    whole = [("t", space["t"].box)]
    before = layout_from(space, 5, dict.fromkeys(range(4), whole))
    way = route(before, layout_from(space, 5, dict.fromkeys(range(5), whole)))
    assert way.sent_bytes() == (512, 512, 512, 512, 0)


def test_digests_differ_where_routes_do() -> None:
    space = Space((TensorSpec(name="t", shape=(4,)),))
    whole = [("t", space["t"].box)]
    before = layout_from(space, 3, {0: whole})
    to = [route(before, layout_from(space, 3, {0: whole, r: whole})).digest() for r in (1, 2, 1)]
    assert to[0] == to[2] != to[1]


def test_rows_are_numbered_in_their_order_however_large_their_numbers_are() -> None:
    large = 1 << 40  # two columns of these are not one of 64 bits
    number, first = numbered(np.array([large, 0, large, 0]), np.array([0, large, large, large]))
    assert number.tolist() == [1, 0, 2, 0]
    assert first.tolist() == [1, 0, 2]


def test_lists_that_differ_under_one_digest_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    values, start = np.array([3, 4, 3, 4, 4, 3]), np.array([0, 2, 4, 6])
    one, same, other = numbered_lists(values, start)[0].tolist()
    assert one == same != other
    monkeypatch.setattr(table, "_mix", np.zeros_like)
    with pytest.raises(LayoutError, match="two lists of ranks have one digest"):
        numbered_lists(values, start)
