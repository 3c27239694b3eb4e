"""Layouts, routes and transitions by hand, and every way in which a move can fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline_balance.pipeline.move.state import by_layer
from pipeline_balance.spec import StageMap
from prophet.errors import BudgetError, LayoutError, SpecError, TransitionError
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.state import transition as module
from prophet.state.layout import Layout, Piece, layout_from, missing, slice_box, whole_tensors
from prophet.state.route import Route, route
from prophet.state.space import ITEM_BYTES, Box, Space, TensorSpec
from prophet.state.streams import CHUNK_BYTES, DEPTH, Measures, placed, torch_dtype, window_of
from prophet.state.transition import Mode, Moved, empty, transition
from tests.helpers.moving import assert_whole, outcomes, pair
from tests.helpers.pipeline_support import csr_rows, csr_specs, flat_shard, random_values, states_of

MATRIX = Space((TensorSpec(name="w", shape=(4, 6)),))


def grown_by_one_copy() -> Route:
    whole = ("w", MATRIX["w"].box)
    return route(layout_from(MATRIX, 2, {0: [whole]}), layout_from(MATRIX, 2, {0: [whole], 1: [whole]}))


def test_a_new_copy_is_sent() -> None:
    # what rank 0 holds and no longer wants is nothing, yet rank 1 needs all of it
    way = grown_by_one_copy()
    assert [str(t) for t in way.transfers] == ["w[0:4, 0:6] 0->1"]
    assert way.wire_bytes == 96


def test_columns_to_rows_sends_only_what_is_missing() -> None:
    columns = layout_from(MATRIX, 2, {r: [("w", slice_box((4, 6), 1, 2, r))] for r in range(2)})
    rows = layout_from(MATRIX, 2, {r: [("w", slice_box((4, 6), 0, 2, r))] for r in range(2)})
    way = route(columns, rows)
    assert sorted(str(t) for t in way.transfers) == ["w[0:2, 3:6] 1->0", "w[2:4, 0:3] 0->1"]


def test_copies_share_the_sending_and_nodes_come_first() -> None:
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(8,)) for i in range(4)))
    every = [(t.name, t.box) for t in space.tensors]
    before = layout_from(space, 3, {0: every, 1: every})
    after = layout_from(space, 3, {0: every, 1: every, 2: every})
    assert route(before, after).sent_bytes() == (64, 64, 0)
    assert route(before, after, nodes=[0, 1, 1]).sent_bytes() == (0, 128, 0)


def test_every_rank_has_a_node() -> None:
    whole = ("w", MATRIX["w"].box)
    one = layout_from(MATRIX, 2, {0: [whole]})
    with pytest.raises(SpecError, match=r"nodes needs one entry per rank \(2\), got 3"):
        route(one, one, nodes=[0, 0, 1])


def test_by_layer_puts_unlayered_state_everywhere() -> None:
    space = Space(
        (
            TensorSpec(name="a", shape=(2,), layer=0),
            TensorSpec(name="b", shape=(2,), layer=1),
            TensorSpec(name="step", shape=(), dtype="int64"),
        )
    )
    layout = by_layer(space, StageMap((0, 1, 2), (1, 0)), 3)
    assert [[p.name for p in row] for row in layout.pieces] == [["b", "step"], ["a", "step"], ["step"]]
    layout.check_complete()
    with pytest.raises(LayoutError, match=r"no rank holds b\[0:2\]"):
        layout_from(space, 2, {0: [("a", Box((0,), (2,)))]}).check_complete()


def test_whole_tensors_lie_as_their_pieces_do() -> None:
    space = Space((MATRIX["w"], TensorSpec(name="s", shape=()), TensorSpec(name="e", shape=(0, 3))))
    holders: list[tuple[int, ...]] = [(2, 0), (1,), ()]
    every = {r: [(t.name, t.box) for t, on in zip(space.tensors, holders, strict=True) if r in on] for r in range(4)}
    assert whole_tensors(space, 4, holders) == layout_from(space, 4, every)
    with pytest.raises(LayoutError, match=r"outside 0\.\.3"):
        whole_tensors(space, 4, [(4,), (), ()])


def test_zero_shards_cut_across_tensors() -> None:
    tensors = (TensorSpec(name="a", shape=(3, 3)), TensorSpec(name="b", shape=(2, 2, 2)))
    shards = [flat_shard(tensors, 4, i) for i in range(4)]
    assert [str(p) for p in shards[1]] == ["a[1:2, 2:3]", "a[2:3, 0:3]", "b[0:1, 0:1, 0:1]"]
    space = Space(tensors)
    layout = layout_from(space, 4, dict(enumerate(shards)))
    layout.check_complete()
    assert [sum(p.box.elements for p in row) for row in layout.pieces] == [5, 5, 5, 2]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_rows_move_with_their_offsets() -> None:
    dense = torch.tensor([[0.0, 2, 0], [1, 0, 3], [0, 0, 0], [4, 5, 6]])
    crow, col = [0, 1, 3, 3, 6], [1, 0, 2, 0, 1, 2]
    space = Space(csr_specs("w", rows=4, nonzeros=6))
    before = layout_from(space, 3, {0: csr_rows("w", crow, 0, 3), 1: csr_rows("w", crow, 3, 4)})
    after = layout_from(space, 3, {2: csr_rows("w", crow, 1, 4), 1: csr_rows("w", crow, 0, 1)})
    values = {
        "w.crow": torch.tensor(crow),
        "w.col": torch.tensor(col),
        "w.values": torch.tensor([2.0, 1, 3, 4, 5, 6]),
    }
    states = states_of(before, values)
    moved = ThreadWorld(3).run(lambda c: transition(route(before, after), states[c.rank], c, budget_bytes=64))
    got = {p.name: t for p, t in moved[2].state.items()}
    rebuilt = torch.sparse_csr_tensor(got["w.crow"] - got["w.crow"][0], got["w.col"], got["w.values"], size=(3, 3))
    assert torch.equal(rebuilt.to_dense(), dense[1:])


def test_an_empty_tensor_moves_too() -> None:
    space = Space((TensorSpec(name="w", shape=(0, 3)), TensorSpec(name="v", shape=(1,))))
    every = [(t.name, t.box) for t in space.tensors]
    way = route(layout_from(space, 2, {0: every}), layout_from(space, 2, {1: every}))
    states = [{Piece(n, b): torch.zeros(b.shape) for n, b in every}, {}]
    moved = ThreadWorld(2).run(lambda c: transition(way, states[c.rank], c, budget_bytes=8))
    assert [tuple(t.shape) for t in moved[1].state.values()] == [(0, 3), (1,)]


def test_tensors_that_are_views_of_others_move_as_they_are_seen() -> None:
    """Transposed, a parameter, and every second row: what is sent, and what stays on rank 0 in another piece."""
    half = slice_box((4, 6), 0, 2, 0)
    space = Space((*MATRIX.tensors, TensorSpec(name="v", shape=(4, 6), dtype="int64")))
    before = layout_from(space, 2, {0: [(t.name, t.box) for t in space.tensors]})
    after = layout_from(
        space, 2, {0: [(t.name, half) for t in space.tensors], 1: [("w", MATRIX["w"].box), ("v", half)]}
    )
    held = {"w": torch.randn(6, 5, requires_grad=True).T[1:], "v": torch.arange(60).reshape(10, 6)[1:9:2]}
    states = [{p: held[p.name] for p in before.on(0)}, {}]
    moved = ThreadWorld(2).run(lambda c: transition(route(before, after), states[c.rank], c, budget_bytes=64))
    assert_whole(route(after, after), [m.state for m in moved], {name: t.detach() for name, t in held.items()})
    assert not any(t.requires_grad for m in moved for t in m.state.values())


def test_a_box_that_no_piece_holds_is_refused() -> None:
    halves = layout_from(MATRIX, 1, {0: [("w", slice_box((4, 6), 0, 2, k)) for k in range(2)]})
    boxes = np.array([[0, 3], [2, 1]]), np.array([[2, 6], [4, 2]])
    found = placed(halves, 0, np.zeros(2, np.int64), *boxes)
    assert [(p.box, low, shape) for p, low, shape in found] == [
        (halves.pieces[0][0].box, [0, 3], [2, 3]),
        (halves.pieces[0][1].box, [0, 1], [2, 1]),
    ]
    for low, high in (([1, 0], [3, 6]), ([0, 0], [4, 6])):  # in both halves; nowhere else does a whole one lie
        with pytest.raises(LayoutError, match="rank 0 has no piece"):
            placed(halves, 0, np.zeros(1, np.int64), np.array([low]), np.array([high]))
    top = layout_from(MATRIX, 1, {0: [("w", slice_box((4, 6), 0, 2, 0))]})
    with pytest.raises(LayoutError, match="rank 0 has no piece"):
        placed(top, 0, np.zeros(1, np.int64), np.array([[1, 0]]), np.array([[3, 6]]))


def test_unchanged_pieces_are_not_copied() -> None:
    way = grown_by_one_copy()
    held = torch.arange(24.0).reshape(4, 6)
    states: list[dict[Piece, Tensor]] = [{way.before.pieces[0][0]: held}, {}]
    moved = ThreadWorld(2).run(lambda c: transition(way, states[c.rank], c, budget_bytes=1 << 20))
    assert next(iter(moved[0].state.values())) is held
    assert moved[0].new_state_bytes == 0
    assert torch.equal(next(iter(moved[1].state.values())), held)


@pytest.mark.parametrize(
    ("budget", "chunk", "depth", "messages", "buffer"),
    [
        (32, 1 << 20, 8, 3, 32),
        (32, 16, 8, 6, 32),
        (1 << 20, 16, 3, 6, 48),
        (1 << 20, 1 << 20, 8, 1, 96),
        (20, 99, 8, 6, 16),
    ],
)
def test_a_stream_is_cut_by_chunk_and_budget(budget: int, chunk: int, depth: int, messages: int, buffer: int) -> None:
    way = grown_by_one_copy()
    held = torch.arange(24.0).reshape(4, 6)
    states: list[dict[Piece, Tensor]] = [{way.before.pieces[0][0]: held}, {}]
    options = {"budget_bytes": budget, "chunk_bytes": chunk, "depth": depth}
    moved = ThreadWorld(2).run(lambda c: transition(way, states[c.rank], c, **options))  # type: ignore[arg-type]
    assert [m.messages for m in moved] == [messages, 0]
    assert [m.buffer_bytes for m in moved] == [buffer, buffer]
    assert moved[0].bytes_to == {1: 96}
    assert torch.equal(next(iter(moved[1].state.values())), held)


@pytest.mark.parametrize(
    ("budget", "streams", "longest", "chunk", "rounds", "depth"),
    [
        (64 << 20, 2, 5 << 20, 2 << 20, 3, 3),  # a small move is a few messages
        (64 << 20, 4, 1000, 1008, 1, 1),
        (16 << 20, 4, 64 << 20, 1 << 20, 64, 4),  # a few rounds under way come before large chunks
        (4 << 20, 8, 64 << 20, 128 << 10, 512, 4),
        (1 << 20, 4, 64 << 20, 128 << 10, 512, 2),  # small chunks come before more rounds
        (1 << 10, 4, 64 << 20, 256, 1 << 18, 1),
    ],
)
def test_what_a_budget_is_used_for(
    budget: int, streams: int, longest: int, chunk: int, rounds: int, depth: int
) -> None:
    window = window_of(budget, CHUNK_BYTES, DEPTH, Measures(streams, 8, (longest,)))
    assert (window.chunk_bytes, window.starts, window.depth) == (chunk, (0, rounds), depth)
    assert window.depth * streams * window.slot_bytes <= budget


class Agreements(ThreadCollective):
    """Knows what its rank has gathered for."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.asked: list[str] = []

    def all_gather(self, x: Tensor, *, op: Operation, **options: Any) -> Tensor:
        self.asked.append(op.name)
        return super().all_gather(x, op=op, **options)


