"""Every dynamic model trains in a pipeline whose layers move, with the losses of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.control.measure import Meter, PipelineLayer
from pipeline_balance.dynamics.freezing import Freezer, FreezingRule, freeze_prefix, gradient_rates
from pipeline_balance.dynamics.gpt import GPTShape, boundaries, builder, loss
from pipeline_balance.dynamics.pruning import prune_globally
from pipeline_balance.pipeline.stages import PipelineConfig
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_blocks import CASES, DIM, HEADS, TOKENS

MICROBATCHES, SEQUENCES, STEPS = 2, 2, 9
ALL = [*CASES, "freezing"]


def _model(case: str) -> tuple[GPTShape, object]:
    make_block, channels = CASES["dense" if case == "freezing" else case]
    shape = GPTShape(vocabulary=7, dim=DIM, heads=HEADS, blocks=4, context=TOKENS, channels=channels)
    return shape, builder(shape, make_block, seed=1)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(7, (MICROBATCHES * SEQUENCES, 1), generator=generator)
    ids = (start + 3 * torch.arange(TOKENS + 1)) % 7
    return ids[:, :-1], ids[:, 1:]


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


def _change(case: str, layers: dict[int, PipelineLayer], freezer: Freezer, step: int, collective: Collective) -> bool:
    """The dynamism between two steps; says whether layers were frozen."""
    if case == "pruning" and step in (2, 5):
        prune_globally(list(layers.values()), 0.3 if step == 2 else 0.6, collective)
    if case == "freezing" and step:
        # the loss is taken as settled; the rule is so generous that layers freeze within a few steps
        before = freezer.frozen
        rates = gradient_rates(layers, freezer.layers, collective, torch.device("cpu"))
        freeze_prefix(layers, freezer.update(rates, 1.0))
        return freezer.frozen != before
    return False


def _freezer(layers: int) -> Freezer:
    return Freezer(layers, FreezingRule(share=0.9999, patience=1, most=3))


def _plain(case: str) -> tuple[list[float], int]:
    shape, build = _model(case)
    meter = Meter(enabled=False)
    layers = {i: PipelineLayer(build(i), i, meter, seed=None) for i in range(shape.layers)}  # type: ignore[operator]
    parameters = [p for layer in layers.values() for p in layer.parameters()]
    optimizer, freezer = _optimizer(parameters), _freezer(shape.layers)
    alone = ThreadWorld(1).collective(0)
    losses = []
    for step in range(STEPS):
        _change(case, layers, freezer, step, alone)
        optimizer.zero_grad()
        parts = []
        for ids, target in zip(*(t.chunk(MICROBATCHES) for t in _batch(step)), strict=True):
            x = ids
            for layer in layers.values():
                x = layer(x)
            out = loss(x, target)
            out.backward()
            parts.append(float(out.detach()))
        for p in parameters:
            if p.grad is not None:
                p.grad /= MICROBATCHES
        optimizer.step()
        losses.append(sum(parts) / len(parts))
    return losses, freezer.frozen


def _train(rank: int, size: int, case: str) -> tuple[list[float | None], int]:
    shape, build = _model(case)
    run = ElasticPipeline(
        build,  # type: ignore[arg-type]
        StageMap.contiguous((0, 3, shape.layers)),
        loss_fn=loss,
        make_optimizer=_optimizer,
        boundaries=boundaries(shape, SEQUENCES, TOKENS),
        config=PipelineConfig(microbatches=MICROBATCHES, timeout_s=60.0),
    )
    freezer = _freezer(shape.layers)
    losses = []
    for step in range(STEPS):
        if _change(case, run.layers, freezer, step, run.collective):
            run.refresh()
        if step and step % 3 == 0:
            run.rebuild(StageMap.contiguous((0, 2 if step % 2 else 4, shape.layers)))
        losses.append(run.step(*_batch(step)))
    return losses, freezer.frozen


@pytest.mark.parametrize("case", ALL)
def test_dynamic_models_train_while_layers_move(case: str) -> None:
    results = run_gloo(_train, 2, case)
    expected, frozen = _plain(case)
    assert results[1][0] == pytest.approx(expected, rel=1e-4)
    assert results[0][1] == results[1][1] == frozen
    assert (frozen > 0) == (case == "freezing")
