"""Windows, sinks and soft caps over chunks: those of the definition, with the bytes of the closed forms."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline_balance.schedules.closed_forms import sliced_window_chunks
from pipeline_balance.slices import attention, kernel
from pipeline_balance.slices.attention import _below, _triangle, attend
from pipeline_balance.slices.store import ChunkStore, Unit, active
from prophet.errors import SpecError
from tests.helpers.sliced_attention import (
    DOCUMENTS,
    EVEN,
    UNEVEN,
    backward,
    check,
    in_slices,
    sinks_of,
    tensors,
    whole,
)

WINDOWS = [1, 2, 3, 4, 5, 7, 8, 11, 12, 40]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("starts", [EVEN, UNEVEN, (0, 2, 4, 6, 8, 10, 12), (0, 12)])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_that_of_the_definition(window: int, starts: Any, documents: Tensor | None) -> None:
    check(starts, documents, window=window)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("window", "cap", "sink"), [(None, None, True), (None, 0.5, False), (3, None, True), (5, 0.5, True)]
)
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_sinks_and_caps_are_those_of_the_definition(
    documents: Tensor | None, window: int | None, cap: float | None, sink: bool, kv_heads: int, again: bool
) -> None:
    options: dict[str, Any] = {"window": window, "soft_cap": cap, "sink": sink}
    check(UNEVEN, documents, again, kv_heads, **options)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_long_slices_are_attended_to_in_parts(
    cap: float | None, window: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CUT", 3)
    monkeypatch.setattr(attention, "BLOCK", 1)
    monkeypatch.setattr(kernel, "_STRIP", 2)
    check((0, 7, 12), DOCUMENTS if documents else None, window=window, soft_cap=cap, sink=True)


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_capped_scores_come_in_strips_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_STRIP", rows)
    for documents in (None, DOCUMENTS):
        check((0, 12), documents, soft_cap=0.5)
        check(UNEVEN, documents, soft_cap=0.5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_lower_precision(cap: float | None, dtype: torch.dtype, tolerance: float) -> None:
    parts, options = tensors(dtype=dtype), {"window": 6, "soft_cap": cap, "sinks": sinks_of(4, dtype)}
    inputs = [*parts, options["sinks"]]
    exact = [t.detach().double().requires_grad_() for t in inputs]  # type: ignore[union-attr]
    outs = in_slices(ChunkStore(), parts, **options)  # type: ignore[arg-type]
    weights = torch.randn((2, 4, 12, 8), dtype=torch.float64)
    expected = whole(*exact[:3], window=6, soft_cap=cap, sinks=exact[3])
    torch.testing.assert_close(torch.cat(outs, 2).double(), expected, rtol=0, atol=tolerance)
    found = backward(outs, weights.to(dtype), EVEN, inputs)  # type: ignore[arg-type]
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=8 * tolerance)


# --- blocks ----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40), st.integers(0, 30), st.integers(1, 40), st.integers(1, 90), st.integers(1, 9), st.integers(1, 3)
)
def test_the_parts_of_a_window_have_each_pair_once(
    tokens: int, gap: int, before: int, window: int, cut: int, block: int
) -> None:
    """A slice's own triangle, and an earlier chunk with a gap between; blocks are whole but at the edges."""
    start = before + gap
    seen = torch.zeros(start + tokens, start + tokens)
    at = torch.arange(start + tokens)
    sees = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CUT", max(cut, 2 * block))
        patch.setattr(attention, "BLOCK", block)
        parts = [(r, c) for r, c, _ in _triangle(start, start + tokens, window)]
        parts += _below(slice(start, start + tokens), slice(0, before), window)
    for rows, columns in parts:
        assert rows.start < rows.stop
        assert columns.start < columns.stop
        # no block without a pair, nor a row or a column without one
        part = sees[rows, columns]
        assert part.any(dim=0).all()
        assert part.any(dim=1).all()
        # all that is hidden is known
        shift = attention._shift(rows, columns, window)
        band = torch.ones_like(part) if shift is None else torch.ones_like(part).triu(shift)
        assert torch.equal(band & (at[columns][None, :] <= at[rows][:, None]), part)
        seen[rows, columns] += part.float()
    want = sees.clone()
    want[:start] = False
    want[:, before:start] = False
    assert torch.equal(seen, want.float())


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
@pytest.mark.parametrize(("window", "allowed"), [(128, 2.5), (256, 2.0), (1024, 1.35), (6000, 1.15)])
def test_little_of_what_a_window_hides_is_computed(window: int, allowed: float, tokens: int) -> None:
    start = 8 * tokens
    parts = [(rows, columns) for rows, columns, _ in _triangle(start, start + tokens, window)]
    for chunk in range(8):
        before = slice(chunk * tokens, (chunk + 1) * tokens)
        parts += _below(slice(start, start + tokens), before, window)
    computed = sum((r.stop - r.start) * (c.stop - c.start) for r, c in parts)
    assert computed <= allowed * tokens * min(window, start)