def test_ranks_agree_twice_and_leave_the_second_to_a_caller_who_has_more_to_do() -> None:
    way, states, values = pair()
    world = ThreadWorld(2)

    def run(c: ThreadCollective, votes: bool) -> tuple[list[str], Moved]:
        mine = Agreements(world, c.rank)
        return mine.asked, transition(way, states[c.rank], mine, budget_bytes=128, votes=votes)

    for asked, moved in world.run(lambda c: run(c, True)):
        assert asked == ["agreeing on a transition", "voting on a transition"]
        assert moved.state
    alone = world.run(lambda c: run(c, False))
    assert [asked for asked, _ in alone] == [["agreeing on a transition"]] * 2
    assert_whole(route(way.after, way.after), [moved.state for _, moved in alone], values)


def test_what_goes_wrong_on_the_way_is_told_to_a_caller_whose_ranks_vote_later(monkeypatch: pytest.MonkeyPatch) -> None:
    way, states, values = pair()
    unpack = module._Mover._unpack

    def failing(mover: module._Mover, *given: Any) -> None:
        if mover.collective.rank == 1:
            raise RuntimeError("out of scratch memory")
        unpack(mover, *given)

    def body(c: ThreadCollective) -> str:
        try:
            transition(way, states[c.rank], c, budget_bytes=1 << 10, votes=False)
        except TransitionError as error:
            return str(error)
        return "moved"

    monkeypatch.setattr(module._Mover, "_unpack", failing)
    moved, failed = ThreadWorld(2).run(body)
    assert moved == "moved"
    assert "out of scratch memory" in failed
    assert_whole(way, states, values)


