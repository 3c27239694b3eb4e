"""Steps of optimizers beside a pipeline."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeline_balance.pipeline.run.passes import Passes, _watch_steps


class _Passes:
    """Of a pipeline, whose parts know each other: only the collector ends it."""

    def __init__(self) -> None:
        self.pipeline, self.checked = self, 0

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.checked += 1


def test_a_pipeline_that_is_collected_while_an_optimizer_steps_leaves_torch_its_hooks() -> None:
    """The collector may run at any time, also where torch iterates over its global hooks."""
    passes = _Passes()
    alive = weakref.ref(passes)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)

    def first(*_: Any) -> None:
        gc.collect()

    # its hook comes before the pipeline's, so that more are left when it is done
    handle = register_optimizer_step_pre_hook(first)
    _watch_steps(cast(Passes, passes))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gc.disable()
    del passes
    try:
        assert alive() is not None
        optimizer.step()
    finally:
        gc.enable()
        handle.remove()
    assert alive() is None
    assert weight.item() == -1.0
