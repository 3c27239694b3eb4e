"""A layer's keys and values take no more memory than the slices that are there, and those of a microbatch adjoin."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pipeline_balance.pipeline.model.buffers import BufferPool
from pipeline_balance.schedules.closed_forms import sliced_peak_units
from pipeline_balance.schedules.sliced import Order, sliced
from pipeline_balance.slices.memory import Room
from pipeline_balance.slices.store import Line


def slice_of(unit: int, tokens: int = 1) -> torch.Tensor:
    return torch.full((2, 3, tokens, 4), float(unit))


@pytest.mark.parametrize("order", ["minimal", "aligned"])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize(("ranks", "slices"), [(1, 4), (2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 16)])
def test_a_schedule_takes_the_memory_of_its_peak(ranks: int, slices: int, microbatches: int, order: Order) -> None:
    for rank, row in enumerate(sliced(ranks, 1, microbatches, slices, order).actions):
        room, pool = Room(), BufferPool()
        for _ in range(2):
            lines: dict[int, Line] = {}
            for action in row:
                line = lines.setdefault(action.microbatch // slices, Line(room, pool))
                if action.kind == "F":
                    line.append(slice_of(action.microbatch), -slice_of(action.microbatch), True)
                else:
                    line.pop()
                for number, one in lines.items():
                    for chunk, unit in zip(one.chunks, range(number * slices, (number + 1) * slices), strict=False):
                        keys, values = room.tokens(*chunk.place)
                        assert torch.equal(keys, slice_of(unit))
                        assert torch.equal(values, -keys)
                if 2 * (ranks - 1) > slices:
                    continue  # four microbatches at once: some of their slices are apart, in the same memory
                places = sorted(chunk.place for chunk in line.chunks)
                assert all(a[1] == b[0] for a, b in pairwise(places)), "they do not adjoin"
            peak = sliced_peak_units(rank, ranks, 1, microbatches, slices, order)
            assert room.n_bytes == 2 * peak * slice_of(0).nbytes
            grown = room.grown
            assert room.used_bytes == 0
            room.trim()
        assert room.grown == grown


def test_a_gap_that_is_too_short_is_left() -> None:
    room = Room()
    first, second, third = (room.take(None, slice_of(n, t), slice_of(n, t)) for n, t in enumerate((2, 3, 1)))
    assert (first, second, third) == ((0, 2), (2, 5), (5, 6))
    room.give(second)
    assert room.take(third, slice_of(3, 2), slice_of(3, 2)) == (3, 5)
    assert room.take(None, slice_of(4, 2), slice_of(4, 2)) == (6, 8)
    assert room.take(first, slice_of(5, 1), slice_of(5, 1)) == (2, 3)
    assert room.tokens(0, 8)[0][0, 0, :, 0].tolist() == [0, 0, 5, 3, 3, 2, 4, 4]


def test_memory_that_is_not_needed_any_more_is_let_go() -> None:
    room = Room()
    for tokens in (6, 2, 0):
        if tokens:
            room.take(None, slice_of(0, tokens), slice_of(0, tokens))
        room.trim()
        assert room.n_bytes == 2 * slice_of(0).nbytes * tokens
    assert room.fits(torch.zeros(1, 1, 5, 1), torch.zeros(1, 1, 5, 1))


@pytest.mark.parametrize(
    "other", [torch.zeros(1, 3, 1, 4), torch.zeros(2, 1, 1, 4), torch.zeros(2, 3, 1, 5), slice_of(0).double()]
)
def test_tensors_of_another_kind_do_not_fit(other: torch.Tensor) -> None:
    room = Room()
    room.take(None, slice_of(0), slice_of(0))
    assert room.fits(slice_of(1, 7), slice_of(1, 7))
    assert not room.fits(slice_of(1), other)
