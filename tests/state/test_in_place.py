"""Transitions in place: what is refused, what goes back when, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prophet.errors import BudgetError, StateLost, TransitionError
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.state import transition as module
from prophet.state.in_place import in_place
from prophet.state.layout import Piece, layout_from
from prophet.state.route import route
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import Moved, empty, transition
from tests.helpers.moving import assert_whole, outcomes, pair


def test_a_failure_in_place_is_told_to_all_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    way, states, _ = pair()
    inner = module._Mover._unpack

    def failing(*args: Any) -> None:
        if threading.current_thread().name == "rank-1":
            raise RuntimeError("out of scratch memory")
        inner(*args)

    monkeypatch.setattr(module._Mover, "_unpack", failing)

    def body(c: ThreadCollective) -> str:
        with pytest.raises(StateLost) as lost:
            transition(way, states[c.rank], c, budget_bytes=1 << 10, chunk_bytes=32, mode="in-place")
        return str(lost.value)

    told = ThreadWorld(2, timeout_s=20.0).run(body)
    assert "ranks [1] could not unpack" in told[0]
    assert "rank 1: out of scratch memory" in told[1]
    assert all("neither the old state nor the new one is whole: take it from copies" in words for words in told)


def test_memory_that_runs_out_in_place_is_a_loss_and_hangs_nobody() -> None:
    way, states, _ = pair()

    def body(c: ThreadCollective) -> str:
        asked = [0]

        def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
            asked[0] += 1
            if c.rank == 1 and asked[0] == 2:  # the buffer comes first
                raise MemoryError("not enough memory")
            return empty(shape, dtype, device)

        with pytest.raises(StateLost) as lost:
            transition(way, states[c.rank], c, budget_bytes=1 << 10, mode="in-place", allocate=allocate)
        return str(lost.value)

    told = ThreadWorld(2, timeout_s=20.0).run(body)
    assert "ranks [1]" in told[0]
    assert "rank 1: not enough memory" in told[1]


def test_what_does_not_fit_in_place_is_refused_before_anything_moves() -> None:
    # the larger tensor goes first: rank 0 has both for a while, rank 1 gets the smaller one once the larger has gone
    way, states, values = pair()
    needs = 256

    def body(c: ThreadCollective) -> None:
        with pytest.raises(BudgetError, match=f"in place, rank 0 needs {needs} bytes beyond the larger"):
            transition(way, states[c.rank], c, budget_bytes=needs, mode="in-place")

    ThreadWorld(2).run(body)
    assert_whole(way, states, values)
    moved = ThreadWorld(2).run(
        lambda c: transition(way, states[c.rank], c, budget_bytes=needs + 64, mode="in-place", chunk_bytes=16)
    )
    assert_whole(way, [m.state for m in moved], values)
    assert [m.peak_bytes - m.buffer_bytes for m in moved] == [768, 512]
    assert all(t.untyped_storage().nbytes() == 0 for row in states for t in row.values())


def test_views_of_one_buffer_give_it_back_together() -> None:
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(16,)) for i in range(4)))
    every = [(t.name, t.box) for t in space.tensors]
    way = route(layout_from(space, 2, {0: every}), layout_from(space, 2, {1: every}))

    def run(flat: Tensor, views: list[Tensor]) -> tuple[int, int]:
        states: list[dict[Piece, Tensor]] = [{Piece(n, b): v for (n, b), v in zip(every, views, strict=True)}, {}]
        options: dict[str, Any] = {"budget_bytes": 1 << 10, "mode": "in-place"}
        expected = torch.cat(views)
        moved = ThreadWorld(2).run(lambda c: transition(way, states[c.rank], c, **options))
        assert torch.equal(torch.cat(list(moved[1].state.values())), expected)
        return flat.untyped_storage().nbytes(), moved[0].peak_bytes - moved[0].buffer_bytes

    flat = torch.arange(64.0)
    assert run(flat, list(flat.split(16))) == (0, 256)
    # what else lies in the buffer belongs to somebody
    flat = torch.arange(65.0)
    assert run(flat, list(flat[:64].split(16))) == (260, 260)
    assert torch.equal(flat, torch.arange(65.0))
    # also where views have as many elements as the buffer: some have the same ones, or every second one
    flat = torch.arange(48.0)
    assert run(flat, [flat[i : i + 16] for i in (0, 8, 16, 24)]) == (192, 192)
    flat = torch.arange(64.0)
    assert run(flat, [flat[0:32:2], flat[32:64:2], flat[16:32], flat[48:64]]) == (256, 256)
    assert torch.equal(flat, torch.arange(64.0))
    # nor can numpy's memory be given back
    flat = torch.from_numpy(np.arange(64, dtype=np.float32))
    assert run(flat, list(flat.split(16))) == (256, 256)


def test_padding_goes_back_with_the_state_and_counts_until_then() -> None:
    space = Space((TensorSpec(name="t", shape=(3, 4)),))
    every = [("t", space["t"].box)]
    way = route(layout_from(space, 2, {0: every}), layout_from(space, 2, {1: every}))
    padded, apart = torch.arange(20.0), torch.zeros(7)
    states: list[dict[Piece, Tensor]] = [{Piece(*every[0]): padded[:12].view(3, 4)}, {}]
    beside = [[padded, padded[12:16], apart], []]
    moved = ThreadWorld(2).run(
        lambda c: transition(
            way, states[c.rank], c, budget_bytes=64, mode="in-place", beside=beside[c.rank], chunk_bytes=16
        )
    )
    assert torch.equal(next(iter(moved[1].state.values())), torch.arange(12.0).view(3, 4))
    assert padded.untyped_storage().nbytes() == 0
    assert apart.untyped_storage().nbytes() == 28
    assert [m.peak_bytes - m.buffer_bytes for m in moved] == [80 + 28, 48]


def test_what_a_rank_knows_to_fail_later_is_refused_before_anything_moves() -> None:
    way, states, values = pair()
    said = ["", "no module can be made"]

    def body(c: ThreadCollective) -> Moved:
        return transition(way, states[c.rank], c, budget_bytes=1 << 10, mode="in-place", problem=said[c.rank])

    first, second = map(str, outcomes(2, body))
    assert "ranks [1] could not prepare the transition; nothing has moved" in first
    assert "rank 1: no module can be made; nothing has moved" in second
    assert_whole(way, states, values)


def test_a_buffer_goes_back_after_the_last_of_its_tensors() -> None:
    # two ranks swap buffers of two tensors each, which go one by one
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(16,)) for i in range(4)))
    a, b, c, d = ((t.name, t.box) for t in space.tensors)
    way = route(layout_from(space, 2, {0: [a, b], 1: [c, d]}), layout_from(space, 2, {0: [c, d], 1: [a, b]}))
    assert len(set(in_place(way.before, way.after)[0].tolist())) > 1
    flat = [torch.arange(32.0), torch.arange(32.0, 64.0)]
    states = [{Piece(*a): flat[0][:16], Piece(*b): flat[0][16:]}, {Piece(*c): flat[1][:16], Piece(*d): flat[1][16:]}]
    moved = ThreadWorld(2).run(lambda x: transition(way, states[x.rank], x, budget_bytes=1 << 10, mode="in-place"))
    for m, first in zip(moved, (32.0, 0.0), strict=True):
        assert torch.equal(torch.cat([m.state[p] for p in sorted(m.state)]), torch.arange(first, first + 32))
    # one has both its own and both others' for a while; the other's buffer has gone by then
    assert sorted(m.peak_bytes - m.buffer_bytes for m in moved) == [192, 256]
    assert [t.untyped_storage().nbytes() for t in flat] == [0, 0]


def test_a_piece_that_stays_keeps_its_buffer_in_place() -> None:
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(4,)) for i in range(2)))
    a, b = ((t.name, t.box) for t in space.tensors)
    way = route(layout_from(space, 2, {0: [a, b]}), layout_from(space, 2, {0: [a], 1: [b]}))
    flat = torch.arange(8.0)
    states: list[dict[Piece, Tensor]] = [{Piece(*a): flat[:4], Piece(*b): flat[4:]}, {}]
    moved = ThreadWorld(2).run(lambda c: transition(way, states[c.rank], c, budget_bytes=64, mode="in-place"))
    assert torch.equal(next(iter(moved[0].state.values())), torch.arange(4.0))
    assert torch.equal(next(iter(moved[1].state.values())), torch.arange(4.0, 8.0))


def test_ranks_that_mean_different_modes_do_not_hang() -> None:
    way, states, values = pair()
    modes: tuple[module.Mode, ...] = ("safe", "in-place")
    body = lambda c: transition(way, states[c.rank], c, budget_bytes=1 << 10, mode=modes[c.rank])  # noqa: E731
    for error in outcomes(2, body):
        assert "ranks [1] want another transition" in str(error)
    assert_whole(way, states, values)
    with pytest.raises(TransitionError, match="expected mode safe or in-place, got 'inplace'"):
        transition(way, states[0], ThreadWorld(2).collective(0), budget_bytes=64, mode="inplace")  # type: ignore[arg-type]
