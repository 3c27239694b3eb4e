"""A GPT whose tokens leave early, where the next one is plain, over the stages of a pipeline that stays even.

    torchrun --standalone --nproc-per-node 2 examples/pipeline_exit.py

`pipeline_exit_one.py` is the same loop in one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from pipeline_balance import ControllerConfig, ElasticPipeline, attach
from pipeline_balance.dynamics.gpt import Block, Embed, GPTShape, Head

STEPS, ROWS, TOKENS, CONFIDENT = 40, 16, 32, 0.9


class ExitBlock(nn.Module):
    """A block behind which tokens leave whose next token is plain already; its loss is theirs."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.block = Block(shape.dim, shape.heads)
        self.exit = Head(shape)

    def forward(self, x: Tensor, here: Tensor, exit_loss: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.where(here[..., None] > 0, self.block(x), x)
        logits = self.exit(x)
        leaving = (logits.softmax(-1).amax(-1) > CONFIDENT) * here
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
        exit_loss = exit_loss + 0.1 * losses.mean() + (losses * leaving[:, :-1].flatten()).mean()
        return x, here - leaving, exit_loss


class ExitGPT(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embed = Embed(shape)
        self.blocks = nn.ModuleList(ExitBlock(shape) for _ in range(shape.blocks))
        self.head = Head(shape)

    def forward(self, input_ids: Tensor, targets: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        state = x, x.new_ones(x.shape[:2]), x.new_zeros(())
        for block in self.blocks:
            state = block(*state, targets)
        logits = self.head(state[0])
        if labels is None:
            return {"logits": logits}
        last = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return {"loss": (last * state[1][:, :-1].flatten()).mean() + state[2], "logits": logits}


torch.manual_seed(0)
model = ExitGPT(GPTShape(vocabulary=64, blocks=6))
torch.distributed.init_process_group("gloo")
ids = torch.zeros(1, TOKENS, dtype=torch.int64)
pipe = ElasticPipeline.from_transformers(
    model,
    microbatches=4,
    make_optimizer=lambda named: AdamW(named, lr=3e-3),
    example={"input_ids": ids, "targets": ids},
)
balanced = attach(pipe, config=ControllerConfig(every_steps=10))

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    loss = balanced.step({"input_ids": ids, "targets": ids}, ids)
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

torch.distributed.destroy_process_group()
