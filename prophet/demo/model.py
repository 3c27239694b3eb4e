"""MoE-GPT: a byte-level causal transformer in which every feed-forward network is a `prophet.MoE`.

Shape legend: B sequences, T sequence length, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.demo.text import VOCABULARY
from prophet.layer.moe import MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the model. With the defaults, experts are 70 % of what a rank computes in a step of 32 sequences.

    Attributes:
        dim: Width of a token, D.
        heads: Attention heads, a divisor of `dim`.
        blocks: Blocks, each with attention and experts.
        hidden: Inner width of an expert.
        experts: Experts of a block.
        top_k: Experts that a token is routed to.
        length: The longest sequence, T.
    """

    dim: int = 96
    heads: int = 4
    blocks: int = 2
    hidden: int = 768
    experts: int = 16
    top_k: int = 2
    length: int = 128

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "blocks", "hidden", "experts", "top_k", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"ModelConfig.dim must be a multiple of heads ({self.heads}), got {self.dim}")


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] to [B, T, D]."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        # [B, T, 3, heads, D / heads] to three of [B, heads, T, D / heads]
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then experts, each behind a norm and around a residual connection."""

    def __init__(self, config: ModelConfig, group: Any) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config.dim, config.heads)
        self.moe_norm = nn.LayerNorm(config.dim)
        # The one line that a dense GPT does not have
        self.moe = MoE(config.dim, config.hidden, config.experts, config.top_k, group=group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))

        return x + self.moe(self.moe_norm(x))  # type: ignore[no-any-return]


class MoEGPT(nn.Module):
    """The demo's language model.

    Built after `torch.manual_seed(seed)` it has equal values on every rank, and each expert has the values that it has
    at any other number of ranks.

    Args:
        config: Sizes.
        group: What `prophet.MoE` takes: the ranks that share the experts.
    """

    def __init__(self, config: ModelConfig, *, group: Any = None) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(VOCABULARY, config.dim)
        self.position = nn.Embedding(config.length, config.dim)
        self.blocks = nn.ModuleList(Block(config, group) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        # As in GPT-2; torch's default of 1 would drown what the blocks add to it
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] for token ids [B, T].

        Raises:
            ValueError: T is larger than the configured length.
        """
        if ids.shape[1] > self.config.length:
            raise ValueError(f"expected sequences of at most {self.config.length} tokens, got {ids.shape[1]}")
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over rows [B, T + 1] of token ids."""
        # Every byte but the first is a target, every byte but the last is seen
        logits = self(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
