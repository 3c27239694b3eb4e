"""Hosts that are evenly slower than the machine, per action of a stage instead of per operator.

Operators of these small layers last no longer than it takes to pace one. And layers are timed by the thread's processor
time, which knows no pauses, so that no pause may be somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.pacing import Pace
from pipeline_balance.pipeline.measure.meter import Meter

__all__ = ["Pace", "PacedAdam", "PacedMeter", "paced_loss"]


class PacedMeter(Meter):
    """A meter on a slower host: the actions that it runs take the host's time, measured or not."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(enabled=False, work_clock=pace.seconds)
        self.pace = pace

    def run_action(self, kind: str, stage: int, call: Callable[[], Any]) -> Any:
        # within what is measured, so that the pause is the action's and no waiting
        return super().run_action(kind, stage, lambda: self.pace.work(call))


class PacedAdam(torch.optim.Adam):
    """Adam on a slower host; `took_s` is what its last step took there."""

    pace = Pace(1.0)
    took_s = 0.0

    def step(self, closure: Any = None) -> Any:
        inner, began = super().step, self.pace.seconds()
        result = self.pace.work(lambda: inner(closure))
        self.took_s = self.pace.seconds() - began
        return result


def paced_loss(pace: Pace, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`loss_fn` on a slower host."""
    return lambda output, target: pace.work(lambda: loss_fn(output, target))
