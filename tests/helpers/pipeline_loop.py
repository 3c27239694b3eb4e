"""Ordinary training loops in a pipeline and in one process, in float64: their losses must agree to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from tests.helpers.pipeline_model import plain_step

LAYERS, DIM, CLASSES, MICROBATCHES, ROWS, SEED = 6, 8, 5, 4, 8, 3
EXACT = 1e-10
Named = list[tuple[str, nn.Parameter]]


class Layer(nn.Module):
    """Residual, with dropout; recomputed in backward if asked for."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(0.2)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.drop(torch.tanh(self.up(x))))
        return out


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop: its optimizer, what steps beside it, and how its gradients are used."""

    make_optimizer: Callable[[Named], Any]
    scheduler: Callable[[Optimizer], Any] | None = None
    max_norm: float | None = None
    calls: int = 1
    recompute: bool = False
    tied: bool = False


def one(name: str, **options: Any) -> Callable[[Named], Any]:
    """An optimizer of torch's by name."""

    def make(named: Named) -> Optimizer:
        made: Optimizer = getattr(torch.optim, name)(named, **{"lr": 1e-2, **options})
        return made

    return make


def by_shape(named: Named) -> Optimizer:
    """Vectors without weight decay, with another rate."""
    wide = [(n, p) for n, p in named if p.dim() > 1]
    flat = [(n, p) for n, p in named if p.dim() < 2]
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 3e-3}], lr=1e-2)


def muon_and_adam(named: Named) -> list[Optimizer]:
    """Muon takes matrices only, so its users have two."""
    wide = [(n, p) for n, p in named if p.dim() == 2]
    flat = [(n, p) for n, p in named if p.dim() != 2]
    return [torch.optim.Muon(wide, lr=1e-2), torch.optim.AdamW(flat, lr=1e-2)]


LOOPS: dict[str, Loop] = {
    "step": Loop(make_optimizer=one("AdamW"), scheduler=lambda o: lr_scheduler.StepLR(o, 4, gamma=0.5)),
    "cosine, groups": Loop(make_optimizer=by_shape, scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "one cycle, clip": Loop(
        make_optimizer=one("SGD", momentum=0.9),
        scheduler=lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=60),
        max_norm=0.05,
    ),
    "plateau, accumulated, clip": Loop(
        make_optimizer=by_shape,
        scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.05),
        max_norm=0.1,
        calls=3,
    ),
    "recomputed": Loop(make_optimizer=one("AdamW"), recompute=True),
    "tied": Loop(make_optimizer=one("AdamW"), max_norm=0.1, calls=2, tied=True),
    "fused": Loop(make_optimizer=one("AdamW", fused=True)),
    "two optimizers": Loop(make_optimizer=muon_and_adam),
    **{
        name: Loop(make_optimizer=one(name))
        for name in ["Adam", "Adafactor", "NAdam", "Rprop", "ASGD", "Adagrad", "Adadelta", "RMSprop", "Adamax", "RAdam"]
    },
    "AMSGrad": Loop(make_optimizer=one("Adam", amsgrad=True)),
}


def layers_of(loop: Loop) -> list[nn.Module]:
    torch.manual_seed(7)
    first, last = nn.Embedding(CLASSES, DIM), nn.Linear(DIM, CLASSES)
    if loop.tied:
        last.weight = first.weight
    every = [first, *(Layer(loop.recompute) for _ in range(LAYERS - 2)), last]
    return [layer.double() for layer in every]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(CLASSES, (ROWS,), generator=generator)
    return ids, (ids * 2 + 1) % CLASSES


def schedulers(loop: Loop, made: Any) -> list[Any]:
    every = [made] if isinstance(made, Optimizer) else made
    return [loop.scheduler(o) for o in every] if loop.scheduler is not None else []


def follow(found: list[Any], loss: float) -> None:
    """Step the schedulers, as a loop does after an update."""
    for scheduler in found:
        scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def alone(loop: Loop, updates: int) -> list[float]:
    """The losses of one process without a pipeline."""
    layers = layers_of(loop)
    named = list(nn.ModuleList(layers).named_parameters())
    made = loop.make_optimizer(named)
    optimizers = [made] if isinstance(made, Optimizer) else made
    found, losses = schedulers(loop, made), []
    for update in range(updates):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = 0.0
        for call in range(loop.calls):
            part = plain_step(
                layers,
                *batch(update * loop.calls + call),
                nn.functional.cross_entropy,
                microbatches=MICROBATCHES,
                seed=SEED,
                update=update,
                first=call * MICROBATCHES,
                share=1 / loop.calls,
            )
            loss += part / loop.calls
        if loop.max_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in named], loop.max_norm)
        for optimizer in optimizers:
            optimizer.step()
        follow(found, loss)
        losses.append(loss)
    return losses


def map_of(move: int, ranks: int) -> StageMap:
    """Maps that wander: other boundaries, stages to and fro, ranks left idle."""
    if ranks < 2:
        return StageMap((0, LAYERS), (0,))
    kinds = [
        StageMap.even(LAYERS, ranks),
        StageMap((0, 1, 3, LAYERS), (0, 1, 0)),
        StageMap((0, LAYERS), (ranks - 1,)),
        StageMap((0, 2, LAYERS), (ranks - 1, 0)),
        StageMap((0, 1, LAYERS), (0, 1)),
    ]
    return kinds[move % len(kinds)]


def piped(
    loop: Loop, updates: int, ranks: int, *, every: int = 5, options: Mapping[str, Any] | None = None
) -> list[float]:
    """The losses of a pipeline that moves every few updates."""
    pipe = ElasticPipeline.from_modules(
        layers_of(loop),
        nn.functional.cross_entropy,
        make_optimizer=loop.make_optimizer,
        microbatches=MICROBATCHES,
        seed=SEED,
        timeout_s=60.0,
        **(options or {}),
    )
    found, losses = schedulers(loop, pipe.optimizer), []
    for update in range(updates):
        if update and update % every == 0:
            pipe.rebuild(map_of(update // every, ranks))
        loss = 0.0
        for call in range(loop.calls):
            last = call == loop.calls - 1
            loss = pipe.step(*batch(update * loop.calls + call), update=last, max_norm=loop.max_norm)
        follow(found, loss)
        losses.append(loss)
    return losses
