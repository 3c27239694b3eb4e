"""Two blocks as people write them: a loop over masks, and a Switch with a capacity.

Shape legend: N tokens, K top-k, E experts, D model dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def expert(dim: int, hidden: int) -> nn.Module:
    """A feed-forward network."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class Loop(nn.Module):
    """Softmax over all, top-k, normalised; a mask for every expert."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, experts, bias=False), top_k
        self.experts = nn.ModuleList(expert(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.gate(tokens).softmax(dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for e, one in enumerate(self.experts):
            at, place = torch.where(ids == e)
            if len(at):
                y.index_add_(0, at, one(tokens[at]) * weights[at, place, None])
        return y.view(x.shape)


class Switch(nn.Module):
    """Top-1 with a capacity by order; what is dropped passes through; the balance loss stays on the block."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.switch, self.aux_loss = nn.Linear(dim, experts), torch.zeros(())
        self.experts = nn.ModuleList(expert(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        probs = self.switch(tokens).softmax(dim=-1)
        top, ids = probs.max(dim=-1)
        count = len(self.experts)
        self.aux_loss = count * (probs.mean(dim=0) * F.one_hot(ids, count).to(x.dtype).mean(dim=0)).sum()
        capacity = int(1.25 * len(tokens) / count)
        y = tokens.clone()
        for e, one in enumerate(self.experts):
            mine = (ids == e).nonzero().view(-1)[:capacity]
            if len(mine):
                y[mine] = one(tokens[mine])
        return (y * top.unsqueeze(1)).view(x.shape)


BLOCKS: dict[str, type[nn.Module]] = {"loop": Loop, "switch": Switch}
