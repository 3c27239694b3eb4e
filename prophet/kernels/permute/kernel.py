"""Permute and unpermute in Triton: one read and one write of every row, nothing added atomically.

Shape legend: N tokens, K choices per token, A choices sent, D model dim.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (arguments of a kernel have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prophet.kernels.choice import on_its_device


# counts change from step to step, and a value that Triton specialises on compiles another kernel
@triton.jit(do_not_specialize=["rows"])
def _spread_kernel(
    x, out, order, rows, dim, stride_n, stride_d,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    token = tl.load(order + row, mask=live, other=0) // TOP_K
    for start in range(0, dim, COLS):
        col = start + tl.arange(0, COLS)
        mask = live[:, None] & (col < dim)[None, :]
        value = tl.load(x + token[:, None] * stride_n + col[None, :].to(tl.int64) * stride_d, mask=mask)
        tl.store(out + row[:, None] * dim + col[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["tokens"])  # counts change from step to step
def _collect_kernel(
    rows, out, position, weights, tokens, dim, stride_a, stride_d,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    for start in range(0, dim, COLS):
        col = start + tl.arange(0, COLS)
        inside = (col < dim)[None, :]
        # in float32, k in order: the same bits in every run, whatever the dtype of the rows
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k in tl.static_range(TOP_K):
            at = tl.load(position + token * TOP_K + k, mask=live, other=-1)
            sent = at >= 0
            source = rows + at[:, None] * stride_a + col[None, :].to(tl.int64) * stride_d
            value = tl.load(source, mask=sent[:, None] & inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                weight = tl.load(weights + token * TOP_K + k, mask=sent, other=0.0).to(tl.float32)
                value = value * weight[:, None]
            total += value
        tl.store(out + token[:, None] * dim + col[None, :], total, mask=live[:, None] & inside)


@triton.jit(do_not_specialize=["count"])  # counts change from step to step
def _collect_backward_kernel(
    d_y, rows, d_rows, order, weights, d_weights, count, dim, stride_n, stride_nd, stride_a, stride_ad,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    choice = tl.load(order + row, mask=live, other=0)
    token = choice // TOP_K
    weight = tl.load(weights + choice, mask=live, other=0.0).to(tl.float32)
    dot = tl.zeros((ROWS,), tl.float32)
    for start in range(0, dim, COLS):
        col = start + tl.arange(0, COLS).to(tl.int64)
        mask = live[:, None] & (col < dim)[None, :]
        grad = tl.load(d_y + token[:, None] * stride_n + col[None, :] * stride_nd, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(rows + row[:, None] * stride_a + col[None, :] * stride_ad, mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(grad * value, axis=1)
        tl.store(d_rows + row[:, None] * dim + col[None, :], grad * weight[:, None], mask=mask)
    tl.store(d_weights + choice, dot, mask=live)


def _blocks(dim: int) -> tuple[int, int]:
    """Return rows and columns of a program's tile: wide loads, about 4096 elements in flight."""
    cols = min(1024, max(16, triton.next_power_of_2(dim)))
    return max(1, 4096 // cols), cols


@on_its_device
def spread(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return rows [A, D] in send order: row i is row order[i] // K of `x`.

    Args:
        x: Tokens [N, D], any strides.
        order: Choices in send order, [A].
        top_k: K, choices per token.
    """
    count, dim = order.shape[0], x.shape[1]
    out = x.new_empty((count, dim))
    if out.numel():
        rows, cols = _blocks(dim)
        grid = (triton.cdiv(count, rows),)
        _spread_kernel[grid](
            x, out, order.contiguous(), count, dim, x.stride(0), x.stride(1), TOP_K=top_k, ROWS=rows, COLS=cols
        )
    return out


@on_its_device
def collect(rows: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """Return y[n] = sum over k of weights[n, k] · rows[position[n, k]], in float32, k in order; [N, D].

    Args:
        rows: Rows [A, D] in send order, any strides.
        position: Where each choice is among them, [N, K]; -1 for those left out.
        weights: [N, K]; None for ones.
    """
    tokens, top_k = position.shape
    dim = rows.shape[1]
    out = rows.new_empty((tokens, dim))
    if out.numel():
        block, cols = _blocks(dim)
        grid = (triton.cdiv(tokens, block),)
        # a kernel needs some pointer: without weights this one is never read
        given = position if weights is None else weights.contiguous()
        _collect_kernel[grid](
            rows, out, position.contiguous(), given, tokens, dim, rows.stride(0), rows.stride(1),
            TOP_K=top_k, WEIGHTED=weights is not None, ROWS=block, COLS=cols,
        )  # fmt: skip
    return out


@on_its_device
def collect_backward(d_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the rows [A, D] and the weights [N, K] of `collect`; zero for weights of dropped choices.

    Args:
        d_y: Gradient of the result, [N, D].
        rows: Rows [A, D] in send order.
        order: Choices in send order, [A].
        weights: [N, K].
    """
    count, dim = rows.shape
    top_k = weights.shape[1]
    d_rows = rows.new_empty((count, dim))
    # every choice that was sent writes its weight's gradient; zeros are for dropped ones
    make = torch.empty if count == weights.numel() and dim else torch.zeros
    d_weights = make(weights.shape, dtype=weights.dtype, device=weights.device)
    if d_rows.numel():
        block, cols = _blocks(dim)
        grid = (triton.cdiv(count, block),)
        _collect_backward_kernel[grid](
            d_y, rows, d_rows, order.contiguous(), weights.contiguous(), d_weights, count, dim,
            d_y.stride(0), d_y.stride(1), rows.stride(0), rows.stride(1), TOP_K=top_k, ROWS=block, COLS=cols,
        )  # fmt: skip
    return d_rows, d_weights
