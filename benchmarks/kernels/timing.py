"""Timing: interleaved repetitions, medians, caches exceeded; CUDA events on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 cache of the largest GPU
HEAD_START_CYCLES = 2_000_000  # about a millisecond, for the host to launch everything before the GPU begins
LONGEST_CYCLES = 64 * HEAD_START_CYCLES


class Flusher:
    """Overwrites the L2 cache between repetitions on a GPU; on CPU does nothing.

    `cycles`: the head start that the host has needed so far.
    """

    def __init__(self, device: str) -> None:
        self.block = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device == "cuda" else None
        self.cycles = HEAD_START_CYCLES

    def __call__(self) -> None:
        if self.block is not None:
            self.block.zero_()


def once_us(run: Callable[[], object], device: str, flush: Flusher) -> float:
    """Microseconds of one run; on a GPU those between the first and the last kernel (see `on_gpu_us`)."""
    if device == "cuda":
        while True:
            us, launched = on_gpu_us(run, flush)
            if launched or flush.cycles >= LONGEST_CYCLES:
                return us
            flush.cycles *= 4
    flush()
    before = time.perf_counter()
    run()
    return (time.perf_counter() - before) * 1e6


def on_gpu_us(run: Callable[[], object], flush: Flusher) -> tuple[float, bool]:
    """Microseconds between the first and the last kernel of a run that the GPU begins after `flush.cycles`.

    Also whether the host had launched all of them by then: if not, it is the host's speed that was measured.
    """
    flush()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(flush.cycles)
    begin.record()
    run()
    end.record()
    launched = not begin.query()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3, launched


@dataclass(frozen=True, slots=True)
class Timer:
    """Where and how often runs are timed. Rounds stop early when `budget_s` is spent, after three at least."""

    device: str
    repeats: int
    budget_s: float

    def medians_us(self, runs: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
        """Median time of each named run; every round visits all of them, on one input set of several.

        `runs[name]` has one callable for each input set.
        """
        flush = Flusher(self.device)
        for sets in runs.values():  # compile, allocate
            sets[0]()
        if self.device == "cuda":
            torch.cuda.synchronize()
        found: dict[str, list[float]] = {name: [] for name in runs}
        deadline = time.perf_counter() + self.budget_s
        for i in range(self.repeats):
            for name, sets in runs.items():
                found[name].append(once_us(sets[i % len(sets)], self.device, flush))
            if i >= 2 and time.perf_counter() > deadline:
                break
        return {name: statistics.median(times) for name, times in found.items()}


def beside(us: Mapping[str, float], peer: str) -> dict[str, Any]:
    """Columns of a row: ours and a peer's, of these medians."""
    return {"ours_us": us["ours"], "peer": peer, "peer_us": us[peer], "ratio": us[peer] / us["ours"]}
