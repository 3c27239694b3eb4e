"""A GPT with stochastic depth, over the stages of a pipeline that stays even.

    torchrun --standalone --nproc-per-node 2 examples/pipeline_depth.py

`pipeline_depth_one.py` is the same loop in one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from pipeline_balance import ControllerConfig, ElasticPipeline, attach
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
torch.distributed.init_process_group("gloo")
pipe = ElasticPipeline.from_modules(layers, loss_fn, microbatches=4, make_optimizer=lambda named: AdamW(named, lr=3e-3))
balanced = attach(pipe, config=ControllerConfig(every_steps=10))

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    loss = balanced.step(ids[:, :-1], ids[:, 1:])
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

torch.distributed.destroy_process_group()
