"""The definition of the grouped feed-forward network: one expert after another.

Shape legend: T rows of all groups, G groups, D model dim, H hidden dim (2H rows in w_in for SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertWeights(NamedTuple):
    """One expert: w_in [H, D] (SwiGLU: [2H, D], gate rows first), w_out [D, H], biases [H] or [2H], and [D]."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None


def expert_ffn(x: Tensor, weights: ExpertWeights, activation: Literal["gelu", "swiglu"]) -> Tensor:
    """One expert on its rows `x` [n, D]: w_out · act(w_in · x + b_in) + b_out."""
    h = F.linear(x, weights.w_in, weights.b_in)
    if activation == "gelu":
        h = F.gelu(h)
    else:
        gate, up = h.chunk(2, dim=-1)
        h = F.silu(gate) * up
    return F.linear(h, weights.w_out, weights.b_out)


def grouped_ffn(
    x: Tensor, sizes: Sequence[int], weights: Sequence[ExpertWeights], activation: Literal["gelu", "swiglu"]
) -> Tensor:
    """Apply expert g to the g-th run of `sizes[g]` consecutive rows of `x` [T, D]; returns [T, D].

    Empty groups cost nothing, but the first group is always run, so that the result depends on `x` and on some
    weight even where no rank sent a token: the backward pass then has the same collectives on every rank.
    """
    if sum(sizes) != x.shape[0] or len(sizes) != len(weights):
        raise ValueError(
            f"{len(sizes)} groups of {sum(sizes)} rows do not match {len(weights)} experts, {x.shape[0]} rows"
        )
    parts = [
        expert_ffn(rows, w, activation)
        for g, (rows, w) in enumerate(zip(x.split(list(sizes)), weights, strict=True))
        if g == 0 or rows.shape[0]
    ]
    return torch.cat(parts)
