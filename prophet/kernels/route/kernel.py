"""The top-k gate in Triton: one read of the logits forward, one backward.

Shape legend: N tokens, E experts, K choices per token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (arguments of a kernel have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prophet.kernels.choice import on_its_device


@triton.jit
def _scores(logits, row, live, experts, stride_n, stride_e, SIGMOID: tl.constexpr, WIDTH: tl.constexpr):
    col = tl.arange(0, WIDTH)
    mask = live[:, None] & (col < experts)[None, :]
    at = logits + row[:, None] * stride_n + col[None, :] * stride_e
    value = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        top = tl.max(value, axis=1)
        # rows past the last token are all -inf, and -inf less -inf would be NaN
        top = tl.where(live, top, 0.0)
        score = tl.exp(value - top[:, None])
        score = score / tl.where(live, tl.sum(score, axis=1), 1.0)[:, None]
    return tl.where(mask, score, 0.0), mask


@triton.jit(do_not_specialize=["tokens"])  # counts change from step to step
def _route_kernel(
    logits, bias, ids, weights, counts, tokens, experts, stride_n, stride_e, scale, tiny,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tokens
    col = tl.arange(0, WIDTH)
    score, _ = _scores(logits, row, live, experts, stride_n, stride_e, SIGMOID, WIDTH)
    wish = score
    if BIASED:
        wish = wish + tl.load(bias + col, mask=col < experts, other=0.0).to(tl.float32)[None, :]
    # scores that are NaN are for the caller to report; until then the ids must name experts that exist
    wish = tl.where((col < experts)[None, :] & (wish > float("-inf")), wish, float("-inf"))
    total = tl.zeros((ROWS,), tl.float32)
    taken = tl.zeros((ROWS, WIDTH), tl.int32)
    for k in tl.static_range(TOP_K):
        # of equal scores the lower expert, so that every run chooses the same
        best = tl.argmax(wish, axis=1)
        hit = col[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), axis=1)
        total += value
        taken += tl.where(hit & live[:, None], 1, 0)
        wish = tl.where(hit, float("-inf"), wish)
        tl.store(ids + row * TOP_K + k, best.to(tl.int64), mask=live)
        if NORMALIZE:
            tl.store(weights + row * TOP_K + k, value, mask=live)
        else:
            tl.store(weights + row * TOP_K + k, value * scale, mask=live)
    if NORMALIZE:
        # the weights were just stored by other threads of the block
        tl.debug_barrier()
        factor = scale / tl.maximum(total, tiny)
        for k in tl.static_range(TOP_K):
            value = tl.load(weights + row * TOP_K + k, mask=live, other=0.0)
            tl.store(weights + row * TOP_K + k, value * factor, mask=live)
    chosen = tl.sum(taken, axis=0).to(tl.int64)
    # integers: the order of atomic additions does not change the sum
    tl.atomic_add(counts + col, chosen, mask=(col < experts) & (chosen > 0))


@triton.jit(do_not_specialize=["tokens"])  # counts change from step to step
def _route_backward_kernel(
    logits, ids, d_weights, d_logits, tokens, experts, stride_n, stride_e, scale, tiny,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tokens
    col = tl.arange(0, WIDTH)
    score, mask = _scores(logits, row, live, experts, stride_n, stride_e, SIGMOID, WIDTH)
    grad = tl.zeros((ROWS, WIDTH), tl.float32)  # of the chosen scores' weights, at their experts
    taken = tl.zeros((ROWS, WIDTH), tl.int1)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids + row * TOP_K + k, mask=live, other=-1)
        hit = col[None, :] == expert[:, None]
        d_weight = tl.load(d_weights + row * TOP_K + k, mask=live, other=0.0).to(tl.float32)
        grad = tl.where(hit, d_weight[:, None] * scale, grad)
        taken = taken | hit
    if NORMALIZE:
        total = tl.maximum(tl.sum(tl.where(taken, score, 0.0), axis=1), tiny)
        # of w_k = s_k / sum(s) over the chosen: dL/ds_k = (g_k - sum(g·w)) / sum(s)
        mean = tl.sum(grad * score, axis=1) / total
        grad = tl.where(taken, (grad - mean[:, None]) / total[:, None], 0.0)
    if SIGMOID:  # noqa: SIM108
        out = grad * score * (1.0 - score)
    else:
        out = score * (grad - tl.sum(grad * score, axis=1)[:, None])
    tl.store(d_logits + row[:, None] * experts + col[None, :], out, mask=mask)


def _blocks(experts: int) -> tuple[int, int]:
    # a row of scores is held by one program, in tiles of about 2048 elements
    width = max(2, triton.next_power_of_2(experts))
    return max(1, min(32, 2048 // width)), width


@on_its_device
def route(
    logits: Tensor, top_k: int, sigmoid: bool, normalize: bool, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [N, K], weights [N, K] float32 and counts [E] of the chosen experts.

    Args:
        logits: [N, E], any strides.
        top_k: K, experts per token.
        sigmoid: Whether scores are sigmoids, and not a softmax.
        normalize: Whether to divide weights by their sum.
        scale: Factor on the weights.
        bias: Added to the scores for the choice only, [E]; None without.
    """
    tokens, experts = logits.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    counts = torch.zeros(experts, dtype=torch.int64, device=logits.device)
    if tokens:
        rows, width = _blocks(experts)
        # a kernel needs some pointer: without a bias this one is never read
        given = logits if bias is None else bias.contiguous()
        _route_kernel[(triton.cdiv(tokens, rows),)](
            logits, given, ids, weights, counts, tokens, experts, logits.stride(0), logits.stride(1), scale,
            torch.finfo(torch.float32).tiny, TOP_K=top_k, SIGMOID=sigmoid, NORMALIZE=normalize,
            BIASED=bias is not None, ROWS=rows, WIDTH=width,
        )  # fmt: skip
    return ids, weights, counts


@on_its_device
def route_backward(
    d_weights: Tensor, logits: Tensor, ids: Tensor, sigmoid: bool, normalize: bool, scale: float
) -> Tensor:
    """Return the gradient of the logits, [N, E].

    Args:
        d_weights: Gradient of the weights, [N, K].
        logits: [N, E].
        ids: The chosen experts, [N, K].
        sigmoid: As in `route`.
        normalize: As in `route`.
        scale: As in `route`.
    """
    tokens, experts = logits.shape
    d_logits = torch.empty((tokens, experts), dtype=logits.dtype, device=logits.device)
    if tokens:
        rows, width = _blocks(experts)
        _route_backward_kernel[(triton.cdiv(tokens, rows),)](
            logits, ids, d_weights.contiguous(), d_logits, tokens, experts, logits.stride(0), logits.stride(1), scale,
            torch.finfo(torch.float32).tiny, TOP_K=ids.shape[1], SIGMOID=sigmoid, NORMALIZE=normalize, ROWS=rows,
            WIDTH=width,
        )  # fmt: skip
    return d_logits