def test_chunks_behind_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    forward = attention._forward
    monkeypatch.setattr(
        attention, "_forward", lambda q, k, *a, **o: calls.append((q.shape[2], k.shape[2])) or forward(q, k, *a, **o)
    )
    in_slices(ChunkStore(), tensors(tokens=24), range(0, 25, 4), window=5)
    # of each slice but the first its own triangle, and the four tokens before it
    assert calls == [(4, 4)] + [(4, 4), (4, 4)] * 5
    calls.clear()
    in_slices(ChunkStore(), tensors(tokens=24), range(0, 25, 4), window=12)
    # the part of the third chunk before that no token sees is left out; whole chunks are read at once
    assert calls == [(4, 4), (4, 4), (4, 4), (4, 4), (4, 8)] + [(4, 4), (3, 3), (4, 8)] * 3


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    parts = tensors()
    free, wide = (in_slices(ChunkStore(), parts, window=window) for window in (None, 12))
    assert all(torch.equal(one, other) for one, other in zip(free, wide, strict=True))


# --- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 20, 23, 24])
@pytest.mark.parametrize("each", [2, 4])
def test_gradients_of_chunks_take_the_bytes_of_the_form(each: int, window: int) -> None:
    parts, starts = tensors(tokens=24), range(0, 25, each)
    slices, store = 24 // each, ChunkStore()
    outs = in_slices(store, parts, starts, window=window)
    chunk = 2 * parts[1][:, :, :each].nbytes
    met = sliced_window_chunks(slices, each, window)
    assert len(store) == slices
    assert store.used_bytes == slices * chunk
    peak, pop = [], store.pop
    store.pop = lambda *given: (peak.append(store.gradient_bytes), pop(*given))[1]  # type: ignore[method-assign, func-returns-value]
    backward(outs, torch.ones(2, 4, 24, 8, dtype=torch.float64), starts, parts)
    # a window of one token meets no earlier chunk
    assert max(peak) == (min(met, slices - 1) if window > 1 else 0) * chunk
    assert store.gradient_bytes == store.used_bytes == 0
    # memory is used again by the next one
    before = store.n_bytes
    backward(in_slices(store, parts, starts, window=window), torch.ones_like(parts[0]), starts, parts)
    assert store.n_bytes == before == slices * chunk + max(peak)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 20, 23, 24, None])
@pytest.mark.parametrize("each", [2, 4])
def test_without_a_backward_chunks_go_when_the_window_has_passed(each: int, window: int | None) -> None:
    parts, starts = tensors(tokens=24), range(0, 25, each)
    slices, store = 24 // each, ChunkStore()
    chunk = 2 * parts[1][:, :, :each].nbytes
    met = slices if window is None else sliced_window_chunks(slices, each, window)
    expected = whole(*parts, window=window)
    with torch.no_grad():
        for number, (a, b) in enumerate(pairwise(starts)):
            with active(store, Unit(0, number, slices, None, tuple(starts))):
                out = attend(*(t[:, :, a:b] for t in parts), layer=3, window=window)
            torch.testing.assert_close(out, expected[:, :, a:b], rtol=0, atol=1e-14)
            # what the next slice does not see is gone
            assert len(store) == (min(number + 1, met - 1) if number < slices - 1 else 0)
            assert store.used_bytes == len(store) * chunk
    assert store.n_bytes == met * chunk


def test_chunks_stay_while_a_backward_of_any_slice_may_read_them() -> None:
    store, parts = ChunkStore(), tensors()
    outs = []
    for number in range(3):
        with active(store, Unit(0, number, 3)), torch.set_grad_enabled(number > 0):
            outs.append(attend(*(t[:, :, 4 * number : 4 * number + 4] for t in parts), layer=3, window=3))
        assert len(store) == number + 1
    for number in (2, 1):
        outs[number].sum().backward()
    seen = whole(*parts, window=3)
    for one, other in zip(parts, torch.autograd.grad(seen[:, :, 4:].sum(), parts), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad[:, :, 4:], other[:, :, 4:], rtol=0, atol=1e-13)
        # the first slice is attended to without gradients
        assert not one.grad[:, :, :4].any()
    assert len(store) == 0


def test_what_cannot_be_is_named() -> None:
    q, k, v = tensors()
    for options, words in (
        ({"window": 0}, "a window must be a number of tokens from 1 on, got 0"),
        ({"window": 2.5}, r"got 2\.5"),
        ({"sinks": torch.zeros(2)}, r"one number for each of 4 heads, got \[2\]"),
        ({"soft_cap": 0.0}, "a soft cap must be above 0"),
    ):
        with active(ChunkStore(), Unit(0, 0, 3)), pytest.raises(SpecError, match=words):
            attend(q, k, v, layer=0, **options)  # type: ignore[arg-type]
