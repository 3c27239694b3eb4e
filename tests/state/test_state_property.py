"""Random layout pairs, 1 to 9 ranks: every bit arrives, no byte twice, buffers keep to the budget, the peak is known.

The oracle is gather and cut.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.elastic.predict.memory import memory_of
from prophet.ranks.collective import Channel, Coming, Messages, Pending
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.state.in_place import in_place
from prophet.state.layout import Layout, layout_from
from prophet.state.route import route
from prophet.state.space import Box, flat_boxes
from prophet.state.transition import Moved, empty, transition, transition_naive
from tests.helpers.pipeline_support import (
    held_bytes,
    missing_bytes,
    random_layout,
    random_space,
    random_values,
    same_bits,
    states_of,
)

MOVES = (st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(400, 4_000), st.integers(8, 200), st.integers(1, 5))


class Counts(ThreadCollective):
    """Counts the bytes that its rank hands over to be sent. Memory of messages under way must not be used again."""

    sent_bytes = 0

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.under_way: list[tuple[int, int]] = []

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        self.sent_bytes += sum(t.nbytes for _, t in sends)
        handed = [(t.data_ptr(), t.data_ptr() + t.nbytes) for _, t in (*sends, *recvs)]
        assert all(stop <= first or last <= start for first, last in handed for start, stop in self.under_way)
        self.under_way += handed
        pending = super().exchange(sends, recvs, op=op, channel=channel)

        def finish() -> torch.Tensor:
            result = pending.wait()
            self.under_way = [span for span in self.under_way if span not in handed]
            return result

        return Coming(finish, pending.ended)


@given(*MOVES)
@settings(max_examples=40, deadline=None)
def test_every_bit_arrives(seed: int, ranks: int, budget_bytes: int, chunk_bytes: int, depth: int) -> None:
    check_move(seed, ranks, budget_bytes, chunk_bytes, depth)


@pytest.mark.slow
@given(*MOVES)
@settings(max_examples=500, deadline=None)
def test_every_bit_arrives_for_500_pairs(
    seed: int, ranks: int, budget_bytes: int, chunk_bytes: int, depth: int
) -> None:
    check_move(seed, ranks, budget_bytes, chunk_bytes, depth)


def everywhere(after: Layout) -> Layout:
    """`after` with some tensors whole on most ranks: few hold them, so they are forwarded."""
    rows = {}
    for rank in range(after.ranks):
        many = {t.name for k, t in enumerate(after.space.tensors) if (k + rank * (k % 3 == 0)) % 2}
        rows[rank] = [p for p in after.pieces[rank] if p.name not in many]
        rows[rank] += [(name, after.space[name].box) for name in sorted(many)]
    return layout_from(after.space, after.ranks, rows)


def check_move(seed: int, ranks: int, budget_bytes: int, chunk_bytes: int, depth: int) -> None:
    """Move between two random layouts; a deadlock ends in an error after 30 s."""
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    before = random_layout(rng, space, ranks, complete=True)
    after = random_layout(rng, space, ranks, complete=bool(rng.integers(2)))
    if rng.integers(2):
        after = everywhere(after)
    values = {t.name: random_values(rng, t) for t in space.tensors}
    states = states_of(before, values)
    nodes = [int(n) for n in rng.integers(0, 3, size=ranks)]
    way = route(before, after, nodes=nodes)
    asked = [0] * ranks

    world = ThreadWorld(ranks, timeout_s=30.0)
    counts = [Counts(world, rank) for rank in range(ranks)]

    def body(collective: ThreadCollective) -> Moved:
        def metered(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            # poisoned, so that an element that nobody wrote is seen
            memory = torch.full((math.prod(shape) * dtype.itemsize,), 0xA5, dtype=torch.uint8, device=device)
            asked[collective.rank] += memory.numel()
            if dtype == torch.bool:
                return torch.ones(shape, dtype=dtype)
            return memory.view(dtype).reshape(shape)

        mine = states[collective.rank]
        return transition(
            way,
            mine,
            counts[collective.rank],
            budget_bytes=budget_bytes + collective.rank,
            chunk_bytes=chunk_bytes + collective.rank,
            depth=max(1, depth - collective.rank % 3),
            allocate=metered,
        )

    moved = world.run(body)
    peak = memory_of(before, after).safe_peak
    expected = transition_naive(states, after)
    for rank in range(ranks):
        assert set(moved[rank].state) == set(after.pieces[rank])
        for piece, tensor in moved[rank].state.items():
            assert same_bits(tensor, expected[rank][piece]), (rank, str(piece))
        # all that was allocated is the new state and the buffer, and the buffer is within this rank's budget
        assert asked[rank] == moved[rank].buffer_bytes + moved[rank].new_state_bytes
        assert moved[rank].buffer_bytes <= budget_bytes + rank
        assert held_bytes(list(states[rank].values())) + asked[rank] == peak[rank] + moved[rank].buffer_bytes
        # what was there before is untouched
        for piece, tensor in states[rank].items():
            assert same_bits(tensor, values[piece.name][piece.box.slices(space[piece.name].box)])
    # all that is on the wire was missing where it went, and comes once
    assert sum(c.sent_bytes for c in counts) == missing_bytes(before, after) == way.wire_bytes
    assert tuple(m.sent_bytes for m in moved) == tuple(c.sent_bytes for c in counts) == way.sent_bytes()
    assert tuple(m.received_bytes for m in moved) == way.received_bytes()


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(16, 200), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_in_place_every_bit_arrives_and_the_peak_is_as_computed(
    seed: int, ranks: int, chunk_bytes: int, depth: int
) -> None:
    check_in_place(seed, ranks, chunk_bytes, depth)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(16, 200), st.integers(1, 5))
@settings(max_examples=500, deadline=None)
def test_in_place_for_500_pairs(seed: int, ranks: int, chunk_bytes: int, depth: int) -> None:
    check_in_place(seed, ranks, chunk_bytes, depth)


def check_in_place(seed: int, ranks: int, chunk_bytes: int, depth: int) -> None:
    """Move in place; memory is metered whenever more is asked for."""
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    before = random_layout(rng, space, ranks, complete=True)
    after = random_layout(rng, space, ranks, complete=bool(rng.integers(2)))
    if rng.integers(2):
        after = everywhere(after)
    states = states_of(before, {t.name: random_values(rng, t) for t in space.tensors})
    expected = transition_naive(states, after)
    old = [{p: same_storage(t) for p, t in row.items()} for row in states]
    predicted = in_place(before, after)[1]

    def body(collective: ThreadCollective) -> tuple[Moved, int]:
        new: list[torch.Tensor] = []
        most = [0]

        def metered(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            new.append(empty(shape, dtype, device))
            there = sum(t.untyped_storage().nbytes() for t in old[collective.rank].values()) + held_bytes(new)
            most[0] = max(most[0], there)
            return new[-1]

        moved = transition(
            route(before, after),
            states[collective.rank],
            collective,
            budget_bytes=1 << 20,
            mode="in-place",
            chunk_bytes=chunk_bytes,
            depth=depth,
            allocate=metered,
        )
        return moved, max(most[0], held_bytes(list(expected[collective.rank].values())))

    for rank, (moved, most) in enumerate(ThreadWorld(ranks, timeout_s=30.0).run(body)):
        for piece, tensor in moved.state.items():
            assert same_bits(tensor, expected[rank][piece]), (rank, str(piece))
        assert set(moved.state) == set(after.pieces[rank])
        assert moved.peak_bytes - moved.buffer_bytes == predicted[rank]
        # memory at the beginning, or as new memory was asked for: the buffer is the first, and stays
        begin = sum(p.box.elements * space[p.name].item_bytes for p in before.pieces[rank])
        assert max(most, begin + moved.buffer_bytes) == moved.peak_bytes
        for piece, tensor in old[rank].items():
            kept = piece in moved.state
            assert (tensor.untyped_storage().nbytes() > 0) == (kept and tensor.numel() > 0)


def same_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory."""
    return tensor.view(tensor.shape)


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_a_flat_range_is_few_boxes(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    numbers = np.arange(total).reshape(shape)
    whole = Box.whole(shape)
    listed = [int(n) for b in boxes for n in np.asarray(numbers[b.slices(whole)]).reshape(-1)]
    assert listed == list(range(start, stop))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_box_algebra_against_masks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 6, size=rng.integers(0, 4)))

    def some_box() -> Box:
        ends = [sorted(int(x) for x in rng.integers(0, n + 1, size=2)) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def mask(box: Box) -> np.ndarray:
        filled = np.zeros(shape, dtype=np.int64)
        filled[box.slices(Box.whole(shape))] += 1
        return filled

    a, b = some_box(), some_box()
    common = a.intersect(b)
    both = mask(a) * mask(b)
    assert (mask(common) == both).all() if common else not both.any()
    rest = a.subtract(b)
    assert len(rest) <= 2 * len(shape)
    assert (sum((mask(r) for r in rest), np.zeros(shape, dtype=np.int64)) == mask(a) - both).all()
    if a.elements:
        size = int(rng.integers(1, a.elements + 1))
        ends = [(first, min(first + size, a.elements)) for first in range(0, a.elements, size)]
        parts = [part.shift(a.start) for first, end in ends for part in flat_boxes(a.shape, first, end)]
        assert all(p.elements <= size for p in parts)
        assert (sum((mask(p) for p in parts), np.zeros(shape, dtype=np.int64)) == mask(a)).all()