@pytest.mark.parametrize("mode", ["safe", "in-place"])
def test_what_stands_against_beginning_leaves_the_old_state(mode: Mode) -> None:
    way, states, values = pair()

    def body(c: ThreadCollective) -> Moved:
        def begin() -> None:
            raise TransitionError("not today")

        return transition(way, states[c.rank], c, budget_bytes=1 << 10, mode=mode, begin=begin)

    assert [str(e) for e in outcomes(2, body)] == ["not today"] * 2
    assert_whole(way, states, values)


def test_long_and_short_streams_end_together() -> None:
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(n,)) for i, n in enumerate((40, 8, 20))))
    before = layout_from(space, 4, {0: [(t.name, t.box) for t in space.tensors]})
    after = layout_from(space, 4, {i + 1: [(t.name, t.box)] for i, t in enumerate(space.tensors)})
    order: list[list[int]] = []

    class Records(ThreadCollective):
        def exchange(self, sends, recvs, **options):  # type: ignore[no-untyped-def]
            order.append([peer for peer, _ in sends])
            return super().exchange(sends, recvs, **options)

    world = ThreadWorld(4)
    values = {t.name: random_values(np.random.default_rng(0), t) for t in space.tensors}
    states = states_of(before, values)
    way = route(before, after)
    options = {"budget_bytes": 1 << 20, "chunk_bytes": 16}

    def body(c: ThreadCollective) -> Moved:
        return transition(way, states[c.rank], Records(world, 0) if c.rank == 0 else c, **options)  # type: ignore[arg-type]

    world.run(body)
    sent = [[peers.count(p) for peers in order] for p in (1, 2, 3)]
    assert [sum(row) for row in sent] == [10, 2, 5]
    half = len(order) // 2
    assert [sum(row[:half]) for row in sent] == [5, 1, 3]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: layout_from(MATRIX, 1, {0: [("w", Box((0, 0), (5, 6)))]}), "outside"),
        (lambda: layout_from(MATRIX, 1, {0: [("v", Box((0, 0), (1, 1)))]}), "no tensor 'v'"),
        (lambda: layout_from(MATRIX, 1, {0: [("w", Box((0, 0), (2, 6))), ("w", Box((1, 0), (3, 6)))]}), "overlap"),
        (lambda: layout_from(MATRIX, 1, {1: []}), "outside 0..0"),
        (lambda: Space((TensorSpec(name="a", shape=()), TensorSpec(name="a", shape=()))), "twice"),
        (lambda: TensorSpec(name="a", shape=(), dtype="float128"), "element type"),
        (lambda: Box((0,), (1, 2)), "as many starts"),
        (lambda: Box((2,), (1,)), "start <= stop"),
        (lambda: slice_box((4, 6), 2, 2, 0), "dimension 2"),
        (lambda: route(layout_from(MATRIX, 1, {}), layout_from(MATRIX, 2, {})), "1 and 2 ranks"),
        (
            lambda: route(layout_from(MATRIX, 1, {}), layout_from(MATRIX, 1, {0: [("w", MATRIX["w"].box)]})),
            "which no rank holds",
        ),
    ],
)
def test_wrong_layouts_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


