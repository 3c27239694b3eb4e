"""The definition of the top-k gate: scores, selection, weights and counts.

Shape legend: N tokens, E experts, K choices per token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


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
    score: Literal["softmax", "sigmoid"] = "softmax",
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
    scores = logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()
    preference = scores if bias is None else scores + bias
    # the choice has no gradient: it comes through the chosen scores
    ids = preference.detach().topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalize:
        # sigmoids may all round to zero: the smallest normal number keeps 0 / 0 away
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return Routed(ids, weights * scale, torch.bincount(ids.reshape(-1), minlength=logits.shape[1]))
