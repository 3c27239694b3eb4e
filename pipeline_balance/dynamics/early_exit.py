"""Early exit: a token whose state has settled skips the blocks that are left.

Shape legend: B sequences, T tokens of each, D model dim, A tokens still alive. After CALM (Schuster et al., 2022;
DynMo, Section 2.5) with its hidden-state criterion: a token leaves once a block changed its direction by less than a
threshold. Its state is what later blocks take keys and values from. Whether a token is alive travels in an extra
channel of the state, so stages may be cut anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.gpt import Block
from prophet.errors import SpecError


class EarlyExit(nn.Module):
    """A block that works on living tokens only, [B, T, D + 1] -> [B, T, D + 1]; the last channel is 1 while alive.

    Args:
        block: The block.
        threshold: The cosine between a token's states before and after the block from which it leaves (above 1: never).
        first: Whether no token leaves here yet.

    Attributes:
        alive: The share of tokens worked on in the last forward.
    """

    def __init__(self, block: Block, threshold: float, *, first: bool = False) -> None:
        super().__init__()
        if not threshold > 0:
            raise SpecError(f"threshold must be positive, got {threshold!r}")
        self.block = block
        self.threshold = threshold
        self.first = first
        self.alive = 1.0

    def forward(self, state: Tensor) -> Tensor:
        # a channel of the state and not an attribute: the next block may be on another rank
        x, living = state[..., :-1], state[..., -1].detach() > 0.5
        self.alive = float(living.float().mean())
        if bool(living.all()):
            y: Tensor = self.block(x)
        else:
            # each sequence has another number of living tokens
            y = torch.stack([self._part(x[b], living[b]) for b in range(x.shape[0])])
        settled = nn.functional.cosine_similarity(x.detach(), y.detach(), dim=-1) > self.threshold
        stays = living if self.first else living & ~settled
        return torch.cat([y, stays.to(y.dtype)[..., None]], dim=-1)

    def _part(self, x: Tensor, living: Tensor) -> Tensor:
        rows = living.nonzero().reshape(-1)
        return x.index_copy(0, rows, self.block.at(x, rows)) if rows.numel() else x
