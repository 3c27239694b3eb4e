"""A small GPT as pipeline layers, each from one tensor to one tensor; the dynamic models put their own blocks in it.

Shape legend: B sequences, T tokens of each, D model dim, H heads, V vocabulary, A tokens that a block works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.errors import SpecError
from prophet.trials import trying


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """Sizes of the model; it has `blocks` + 2 pipeline layers: embedding, blocks, head.

    Attributes:
        vocabulary: V.
        dim: D.
        heads: H, which divide D.
        blocks: How many blocks.
        context: The most tokens of a sequence.
        channels: Extra channels of the state, which dynamic models use: the first starts at 1, a second holds the
            tokens' numbers.
    """

    vocabulary: int
    dim: int = 64
    heads: int = 4
    blocks: int = 4
    context: int = 64
    channels: int = 0

    def __post_init__(self) -> None:
        if min(self.vocabulary, self.dim, self.heads, self.blocks, self.context) < 1 or self.channels < 0:
            raise SpecError(f"all sizes must be at least 1, got {self}")
        if self.dim % self.heads:
            raise SpecError(f"dim {self.dim} is no multiple of {self.heads} heads")

    @property
    def layers(self) -> int:
        """Layers of the pipeline: the blocks, and one each for embedding and head."""
        return self.blocks + 2


class Embed(nn.Module):
    """Token and position embeddings, [B, T] -> [B, T, D + channels]."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.dim)
        self.position = nn.Embedding(shape.context, shape.dim)
        self.channels = shape.channels

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        extra = x.new_ones(*ids.shape, self.channels)
        # all tokens are alive at first
        if self.channels > 1:
            # whole numbers up to it are exact: in float32 up to 2^24, in bfloat16 up to 256
            largest = round(2 / torch.finfo(x.dtype).eps)
            if self.token.num_embeddings > largest + 1:
                held = f"{x.dtype} is exact for {largest + 1} tokens"
                raise SpecError(f"the state holds numbers of {self.token.num_embeddings} tokens, {held}: use autocast")
            extra[..., 1] = ids
        return torch.cat([x, extra], dim=-1) if self.channels else x


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a whole sequence, [B, T, D] -> [B, T, D]."""
        return self._mix(x, x, is_causal=True)

    def at(self, x: Tensor, rows: Tensor) -> Tensor:
        """Attend for tokens `rows` [A] of one sequence x [T, D] only, over all tokens up to each: [A, D]."""
        return self._mix(x[rows], x, attn_mask=torch.arange(x.shape[0], device=x.device) <= rows[:, None])

    def _mix(self, asking: Tensor, x: Tensor, **masked: Any) -> Tensor:
        parts = (self.query(asking), *self.key_value(x).chunk(2, dim=-1))
        # [..., T, D] -> [..., H, T, D / H]
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(*heads, **masked)
        result: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return result


class Block(nn.Module):
    """Pre-norm transformer block, [B, T, D] -> [B, T, D].

    Args:
        dim: D.
        heads: H.
        attention: Its attention (None: plain causal attention).
        mlp: Its feed-forward part (None: two linear layers with GELU, 4 D wide).
    """

    def __init__(self, dim: int, heads: int, attention: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention if attention is not None else Attention(dim, heads)
        self.mlp = (
            mlp if mlp is not None else nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed

    def at(self, x: Tensor, rows: Tensor) -> Tensor:
        """Compute the block's output for tokens `rows` [A] of one sequence x [T, D]: [A, D]."""
        attention = self.attention
        if not isinstance(attention, Attention):
            raise SpecError("only plain attention works on a part of the tokens")
        # keys and values are those of all tokens, so the norm is taken of all of them
        part = x[rows] + attention.at(self.norm1(x), rows)
        mixed: Tensor = part + self.mlp(self.norm2(part))
        return mixed


class Head(nn.Module):
    """Final norm and read-out, [B, T, D + channels] -> [B, T, V]."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.dim = shape.dim
        self.norm = nn.LayerNorm(shape.dim)
        self.out = nn.Linear(shape.dim, shape.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        # extra channels are bookkeeping and no part of what is read out
        logits: Tensor = self.out(self.norm(x[..., : self.dim]))
        return logits


def builder(shape: GPTShape, make_block: Callable[[int], nn.Module], *, seed: int = 0) -> Callable[[int], nn.Module]:
    """Return a function that builds layer i, the same on every rank. The caller's random stream is left as it was.

    Args:
        shape: Sizes of the model.
        make_block: `make_block(i)` makes block i of 0, 1, ...
        seed: Weights follow this and the layer's number.
    """

    def build(index: int) -> nn.Module:
        # a seed for each layer, as ranks build only some of them, and in any order
        with trying(seed * 100_003 + index):
            if index == 0:
                return Embed(shape)
            return Head(shape) if index == shape.layers - 1 else make_block(index - 1)

    return build


def modules(shape: GPTShape, make_block: Callable[[int], nn.Module], *, seed: int = 0) -> list[nn.Module]:
    """Build all layers of the model, for `ElasticPipeline.from_modules`.

    Args:
        shape: Sizes of the model.
        make_block: `make_block(i)` makes block i of 0, 1, ...
        seed: Weights follow this and the layer's number.
    """
    build = builder(shape, make_block, seed=seed)
    return [build(i) for i in range(shape.layers)]


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the mean cross-entropy in nats; uniform guessing gives log V."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
