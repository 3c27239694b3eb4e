"""Layers that attend over slices, between layers of experts that replicas share; and one process that holds all."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import prophet
import prophet.parallel
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices import SliceOptions
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers import sliced_layers as own
from tests.helpers.support import FixedPlanner, everywhere

EXPERTS, TOP_K, SLICES = 4, 2, 4
MOE = (2, 4)  # which layers
MAP = StageMap((0, 3, 6), (0, 1))


class Experts(nn.Module):
    """Experts beside the stream."""

    def __init__(self, group: Collective) -> None:
        super().__init__()
        self.moe = prophet.MoE(own.DIM, 8, EXPERTS, TOP_K, group=group, impl="naive")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.moe(x)
        return found


def layers(group: Collective) -> nn.Sequential:
    """Embedding, attention, experts, attention, experts, head; alike at any number of ranks."""
    embed, *blocks, head = own.layers()
    made: list[nn.Module] = [embed]
    for i, block in enumerate(blocks):
        torch.manual_seed(i)
        made += [block, Experts(group).double()]
    torch.manual_seed(7)
    with torch.no_grad():  # what a layer draws after its own experts depends on how many those are
        for layer in made[2::2]:
            for p in layer.moe.gate.parameters():  # type: ignore[union-attr]
                p.copy_(torch.randn(p.shape, dtype=p.dtype) / own.DIM**0.5)
    return nn.Sequential(*made, head)


class Counts(NamedTuple):
    """What a pipeline asks a balancer for before it trains."""

    config: prophet.EngineConfig

    def close(self) -> None:
        """It is attached to nothing."""


class Outcome(NamedTuple):
    """Losses by update, all-to-alls of a step by layer of experts, replicas made, choices that the planner saw."""

    losses: list[float]
    all_to_alls: float
    copies: int
    choices: list[int]
    weights: dict[str, Tensor]


class _Counting:
    """Counts the all-to-alls of a group of experts."""

    def __init__(self, collective: Any) -> None:
        self.count, self._inner = 0, collective.all_to_all
        collective.all_to_all = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += kwargs.get("channel", "tokens") == "tokens"
        return self._inner(*args, **kwargs)


def trained(rank: int, size: int, slices: int, balanced: bool, balance: Any, updates: int) -> Outcome:
    """Two pipelines of two stages that share experts; `balanced`, every expert has a copy on every rank."""
    replicas = 2
    group = prophet.parallel.expert_groups(size // replicas, timeout_s=60.0)[1]
    microbatches = own.PARTS // replicas
    crossover = 4 if balance == "uneven" else None
    pipe = ElasticPipeline.from_modules(
        layers(group),
        own.loss_fn,
        MAP,
        counted=own.counted,
        slices=SliceOptions(slices, balance=balance, crossover_tokens=crossover),
        make_optimizer=own.adam,
        microbatches=microbatches,
        replicas=replicas,
        seed=own.SEED,
        timeout_s=60.0,
    )
    engine: Any = None
    if balanced:
        config = prophet.EngineConfig(
            planner=FixedPlanner(everywhere(EXPERTS, replicas)),  # type: ignore[arg-type]
            accumulation_steps=microbatches * slices,
            slots_per_rank=EXPERTS,
        )
        wrong = dataclasses.replace(config, accumulation_steps=microbatches)
        with pytest.raises(SpecError, match=f"accumulation_steps={microbatches}: .* has {microbatches * slices} back"):
            pipe.balance_experts(lambda part: Counts(wrong))  # type: ignore[arg-type]
        engine = pipe.balance_experts(lambda part: prophet.attach(part, config=config))
    losses, copies, choices = [], 0, []
    counting = _Counting(pipe.experts.collectives[0])
    for update in range(updates):
        inputs, labels = own.batch(update, 0)
        mine = {n: t.chunk(replicas)[pipe.replica] for n, t in inputs.items()}
        losses.append(pipe.step(mine, labels.chunk(replicas)[pipe.replica], max_norm=own.MAX_NORM))
        if engine is not None:
            copies += int(engine.last_step.copies.sum())
            choices.append(int(engine.last_step.counts.sum()))
    if engine is not None:
        engine.close()
    mine_alone = {
        n: p.detach().clone() for n, p in pipe.module.named_parameters() if not p.is_meta and "experts" not in n
    }
    held = sum(unit in MOE for unit in pipe.layers)
    return Outcome(losses, counting.count / updates / held, copies, choices, mine_alone)


def one_process(updates: int, starts: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """The same with all experts on one rank, in the same slices, by the definition of attention."""
    return own.one_process(updates, starts, 1, layers(ThreadWorld(1).collective(0)))