def test_missing_counts_elements_once() -> None:
    left = missing([Box((0, 0), (4, 4))], [Box((0, 0), (2, 2)), Box((1, 1), (3, 3)), Box((9, 9), (9, 9))])
    assert sum(b.elements for b in left) == 16 - 7


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_allocation_that_fails_stops_all_ranks(fails_at: int) -> None:
    way, states, values = pair()

    def body(collective: ThreadCollective) -> Moved:
        asked = [0]

        def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
            asked[0] += 1
            if collective.rank == 1 and asked[0] == fails_at + 1:
                raise MemoryError("not enough memory: you tried to allocate a lot")
            return empty(shape, dtype, device)

        return transition(way, states[collective.rank], collective, budget_bytes=128, allocate=allocate)

    errors = [str(e) for e in outcomes(2, body)]
    assert "ranks [1] could not prepare" in errors[0]
    assert "rank 1: no memory for the new state: not enough memory" in errors[1]
    assert_whole(way, states, values)


@pytest.mark.parametrize("what", ["_pack", "_unpack", "_keep"])
def test_a_failure_on_the_way_is_told_and_hangs_nobody(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, states, values = pair()
    inner = getattr(module._Mover, what)

    def failing(*args: object) -> None:
        if threading.current_thread().name == "rank-1":
            raise RuntimeError("out of scratch memory")
        inner(*args)

    monkeypatch.setattr(module._Mover, what, failing)
    body = lambda c: transition(way, states[c.rank], c, budget_bytes=1 << 10, chunk_bytes=32)  # noqa: E731
    errors = [str(e) for e in outcomes(2, body)]
    assert "ranks [1] could not unpack" in errors[0]
    assert "rank 1: out of scratch memory; the state from before the move is whole" in errors[1]
    assert_whole(way, states, values)


def test_a_rank_that_dies_during_the_move() -> None:
    way, states, values = pair()

    class Dies(ThreadCollective):
        exchanges = 0

        def exchange(self, sends, recvs, **options):  # type: ignore[no-untyped-def]
            Dies.exchanges += 1
            if Dies.exchanges == 2:
                raise SystemExit("this rank is gone")
            return super().exchange(sends, recvs, **options)

    world = ThreadWorld(2, timeout_s=20.0)

    def body(collective: ThreadCollective) -> object:
        mine: ThreadCollective = Dies(world, 1) if collective.rank == 1 else collective
        try:
            return transition(way, states[collective.rank], mine, budget_bytes=128)
        except TransitionError as error:
            return error
        except SystemExit as gone:
            world.abort(RuntimeError(str(gone)))
            return gone

    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="this rank is gone"):
        world.run(body)
    assert time.perf_counter() - began < 10.0
    assert_whole(way, states, values)


