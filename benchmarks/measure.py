"""What several benchmarks measure alike: seconds of a call, candidates in turns, meetings of ranks, memory."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

T = TypeVar("T")


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rotated(candidates: Sequence[T], turn: int) -> list[T]:
    """Another candidate first in every turn, so that a drift of the machine favours none."""
    first = turn % max(1, len(candidates))
    return [*candidates[first:], *candidates[:first]]


def slowest(by_rank: Iterable[Sequence[float]]) -> list[float]:
    """By repetition, the seconds of the slowest rank: what all of them do is over when its part is."""
    return [max(at) for at in zip(*by_rank, strict=True)]


def quartiles(samples: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(samples) < 2:
        return [*samples] * 2
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return [first, third]


def meet(collective: Collective) -> None:
    """Return once all ranks are here."""
    collective.all_gather(torch.zeros(1), op=Operation("meeting"))


# --- memory of this process ---


def reset_peak_memory() -> None:
    """Let the kernel's high-water mark start again, where it can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """The high-water mark; 0 where the system does not say."""
    with suppress(OSError):
        said = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.M)
        return int(said[1]) * 1024 if said else 0
    return 0


def resident_bytes() -> int:
    """What is in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
