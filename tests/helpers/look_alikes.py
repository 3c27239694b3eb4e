"""Six modules that hold a list of alike modules, and often a linear layer onto their number, and are no MoE blocks.

Shape legend: B sequences, S tokens of a sequence, E modules in the list, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.hand_written import DIM, EXPERTS, feed_forward


class SoftMixture(nn.Module):
    """All experts run on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        y: Tensor = (torch.stack([expert(x) for expert in self.experts], dim=-1) * weights.unsqueeze(-2)).sum(dim=-1)
        return y


class MixtureOfLora(nn.Module):
    """A linear layer, and low-rank changes of it that are all computed."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.route = nn.Linear(DIM, DIM), nn.Linear(DIM, EXPERTS)
        self.changes = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x).softmax(dim=-1)
        changes = torch.stack([change(x) for change in self.changes], dim=-1)
        y: Tensor = self.base(x) + (changes * weights.unsqueeze(-2)).sum(dim=-1)
        return y


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(DIM, 4), nn.Linear(DIM, 4), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(dim=-1) @ self.v(x)
        return y


class GatedHeads(nn.Module):
    """Attention heads, each with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.gates = nn.ModuleList(Head() for _ in range(EXPERTS)), nn.Linear(DIM, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gates(x).sigmoid()
        return torch.stack([head(x) * gates[..., h : h + 1] for h, head in enumerate(self.heads)]).sum(dim=0)


class Ensemble(nn.Module):
    """Heads whose mean is taken, and a classifier onto as many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.classes = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS)), nn.Linear(DIM, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(dim=0) + self.classes(x).mean()


class LayerStack(nn.Module):
    """Layers one after the other, of which padding skips some rows; each is row-wise and alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(feed_forward() for _ in range(EXPERTS)), nn.Linear(DIM, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows = x.sum(dim=-1) > -1
            x = x.clone().masked_scatter(rows.unsqueeze(-1), x[rows] + layer(x[rows]))
        y: Tensor = self.head(x)
        return y


class Pyramid(nn.Module):
    """Alike lateral layers on different parts of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral, self.classes = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3)), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classes(torch.stack([layer(x[:, i : i + 4]) for i, layer in enumerate(self.lateral)]).sum(0))
        return y


LOOK_ALIKES: tuple[type[nn.Module], ...] = (SoftMixture, MixtureOfLora, GatedHeads, Ensemble, LayerStack, Pyramid)
