"""A small model in a pipeline, its data, and the losses of the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.added_loss import added_losses
from pipeline_balance.pipeline.run.generators import unit_seed
from pipeline_balance.pipeline.trainer import ElasticPipeline
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


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (BATCH,), generator=generator)
    return ids, (ids * 3 + 1) % VOCABULARY


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=3e-3)


def pipeline(stage_map: StageMap | None = None, **options: Any) -> ElasticPipeline:
    """The model on real processes."""
    given: dict[str, Any] = {"make_optimizer": make_optimizer, "microbatches": MICROBATCHES, "seed": SEED}
    layers = [build_layer(i) for i in range(LAYERS)]
    return ElasticPipeline.from_modules(
        layers, nn.functional.cross_entropy, stage_map, **{**given, "timeout_s": 60.0, **options}
    )


def plain_step(
    layers: list[nn.Module],
    inputs: Tensor,
    labels: Tensor,
    loss_fn: Callable[[Any, Tensor], Tensor],
    *,
    microbatches: int,
    seed: int,
    update: int,
    first: int = 0,
    share: float = 1.0,
) -> float:
    """Forward and backward of one batch in one process, with a pipeline's random numbers: the mean loss.

    `share` is what the batch counts in its update. Rows of equal size are assumed to count alike.
    """
    total = 0.0
    parts = zip(inputs.tensor_split(microbatches), labels.tensor_split(microbatches), strict=True)
    for number, (given, target) in enumerate(parts, start=first):
        x: Any = given
        weight = share * target.shape[0] / labels.shape[0]
        with added_losses(weight) as added:
            for unit, layer in enumerate(layers):
                torch.manual_seed(unit_seed(seed, unit, update, number))
                x = layer(x) if not isinstance(x, tuple) else layer(*x)
            loss = loss_fn(x, target)
            (loss * weight).backward()
        total += float(loss.detach().double() + sum(v.double() for v in added.values)) * weight / share
    return total


def plain_losses(
    steps: int, before_step: Callable[[dict[int, Any], int], object] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in one process without a pipeline."""
    layers = [build_layer(i) for i in range(LAYERS)]
    optimizer = make_optimizer([(f"{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if before_step is not None:
            before_step(dict(enumerate(layers)), step)
        loss = plain_step(
            layers,
            *batch(step),
            nn.functional.cross_entropy,
            microbatches=MICROBATCHES,
            seed=SEED,
            update=step,
        )
        optimizer.step()
        losses.append(loss)
    return losses, {f"{i}.{n}": t.detach() for i, m in enumerate(layers) for n, t in m.state_dict().items()}
