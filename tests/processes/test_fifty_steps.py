"""The demo's own model in float32: the loss notices neither balancing nor placements made at random."""

from __future__ import annotations

import numpy as np
import pytest

from prophet.demo.text import load_corpus
from prophet.demo.train import RunResult, TrainConfig, train
from prophet.planner.base import Planner
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import on_processes
from tests.helpers.support import RandomPlanner

RANKS = 4
LIMIT_S = 240.0
SIZES = {"sequences_per_rank": 2, "held_out_sequences_per_rank": 4, "slots_per_rank": 3}
SHORT = TrainConfig(steps=12, timeout_s=60.0, **SIZES)
LONG = TrainConfig(steps=50, timeout_s=60.0, **SIZES | {"sequences_per_rank": 4})


def three_runs(config: TrainConfig) -> list[tuple[list[float], float, float, float]]:
    """By planner: losses, held-out loss, copies per rank and layer, median of max/mean after the first step."""
    corpus = load_corpus()
    planners: dict[str, str | Planner] = {"off": "static", "on": "prophet", "at random": RandomPlanner(seed=1)}
    return [measure(run) for run in train(config, corpus, planners=planners, group=collective_for(None)).values()]


def measure(run: RunResult) -> tuple[list[float], float, float, float]:
    load = run.rank_load[1:].astype(float)
    max_mean = float(np.median(load.max(axis=2) / load.mean(axis=2)))
    return run.loss.tolist(), run.held_out_loss, float(run.copies[1:].mean()), max_mean


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "config", [pytest.param(SHORT, id="twelve steps"), pytest.param(LONG, id="fifty steps", marks=pytest.mark.slow)]
)
def test_losses_are_equal_off_on_and_at_random(config: TrainConfig) -> None:
    off, on, at_random = on_processes(RANKS, three_runs, config, timeout_s=LIMIT_S)[0]
    assert len(off[0]) == config.steps
    assert off[0][-1] < 0.7 * off[0][0], "it must have learned something"
    for run in (on, at_random):
        np.testing.assert_allclose(run[0], off[0], rtol=1e-5)
        assert run[1] == pytest.approx(off[1], rel=1e-5)
    assert off[2] == 0
    assert on[2] > 0
    assert at_random[2] > 0.5
    assert on[3] <= 1.05
    assert off[3] > 1.5
