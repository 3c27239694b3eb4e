"""What the performance model says of a step that has run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from prophet.engine.step_report import StepReport, predicted_seconds
from prophet.planner import get_planner
from prophet.planner.model.cost import step_cost
from prophet.spec import LayerShape, PlanContext, Split, Topology


def test_predicted_seconds_are_those_of_all_layers() -> None:
    topology, shape = Topology.uniform(2, flops_per_s=16e3), LayerShape.feed_forward(dim=2, hidden=2)
    context = PlanContext(topology=topology, shape=shape, home=(0, 1))
    planner = get_planner("static")
    homes = context.homes_only()
    load = np.array([[10, 0], [10, 0]])
    report = SimpleNamespace(counts=np.stack([load, load[:, ::-1]]), placements=(homes, homes))
    found = predicted_seconds(cast(StepReport, report), planner, [context, context])
    one = step_cost(Split.to_homes(load, homes), homes, context).total_s
    assert found == pytest.approx(2 * one)
    assert one > 3 * 20 / 1000, "20 rows at 1000 rows/s, backward twice as long"
