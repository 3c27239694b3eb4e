"""End a process that waits in torch for its device for ever, and say why: another rank has failed.

`loss.item()` waits for a device. Where the device waits for a rank that will not come, nothing in Python can end that
wait: no error can be raised in it, and giving the groups up would let training go on with undefined numbers. So the
thread of the pulse ends the process.

Three things must hold for `STUCK_S`: the main thread has not moved by one instruction, the device has work that it does
not finish, and a rank has failed or ended since this process last made a group. A process that has recovered goes on.
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

from prophet.ranks.presence import KEEPER, LEFT_AFTER, Presence, Pulse

STUCK_S = 20.0
_KEY = "prophet failure on a device"


class StuckWatch:
    """Looks at this process with every pulse, see the module.

    Args:
        presence: This process among all of them.
        ranks: How many processes there are.
        busy: Whether a device of this process has work under way. Asked only once the rest holds: a stream must not be
            asked while a graph is captured.
    """

    def __init__(self, presence: Presence, ranks: int, busy: Callable[[], bool]) -> None:
        self._presence, self._ranks, self._busy = presence, ranks, busy
        # What has failed before this process made its present groups; None while it has none on a device
        self._over: dict[int, str] | None = None
        # Where the main thread was at the last look
        self._place: tuple[object, ...] = ()
        self._since = time.monotonic()
        # Since when its device is known to be busy while another rank has failed
        self._busy_since: float | None = None
        # Each rank's last pulse, and when it was first seen
        self._pulses: dict[int, tuple[Pulse, float]] = {}

    def renew(self) -> None:
        """Take the failures so far for over: groups are made anew."""
        self._over = {}
        with suppress(RuntimeError):
            self._over = self._failures()

    def report(self, error: Exception) -> None:
        """Tell the other ranks that this one has given up its device's groups."""
        # A number, so that the same failure counts again in groups that were made since
        text = json.dumps([self._presence.rank, f"{type(error).__name__}: {error}", time.time()])
        with suppress(RuntimeError):
            self._presence.store.set(_KEY, text)

    def look(self, store_is_gone: bool) -> None:
        """Look once, from another thread than the main one; ends the process where it is stuck.

        Args:
            store_is_gone: Whether the store does not answer any more: the process that kept it has ended.
        """
        if self._over is None:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        now = time.monotonic()
        # Messages, too: a loop may be found in the same call at each look
        place = (id(frame), frame.f_lasti if frame is not None else 0, self._presence.begun_messages())
        if frame is None or place != self._place:
            self._place, self._since, self._busy_since = place, now, None
            return
        if now - self._since < STUCK_S / 2:
            return
        failures = {KEEPER: "the store that it kept is gone"} if store_is_gone else self._failures()
        new = {rank: text for rank, text in failures.items() if self._over.get(rank) != text}
        if not new or not self._busy():
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        elif now - self._busy_since >= STUCK_S / 2:
            _end(self._presence.rank, frame, new)

    def _failures(self) -> dict[int, str]:
        """What ranks have failed of: what one has reported, and those whose processes have ended or are silent."""
        now, found = time.monotonic(), {}
        for rank in range(self._ranks):
            pulse = self._presence.pulse(rank) if rank != self._presence.rank else None
            if pulse is None:
                continue
            before, first_seen = self._pulses.get(rank, (pulse, now))
            if pulse.count != before.count:
                first_seen = now
            self._pulses[rank] = pulse, first_seen
            if pulse.at.startswith(LEFT_AFTER):
                found[rank] = f"its program has ended after {pulse.at.removeprefix(LEFT_AFTER)}"
            elif self._presence.has_ended(pulse):
                found[rank] = f"its process has ended, when last heard of {pulse.at or 'at its start'}"
            elif now - first_seen >= STUCK_S / 2:
                found[rank] = f"it gives no sign of life, when last heard of {pulse.at or 'at its start'}"
        reported = self._presence.first_failure(_KEY)
        if reported is not None:
            rank, text, at = json.loads(reported)
            if rank != self._presence.rank:
                found[rank] = f"{text} ({time.strftime('%H:%M:%S', time.localtime(at))})"
        return found


def _end(rank: int, frame: FrameType, failures: dict[int, str]) -> None:
    stack = "".join(traceback.format_stack(frame))
    lines = "\n".join(f"rank {r}: {text}" for r, text in sorted(failures.items()))
    text = (
        f"rank {rank} ends. Its device waits for a rank that does not come, and its main thread waits for the device, "
        f"which no error can interrupt, at\n{stack}{lines}\n"
    )
    # One write to the descriptor: what replaces sys.stderr may need the main thread
    os.write(2, text.encode(errors="replace"))
    os._exit(1)
