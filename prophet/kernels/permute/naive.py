"""The definition of permute and unpermute: token rows to send order, and weighted expert outputs back to tokens.

Shape legend: N tokens, K choices per token, A choices sent (N*K less those dropped), D model dim.
"""

from __future__ import annotations

from torch import Tensor


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return the rows of `x` in the order of their choices, [A, D]: row i is token order[i] // K.

    Args:
        x: Tokens [N, D].
        order: Choices in send order, [A].
        top_k: K, choices per token.
    """
    n, dim = x.shape
    # choice n*K + k of token n is row n*K + k
    choices = x.unsqueeze(1).expand(n, top_k, dim).reshape(n * top_k, dim)
    return choices.index_select(0, order)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return y[n] = sum over k of weights[n, k] · rows[position of choice (n, k)], [N, D] in the dtype of `rows`.

    Choices that were not sent count as zero. The sum runs over k in order, in the wider of both precisions.

    Args:
        rows: Rows [A, D] in send order.
        order: Choices in send order, [A].
        weights: [N, K].
    """
    n, k = weights.shape
    # zeros for choices that were dropped: `order` does not list them
    back = rows.new_zeros((n * k, rows.shape[1])).index_copy(0, order, rows).view(n, k, rows.shape[1])
    return (back * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)
