"""End a process that waits in torch for its device for ever, and say why: another rank has failed.

`loss.item()` waits for a device. Where the device waits for a rank that will not come, nothing in Python can end that
wait: no error can be raised in it, and giving the groups up would let training go on with undefined numbers. So the
thread of the pulse ends the process.

Three things must hold. A rank has failed or ended since this process last made a group: one that has recovered goes on.
For `STUCK_S` the main thread is found at the same instruction. And for half of that its device does not come to an
event, so that a loop is told from a wait. A rank that is only silent proves nothing: it may be stopped, or at work.
All look at all, so with more than 64 processes nobody does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from prophet.ranks.failures.presence import KEEPER, LEFT, LEFT_AFTER, PULSE_S, Presence

STUCK_S = 20.0
_KEY = "prophet failure on a device"
# of a second, for each rank, between two looks at all ranks: many share one store
_SHARE_S = 0.2
# With more processes nobody looks
_MOST_RANKS = 64

Reached = Callable[[], bool]
"""Whether a device has come to where it was marked."""


class StuckWatch:
    """Looks at this process with every pulse, see the module.

    Args:
        presence: This process among all of them.
        ranks: How many processes there are.
        mark: Marks where the devices of this process are. Called only once a rank has failed: a stream must not be
            asked while a graph is captured.
    """

    def __init__(self, presence: Presence, ranks: int, mark: Callable[[], Reached]) -> None:
        self._presence, self._ranks, self.mark = presence, ranks, mark
        # What has failed before this process made its present groups; None while it has none on a device
        self._over: dict[int, str] | None = None
        # Where the main thread was at the last look, and since when: a thread that moves does not wait
        self._place: tuple[object, ...] = ()
        self._since = self._looked = time.monotonic()
        self._ended: dict[int, str] = {}
        # Since when the device has not come to a mark, while another rank has failed
        self._marked: tuple[float, Reached] | None = None

    def renew(self) -> None:
        """Take the failures so far for over: groups are made anew."""
        if self._ranks > _MOST_RANKS:
            return
        before, self._over = self._over, {}
        with suppress(RuntimeError):
            # several groups are made in a row
            if before is None or time.monotonic() - self._looked > PULSE_S:
                self._looked, self._ended = time.monotonic(), self._have_ended()
            self._over = self._failures()

    def report(self, error: Exception) -> None:
        """Tell the other ranks that this one has given up its device's groups."""
        # The time, so that the same failure counts again in groups that were made since
        text = json.dumps([self._presence.rank, f"{type(error).__name__}: {error}", time.time()])
        with suppress(RuntimeError):
            self._presence.store.set(_KEY, text)

    def look(self, store_is_gone: bool) -> bool:
        """Look once, from another thread than the main one; ends the process where it is stuck.

        Args:
            store_is_gone: Whether the store does not answer any more: the process that kept it has ended.

        Returns:
            Whether there is anything to look at.
        """
        if self._over is None:
            return False
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        now = time.monotonic()
        # Messages, too: a loop may be found in the same call at each look
        place = (id(frame), frame.f_lasti if frame is not None else 0, self._presence.begun_messages())
        if frame is None or place != self._place:
            self._place, self._since, self._marked = place, now, None
        elif now - self._since >= STUCK_S / 2:
            self._judge(frame, now, store_is_gone)
        return True

    def _judge(self, frame: FrameType, now: float, store_is_gone: bool) -> None:
        if not store_is_gone and now - self._looked >= max(PULSE_S, _SHARE_S * self._ranks):
            self._looked, self._ended = now, self._have_ended()
        failures = {KEEPER: "the store that it kept is gone"} if store_is_gone else self._failures()
        new = {rank: text for rank, text in failures.items() if (self._over or {}).get(rank) != text}
        if not new:
            self._marked = None
        elif self._marked is None or self._marked[1]():
            self._marked = now, self.mark()
        elif now - self._marked[0] >= STUCK_S / 2:
            _end(self._presence.rank, frame, new)

    def _failures(self) -> dict[int, str]:
        """What ranks have failed of: the one that has reported last, and those that have ended."""
        found = dict(self._ended)
        reported = self._presence.first_failure(_KEY)
        if reported is not None:
            rank, text, at = json.loads(reported)
            if rank != self._presence.rank:
                found[rank] = f"{text} ({time.strftime('%H:%M:%S', time.localtime(at))})"
        return found

    def _have_ended(self) -> dict[int, str]:
        found = {}
        for rank in range(self._ranks):
            pulse = self._presence.pulse(rank) if rank != self._presence.rank else None
            if pulse is None or pulse.at == LEFT:
                continue
            if pulse.at.startswith(LEFT_AFTER):
                found[rank] = f"its program has ended after {pulse.at.removeprefix(LEFT_AFTER)}"
            elif self._presence.has_ended(pulse):
                found[rank] = f"its process has ended, when last heard of {pulse.at or 'at its start'}"
        return found


def _end(rank: int, frame: FrameType, failures: dict[int, str]) -> None:
    try:
        stack = "".join(traceback.format_stack(frame))
        lines = "\n".join(f"rank {r}: {text}" for r, text in sorted(failures.items()))
        text = (
            f"rank {rank} ends. Its device waits for a rank that does not come, and its main thread waits for the "
            f"device, which no error can interrupt, at\n{stack}{lines}\n"
        )
        # One write to the descriptor: what replaces sys.stderr may need the main thread
        os.write(2, text.encode(errors="replace"))
    # also where nobody reads that
    finally:
        os._exit(1)
