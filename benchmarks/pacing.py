"""Hosts that are evenly slower than the machine: what they compute lasts `slowdown` times its processor time.

The rest of that time is slept. So several hosts share two cores without waiting for each other, and what else runs on
the machine disturbs a measurement only where it takes more than the pauses. A processor quota would be felt in lumps:
the kernel checks it once in a tick, so that work of a few milliseconds runs at full speed, and a host that has used its
quota up stops its own network traffic as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITED_S = 0.001  # longer than this between two operators, beside the work there: the host waited for others
MOST_LATE_S = 0.02
SHORTEST_SLEEP_S = 0.0002  # less is owed until more has come together
SHORT_SLICE_NS, LONG_SLICE_NS = 100_000, 20_000_000
NETWORK_NICE = -15
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def wake_promptly() -> bool:
    """Short time slices for this thread and those it starts later; whether the kernel agreed.

    A host wakes whenever a message comes. With the usual slice it would wait some milliseconds each time until another
    program's has passed, and an action lasts only a few times that.
    """
    return _ask_for_slice(SHORT_SLICE_NS)


def compute_at_length() -> bool:
    """Long time slices for this thread and those it starts later; whether the kernel agreed.

    Hosts that take turns within an operator throw each other's weights out of the core's cache.
    """
    return _ask_for_slice(LONG_SLICE_NS)


def _ask_for_slice(slice_ns: int) -> bool:
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    # struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period, two bounds
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, 0, 0, slice_ns, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, 0, ctypes.create_string_buffer(attributes, 56), 0) == 0)


@functools.cache
def _cores() -> tuple[int, ...]:
    """The cores that this process had when it first asked."""
    return tuple(sorted(os.sched_getaffinity(0)))


def network_cores() -> tuple[int, ...]:
    """The second half of the cores, which move bytes; none where there is one core."""
    cores = _cores()
    return cores[len(cores) // 2 :] if len(cores) > 1 else ()


def compute_apart() -> None:
    """This thread on the first half of the cores, threads that move gloo's bytes on the others and before any other.

    The kernel's network work runs on the core that sends, in the time of whatever thread it interrupts there: paced,
    that would count many times over. A network card needs no core. To be called again when further process groups have
    been made. Needs root; leaves everything as it is on one core.
    """
    others = network_cores()
    if not others:
        return
    os.sched_setaffinity(0, set(_cores()) - set(others))
    waiting = {
        str(t.native_id) for t in threading.enumerate() if t.name.startswith("gloo")
    }  # of `prophet.ranks.process_group`
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if task.name in waiting or "gloo" in (task / "comm").read_text():
                os.sched_setaffinity(int(task.name), others)
                os.setpriority(os.PRIO_PROCESS, int(task.name), NETWORK_NICE)


@functools.cache
def _computes(operator: Callable[..., Any]) -> bool:
    """Whether an accelerator would run something for this torch operator."""
    name = str(getattr(operator, "__name__", "")).partition(".")[0]
    collective = "c10d" in getattr(operator, "namespace", "")
    return not (collective or getattr(operator, "is_view", False) or name in _UNFILLED)


class PacedOperators(TorchDispatchMode):
    """While entered, this thread's torch operators last `slowdown` times their processor time: an accelerator's work.

    Everything else keeps the machine's speed, as a host's processor does: Python, planning, threads that move bytes,
    and operators that compute nothing (views, memory that is not filled, collectives that are posted). A host that
    could not get a core in time catches up to `MOST_LATE_S`; waiting for others gives no such credit.
    """

    def __init__(self, slowdown: float) -> None:
        if not slowdown >= 1:
            raise ValueError(f"slowdown must be at least 1, got {slowdown!r}")
        super().__init__()
        self.slowdown = slowdown
        self._late_s = 0.0  # how much longer than it should have the work so far took
        self._left = (0.0, 0.0)  # wall and processor time when the last operator ended

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _computes(func):
            return func(*args, **(kwargs or {}))
        began, worked = time.perf_counter(), time.thread_time()
        if began - self._left[0] - (worked - self._left[1]) > WAITED_S:
            self._late_s = 0.0
        result = func(*args, **(kwargs or {}))
        owed = self.slowdown * (time.thread_time() - worked) - (time.perf_counter() - began) - self._late_s
        if owed > SHORTEST_SLEEP_S:
            due = time.perf_counter() + owed
            time.sleep(owed)
            owed = due - time.perf_counter()
        self._late_s = min(-owed, MOST_LATE_S)
        self._left = (time.perf_counter(), time.thread_time())
        return result
