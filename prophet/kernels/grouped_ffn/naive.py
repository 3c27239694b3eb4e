"""The definition of the grouped feed-forward network: one expert after another.

Shape legend: T rows of all groups, G groups, D model dim, H hidden dim (2H rows in w_in for SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu", "swiglu_clamped"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATED: tuple[Activation, ...] = ("swiglu", "swiglu_clamped")  # w_in has 2H rows, the gate's first

CLAMP_SLOPE, CLAMP_LIMIT = 1.702, 7.0  # of GPT-OSS (OpenAI 2025), the one model that clamps


class ExpertWeights(NamedTuple):
    """One expert: w_in [H, D] (gated: [2H, D], gate rows first), w_out [D, H], biases [H] or [2H], and [D]."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None


def activate(h: Tensor, activation: Activation) -> Tensor:
    """The activation of pre-activations `h` [n, H], or [n, 2H] where it is gated.

    "swiglu" is silu(gate)·up (Shazeer 2020, Eq. 6). "swiglu_clamped" bounds the gate from above and `up` on both
    sides by 7, and is gate·sigmoid(1.702·gate)·(up + 1).
    """
    if activation == "gelu":
        return F.gelu(h)
    if activation == "gelu_tanh":
        return F.gelu(h, approximate="tanh")
    if activation == "relu":
        return F.relu(h)
    gate, up = h.chunk(2, dim=-1)
    if activation == "swiglu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * torch.sigmoid(CLAMP_SLOPE * gate) * (up + 1)


def expert_ffn(x: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """One expert on its rows `x` [n, D]: w_out · act(w_in · x + b_in) + b_out."""
    h = activate(F.linear(x, weights.w_in, weights.b_in), activation)
    return F.linear(h, weights.w_out, weights.b_out)


def grouped_ffn(x: Tensor, sizes: Sequence[int], weights: Sequence[ExpertWeights], activation: Activation) -> Tensor:
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
