"""AutoEP's blocks with our experts, on ranks that are threads, and what is refused.

AutoEP replaces its blocks here as it does inside a DeepSpeed engine; the engine itself is in
tests/processes/test_deepspeed_autoep.py.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prophet_deepspeed import ConfigError, ProphetSection, autoep
from prophet_deepspeed.section import read_config
from torch import Tensor, nn

import prophet
from prophet.convert import converted, load_original_state_dict, original_state_dict
from prophet.engine.config import Experiment
from prophet.errors import ConversionError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.autoep_support import let_autoep_read_the_registry
from tests.helpers.moe_models import Seen, alone, batches, compare, hugging_face, loss_of
from tests.helpers.support import RandomPlanner, dense_parameters

RANKS = 2
FAMILIES = ("deepseek_v3", "mixtral", "qwen2", "qwen3", "deepseek_v2")


@pytest.fixture(autouse=True)
def _registry() -> None:
    let_autoep_read_the_registry()


def autoep_config(**changes: Any) -> Any:
    module: Any = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    return module.parse_autoep_config({"enabled": True, "autoep_size": RANKS, **changes})


def take_over(model: nn.Module, group: Collective, *, sources: bool = False, **changes: Any) -> Any:
    """AutoEP's replacement and ours on one rank; what `configure` gives."""
    config = autoep_config(autoep_size=group.size, **changes)
    detection: Any = importlib.import_module("deepspeed.module_inject.auto_ep")

    def replace() -> Any:
        found = detection.AutoEP(model, config)
        return found.replace_moe_layers(found.ep_parser(), group.size, group.rank, collect_sources=sources)

    return autoep.configure(config, model, replace, ProphetSection(), group=group)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients under the names that parameters had before AutoEP; collective."""
    params = [p for p in model.parameters() if p.requires_grad]
    before = [p.data for p in params]
    for p in params:
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    state = {k: v.clone() for k, v in original_state_dict(model).items()}
    for p, data in zip(params, before, strict=True):
        p.data = data
    return state


def together(models: Sequence[nn.Module], steps: list[list[Tensor]], group: Collective) -> Seen:
    """Train one rank's model with placements at random."""
    model = models[group.rank]
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    _, report = take_over(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = prophet.EngineConfig(planner=RandomPlanner(3, 0.7), slots_per_rank=4)
    engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    seen = Seen()
    for at, by_rank in enumerate(steps):
        optimizer.zero_grad()
        loss, logits = loss_of(model, by_rank[group.rank])
        loss.backward()
        group.all_reduce_mean_([p.grad for p in dense_parameters(model).values() if p.grad is not None])
        seen.logits.append(logits.detach().clone())
        seen.losses.append(float(loss.detach()))
        if at < len(steps) - 1:
            optimizer.step()
    seen.gradients = {n: g for n, g in gradients(model).items() if n in names}
    step = engine.runtime.step
    assert step is not None
    counts = [block.tokens_per_expert.clone() for _, block, *_ in converted(model)]
    seen.extra = sum(a.kind == "AGG" for a in step.actions), counts, report
    engine.close()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_models_own(family: str) -> None:
    """Replicas are in force; shared experts, group limits and correction biases are those of the family."""
    steps = [batches(RANKS, seed=s) for s in range(3)]
    model = hugging_face(family)
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    wanted = alone(model, steps)
    found = ThreadWorld(RANKS).run(partial(together, models, steps))
    compare(wanted, found, 1e-5)
    for seen in found:
        copies, counts, report = seen.extra
        assert copies > 0
        top_k = report.replaced[0].spec.top_k
        # AutoEP's statistics go on: every choice of this rank's tokens, step by step
        assert [float(c.sum()) for c in counts] == [3 * steps[0][0].numel() * top_k] * 2
