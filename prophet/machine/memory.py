"""The C library's memory, where tensors are its own: on the CPU."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

KEPT_BYTES, READY_BYTES = 1 << 30, 1 << 29
# glibc before 2.35 takes no higher threshold for allocations that are mapped separately.
_OLDER_MOST = 1 << 25
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_memory(ready_bytes: int = READY_BYTES) -> bool:
    """Make the C library keep freed memory, as a device's allocator does.

    It also touches some memory in advance, at most a sixteenth of what is available. Call it once, at the start of the
    process.

    Without it the kernel hands out fresh pages for every large tensor. A page costs some microseconds, and the pages of
    an 8 MB tensor cost as much as a product with it. So times depend on what the process has just freed.

    Args:
        ready_bytes: Bytes to touch.

    Returns:
        Whether the C library agreed.
    """
    if platform.system() != "Linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES) != 1:
        return False
    if not any(mallopt(_M_MMAP_THRESHOLD, most) == 1 for most in (KEPT_BYTES, _OLDER_MOST)):
        return False
    # Not more than there is: filling would push other programs' memory out.
    lines = Path("/proc/meminfo").read_text().splitlines()
    available_bytes = next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), 0)
    # Written once, so that the kernel has given its pages before anything is timed.
    torch.empty(min(ready_bytes, available_bytes // 16), dtype=torch.uint8).fill_(0)
    return True
