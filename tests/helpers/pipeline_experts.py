"""A pipeline whose replicas share experts, and the same run in one process that holds all of them: float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import prophet
import prophet.parallel
from pipeline_balance.pipeline.run.optimizers import MakeOptimizer
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.support import FixedPlanner, RandomPlanner, everywhere

DIM, EXPERTS, UNITS, PARTS, ROWS = 6, 4, 6, 4, 5
MAX_NORM = 0.3
TOLERANCE = 1e-10


def layers(group: Collective) -> nn.Sequential:
    """Two layers of experts, each in a stage; more tokens go to some experts than to others."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for unit in range(UNITS):
        if unit in (1, 4):
            made.append(prophet.MoE(DIM, 8, EXPERTS, 2, group=group, impl="naive"))
        else:
            made.append(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
    whole = nn.Sequential(*made).double()
    # every expert draws alike at any number of ranks, what comes after it does not
    torch.manual_seed(1)
    with torch.no_grad():
        for module in whole.modules():
            if isinstance(module, nn.Linear | prophet.MoE):
                owned = module if isinstance(module, nn.Linear) else module.gate
                for p in owned.parameters():
                    p.copy_(torch.randn(p.shape, dtype=p.dtype) / DIM**0.5)
    return whole


def batch(update: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    x = torch.randn(PARTS * ROWS, 2, DIM, generator=generator, dtype=torch.float64)
    return x, torch.randn(PARTS * ROWS, 2, DIM, generator=generator, dtype=torch.float64)


class Outcome(NamedTuple):
    """Losses and norms of all updates, the loss of evaluation, and replicas of experts made on all ranks."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    copies: int


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5, momentum=0.9)


def one_process(updates: int, make: MakeOptimizer = make_optimizer, calls: int = 1) -> Outcome:
    """All experts on one rank, no pipeline. Every update adds up `calls` times the same batch."""
    model = layers(ThreadWorld(1).collective(0))
    made = make(list(model.named_parameters()))
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    losses, norms = [], []
    for update in range(updates):
        model.zero_grad()
        total = 0.0
        for x, y in zip(*(t.chunk(PARTS) * calls for t in batch(update)), strict=True):
            loss = nn.functional.mse_loss(model(x), y) / (PARTS * calls)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    with torch.no_grad():
        x, y = batch(999)
        evaluated = float(nn.functional.mse_loss(model.eval()(x), y))
    return Outcome(losses, norms, evaluated, 0)


def pipeline(size: int, replicas: int, **options: Any) -> ElasticPipeline:
    given: dict[str, Any] = {"microbatches": PARTS // replicas, "replicas": replicas, "timeout_s": 60.0}
    given |= {"make_optimizer": make_optimizer, **options}
    group = prophet.parallel.expert_groups(size // replicas, timeout_s=given["timeout_s"])[1]
    stage_map = StageMap((0, 3, UNITS), (0, 1)) if size // replicas > 1 else StageMap((0, UNITS), (0,))
    return ElasticPipeline.from_modules(layers(group), nn.functional.mse_loss, stage_map, **given)


def random_placements(passes: int = PARTS // 2) -> prophet.EngineConfig:
    """Experts have other copies in every update."""
    return prophet.EngineConfig(planner=RandomPlanner(5, 0.6), accumulation_steps=passes, slots_per_rank=4)


def shared_experts(
    rank: int, size: int, replicas: int, updates: int, balanced: bool, split: bool, zero: int = 0
) -> Outcome:
    """The run with experts shared over `replicas`; `balanced`, every expert has a copy on every rank in each step."""
    pipe = pipeline(size, replicas, split_backward=split, zero=zero)
    engine: Any = None
    if balanced:
        config = prophet.EngineConfig(
            planner=FixedPlanner(everywhere(EXPERTS, replicas)),  # type: ignore[arg-type]
            accumulation_steps=PARTS // replicas,
            slots_per_rank=EXPERTS,
        )
        engine = pipe.balance_experts(lambda part: prophet.attach(part, config=config))
    losses, norms, copies = [], [], 0
    for update in range(updates):
        mine = [t.chunk(replicas)[pipe.replica] for t in batch(update)]
        losses.append(pipe.step(*mine, max_norm=MAX_NORM))
        norms.append(pipe.grad_norm or 0.0)
        if engine is not None and engine.last_step is not None:
            copies += int(engine.last_step.copies.sum())
    evaluated = pipe.evaluate(*(t.chunk(replicas)[pipe.replica] for t in batch(999)))
    if engine is not None:
        engine.close()
    return Outcome(losses, norms, evaluated, copies)
