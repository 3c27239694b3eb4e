"""Experts that describe themselves, with flags of the test's own choosing, and a small model that calls them.

Their forward is written anew, one token and one choice after the other.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HIDDEN, EXPERTS, TOP_K = 8, 6, 4, 2


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What such a class says of itself. limit: of a clamped gate. slope: of a quick GELU; None: SiLU."""

    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False
    has_gate: bool = True
    has_post_expert_norm: bool = False
    limit: float | None = None
    slope: float | None = None
    plus_one: bool = False


class DescribedExperts(nn.Module):
    """E experts in stacked parameters, called with tokens [N, D], ids and weights [N, K]."""

    def __init__(self, flags: Flags) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        for name in ("is_transposed", "is_concatenated", "has_bias", "has_gate", "has_post_expert_norm"):
            setattr(self, name, getattr(flags, name))
        self.act_fn = nn.SiLU() if flags.slope is None else Quick(flags.slope)
        self.plus_one = flags.plus_one
        if flags.limit is not None:
            self.limit = flags.limit
        self._first = "gate_up_proj" if flags.has_gate else "up_proj"
        rows = 2 * HIDDEN if flags.has_gate else HIDDEN
        for name, (out, given) in {self._first: (rows, DIM), "down_proj": (DIM, HIDDEN)}.items():
            shape = (EXPERTS, given, out) if flags.is_transposed else (EXPERTS, out, given)
            setattr(self, name, nn.Parameter(torch.randn(shape) / given**0.5))
            if flags.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, out) / 2))

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        matrix = getattr(self, name)[expert]
        y = x @ (matrix if self.is_transposed else matrix.t())
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1) if self.is_concatenated else (rows[..., ::2], rows[..., 1::2])
        limit = getattr(self, "limit", None)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return self.act_fn(gate) * (up + 1 if self.plus_one else up)

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for x, chosen, factors in zip(tokens, ids.tolist(), weights, strict=True):
            y = torch.zeros_like(x)
            for expert, factor in zip(chosen, factors, strict=True):
                if expert != self.num_experts:
                    h = self._product(self._first, expert, x)
                    y = y + factor * self._product(
                        "down_proj", expert, self._apply_gate(h) if self.has_gate else self.act_fn(h)
                    )
            rows.append(y)
        return torch.stack(rows) if rows else tokens


class Quick(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)


class Layer(nn.Module):
    """A decoder layer that calls the experts itself. none: from which score on a choice is dropped, by the id E."""

    def __init__(self, experts: nn.Module, none: float) -> None:
        super().__init__()
        self.router, self.experts, self.none = nn.Linear(DIM, EXPERTS), experts, none

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        weights, ids = self.router(tokens).softmax(dim=-1).topk(TOP_K)
        ids = torch.where(weights > self.none, ids, EXPERTS)
        return x + self.experts(F.layer_norm(tokens, (DIM,)), ids, weights).view(x.shape)


class DescribedModel(nn.Module):
    """Token ids [B, S] to logits, over two layers."""

    def __init__(self, flags: Flags, none: float = 0.1, kind: type[DescribedExperts] = DescribedExperts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, DIM)
        self.layers = nn.ModuleList(Layer(kind(flags), none) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = x @ self.embedding.weight.t()
        return logits


def described_loss(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logits on `ids` [B, S]."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits
