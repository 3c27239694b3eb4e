"""Permute and unpermute with library gathers: what runs on CPU, and on a GPU without Triton.

Both directions of both passes are gathers, so nothing is zeroed first, nothing is added atomically, and every result is
the same bit for bit in every run.

Shape legend: N tokens, K choices per token, A choices sent (N*K less those dropped), D model dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def spread(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return rows [A, D] in send order: row i is row order[i] // K of `x`.

    Args:
        x: Tokens [N, D].
        order: Choices in send order, [A].
        top_k: K, choices per token.
    """
    return x.index_select(0, order if top_k == 1 else order // top_k)


def collect(rows: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """Return y[n] = sum over k of weights[n, k] · rows[position[n, k]], [N, D].

    Sums run over k in order, in the wider of the dtypes and in float32 at least; the result has the dtype of `rows`.

    Args:
        rows: Rows [A, D] in send order.
        position: Where each choice is among them, [N, K]; -1 for those left out.
        weights: [N, K]; None for ones.
    """
    tokens, top_k = position.shape
    # a permutation: no sum is needed
    if top_k == 1 and weights is None and rows.shape[0] == tokens:
        return rows.index_select(0, position.view(-1))
    if rows.shape[0] == 0:
        return rows.new_zeros((tokens, rows.shape[1]))
    # `embedding_bag` reads each row once, and adds without a buffer per k
    if rows.device.type == "cpu" and all(t is None or t.dtype == torch.float32 for t in (rows, weights)):
        return _bags(rows, position, weights)
    precise = torch.promote_types(rows.dtype, torch.float32 if weights is None else weights.dtype)
    precise = torch.promote_types(precise, torch.float32)
    # with all choices sent nothing has to be masked, which would cost a pass per k
    dropped = position < 0 if rows.shape[0] < tokens * top_k else None
    y = torch.zeros((tokens, rows.shape[1]), dtype=precise, device=rows.device)
    for k in range(top_k):
        # -1 is no index: any row is read in its place, and masked below
        part = rows.index_select(0, position[:, k].clamp_min(0))
        if dropped is not None:
            part = part.masked_fill_(dropped[:, k : k + 1], 0)
        if weights is None:
            y += part
        else:
            y.addcmul_(part.to(precise), weights[:, k : k + 1].to(precise))
    return y.to(rows.dtype)


def _bags(rows: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """Return what `collect` does, in one pass over the rows; float32 on CPU."""
    if rows.shape[0] == position.numel():
        return F.embedding_bag(position, rows, mode="sum", per_sample_weights=weights)
    sent = position >= 0
    ends = F.pad(sent.sum(dim=1).cumsum(0), (1, 0))
    picked = None if weights is None else weights[sent]
    return F.embedding_bag(position[sent], rows, ends, mode="sum", per_sample_weights=picked, include_last_offset=True)


def collect_backward(d_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the rows [A, D] and the weights [N, K] of `collect`; zero for weights of dropped choices.

    Args:
        d_y: Gradient of the result, [N, D].
        rows: Rows [A, D] in send order.
        order: Choices in send order, [A].
        weights: [N, K].
    """
    top_k = weights.shape[1]
    d_rows = spread(d_y, order, top_k)
    precise = torch.promote_types(rows.dtype, torch.promote_types(weights.dtype, torch.float32))
    flat = weights.reshape(-1)
    d_flat = torch.zeros_like(flat)
    if rows.dtype == precise:
        # each choice is sent once, so this writes every element at most once: no sum, no order
        d_flat[order] = torch.linalg.vecdot(rows, d_rows).to(flat.dtype)
        return d_rows.mul_(flat[order].unsqueeze(1)), d_flat.view_as(weights)
    wide = d_rows.to(precise)
    d_flat[order] = torch.linalg.vecdot(rows.to(precise), wide).to(flat.dtype)
    return wide.mul_(flat[order].unsqueeze(1)).to(rows.dtype), d_flat.view_as(weights)
