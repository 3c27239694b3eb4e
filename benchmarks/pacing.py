"""Hosts that are evenly slower than the machine: what they compute lasts `slowdown` times its processor time.

The rest of that time is slept. So several hosts share some cores without waiting for each other, and what else runs on
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
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
WAITED_S = 0.001  # longer than this between two operators, beside the work there: the host waited for others
MOST_LATE_S = 0.02
SHORTEST_SLEEP_S = 0.0002  # less is owed until more has come together
SHORT_SLICE_NS, LONG_SLICE_NS = 100_000, 20_000_000
PLANNING_NICE = 10
LOOK_S = 0.05  # between two looks for new threads, which a paced thread takes while it sleeps anyway
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


def _ask_for_slice(slice_ns: int, *, thread: int = 0) -> bool:
    """thread: as the kernel numbers it; 0 for this one. It gets the usual niceness."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    # struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period, two bounds
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, 0, 0, slice_ns, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, thread, ctypes.create_string_buffer(attributes, 56), 0) == 0)


# --- cores ---


@functools.cache
def _cores() -> tuple[int, ...]:
    """The cores that this process had when it first asked."""
    return tuple(sorted(os.sched_getaffinity(0)))


def compute_cores() -> tuple[int, ...]:
    """The first half of the cores, for the threads that are paced; the one core there is."""
    return _cores()[: max(1, len(_cores()) // 2)]


def network_cores() -> tuple[int, ...]:
    """The second half of the cores, for all that is not paced; none where there is one core."""
    return _cores()[len(_cores()) // 2 :] if len(_cores()) > 1 else ()


class Apart:
    """Keeps the main thread, which is paced, on `compute_cores` and all others of its process on `network_cores`.

    A host's processor and its network card take no time of its accelerator. The kernel's network work runs on the core
    that sends, in the time of whatever thread it interrupts there: paced, that would count many times over. A thread
    that plans would make the accelerators of other hosts wait. Everything is left as it is on one core.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._next_s = 0.0

    def look(self, now_s: float) -> None:
        """Move threads that have come since: they begin where the thread that started them is."""
        if now_s < self._next_s or not network_cores():
            return
        self._next_s = now_s + LOOK_S
        tasks = set(os.listdir("/proc/self/task"))
        new, self._known = tasks - self._known, tasks
        if not new:
            return
        # Python does not tell the kernel how its threads are called
        names = {str(t.native_id): t.name for t in threading.enumerate()}
        for task in new:
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                if int(task) == os.getpid():
                    os.sched_setaffinity(int(task), compute_cores())
                    continue
                os.sched_setaffinity(int(task), network_cores())
                if "gloo" in names.get(task, "") + Path(f"/proc/self/task/{task}/comm").read_text():
                    _ask_for_slice(SHORT_SLICE_NS, thread=int(task))
                    continue
                # After those that move bytes, as a network card needs no core. Were those raised instead, the kernel
                # would take the hosts' weight from the cores that compute: it goes with the weights of a core's threads
                os.setpriority(os.PRIO_PROCESS, int(task), PLANNING_NICE)


# --- time ---


class Pace:
    """Work of one thread that lasts `slowdown` times its processor time; the rest of it is slept.

    A host that could not get a core in time catches up to `MOST_LATE_S`; waiting for others gives no such credit.
    `roams`: between two works the thread may be on any core, as what it does there is the host's processor's, and hosts
    that do it at once would wait for each other. Changing cores takes longer than many an operator.
    """

    def __init__(self, slowdown: float, *, apart: Apart | None = None, roams: bool = False) -> None:
        if not slowdown >= 1:
            raise ValueError(f"slowdown must be at least 1, got {slowdown!r}")
        self.slowdown = slowdown
        self._apart = apart
        self._late_s = 0.0  # how much longer than it should have the work so far took
        self._left = (0.0, 0.0)  # wall and processor time when the last work ended
        self._within = False
        if apart is not None:
            apart.look(time.perf_counter())
        self._roams = roams and apart is not None
        if self._roams:
            os.sched_setaffinity(0, _cores())

    def seconds(self) -> float:
        """A clock that tells this thread's work in the host's time."""
        return time.thread_time() * self.slowdown

    def work(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run what only computes: it ends when the host would have ended it."""
        if self._within:  # the outer call pays for it
            return call(*args, **kwargs)
        began, worked = time.perf_counter(), time.thread_time()
        if self._roams:
            os.sched_setaffinity(0, compute_cores())  # may wait for one of them, which is late as any such wait
        if began - self._left[0] - (worked - self._left[1]) > WAITED_S:
            self._late_s = 0.0
        self._within = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._within = False
        owed = self.slowdown * (time.thread_time() - worked) - (time.perf_counter() - began) - self._late_s
        if owed > SHORTEST_SLEEP_S:
            due = time.perf_counter() + owed
            if self._apart is not None:
                self._apart.look(due - owed)
            time.sleep(max(0.0, due - time.perf_counter()))
            owed = due - time.perf_counter()
        self._late_s = min(-owed, MOST_LATE_S)
        if self._roams:
            os.sched_setaffinity(0, _cores())
        self._left = (time.perf_counter(), time.thread_time())
        return result


@functools.cache
def _computes(operator: Callable[..., Any]) -> bool:
    """Whether an accelerator would run something for this torch operator."""
    name = str(getattr(operator, "__name__", "")).partition(".")[0]
    collective = "c10d" in getattr(operator, "namespace", "")
    return not (collective or getattr(operator, "is_view", False) or name in _UNFILLED)


class PacedOperators(TorchDispatchMode):
    """While entered, this thread's torch operators are the work of a `Pace`: an accelerator's.

    Everything else keeps the machine's speed, as a host's processor does: Python, planning, threads that move bytes,
    and operators that compute nothing (views, memory that is not filled, collectives that are posted).
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _computes(func):
            return func(*args, **(kwargs or {}))
        return self.pace.work(func, *args, **(kwargs or {}))
