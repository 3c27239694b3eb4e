"""Find the call of `torch.distributed` that this process waits in. Another thread asks, so the wait costs nothing.

`if rank == 0:` around a forward pass leaves that rank waiting for the others, while they wait for it in a barrier. The
others' calls are not the library's, and only they can say so.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

_CALLS = "torch.distributed.distributed_c10d"
# Where the innermost frame is that waits
_WAITING = ("torch.distributed.", "torch.nn.parallel.")
_STILL_S = 0.01  # at one place for so long: no loop that computes
# (module, function): its name in messages, and the attribute of its object that holds the group
_METHODS = {
    # Its forward pass broadcasts buffers, and once rebuilds the buckets of gradients: both wait in C++, without a frame
    ("torch.nn.parallel.distributed", "_pre_forward"): ("DistributedDataParallel", "process_group"),
    ("torch.distributed.algorithms.join", "__exit__"): ("join()", "_process_group"),
}


@dataclass(frozen=True, slots=True)
class Blocked:
    """A call that waits for other processes.

    Attributes:
        name: The function, as messages show it.
        line: File and line of the user's code that called it.
        group: The process group; None for all processes.
    """

    name: str
    line: str
    group: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"


def blocked() -> Blocked | None:
    """Find the call of torch.distributed that the main thread is in; called from another thread.

    Returns:
        The call, or None where the main thread is in none, or in one that this library made.
    """
    frame = _still(threading.main_thread().ident or 0)
    found: tuple[str, Any] | None = None
    # From the innermost frame outwards. The last match is the outermost call, the one that the user has written.
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if home == _CALLS:
            found = f"torch.distributed.{frame.f_code.co_name}", frame.f_locals.get("group")
        elif (home, frame.f_code.co_name) in _METHODS:
            name, group = _METHODS[home, frame.f_code.co_name]
            found = name, getattr(frame.f_locals.get("self"), group, None)
        elif home.split(".", maxsplit=1)[0] != "torch":
            break
        frame = frame.f_back
    # The library's waits name their operation themselves
    if found is None or frame is None or str(frame.f_globals.get("__name__", "")).split(".")[0] == "prophet":
        return None
    return Blocked(found[0], _line(frame), found[1])


def _still(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread that waits for other processes; None where it may be running.

    CPython 3.11 crashes where another thread follows `f_back` of frames that are left meanwhile.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or not str(frame.f_globals.get("__name__", "")).startswith(_WAITING):
        return None
    place = frame.f_lasti
    time.sleep(_STILL_S)
    # `frame` is kept alive, so that a later call cannot have its identity
    return frame if sys._current_frames().get(thread) is frame and frame.f_lasti == place else None


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
