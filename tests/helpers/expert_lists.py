"""MoE blocks in the form that transformers once had, where every expert is a module, and a model made of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.moe_models import VOCAB
from tests.helpers.support import seeded

DIM, HIDDEN, EXPERTS, TOP_K = 8, 10, 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


def one_by_one(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """All experts on all tokens; the definition."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        share = (weights * (ids == e)).sum(dim=1, keepdim=True)
        y = y + share * expert(x)
    return y


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.jitter_noise = TOP_K, 0.0
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, DIM)
        logits = self.gate(x)
        weights, ids = F.softmax(logits, dim=1).topk(self.top_k)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(dim=1, keepdim=True)
        y = one_by_one(self.experts, x, ids, weights)
        if hasattr(self, "shared_expert"):
            y = y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y.view(hidden_states.shape), logits


class Qwen2MoeSparseMoeBlock(MixtralSparseMoeBlock):
    def __init__(self) -> None:
        super().__init__()
        self.norm_topk_prob = False
        self.shared_expert = Expert()
        self.shared_expert_gate = nn.Linear(DIM, 1, bias=False)


class DeepseekGate(nn.Linear):
    top_k = TOP_K

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weights, ids = super().forward(x.reshape(-1, DIM)).sigmoid().topk(TOP_K, sorted=False)
        return ids, 1.5 * weights


class DeepseekV3MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = DeepseekGate(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared_experts = Expert()

    def moe(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return one_by_one(self.experts, x, ids, weights)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        ids, weights = self.gate(hidden_states)
        y = self.moe(hidden_states.reshape(-1, DIM), ids, weights).view(hidden_states.shape)
        return y + self.shared_experts(hidden_states), None


# adapters know classes by where they are defined
for _kind, _package in (
    (MixtralSparseMoeBlock, "mixtral"),
    (Qwen2MoeSparseMoeBlock, "qwen2_moe"),
    (DeepseekV3MoE, "deepseek_v3"),
):
    _kind.__module__ = f"transformers.models.{_package}.modeling_{_package}"


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = MixtralSparseMoeBlock) -> None:
        super().__init__()
        with seeded(4):
            self.embed = nn.Embedding(VOCAB, DIM)
            self.blocks = nn.ModuleList(block() for _ in range(2))
            self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, aux = self.embed(ids), torch.zeros(())
        for block in self.blocks:
            y, logits = block(x)
            x = x + y
            if logits is not None:
                aux = aux + logits.logsumexp(dim=1).square().mean()
        return self.head(x), aux


def net_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits, aux = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.01 * aux, logits
