"""Attention over chunks of one sequence, and its definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline_balance.slices.attention import attend
from pipeline_balance.slices.store import ChunkStore, Unit, active

EVEN = (0, 4, 8, 12)
# slices of other lengths, one of a single token
UNEVEN = (0, 6, 7, 12)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 6 + [2] * 4])


def tensors(
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float64,
    width: int = 8,
    value_width: int = 8,
    tokens: int = 12,
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, tokens, width), (2, kv_heads, tokens, width), (2, kv_heads, tokens, value_width)]
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The oracle, by the definition: scores, their cap, mask, a column for the sink, softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    at = torch.arange(q.shape[2])
    hidden = (at[None, :] > at[:, None])[None, None]
    if window is not None:
        hidden = hidden | (at[None, :] <= at[:, None] - window)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : q.shape[2]] @ v


def in_slices(
    store: ChunkStore,
    parts: Sequence[Tensor],
    starts: Sequence[int] = EVEN,
    documents: Tensor | None = None,
    microbatch: int = 0,
    again: bool = False,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> list[Tensor]:
    """Outputs by slice, forward in order. With `again` every slice is checkpointed."""
    outs = []
    for number, (start, stop) in enumerate(pairwise(starts)):
        unit = Unit(microbatch, number, len(starts) - 1, documents, tuple(starts))

        def run(q: Tensor, k: Tensor, v: Tensor, unit: Unit = unit) -> Tensor:
            with active(store, unit):
                return attend(q, k, v, layer=3, window=window, sinks=sinks, soft_cap=soft_cap)

        cut = [t[:, :, start:stop] for t in parts]
        outs.append(checkpoint(run, *cut, use_reentrant=False) if again else run(*cut))
    return outs


def backward(outs: list[Tensor], weights: Tensor, starts: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of sum(out * weights), slices in reverse order."""
    total = [torch.zeros_like(t) for t in inputs]
    for number in reversed(range(len(outs))):
        loss = (outs[number] * weights[:, :, starts[number] : starts[number + 1]]).sum()
        total = [a + b for a, b in zip(total, torch.autograd.grad(loss, inputs), strict=True)]
    return total


def sinks_of(heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    # some are far below the scores, some above
    return torch.linspace(-3.0, 3.0, heads, dtype=torch.float64).to(dtype).requires_grad_()


def check(
    starts: Sequence[int],
    documents: Tensor | None,
    again: bool = False,
    kv_heads: int = 2,
    *,
    width: int = 8,
    value_width: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    sink: bool = False,
    **options: Any,
) -> None:
    """Outputs, gradients and what is left are those of the definition.

    Args:
        starts: First tokens of slices, and the end.
        documents: [B, T], on the host.
        again: Whether every slice is checkpointed.
        kv_heads: Of keys and values, for 4 of queries.
        width: Of queries and keys.
        value_width: Of values; None: the same.
        device: Where slices attend.
        dtype: In what.
        tolerance: Absolute, of outputs; eight times as much of gradients, and as much relative to them. None: as
            float64 has it.
        sink: Whether there are sinks.
        options: Of `attend`.
    """
    drawn = tensors(4, kv_heads, tokens=starts[-1], width=width, value_width=value_width or width)
    if sink:
        drawn.append(sinks_of(4))
    inputs = [t.detach().to(device, dtype).requires_grad_() for t in drawn]
    exact = [t.detach().cpu().double().requires_grad_() for t in inputs]
    of_whole, of_slices = ({**options, "sinks": given[3]} if sink else options for given in (exact, inputs))
    store = ChunkStore()
    expected = whole(exact[0], exact[1], exact[2], documents, **of_whole)
    outs = in_slices(store, inputs[:3], starts, documents, again=again, **of_slices)
    near = 1e-14 if tolerance is None else tolerance
    torch.testing.assert_close(torch.cat(outs, 2).cpu().double(), expected, rtol=0, atol=near)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    found = backward(outs, weights.to(device, dtype), starts, inputs)
    rtol, atol = (0.0, 1e-13) if tolerance is None else (tolerance, 8 * tolerance)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.cpu().double(), other, rtol=rtol, atol=atol)
    assert len(store) == store.used_bytes == store.gradient_bytes == 0
