"""The definition of the top-k gate: scores, selection, weights and counts.

Shape legend: N tokens, E experts, K choices per token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Routed(NamedTuple):
    """ids: [N, K] int64, the chosen experts, best first. weights: [N, K]. counts: [E] int64 choices per expert."""

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
    """Choose the K experts of highest score (plus `bias` [E], which shifts the choice and never the weights).

    logits: [N, E]. Weights are the chosen scores, divided by their sum if `normalize`, times `scale`.
    """
    scores = logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()
    preference = scores if bias is None else scores + bias
    ids = preference.detach().topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return Routed(ids, weights * scale, torch.bincount(ids.reshape(-1), minlength=logits.shape[1]))
