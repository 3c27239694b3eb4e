"""How long the windows of a step are: as this rank's host sees them, as all ranks agree, and by the model.

Each rank measures its windows itself. The lengths travel with the counts, and the mean over ranks cuts the
transfers, which has to be the same everywhere.

Shape legend: R ranks, L layers, W windows of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prophet.scheduler.actions import Window, WindowKind
from prophet.spec import FloatArray, IntArray, PlanContext

# what the stopwatch counts of communication: no compute, so no cover for transfers
WAITS = ("a2a", "counts", "exposed_trans", "exposed_agg", "exposed_plan")
KINDS: tuple[WindowKind, ...] = ("FEC", "FNEC", "BNEC", "BEC")
# they hide the first block's transfers
_ENDS: tuple[WindowKind, ...] = ("START", "END")
# of four parts: how much of the lengths so far a new measurement leaves
_KEEP = 3


class Timing:
    """One stretch of time that a stopwatch counts: a context, or `start` and `stop` where the two lie apart."""

    __slots__ = ("_began_s", "_name", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, name: str) -> None:
        self._stopwatch, self._name = stopwatch, name
        self._began_s = 0.0

    def start(self) -> None:
        self._began_s = time.perf_counter()

    def stop(self) -> None:
        self._stopwatch.add(self._name, time.perf_counter() - self._began_s)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()


class Stopwatch:
    """Host seconds by name, summed over a step: `with stopwatch("split"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> Timing:
        """Return a stretch of time that counts towards `name`."""
        return Timing(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` towards `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return what was measured, and start again from zero."""
        taken, self.seconds = self.seconds, {}
        return taken

    def waited(self) -> float:
        """Return the seconds of it that were communication, and no cover for transfers."""
        return sum(self.seconds.get(name, 0.0) for name in WAITS)


class WindowClock:
    """Seconds of compute by window: from one window's start to the next one's, less what was waiting.

    On a device that computes behind the host's back these are not the device's seconds.

    Args:
        stopwatch: Knows how long was waited.
        now: Returns seconds; another one in tests.
    """

    def __init__(self, stopwatch: Stopwatch, now: Callable[[], float] = time.perf_counter) -> None:
        self._stopwatch = stopwatch
        self._now = now
        self._open: tuple[Window, float, float] | None = None
        self._seconds: dict[Window, list[float]] = {}

    def enter(self, window: Window) -> None:
        """Note that a window starts, and that the one before it ends."""
        self.close()
        self._open = (window, self._now(), self._stopwatch.waited())

    def close(self) -> None:
        """Note that the window under way ends."""
        if self._open is not None:
            window, began_s, waited_s = self._open
            spent = self._now() - began_s - (self._stopwatch.waited() - waited_s)
            # two clocks are read, one after the other: a window of nothing could come out negative
            self._seconds.setdefault(window, []).append(max(spent, 0.0))
            self._open = None

    def take(self) -> dict[Window, float]:
        """Return every window's mean length, and start again: with several microbatches each is measured often."""
        self.close()
        taken, self._seconds = self._seconds, {}
        return {window: sum(seconds) / len(seconds) for window, seconds in taken.items()}


class BlockWindows:
    """Lengths of one block's windows in microseconds. The first block's include the two ends of the step.

    Args:
        block: The block's place in the order of execution.

    Attributes:
        own_us: What this rank measured in the last step, [W].
    """

    def __init__(self, block: int) -> None:
        ends = [Window(kind) for kind in _ENDS] if block == 0 else []
        self._windows = [Window(kind, block) for kind in KINDS] + ends
        self._agreed_us = np.zeros(len(self._windows), dtype=np.int64)
        self.own_us = [0] * len(self._windows)

    def measured(self, seconds: Mapping[Window, float]) -> None:
        """Take in this rank's windows of the step that has ended."""
        self.own_us = [round(1e6 * seconds.get(w, 0.0)) for w in self._windows]

    def agree(self, reported_us: IntArray) -> None:
        """Take in what all ranks measured, [R, W]."""
        # integers all through: every rank comes to the same lengths, and cuts at the same element
        mean, known = reported_us.sum(axis=0) // reported_us.shape[0], self._agreed_us
        self._agreed_us = (_KEEP * known + mean) // (_KEEP + 1) if known.any() else mean

    def agreed_us(self) -> dict[Window, int]:
        """Return microseconds by window, the same on all ranks; zeros before the first measurement."""
        return dict(zip(self._windows, self._agreed_us.tolist(), strict=True))


def predicted_window_us(contexts: Sequence[PlanContext], rank_load_LR: Sequence[IntArray]) -> dict[Window, int]:
    """Return microseconds by window from the performance model, for devices whose windows the host cannot time.

    Args:
        contexts: The machine and the layer, by block, [L].
        rank_load_LR: Rows that every rank computed in the last step, [L, R]; the same integers on every rank.
    """
    lengths: dict[Window, int] = {}
    for block, (context, load) in enumerate(zip(contexts, rank_load_LR, strict=True)):
        rate: FloatArray = np.asarray(context.topology.flops_per_s) / context.shape.forward_flops_per_token
        # backward takes twice the forward's products: one for the rows, one for the weights
        experts_s = float((load / rate).mean())
        windows = context.windows
        for kind, seconds in zip(KINDS, (experts_s, windows.fnec_s, windows.bnec_s, 2.0 * experts_s), strict=True):
            lengths[Window(kind, block)] = round(1e6 * seconds)
    # what comes before the first block is like what comes before any other: its own attention
    return lengths | {Window("START"): lengths[Window("FNEC", 0)], Window("END"): lengths[Window("BNEC", 0)]}
