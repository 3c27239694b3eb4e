"""A pipeline whose replicas each own a part of the optimizers' state, and the same run in one process: float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.run.generators import unit_seed
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from tests.helpers.pipeline_replicas import adam_and_decaying

UNITS, DIM, PARTS, ROWS, SEED = 6, 4, 4, 3, 0
TOLERANCE = 1e-10


class Block(nn.Module):
    """What differs between replicas is in its buffers, and whether `rare` has run; it draws anew in every update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
        self.rare = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rare(x) if float(x.detach()[:, 0].sum()) > 2 else x
        return x + self.down(nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.2, self.training))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(UNITS))).double()


def pipeline(stage_map: StageMap, **options: Any) -> ElasticPipeline:
    """Two replicas; one optimizer keeps tensors, the other also plain numbers."""
    given: dict[str, Any] = {"make_optimizer": adam_and_decaying, "microbatches": PARTS // 2, "replicas": 2}
    given |= {"seed": SEED, "zero": 1, "timeout_s": 60.0, **options}
    return ElasticPipeline.from_modules(layers(), nn.functional.mse_loss, stage_map, **given)


def batch(call: int) -> tuple[Tensor, Tensor]:
    """The batch of both replicas."""
    generator = torch.Generator().manual_seed(call)
    x, y = (torch.randn(PARTS * ROWS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def one_process(updates: int) -> list[float]:
    """The losses without a pipeline, with the same microbatches and random numbers."""
    model, losses = layers(), []
    optimizers = adam_and_decaying(list(model.named_parameters()))
    for update in range(updates):
        model.zero_grad()
        total = 0.0
        for number, (given, y) in enumerate(zip(*(t.chunk(PARTS) for t in batch(update)), strict=True)):
            x = given
            for unit, layer in enumerate(model):
                torch.manual_seed(unit_seed(SEED, unit, update, number))
                x = layer(x)
            loss = nn.functional.mse_loss(x, y) / PARTS
            loss.backward()
            total += float(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    return losses
