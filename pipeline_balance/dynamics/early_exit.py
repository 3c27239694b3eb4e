"""Early exit: a token whose state has settled, or whose prediction is sure, skips the blocks that are left.

Shape legend: B sequences, T tokens of each, D model dim, A tokens still alive, V vocabulary. `EarlyExit` is CALM's
hidden-state criterion (Schuster et al., 2022; DynMo, Section 2.5): a token leaves once a block changed its direction by
less than a threshold. `ConfidentExit` is the confidence of ADP-C (Liu et al., Anytime Dense Prediction with Confidence
Adaptivity, ICLR 2022, Section 3; arXiv 2104.00749): an exit, trained with the model, predicts at every
place, and a place whose most probable class exceeds a threshold is left out of what follows. ADP-C's places are pixels,
here they are tokens, so its encoder-decoder exits and its interpolation between neighbours have no counterpart.

A token's state is what later blocks take keys and values from. Whether a token is alive travels in an extra channel of
the state, so stages may be cut anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.gpt import Block
from pipeline_balance.pipeline.model.added_loss import add_loss
from prophet.errors import SpecError


class EarlyExit(nn.Module):
    """A block that works on living tokens only, [B, T, D + channels] -> the same; a channel is 1 while alive.

    Args:
        block: The block.
        threshold: The cosine between a token's states before and after the block from which it leaves (above 1: never).
            It may change while training.
        first: Whether no token leaves here yet.

    Attributes:
        channels: Extra channels of the state behind D, the first of which is 1 while a token is alive.
        alive: The share of tokens worked on in the last forward.
    """

    channels = 1

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
        x, extra = state[..., : -self.channels], state[..., -self.channels :].detach()
        living = extra[..., 0] > 0.5
        self.alive = float(living.float().mean())
        if bool(living.all()):
            y: Tensor = self.block(x)
        else:
            # each sequence has another number of living tokens
            y = torch.stack([self._part(x[b], living[b]) for b in range(x.shape[0])])
        if not self.first:
            y, leaves = self._leaving(x, y, living, extra)
            living = living & ~leaves
        return torch.cat([y, living.to(y.dtype)[..., None], extra[..., 1:]], dim=-1)

    def _part(self, x: Tensor, living: Tensor) -> Tensor:
        rows = living.nonzero().reshape(-1)
        return x.index_copy(0, rows, self.block.at(x, rows)) if rows.numel() else x

    def _leaving(self, x: Tensor, y: Tensor, living: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output, and which tokens leave [B, T].

        Args:
            x: Their states before the block [B, T, D].
            y: After it.
            living: Who is alive [B, T].
            extra: The state's other channels [B, T, channels].
        """
        return y, nn.functional.cosine_similarity(x.detach(), y.detach(), dim=-1) > self.threshold


class ConfidentExit(EarlyExit):
    """A block that works on living tokens only, with an exit unless it is among the `first`.

    The second channel holds the tokens' numbers. The exit learns, with the model, to predict the next one.

    Args:
        block: The block.
        dim: D.
        vocabulary: V.
        threshold: The probability of an exit's most probable token above which a token leaves (1: never). It may change
            while training.
        first: Whether there is no exit here.
        exit_weight: How much the exit's loss counts.
    """

    channels = 2

    def __init__(
        self,
        block: Block,
        dim: int,
        vocabulary: int,
        threshold: float = 0.998,
        *,
        first: bool = False,
        exit_weight: float = 1.0,
    ) -> None:
        super().__init__(block, threshold, first=first)
        self.exit_weight = exit_weight
        # without an exit there is nothing to train
        self.exit = None if first else nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, vocabulary))

    def _leaving(self, x: Tensor, y: Tensor, living: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        assert self.exit is not None
        # who has left is not asked again
        logits = self.exit(y[living])
        leaves = torch.zeros_like(living)
        leaves[living] = logits.detach().softmax(dim=-1).amax(dim=-1) > self.threshold
        if self.training and torch.is_grad_enabled():
            # the token that follows is known here for all but the last one of a sequence
            known = living.clone()
            known[:, -1] = False
            follows = extra[..., 1].roll(-1, dims=1)[known].long()
            # a mean, with a graph where nobody is left as well: an exit has a gradient in every step
            total = nn.functional.cross_entropy(logits[known[living]], follows, reduction="sum")
            y = add_loss(y, self.exit_weight * total / max(1, len(follows)))
        return y, leaves
