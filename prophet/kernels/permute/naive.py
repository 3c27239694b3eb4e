"""The definition of permute and unpermute: token rows to send order, and weighted expert outputs back to tokens.

Shape legend: N tokens, K choices per token, A choices sent (N*K less those dropped), D model dim.
"""

from __future__ import annotations

from torch import Tensor


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Rows of `x` [N, D] in the order of their choices: row i of the result is token order[i] // K. Returns [A, D]."""
    n, dim = x.shape
    choices = x.unsqueeze(1).expand(n, top_k, dim).reshape(n * top_k, dim)
    return choices.index_select(0, order)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """y[n] = sum over k of weights[n, k] · rows[position of choice (n, k)], [N, D] in the dtype of `rows` [A, D].

    Choices that were not sent count as zero. The sum runs over k in order, in the wider of both precisions.
    """
    n, k = weights.shape
    back = rows.new_zeros((n * k, rows.shape[1])).index_copy(0, order, rows).view(n, k, rows.shape[1])
    return (back * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)
