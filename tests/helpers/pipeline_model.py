"""A small model in a pipeline, its data, and the losses of the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.control.measure import Meter, PipelineLayer
from pipeline_balance.pipeline.stages import PipelineConfig
from pipeline_balance.pipeline.trainer import PipelineTrainer
from pipeline_balance.spec import StageMap

LAYERS, DIM, VOCABULARY, MICROBATCHES, BATCH = 7, 12, 11, 4, 8
SEED = 5
# losses of a float32 run whose sums are taken in the same order; what differs is only where they run
TOLERANCE = 1e-5


class _Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class _Block(nn.Module):
    """Residual, with dropout (random numbers), a buffer that changes, and a width that differs by layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 8 * index)
        self.down = nn.Linear(8 * index, DIM)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.down(self.drop(torch.relu(self.up(x))))


def build_layer(index: int) -> nn.Module:
    torch.manual_seed(100 + index)
    if index == 0:
        return _Embed()
    return nn.Linear(DIM, VOCABULARY) if index == LAYERS - 1 else _Block(index)


def boundaries() -> list[Tensor]:
    rows = BATCH // MICROBATCHES
    hidden = [torch.zeros(rows, DIM) for _ in range(LAYERS - 1)]
    return [torch.zeros(rows, dtype=torch.int64), *hidden, torch.zeros(rows, VOCABULARY)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (BATCH,), generator=generator)
    return ids, (ids * 3 + 1) % VOCABULARY


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


def pipeline(stage_map: StageMap | None, *, split_backward: bool = False) -> PipelineTrainer:
    """The model on real processes; None for the map of a process that joins a group that trains already."""
    return PipelineTrainer(
        build_layer,
        stage_map,
        loss_fn=nn.functional.cross_entropy,
        make_optimizer=make_optimizer,
        boundaries=boundaries(),
        config=PipelineConfig(microbatches=MICROBATCHES, seed=SEED, timeout_s=60.0, split_backward=split_backward),
    )


def plain_losses(
    steps: int, before_step: Callable[[dict[int, Any], int], object] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in one process without a pipeline."""
    meter = Meter(enabled=False)
    layers = [PipelineLayer(build_layer(i), i, meter, seed=SEED) for i in range(LAYERS)]
    optimizer = make_optimizer([p for layer in layers for p in layer.parameters()])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if before_step is not None:
            before_step(dict(enumerate(layers)), step)
        parts = []
        for ids, target in zip(*(t.chunk(MICROBATCHES) for t in batch(step)), strict=True):
            x = ids
            for layer in layers:
                x = layer(x)
            loss = nn.functional.cross_entropy(x, target)
            (loss / MICROBATCHES).backward()
            parts.append(float(loss.detach()))
        optimizer.step()
        losses.append(sum(parts) / len(parts))
    return losses, {f"{i}/{n}": t.detach() for i, m in enumerate(layers) for n, t in m.module.state_dict().items()}
