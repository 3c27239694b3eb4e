"""Attention over chunks equals attention over the whole sequence, in value and gradient, and leaves no chunk behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline_balance.slices.attention import _triangle, attend
from pipeline_balance.slices.store import ChunkStore, SliceError, Unit, active
from prophet.errors import SpecError
from tests.helpers.sliced_attention import DOCUMENTS, EVEN, UNEVEN, backward, in_slices, tensors, whole


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("starts", [EVEN, UNEVEN])
@pytest.mark.parametrize(("heads", "kv_heads", "value_width"), [(4, 4, 8), (4, 2, 8), (3, 1, 5)])
def test_float64_equals_the_definition(
    heads: int, kv_heads: int, value_width: int, starts: Sequence[int], documents: Tensor | None, again: bool
) -> None:
    parts = tensors(heads, kv_heads, value_width=value_width)
    store = ChunkStore()
    expected = whole(*parts, documents)
    outs = in_slices(store, parts, starts, documents, again=again)
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=0, atol=1e-14)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    found = backward(outs, weights, starts, parts)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), parts), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    assert len(store) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    parts = tensors(dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in parts]
    store = ChunkStore()
    outs = in_slices(store, parts)
    weights = torch.randn((2, 4, 12, 8), dtype=torch.float64)
    expected = whole(*exact)
    torch.testing.assert_close(torch.cat(outs, 2).double(), expected, rtol=0, atol=tolerance)
    found = backward(outs, weights.to(dtype), EVEN, parts)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("documents", [False, True])
def test_long_slices_attend_to_themselves_in_parts(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # the first slice is cut in two, and its second half again
    monkeypatch.setattr("pipeline_balance.slices.attention.CUT", 4)
    monkeypatch.setattr("pipeline_balance.slices.attention.BLOCK", 1)
    parts, packed, starts = tensors(), DOCUMENTS if documents else None, (0, 7, 12)
    store = ChunkStore()
    outs = in_slices(store, parts, starts, packed)
    expected = whole(*parts, packed)
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=0, atol=1e-14)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    found = backward(outs, weights, starts, parts)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), parts), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 255, 512, 1001, 1024])
def test_the_parts_of_a_slice_are_its_triangle(tokens: int) -> None:
    seen = torch.zeros(tokens, tokens)
    for rows, columns, causal in _triangle(0, tokens):
        block = torch.ones(rows.stop - rows.start, columns.stop - columns.start)
        assert not causal or rows == columns
        seen[rows, columns] += block.tril() if causal else block
    assert torch.equal(seen, torch.ones(tokens, tokens).tril())


def test_gradients_of_chunks_are_summed_in_float32() -> None:
    parts = tensors(dtype=torch.bfloat16)
    store = ChunkStore()
    outs = in_slices(store, parts)
    outs[2].sum().backward()
    chunks = store.chunks(3, 0)
    assert len(chunks) == 2
    grads = [store.line(3, 0).gradients(*chunk.place) for chunk in chunks]
    assert all(t.dtype == torch.float32 and t.abs().sum() > 0 for pair in grads for t in pair)


def test_a_document_that_ended_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline_balance.slices import attention

    calls = []
    forward = attention._forward
    monkeypatch.setattr(attention, "_forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    # one document per slice, for both sequences: 3 passes instead of 6
    in_slices(ChunkStore(), tensors(), EVEN, torch.arange(3).repeat_interleave(4).expand(2, 12))
    assert len(calls) == 3


def test_microbatches_and_layers_are_apart() -> None:
    store = ChunkStore()
    first, second = tensors(), [t.detach().flip(2).requires_grad_() for t in tensors()]
    outs = [in_slices(store, parts, microbatch=m) for m, parts in enumerate((first, second))]
    assert len(store) == 6
    for parts, found in zip((first, second), outs, strict=True):
        torch.testing.assert_close(torch.cat(found, 2), whole(*parts), rtol=0, atol=1e-14)
    for parts, found in zip((first, second), outs, strict=True):
        backward(found, torch.ones(2, 4, 12, 8, dtype=torch.float64), EVEN, parts)
    assert len(store) == 0


def test_chunks_that_lie_apart_are_read_apart() -> None:
    store, both = ChunkStore(), (tensors(), [t.detach().flip(2).requires_grad_() for t in tensors()])
    outs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, (start, stop) in enumerate(pairwise(EVEN)):
        for microbatch, parts in enumerate(both):  # in turn, so each has the other's slices between its own
            with active(store, Unit(microbatch, number, 3)):
                outs[microbatch].append(attend(*(t[:, :, start:stop] for t in parts), layer=3))
    for parts, found in zip(both, outs, strict=True):
        expected = whole(*parts)
        torch.testing.assert_close(torch.cat(found, 2), expected, rtol=0, atol=1e-14)
        got = backward(found, torch.ones_like(expected), EVEN, parts)
        for one, other in zip(got, torch.autograd.grad(expected.sum(), parts), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_buffers_are_used_again() -> None:
    store = ChunkStore()
    weights = torch.ones(2, 4, 12, 8, dtype=torch.float64)
    for _ in range(3):
        parts = tensors()
        backward(in_slices(store, parts), weights, EVEN, parts)
        # three slices' keys and values, and the gradients of the first two
        assert store.n_bytes == (3 * 2 + 2 * 2) * parts[1][:, :, :4].nbytes
        assert [room.grown for room in store.rooms[3]] == [3]
        assert store.pool.allocated == 2


def test_nothing_is_kept_where_no_backward_comes() -> None:
    store = ChunkStore()
    parts = tensors()
    with torch.no_grad():
        outs = in_slices(store, parts)
    assert len(store) == 0
    frozen = in_slices(store, [t.detach() for t in parts])
    assert len(store) == 0
    torch.testing.assert_close(outs, frozen, rtol=0, atol=0)


@pytest.mark.parametrize("trained", range(3))
def test_one_of_three_inputs_trains(trained: int) -> None:
    store = ChunkStore()
    parts = [t.detach().requires_grad_(i == trained) for i, t in enumerate(tensors())]
    outs = in_slices(store, parts)
    weights = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    (found,) = backward(outs, weights, EVEN, [parts[trained]])
    (expected,) = torch.autograd.grad((whole(*parts) * weights).sum(), [parts[trained]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert len(store) == 0


def test_a_prefix_without_gradients_keeps_none() -> None:
    store = ChunkStore()
    parts = tensors()
    outs = []
    for number in range(3):
        with active(store, Unit(0, number, 3)), torch.set_grad_enabled(number > 0):
            outs.append(attend(*(t[:, :, 4 * number : 4 * number + 4] for t in parts), layer=3))
    (outs[2].sum() * 2).backward()
    outs[1].sum().backward()
    assert len(store) == 0
    # keys and values of three slices, gradients of the second one's alone
    assert store.n_bytes == (3 * 2 + 2) * parts[1][:, :, :4].nbytes
    cut = [t.detach().requires_grad_() for t in parts]
    weights = torch.tensor([0.0] * 4 + [1.0] * 4 + [2.0] * 4, dtype=torch.float64)[:, None]
    before = torch.tensor([False] * 4 + [True] * 8)[:, None]
    # the oracle's prefix takes part without gradients
    given = [torch.where(before, t, t.detach()) for t in cut]
    for one, other in zip(parts, torch.autograd.grad((whole(*given) * weights).sum(), cut), strict=True):
        torch.testing.assert_close(one.grad, other, rtol=0, atol=1e-13)


def test_wrong_orders_are_named() -> None:
    store = ChunkStore()
    parts = tensors()
    outs = in_slices(store, parts)
    with pytest.raises(SliceError, match="backward of slice 0, but slice 2 comes first"):
        outs[0].sum().backward()
    with (
        pytest.raises(SliceError, match=r"slice 2 goes forward with chunks of slices \[\], expected"),
        active(store, Unit(1, 2, 3)),
    ):
        attend(*(t[:, :, :4] for t in parts), layer=3)
    outs[2].sum().backward(retain_graph=True)
    with pytest.raises(SliceError, match="backward of slice 2, but its chunk is gone"):
        outs[2].sum().backward()
    store.clear()
    assert len(store) == 0


def test_an_output_changed_in_place_is_named() -> None:
    outs = in_slices(ChunkStore(), tensors())
    outs[2].mul_(2.0)
    with pytest.raises(SpecError, match="layer 3: the output of its attention was changed in place"):
        outs[2].sum().backward()


def test_outside_of_a_step() -> None:
    with pytest.raises(SliceError, match="outside of a pipeline's step"):
        attend(*tensors(), layer=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda q, k, v: (q[0], k, v), r"needs \[B, H, T, D\]"),
        (lambda q, k, v: (q, k, v[:, :, :3]), r"needs \[B, H, T, D\]"),
        (lambda q, k, v: (q[:, :3], k, v), "do not fit"),
        (lambda q, k, v: (q, k[:, :, :6], v[:, :, :6]), "do not fit"),
        (lambda q, k, v: (q, k, F.pad(v, (0, 1))), "do not fit"),
        (lambda q, k, v: (q.to("meta"), k, v), "kernels for CPUs and NVIDIA GPUs, got tensors on meta"),
    ],
)
def test_bad_shapes_are_named(change: object, error: str) -> None:
    store = ChunkStore()
    with active(store, Unit(0, 0, 3)), pytest.raises(SpecError, match=error):
        attend(*change(*tensors()), layer=0)  # type: ignore[operator]
    assert len(store) == 0


def test_two_attentions_of_one_pass_need_layers_of_their_own() -> None:
    store = ChunkStore()
    in_slices(store, tensors(), starts=(0, 12))
    with pytest.raises(SpecError, match="two attentions of one pass call themselves layer 3"):
        in_slices(store, tensors(), starts=(0, 12))
