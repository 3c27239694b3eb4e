"""Hosts that are evenly slower than the machine: what is computed lasts `slowdown` times its processor time.

The rest of that time is slept. So four hosts share two cores without waiting for each other, and what else runs on the
machine disturbs a measurement only where it takes more than the pauses. A processor quota would be felt in lumps of its
period, which are as long as one action of a stage.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.measure import Meter

SHORT_SLICE_NS = 100_000
KEPT_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def wake_promptly() -> bool:
    """Ask the kernel for short time slices, for this thread and those it starts later; whether it agreed.

    A host wakes whenever a message comes. With the usual slice it would wait some milliseconds each time until another
    program's has passed, and an action lasts only a few times that.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    # struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period, two bounds
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, 0, 0, SHORT_SLICE_NS, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, 0, ctypes.create_string_buffer(attributes, 56), 0) == 0)


def keep_memory() -> bool:
    """Let the C library keep freed memory, as a device's allocator does; whether it agreed.

    Else every large tensor's pages come from the kernel anew, and how long a layer takes depends on what the process
    has just given back.
    """
    if platform.system() != "Linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, KEPT_BYTES) == 1 for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))


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
        self._sleep_until(began + (time.thread_time() - worked) * self.slowdown)
        return result

    def work_with_waits(self, call: Callable[[], Any]) -> Any:
        """Run what computes and waits for others, too: only its own work is stretched."""
        worked = time.thread_time()
        result = call()
        self._sleep_until(time.perf_counter() + (time.thread_time() - worked) * (self.slowdown - 1))
        return result

    @staticmethod
    def _sleep_until(moment: float) -> None:
        left = moment - time.perf_counter()
        if left > 0:
            time.sleep(left)


class PacedMeter(Meter):
    """A meter on a slower host: the actions that it runs take the host's time, measured or not."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(enabled=False, work_clock=pace.seconds)
        self.pace = pace

    def run_action(self, kind: str, stage: int, call: Callable[[], Any]) -> Any:
        # within what is measured, so that the pause is the action's and no waiting
        return super().run_action(kind, stage, lambda: self.pace.work(call))


class PacedAdam(torch.optim.Adam):
    """Adam on a slower host."""

    pace = Pace(1.0)

    def step(self, closure: Any = None) -> Any:
        inner = super().step
        return self.pace.work(lambda: inner(closure))


def paced_loss(pace: Pace, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`loss_fn` on a slower host."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = pace.work(lambda: loss_fn(output, target))
        return result

    return loss
