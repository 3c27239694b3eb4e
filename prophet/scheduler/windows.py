"""How long the windows of a step are: as this rank measures them, as all ranks agree, and by the model.

Each rank measures its windows itself. The lengths travel with the counts, and the mean over ranks cuts the
transfers, which has to be the same everywhere. On a device that computes behind the host's back, events mark the time.
They are read one step later, so that nothing waits for the device.

Shape legend: R ranks, L layers, W windows of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prophet.ranks.device.clocks import Mark, clock_on, is_over, on_host, seconds_between
from prophet.scheduler.actions import Window, WindowKind
from prophet.spec import FloatArray, IntArray, PlanContext

if TYPE_CHECKING:
    import torch

# what the stopwatch counts of communication: no compute, so no cover for transfers
WAITS = ("a2a", "counts", "exposed_trans", "exposed_agg", "exposed_plan")
KINDS: tuple[WindowKind, ...] = ("FEC", "FNEC", "BNEC", "BEC")
# they hide the first block's transfers
_ENDS: tuple[WindowKind, ...] = ("START", "END")
# of four parts: how much of the lengths so far a new measurement leaves
_KEEP = 3
# pairs of marks that a stopwatch keeps unread
_MOST_MARKS = 1 << 14


class Timing:
    """One stretch of time that a stopwatch counts: a context, or `start` and `stop` where the two lie apart."""

    __slots__ = ("_began", "_name", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, name: str) -> None:
        self._stopwatch, self._name = stopwatch, name
        self._began: Mark = 0.0

    def start(self) -> None:
        self._began = self._stopwatch.now()

    def stop(self) -> None:
        self._stopwatch.between(self._name, self._began, self._stopwatch.now())

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()


class Stopwatch:
    """Seconds by name, summed over a step: `with stopwatch("split"): ...`.

    Attributes:
        now: Marks the time: by the host's clock until `on` is called.
        seconds: What is known so far.
        waits: The stretches of waiting on a device since a `WindowClock` put a list here; None: nobody asks.
    """

    def __init__(self) -> None:
        self.now: Callable[[], Mark] = time.perf_counter
        self.seconds: dict[str, float] = {}
        self.waits: list[tuple[Mark, Mark]] | None = None
        # of a device, by name: of this step, and of the one before it
        self._stretches: list[tuple[str, Mark, Mark]] = []
        self._earlier: list[tuple[str, Mark, Mark]] = []

    def on(self, device: torch.device) -> None:
        """Time what runs on `device` from now on."""
        self.now = clock_on(device)

    def __call__(self, name: str) -> Timing:
        """Return a stretch of time that counts towards `name`."""
        return Timing(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` towards `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def between(self, name: str, began: Mark, ended: Mark) -> None:
        """Count a stretch of time.

        Args:
            name: What it counts towards.
            began: The mark at its start.
            ended: The mark at its end.
        """
        if on_host(ended):
            self.add(name, ended - began)
            return
        self._stretches.append((name, began, ended))
        if self.waits is not None and name in WAITS:
            self.waits.append((began, ended))
        # a long evaluation has no step that would end: its marks must not pile up, and the first ones are long over
        if len(self._stretches) > _MOST_MARKS:
            first, rest = self._stretches[: _MOST_MARKS // 2], self._stretches[_MOST_MARKS // 2 :]
            if is_over(first[-1][2]):
                self._count(first)
                self._stretches = rest

    def _count(self, stretches: Sequence[tuple[str, Mark, Mark]]) -> None:
        for name, began, ended in stretches:
            self.add(name, seconds_between(began, ended))

    def take(self) -> dict[str, float]:
        """Return what was measured, and start again from zero.

        What ran on a device is returned one call later, or once it is over: this waits for nothing.
        """
        if self._earlier and is_over(self._earlier[-1][2]):
            self._count(self._earlier)
            self._earlier = []
        self._earlier += self._stretches
        self._stretches = []
        taken, self.seconds = self.seconds, {}
        return taken

    def waited(self) -> float:
        """Return the seconds of it that were communication, and no cover for transfers."""
        return sum(self.seconds.get(name, 0.0) for name in WAITS)


class WindowClock:
    """Seconds of compute by window: from one window's start to the next one's, less what was waiting.

    Args:
        stopwatch: Knows how long was waited.
        now: Marks the time, as the stopwatch does; another one in tests.
    """

    def __init__(self, stopwatch: Stopwatch, now: Callable[[], Mark] | None = None) -> None:
        self._stopwatch = stopwatch
        self._given = now
        self._open: tuple[Window, Mark, float] | None = None
        self._seconds: dict[Window, list[float]] = {}
        # of a device, with the waits in it: of this step, and of the one before it
        self._marked: list[tuple[Window, Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self._earlier: list[tuple[Window, Mark, Mark, list[tuple[Mark, Mark]]]] = []

    def _mark(self) -> Mark:
        # the stopwatch's clock may change
        return (self._given or self._stopwatch.now)()

    def enter(self, window: Window) -> None:
        """Note that a window starts, and that the one before it ends."""
        self.close()
        self._stopwatch.waits = []
        self._open = (window, self._mark(), self._stopwatch.waited())

    def close(self) -> None:
        """Note that the window under way ends."""
        if self._open is not None:
            (window, began, waited_s), ended = self._open, self._mark()
            waits, self._stopwatch.waits = self._stopwatch.waits or [], None
            if on_host(ended):
                self._add(window, ended - began - (self._stopwatch.waited() - waited_s))
            else:
                self._marked.append((window, began, ended, waits))
            self._open = None

    def _add(self, window: Window, spent_s: float) -> None:
        # two clocks are read, one after the other: a window of nothing could come out negative
        self._seconds.setdefault(window, []).append(max(spent_s, 0.0))

    def take(self) -> dict[Window, float]:
        """Return every window's mean length, and start again: with several microbatches each is measured often.

        Windows on a device are returned one call later, or once they are over: this waits for nothing.
        """
        self.close()
        if self._earlier and is_over(self._earlier[-1][2]):
            for window, began, ended, waits in self._earlier:
                waited_s = sum(seconds_between(*wait) for wait in waits)
                self._add(window, seconds_between(began, ended) - waited_s)
            self._earlier = []
        self._earlier += self._marked
        self._marked = []
        taken, self._seconds = self._seconds, {}
        return {window: sum(found) / len(found) for window, found in taken.items()}


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
    """Return microseconds by window from the performance model, for the steps before the first measurement.

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
