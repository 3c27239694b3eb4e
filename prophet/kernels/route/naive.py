"""The definition of the top-k gate: scores, selection, weights and counts.

Shape legend: N tokens, E experts, K choices per token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid"]


class Routed(NamedTuple):
    """What the gate has decided.

    Attributes:
        ids: The chosen experts, best first, [N, K] int64.
        weights: [N, K].
        counts: Choices per expert, [E] int64.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> Routed:
    """Choose the K experts of highest score.

    Weights are the chosen scores, divided by their sum if `normalize`, times `scale`.

    Args:
        logits: [N, E].
        top_k: K, experts per token.
        score: Softmax over experts, or a sigmoid per expert.
        normalize: Whether to divide weights by their sum.
        scale: Factor on the weights.
        bias: Shifts the choice and never the weights, [E]; None without.
    """
    # the choice has no gradient, which comes through the chosen scores: under hooks of saved tensors, a softmax whose
    # backward never runs would hold itself and all before it for ever
    scores = _scores(logits.detach(), score)
    preference = scores if bias is None else scores + bias
    ids = preference.topk(top_k, dim=-1).indices
    weights = weights_of(logits, ids, score=score, normalize=normalize, scale=scale)
    return Routed(ids, weights, torch.bincount(ids.reshape(-1), minlength=logits.shape[1]))


def weights_of(logits: Tensor, ids: Tensor, *, score: Score, normalize: bool, scale: float) -> Tensor:
    """Return the weights [N, K] of experts that were chosen by whatever rule; differentiable by the logits.

    Args:
        logits: [N, E].
        ids: The chosen experts, [N, K].
        score: As in `route`.
        normalize: As in `route`.
        scale: As in `route`.
    """
    weights = _scores(logits, score).gather(1, ids)
    if normalize:
        # sigmoids may all round to zero: the smallest normal number keeps 0 / 0 away
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return weights * scale


def _scores(logits: Tensor, score: Score) -> Tensor:
    return logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()