def test_a_rank_that_never_answers_is_a_named_error() -> None:
    way, states, values = pair()

    def body(collective: ThreadCollective) -> Moved:
        if collective.rank == 1:
            raise TransitionError("left out")
        return transition(way, states[0], collective, budget_bytes=128)

    errors = outcomes(2, body, timeout_s=0.5)
    assert "no answer from rank 1" in str(errors[0])
    assert "the state from before the move is whole" in str(errors[0])
    assert_whole(way, states, values)


def test_ranks_that_mean_different_moves_do_not_hang() -> None:
    way, states, values = pair()
    other = route(way.before, way.before)
    body = lambda c: transition((way, other)[c.rank], states[c.rank], c, budget_bytes=128)  # noqa: E731
    for error in outcomes(2, body):
        assert "ranks [1] want another transition" in str(error)
    assert_whole(way, states, values)
    with pytest.raises(TransitionError, match="the route is of 2 ranks, the collective of 1"):
        transition(way, states[0], ThreadWorld(1).collective(0), budget_bytes=128)


def test_wrong_state_is_named_before_anything_moves() -> None:
    way, states, _ = pair()
    wrong: list[dict[Piece, Tensor]] = [states[0], {p: t.float() for p, t in states[1].items()}]
    errors = [str(e) for e in outcomes(2, lambda c: transition(way, wrong[c.rank], c, budget_bytes=128))]
    assert "ranks [1] could not prepare" in errors[0]
    assert "b[0:64] must be [64] torch.float64 on cpu, got [64] torch.float32" in errors[1]
    absent: list[dict[Piece, Tensor]] = [{}, states[1]]
    errors = [str(e) for e in outcomes(2, lambda c: transition(way, absent[c.rank], c, budget_bytes=128))]
    assert "the state and the layout differ in a[0:64]" in errors[0]


def test_a_budget_too_small_is_an_error_on_every_rank() -> None:
    way, states, _ = pair()
    budgets = (1 << 20, 8)

    def body(collective: ThreadCollective) -> object:
        with pytest.raises(BudgetError, match="one element of 8 bytes"):
            transition(way, states[collective.rank], collective, budget_bytes=budgets[collective.rank])
        return None

    assert ThreadWorld(2).run(body) == [None, None]


def test_layouts_grow_and_shrink_in_ranks() -> None:
    space = Space(tuple(TensorSpec(name=f"l{i}", shape=(3,), layer=i) for i in range(6)))
    four = by_layer(space, StageMap.contiguous((0, 2, 3, 5, 6)), 4)
    two = Layout(space, (*by_layer(space, StageMap.contiguous((0, 3, 6)), 2).pieces, (), ()))
    values = {t.name: random_values(np.random.default_rng(1), t) for t in space.tensors}
    states = states_of(four, values)
    there = ThreadWorld(4).run(lambda c: transition(route(four, two), states[c.rank], c, budget_bytes=64))
    assert [len(m.state) for m in there] == [3, 3, 0, 0]
    back = ThreadWorld(4).run(lambda c: transition(route(two, four), there[c.rank].state, c, budget_bytes=64))
    assert_whole(route(two, four), [m.state for m in back], values)


def test_elements_take_the_bytes_that_torch_says() -> None:
    specs = [TensorSpec(name="t", shape=(1,), dtype=name) for name in ITEM_BYTES]
    assert [spec.item_bytes for spec in specs] == [torch_dtype(spec).itemsize for spec in specs]
