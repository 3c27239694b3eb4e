"""A block of every dynamic model, for a small GPT."""

from __future__ import annotations

from torch import nn

from pipeline_balance.dynamics.depths import MixtureOfDepths
from pipeline_balance.dynamics.early_exit import ConfidentExit, EarlyExit
from pipeline_balance.dynamics.experts import MixtureOfExperts
from pipeline_balance.dynamics.gpt import Block
from pipeline_balance.dynamics.pruning import PrunedLinear
from pipeline_balance.dynamics.sparse_attention import HashAttention

DIM, HEADS, TOKENS = 16, 2, 12


def block() -> Block:
    return Block(DIM, HEADS)


def _pruned_block(_: int) -> Block:
    mlp = nn.Sequential(PrunedLinear(DIM, 4 * DIM), nn.GELU(), PrunedLinear(4 * DIM, DIM))
    return Block(DIM, HEADS, mlp=mlp)


CASES = {
    "dense": (lambda i: block(), 0),
    "mixture of experts": (lambda i: MixtureOfExperts(DIM, HEADS, 4), 0),
    "pruning": (_pruned_block, 0),
    "sparse attention": (lambda i: Block(DIM, HEADS, attention=HashAttention(DIM, HEADS, bits=1, tile=12)), 0),
    "early exit": (lambda i: EarlyExit(block(), 0.98, first=i == 0), 1),
    "confident exit": (lambda i: ConfidentExit(block(), DIM, 7, 0.9, first=i == 0), 2),
    "mixture of depths": (lambda i: MixtureOfDepths(block(), DIM, 0.5) if i % 2 else block(), 0),
}
