"""Mixture of depths: each block works on the tokens its router chooses, the others pass by unchanged.

Shape legend: B sequences, T tokens of each, K tokens chosen, D model dim. After Raposo et al. (2024; DynMo, Section
2.6): the router chooses the K tokens with the largest weight of every sequence (expert choice), which looks ahead; a
small predictor learns from the token alone whether it will be chosen, and takes the router's place where looking ahead
is not possible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.added_loss import add_loss
from prophet.errors import SpecError


class MixtureOfDepths(nn.Module):
    """A block behind a router, [B, T, D] -> [B, T, D]: y = x + r (block(x') - x') for chosen tokens, y = x for others.

    In training and evaluation the router chooses; with `causal` set, the predictor does, token by token.

    Args:
        block: The block that works on chosen tokens, [B, K, D] to the same.
        dim: D.
        capacity: The share of tokens chosen, of each sequence (at least one token). It may change while training.
        predictor_weight: How much the predictor's loss counts.

    Attributes:
        causal: Whether the predictor chooses.
        routed: The share of tokens worked on in the last forward.
    """

    def __init__(self, block: nn.Module, dim: int, capacity: float, *, predictor_weight: float = 0.01) -> None:
        super().__init__()
        if not 0.0 < capacity <= 1.0:
            raise SpecError(f"capacity must be above 0 and at most 1, got {capacity!r}")
        self.block = block
        self.router = nn.Linear(dim, 1)
        self.predictor = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        self.capacity = capacity
        self.predictor_weight = predictor_weight
        self.causal = False
        self.routed = capacity

    def forward(self, x: Tensor) -> Tensor:
        return self._by_prediction(x) if self.causal else self._by_choice(x)

    def _by_choice(self, x: Tensor) -> Tensor:
        weights = self.router(x).squeeze(-1)
        k = math.ceil(self.capacity * x.shape[1])
        # ascending positions, so that attention among the chosen stays causal
        chosen = weights.topk(k, dim=1).indices.sort(dim=1).values
        rows = chosen[..., None].expand(-1, -1, x.shape[-1])
        part = x.gather(1, rows)
        scale = torch.sigmoid(weights.gather(1, chosen))[..., None]
        # r enters the output, so the router learns from the model's loss
        y = x.scatter_add(1, rows, scale * (self.block(part) - part))
        self.routed = k / x.shape[1]
        if self.training and torch.is_grad_enabled():
            wanted = torch.zeros_like(weights).scatter_(1, chosen, 1.0)
            # detached: the predictor watches the model and must not change it
            guess = self.predictor(x.detach()).squeeze(-1)
            extra = nn.functional.binary_cross_entropy_with_logits(guess, wanted)
            y = add_loss(y, self.predictor_weight * extra)
        return y

    def _by_prediction(self, x: Tensor) -> Tensor:
        taken = self.predictor(x).squeeze(-1) > 0
        scale = torch.sigmoid(self.router(x))
        y = x.clone()
        for b in range(x.shape[0]):
            rows = taken[b].nonzero().reshape(-1)
            if rows.numel():
                # sequence by sequence, as each has another number of chosen tokens
                part = x[b : b + 1, rows]
                y[b, rows] += (scale[b : b + 1, rows] * (self.block(part) - part))[0]
        self.routed = float(taken.float().mean())
        return y
