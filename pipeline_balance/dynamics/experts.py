"""Mixture of experts: prophet's MoE layer in a pipeline block, with its auxiliary losses.

Shape legend: B sequences, T tokens of each, D model dim, E experts. The layer waits for its most loaded
expert-parallel rank; with all experts on the pipeline's rank its time varies with how tokens spread over experts only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.gpt import Block
from pipeline_balance.pipeline.model.added_loss import add_loss
from prophet.experts.gate import GateConfig
from prophet.layer.moe import MoE, collect_losses
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld


class MixtureOfExperts(nn.Module):
    """A transformer block whose feed-forward part is a mixture of experts, [B, T, D] -> [B, T, D].

    Args:
        dim: D.
        heads: Attention heads.
        num_experts: E.
        hidden: Hidden dim of an expert (None: 4 D).
        top_k: Experts that a token goes to.
        gate: Options of the gate (None: its defaults).
        group: The expert-parallel group (None: this rank alone).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        num_experts: int,
        *,
        hidden: int | None = None,
        top_k: int = 2,
        gate: GateConfig | None = None,
        group: Collective | None = None,
    ) -> None:
        super().__init__()
        # a group of one: all experts are on this rank, and nothing is sent
        alone = group if group is not None else ThreadWorld(1).collective(0)
        experts = MoE(dim, hidden or 4 * dim, num_experts, top_k, gate=gate, group=alone)
        self.block = Block(dim, heads, mlp=experts)

    def forward(self, x: Tensor) -> Tensor:
        with collect_losses(self.block) as book:
            y: Tensor = self.block(x)
        # auxiliary losses join the backward pass where they arise, as a pipeline passes on one tensor only
        if self.training and torch.is_grad_enabled() and book.entries:
            return add_loss(y, book.total())
        return y
