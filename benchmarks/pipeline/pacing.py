"""Hosts that are evenly slower than the machine: what is computed lasts `slowdown` times its processor time.

The rest of that time is slept, per action of a stage; see `benchmarks.pacing` for why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.measure.meter import Meter


@dataclass(frozen=True, slots=True)
class Pace:
    """How much slower a host is than the machine, at least 1."""

    slowdown: float

    def seconds(self) -> float:
        """A clock that tells this thread's work in the host's time."""
        return time.thread_time() * self.slowdown

    def work(self, call: Callable[[], Any]) -> Any:
        """Run what only computes: it ends when the host would have ended it."""
        began, worked = time.perf_counter(), time.thread_time()
        result = call()
        left = began + (time.thread_time() - worked) * self.slowdown - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return result


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
