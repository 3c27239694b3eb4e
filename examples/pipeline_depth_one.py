"""A GPT with stochastic depth, in one process.

    python examples/pipeline_depth_one.py

`pipeline_depth.py` is the same loop over the stages of a pipeline.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from pipeline_balance.dynamics.gpt import Block, GPTShape, modules
from pipeline_balance.dynamics.gpt import loss as loss_fn

STEPS, ROWS, TOKENS = 40, 16, 32


class MaySkip(nn.Module):
    """A block that is left out at random, the later the more often."""

    def __init__(self, block: nn.Module, skipped: float) -> None:
        super().__init__()
        self.block = block
        self.skipped = skipped

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < self.skipped:
            return x
        return self.block(x)


torch.manual_seed(0)
shape = GPTShape(vocabulary=64, blocks=6)
layers = modules(shape, lambda i: MaySkip(Block(shape.dim, shape.heads), skipped=0.5 * i / shape.blocks))
model = nn.Sequential(*layers)
optimizer = AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    loss = loss_fn(model(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")
