"""What placements are planned for: the step that just ran, or a moving average of steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import prophet
from prophet.engine.config import Experiment
from prophet.engine.history import History
from prophet.engine.replan import EVERY_STEP, ReplanConfig
from prophet.ranks.threads import ThreadCollective
from prophet.spec import IntArray, Placement, PlanContext
from tests.helpers.support import HomesPlanner, TinyModel, next_id_loss, on_threads


class Listening(HomesPlanner):
    """Remembers the loads that it was asked to plan for."""

    def __init__(self) -> None:
        self.asked: list[IntArray] = []

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        self.asked.append(load)
        return super().place(load, context)


@pytest.mark.parametrize("mode", ["last", "ema", "mean", "best"])
def test_placements_are_planned_for_the_predicted_load(mode: str) -> None:
    def body(c: ThreadCollective) -> None:
        planner = Listening()
        model = TinyModel(seed=1, group=c, blocks=1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        experiment = Experiment(replan=replace(EVERY_STEP, predict=mode))
        config = prophet.EngineConfig(planner=planner)
        engine = prophet.attach(model, optimizer, config=config, experiment=experiment)
        reference = History(c.size, 8, adaptive=True)
        for step in range(4):
            ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + c.rank))
            optimizer.zero_grad()
            next_id_loss(model(ids), ids, 1.0).backward()
            optimizer.step()
            assert engine.last_step is not None
            reference.observe(engine.last_step.counts[0])
            engine.balanced[0].plans.latest()
            np.testing.assert_array_equal(planner.asked[-1], reference.predict(mode))  # type: ignore[arg-type]
        engine.close()

    on_threads(2, body)


@pytest.mark.parametrize("mode", ["last", "ema", "mean", "best"])
def test_a_forecast_is_the_prediction_after_observing_and_remembers_nothing(mode: str) -> None:
    rng = np.random.default_rng(0)
    history = History(2, 3, window=3, adaptive=True)
    for _ in range(5):
        load = rng.integers(0, 100, (2, 3))
        before = history.predict(mode)  # type: ignore[arg-type]
        expected = history.forecast(load, mode)  # type: ignore[arg-type]
        np.testing.assert_array_equal(history.predict(mode), before)  # type: ignore[arg-type]
        history.observe(load)
        np.testing.assert_array_equal(history.predict(mode), expected)  # type: ignore[arg-type]


def test_an_unknown_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match="predict must be one of 'last', 'ema', 'mean', 'best', got 'oracle'"):
        ReplanConfig(predict="oracle")  # type: ignore[arg-type]
