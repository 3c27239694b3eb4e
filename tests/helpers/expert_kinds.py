"""Experts of ten kinds, as people write them, and a model of them with a reference that is written out by hand.

Shape legend: N tokens, D model dim (8), E experts, R ranks.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.ranks.collective import Collective

D = 8
_ONE_AT_A_TIME = threading.Lock()


class FixedDropout(nn.Module):
    """Drops always the same columns, which differ from expert to expert, and are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)
        self.register_buffer("kept", (torch.rand(12) > 0.3).float() / 0.7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)) * self.kept)
        return out


class LoRA(nn.Module):
    """A frozen matrix, and a trained difference of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class Recurrent(nn.Module):
    """Every row is a sequence of four."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x.view(-1, 4, 2))
        out: Tensor = self.out(hidden.flatten(1))
        return out


class Checkpointed(nn.Module):
    """Computes its inside again in the backward pass."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return out


class Convolution(nn.Module):
    """Every row is a signal of eight samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.silu(self.conv(x.unsqueeze(1))).flatten(1))
        return out


class Tied(nn.Module):
    """One matrix in two places, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(torch.tanh(self.there(x)))
        return out


class SwiGLU(nn.Module):
    """With SiLU, as LLaMA's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(i, o, bias=False) for i, o in ((D, 12), (12, D), (D, 12)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "norm first": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)),
    "dropout fixed": FixedDropout,
    "lora": LoRA,
    "lstm": Recurrent,
    "checkpointed": Checkpointed,
    "conv": Convolution,
    "output size": lambda: nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, 5)),
    "tied inside": Tied,
    "silu": SwiGLU,
}


class Stack(nn.Module):
    """Residual MoE layers of one kind of expert. An answer that is shorter than a token is filled with zeros."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        group: Collective,
        *,
        experts: int = 8,
        blocks: int = 2,
        seed: int = 0,
        double: bool = True,
    ) -> None:
        super().__init__()
        with _ONE_AT_A_TIME:  # ranks that are threads share one random generator
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(
                prophet.MoE(D, num_experts=experts, top_k=2, expert=make, group=group) for _ in range(blocks)
            )
        if double:
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(x + F.pad(y, (0, D - y.shape[-1])))
        return x


class Reference(nn.Module):
    """The same model without anything of the library: a loop over the experts, each with its rows."""

    def __init__(self, gates: Sequence[Tensor], experts: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.gates = nn.ParameterList(nn.Parameter(g.detach().clone()) for g in gates)
        self.experts = nn.ModuleList(nn.ModuleList(copy.deepcopy(e) for e in layer) for layer in experts)

    def forward(self, x: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            scores = torch.softmax(x @ gate.t(), dim=1)
            best, ids = scores.topk(2, dim=1)
            best = best / best.sum(dim=1, keepdim=True)
            total = torch.zeros_like(x)
            for e, expert in enumerate(experts):  # type: ignore[arg-type]
                row, choice = (ids == e).nonzero(as_tuple=True)
                if row.numel():
                    answer = expert(x[row]) * best[row, choice].unsqueeze(1)
                    total = total.index_add(0, row, F.pad(answer, (0, D - answer.shape[1])))
            x = torch.tanh(x + total)
        return x
