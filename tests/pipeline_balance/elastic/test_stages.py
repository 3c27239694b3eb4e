"""Stages that a job fills in from what its controller knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeline_balance.control.decide import ControllerConfig
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.stages import JobStages
from pipeline_balance.spec import LayerCost, RankLimits


def test_a_layout_in_other_slices_keeps_to_the_memory() -> None:
    """A first stage holds two microbatches of each of its layers, in eight slices nine eighths of one."""
    nothing: Any = None
    limits = [RankLimits(memory_bytes=18), RankLimits(memory_bytes=1000)]
    stages = JobStages(nothing, ControllerConfig(), limits, nothing)
    # as the controller keeps them, whichever slices it has measured: of a microbatch
    costs = [LayerCost(forward_s=1.0, backward_input_s=1.0, activation_bytes=8) for _ in range(4)]
    controller: Any = SimpleNamespace(costs=costs)
    stages.controller = controller
    assert stages.filled(Parallelism(pp=2), 4).stages == (1, 3)
    assert stages.filled(Parallelism(pp=2, slices=8), 4).stages == (2, 2)
