"""How long the windows of a step are, as this rank's host sees them."""

from __future__ import annotations

import time
from collections.abc import Callable

from prophet.scheduler.actions import Window

WAITS = ("a2a", "counts", "exposed_trans", "exposed_agg", "exposed_plan")


class Stopwatch:
    """Host seconds by name, summed over a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` towards `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return what was measured, and start again from zero."""
        taken, self.seconds = self.seconds, {}
        return taken

    def waited(self) -> float:
        """Seconds of it that were communication, and no cover for transfers."""
        return sum(self.seconds.get(name, 0.0) for name in WAITS)


class WindowClock:
    """Seconds of compute by window: from one window's start to the next one's, less what the stopwatch saw of waiting.

    On a device that computes behind the host's back these are not the device's seconds.
    """

    def __init__(self, stopwatch: Stopwatch, now: Callable[[], float] = time.perf_counter) -> None:
        self._stopwatch = stopwatch
        self._now = now
        self._open: tuple[Window, float, float] | None = None
        self._seconds: dict[Window, list[float]] = {}

    def enter(self, window: Window) -> None:
        """A window starts, and the one before it ends."""
        self.close()
        self._open = (window, self._now(), self._stopwatch.waited())

    def close(self) -> None:
        """The window under way ends."""
        if self._open is not None:
            window, began_s, waited_s = self._open
            spent = self._now() - began_s - (self._stopwatch.waited() - waited_s)
            self._seconds.setdefault(window, []).append(max(spent, 0.0))
            self._open = None

    def take(self) -> dict[Window, float]:
        """Return every window's mean length, and start again: a step of several microbatches has each of them often."""
        self.close()
        taken, self._seconds = self._seconds, {}
        return {window: sum(seconds) / len(seconds) for window, seconds in taken.items()}
