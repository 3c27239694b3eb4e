"""In which call of `torch.distributed` does this process wait? Another thread asks, so the wait itself costs nothing.

`if rank == 0:` around a forward pass leaves that rank waiting for the others, while they wait for it in a barrier. The
others' calls are not the library's, and only they can say so.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

_CALLS = "torch.distributed.distributed_c10d"
# (module, function): what messages call it, and the attribute of its object that holds the group
_METHODS = {
    # DDP sends buffers, and once what it has in each bucket
    ("torch.nn.parallel.distributed", "_pre_forward"): ("DistributedDataParallel", "process_group"),
    ("torch.distributed.algorithms.join", "__exit__"): ("join()", "_process_group"),
}


@dataclass(frozen=True, slots=True)
class Blocked:
    """A call that waits for other processes.

    name: of the function. line: where the user's own code has called it. group: the process group, None for all.
    """

    name: str
    line: str
    group: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"


def blocked() -> Blocked | None:
    """The call of torch.distributed that the main thread is in; None where it is in none, or in one of the library's.

    Asked from another thread than the main one.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: tuple[str, Any] | None = None
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
    if found is None or frame is None or str(frame.f_globals.get("__name__", "")).split(".")[0] == "prophet":
        return None
    return Blocked(found[0], _line(frame), found[1])


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
