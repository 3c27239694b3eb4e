"""Permute and unpermute as differentiable operators.

Shape legend: N tokens, K choices per token, A choices sent (N*K less those dropped), D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prophet.kernels.choice import Impl, choose
from prophet.kernels.permute import gather, naive


def permute(x: Tensor, order: Tensor, position: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Return rows of tokens in the order in which choices are sent, [A, D]: row i is token order[i] // K.

    With K = 1 and nothing dropped this reorders rows.

    Args:
        x: Tokens [N, D].
        order: Choices in send order, [A], from `prophet.kernels.split_apply.send_order`.
        position: Where in the order choice n*K + k is, [N, K], or -1 where it is not sent; from there as well.
        impl: Which implementation runs, see `prophet.kernels.choice`.

    Raises:
        ValueError: Shapes do not fit.
    """
    _check(x.shape[0], order, position, x)
    chosen = choose(impl, x)
    if chosen == "naive":
        return naive.permute(x, order, position.shape[1])
    # as operators of torch.library: torch.compile sees one node, and fake tensors their shapes
    rows: Tensor = _permute_op(x, order, position, chosen)
    return rows


def unpermute(
    rows: Tensor, order: Tensor, position: Tensor, weights: Tensor | None = None, *, impl: Impl = "auto"
) -> Tensor:
    """Combine experts' outputs: y[n] = sum over k of weights[n, k] · rows[position[n, k]].

    Choices that were not sent count as zero. The sum runs over k in order, in float32 at least; the result has the
    dtype of `rows`. Differentiable in rows and weights, once.

    Args:
        rows: Rows [A, D] in send order.
        order: Choices in send order, [A].
        position: Where each choice is among the rows, [N, K]; -1 where it was not sent.
        weights: [N, K]; None for ones.
        impl: Which implementation runs, see `prophet.kernels.choice`.

    Returns:
        Tokens' answers [N, D].

    Raises:
        ValueError: Shapes do not fit.
    """
    _check(position.shape[0], order, position, rows)
    if rows.shape[0] != order.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows cannot be combined by an order of {order.shape[0]}")
    if weights is not None and weights.shape != position.shape:
        raise ValueError(f"expected weights of shape {list(position.shape)}, got {list(weights.shape)}")
    chosen = choose(impl, rows)
    if chosen == "naive":
        return naive.unpermute(rows, order, torch.ones_like(position, dtype=rows.dtype) if weights is None else weights)
    y: Tensor = _collect_op(rows, order, position, weights, chosen)
    return y


def _check(tokens: int, order: Tensor, position: Tensor, x: Tensor) -> None:
    if x.ndim != 2 or order.ndim != 1 or position.ndim != 2 or position.shape[0] != tokens:
        raise ValueError(
            f"expected rows [.., D], order [A] and position [N, K] for {tokens} tokens, got shapes "
            f"{list(x.shape)}, {list(order.shape)} and {list(position.shape)}"
        )


# --- operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("prophet::permute", mutates_args=())
def _permute_op(x: Tensor, order: Tensor, position: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        # imported when it runs: Triton is optional
        from prophet.kernels.permute import kernel

        return kernel.spread(x, order, position.shape[1])
    return gather.spread(x, order, position.shape[1])


@_permute_op.register_fake
def _(x: Tensor, order: Tensor, position: Tensor, impl: str) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


@torch.library.custom_op("prophet::collect", mutates_args=())
def _collect_op(rows: Tensor, order: Tensor, position: Tensor, weights: Tensor | None, impl: str) -> Tensor:
    """Return the weighted sum over a token's choices: unpermute, or without weights permute's backward pass."""
    if impl == "triton":
        from prophet.kernels.permute import kernel

        return kernel.collect(rows, position, weights)
    return gather.collect(rows.contiguous(), position, weights)


@_collect_op.register_fake
def _(rows: Tensor, order: Tensor, position: Tensor, weights: Tensor | None, impl: str) -> Tensor:
    return rows.new_empty((position.shape[0], rows.shape[1]))


@torch.library.custom_op("prophet::collect_backward", mutates_args=())
def _collect_backward_op(d_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    if impl == "triton":
        from prophet.kernels.permute import kernel

        return kernel.collect_backward(d_y, rows, order, weights)
    return gather.collect_backward(d_y, rows, order, weights)


@_collect_backward_op.register_fake
def _(d_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, position, ctx.impl = inputs
    ctx.save_for_backward(order, position)


def _permute_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None, None]:
    # the gradient of a copy to K rows is the sum of their gradients
    return _collect_op(d_rows, *ctx.saved_tensors, None, ctx.impl), None, None, None


def _setup_collect(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, order, position, weights, ctx.impl = inputs
    # without weights the gradient of the rows needs no values: the rows need not stay in memory
    ctx.save_for_backward(order, position, *(() if weights is None else (rows, weights)))


def _collect_backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
    order, position, *weighted = ctx.saved_tensors
    # the gradient of a plain sum is a copy to the row of each choice
    if not weighted:
        return _permute_op(d_y, order, position, ctx.impl), None, None, None, None
    d_rows, d_weights = _collect_backward_op(d_y, weighted[0], order, weighted[1], ctx.impl)
    return d_rows, None, None, d_weights, None


_permute_op.register_autograd(_permute_backward, setup_context=_setup_permute)
_collect_op.register_autograd(_collect_backward, setup_context=_setup_collect)
