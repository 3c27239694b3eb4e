"""The top-k gate as one differentiable operator.

Shape legend: N tokens, E experts, K choices per token.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from prophet.kernels.choice import Impl, choose
from prophet.kernels.route import naive
from prophet.kernels.route.naive import Routed


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    impl: Impl = "auto",
) -> Routed:
    """Choose the K experts of highest score for every row, and count the choices.

    Weights are the chosen scores, divided by their sum if `normalize`, times `scale`; they alone are differentiable
    (once), with respect to the logits. No expert is chosen twice. Library calls choose what the definition chooses;
    Triton takes the lower of two experts whose scores are equal.

    Args:
        logits: [N, E].
        top_k: K, experts per token.
        score: Softmax over experts, or a sigmoid per expert.
        normalize: Whether to divide weights by their sum.
        scale: Factor on the weights.
        bias: Added to the scores for the choice only, [E]; None without.
        impl: Which implementation runs, see `prophet.kernels.choice`.

    Raises:
        ValueError: Arguments do not fit.
    """
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"expected logits [N, E] with E >= top_k >= 1, got {list(logits.shape)} and top_k {top_k}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"expected a bias of shape {list(logits.shape[1:])}, got {list(bias.shape)}")
    chosen = choose(impl, logits)
    if chosen == "naive":
        return naive.route(logits, top_k, score=score, normalize=normalize, scale=scale, bias=bias)
    ids, weights, counts = _route_op(logits, top_k, score == "sigmoid", normalize, scale, bias, chosen)
    return Routed(ids, weights, counts)


def tally(ids: Tensor, experts: int, kept: Tensor | None = None) -> Tensor:
    """Return how often each expert is among `ids`, [E] int64; no host waits for a device.

    Args:
        ids: Experts, integers of any shape.
        experts: E.
        kept: Booleans like `ids`; those that are False do not count. None counts all.
    """
    flat = ids.reshape(-1)
    if not flat.is_cuda:
        return torch.bincount(flat if kept is None else flat[kept.reshape(-1)], minlength=experts)
    # not by `bincount`, which asks a device for the maximum and waits for it
    ones = torch.ones_like(flat) if kept is None else kept.reshape(-1).to(flat.dtype)
    return flat.new_zeros(experts).scatter_add_(0, flat, ones)


@torch.library.custom_op("prophet::route", mutates_args=())
def _route_op(
    logits: Tensor, top_k: int, sigmoid: bool, normalize: bool, scale: float, bias: Tensor | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    if impl == "triton":
        from prophet.kernels.route import kernel

        return kernel.route(logits, top_k, sigmoid, normalize, scale, bias)
    # A softmax over the K largest logits would do where nothing else is asked for, but scores that are equal after
    # rounding would then be told apart by their logits: not the choice that the definition makes.
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    if bias is None:
        weights, ids = scores.topk(top_k, dim=-1)
    else:
        ids = (scores + bias).topk(top_k, dim=-1).indices
        weights = scores.gather(1, ids)
    if normalize:
        weights /= weights.sum(dim=-1, keepdim=True).clamp_min_(torch.finfo(weights.dtype).tiny)
    if scale != 1.0:
        weights *= scale
    return ids, weights, tally(ids, logits.shape[1])


@_route_op.register_fake
def _(logits: Tensor, top_k: int, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    ids = logits.new_empty((logits.shape[0], top_k), dtype=torch.int64)
    precise = torch.float32 if others[-1] == "triton" else logits.dtype
    return ids, logits.new_empty(ids.shape, dtype=precise), ids.new_empty(logits.shape[1])


@torch.library.custom_op("prophet::route_backward", mutates_args=())
def _route_backward_op(
    d_weights: Tensor, logits: Tensor, ids: Tensor, sigmoid: bool, normalize: bool, scale: float, impl: str
) -> Tensor:
    if impl == "triton":
        from prophet.kernels.route import kernel

        return kernel.route_backward(d_weights, logits, ids, sigmoid, normalize, scale)
    grad = d_weights * scale
    if normalize and not sigmoid:
        # a softmax divided by the sum over the chosen is a softmax of their logits alone: the others have no gradient
        weights = logits.gather(1, ids).softmax(dim=-1)
        inner = weights * (grad - (grad * weights).sum(dim=-1, keepdim=True))
        return torch.zeros_like(logits).scatter_(1, ids, inner)
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    chosen = scores.gather(1, ids)
    if normalize:
        total = chosen.sum(dim=-1, keepdim=True).clamp_min_(torch.finfo(chosen.dtype).tiny)
        grad = (grad - (grad * chosen).sum(dim=-1, keepdim=True) / total) / total
    if sigmoid:
        return torch.zeros_like(logits).scatter_(1, ids, grad * chosen * (1 - chosen))
    # of a softmax: dL/dz_e = s_e · (g_e - sum(g·s)), with g zero where not chosen
    mean = (grad * chosen).sum(dim=-1, keepdim=True)
    return (scores * -mean).scatter_add_(1, ids, grad * chosen)


@_route_backward_op.register_fake
def _(d_weights: Tensor, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, sigmoid, normalize, scale, _, impl = inputs
    # so that weights nobody used give no gradient, instead of one of zeros
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[0], output[2])
    ctx.save_for_backward(logits, output[0])
    ctx.plain = sigmoid, normalize, scale, impl


def _backward(ctx: Any, _ids: Any, d_weights: Tensor | None, _counts: Any) -> tuple[Any, ...]:
    if d_weights is None:
        return (None,) * 7
    logits, ids = ctx.saved_tensors
    return _route_backward_op(d_weights, logits, ids, *ctx.plain), None, None, None, None, None, None


_route_op.register_autograd(_backward, setup_context=_setup)
