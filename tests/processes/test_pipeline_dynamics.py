"""Every dynamic model trains in a pipeline whose layers move, with the losses of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.freezing import Freezer, FreezingRule, freeze_prefix, gradient_rates
from pipeline_balance.dynamics.gpt import GPTShape, loss, modules
from pipeline_balance.dynamics.pruning import prune_globally
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_blocks import CASES, DIM, HEADS, TOKENS
from tests.helpers.pipeline_model import plain_step

MICROBATCHES, SEQUENCES, STEPS = 2, 2, 9
ALL = [*CASES, "freezing"]


def _model(case: str) -> list[nn.Module]:
    make_block, channels = CASES["dense" if case == "freezing" else case]
    shape = GPTShape(vocabulary=7, dim=DIM, heads=HEADS, blocks=4, context=TOKENS, channels=channels)
    return modules(shape, make_block, seed=1)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(7, (MICROBATCHES * SEQUENCES, 1), generator=generator)
    ids = (start + 3 * torch.arange(TOKENS + 1)) % 7
    return ids[:, :-1], ids[:, 1:]


def _optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=3e-3)


def _change(
    case: str, every: list[nn.Module], here: list[nn.Module], freezer: Freezer, step: int, collective: Collective
) -> None:
    """The dynamism between two steps: of all layers, and of those that run here."""
    if case == "pruning" and step in (2, 5):
        prune_globally(here, 0.3 if step == 2 else 0.6, collective)
    if case == "freezing" and step:
        # the loss is taken as settled; the rule is so generous that layers freeze within a few steps
        layers = dict(enumerate(every))
        rates = gradient_rates(layers, freezer.layers, collective)
        freeze_prefix(layers, freezer.update(rates, 1.0))


def _freezer(layers: int) -> Freezer:
    return Freezer(layers, FreezingRule(share=0.9999, patience=1, most=3))


def _plain(case: str) -> tuple[list[float], int]:
    layers = _model(case)
    named = [(f"{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()]
    optimizer, freezer = _optimizer(named), _freezer(len(layers))
    alone = ThreadWorld(1).collective(0)
    losses = []
    for step in range(STEPS):
        _change(case, layers, layers, freezer, step, alone)
        optimizer.zero_grad()
        losses.append(plain_step(layers, *_batch(step), loss, microbatches=MICROBATCHES, seed=0, update=step))
        optimizer.step()
    return losses, freezer.frozen


def _train(rank: int, size: int, case: str) -> tuple[list[float], int]:
    layers = _model(case)
    run = ElasticPipeline.from_modules(
        layers,
        loss,
        StageMap.contiguous((0, 3, len(layers))),
        make_optimizer=_optimizer,
        microbatches=MICROBATCHES,
        timeout_s=60.0,
    )
    freezer = _freezer(len(layers))
    losses = []
    for step in range(STEPS):
        _change(case, layers, list(run.layers.values()), freezer, step, run.collective)
        if step and step % 3 == 0:
            run.rebuild(StageMap.contiguous((0, 2 if step % 2 else 4, len(layers))))
        losses.append(run.step(*_batch(step)))
    return losses, freezer.frozen


@pytest.mark.parametrize("case", ALL)
def test_dynamic_models_train_while_layers_move(case: str) -> None:
    results = run_gloo(_train, 2, case)
    expected, frozen = _plain(case)
    assert results[0][0] == results[1][0] == pytest.approx(expected, rel=1e-4)
    assert results[0][1] == results[1][1] == frozen
    assert (frozen > 0) == (case == "freezing")
