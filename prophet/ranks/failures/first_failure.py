"""Waits that end when another rank fails: who failed first, who has ended, who gives no sign of life.

The first rank to fail reports it to all of them, through the store that they met in. During a long wait a rank asks
there, in another thread: a store may not answer either. So ranks that wait for one another in a row all learn of the
one at its end, and Ctrl-C is seen, for the thread that waits comes back in short turns.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from prophet.errors import StageFailed
from prophet.ranks.failures.presence import LEFT, LEFT_AFTER, PULSE_S, Presence, Pulse
from prophet.ranks.waiting import TURN_S, Waiter, joined

T = TypeVar("T")
# Between two queries of the store; a shorter wait makes none
LOOK_S = 0.5
# Two pulses that did not come, and some time for the second one
SILENT_S = 2.5 * PULSE_S
# How long the store may take to answer
ASK_S = 1.0


def _to_json(failure: StageFailed) -> str:
    return json.dumps([failure.rank, failure.stages, failure.action, failure.cause])


class FailureWatch:
    """Failures of the ranks of one group, as this rank learns of them.

    Args:
        presence: This process among all of them.
        ranks: The group's ranks among all processes; errors use their numbers in the group.
        name: The group's name, equal on all ranks.
        stages_of: Returns the stages that a rank of the group runs now.
    """

    def __init__(
        self, presence: Presence, ranks: Sequence[int], name: str, stages_of: Callable[[int], Sequence[int]]
    ) -> None:
        self.presence = presence
        self.ranks = list(ranks)
        self.stages_of = stages_of
        self._key = f"prophet first failure of {name}"
        self._asker = Waiter(f"asks for news of {name}")
        # A rank's last pulse, and when it was first seen
        self._last_pulses: dict[int, tuple[Pulse, float]] = {}
        # Ranks whose processes were found gone by the last query
        self._ended: set[int] = set()
        # When the store answered last
        self._looked = -math.inf
        self._store_is_gone = False
        self._acquainted: Future[StageFailed | None] | None = None

    # --- waits ---

    def begin(self) -> None:
        """Read in the background which processes the ranks are, to notice their end even without the store."""
        if self._acquainted is None or (self._acquainted.done() and len(self._last_pulses) < len(self.ranks) - 1):
            self._acquainted = self._asker.submit(self._look)

    def turns(self, limit_s: float) -> Callable[[], None]:
        """Make the function that a wait calls between its turns.

        Args:
            limit_s: Seconds that the wait may take.

        Returns:
            A function that raises `StageFailed` once a failure is known, and TimeoutError after `limit_s`.
        """
        # All ranks share one store: with many of them each asks less often
        every_s = max(LOOK_S, len(self.ranks) / 200)
        began = time.monotonic()
        next_look = began + every_s
        news: Future[StageFailed | None] | None = None

        def turn() -> None:
            nonlocal next_look, news
            now = time.monotonic()
            # Never waited for: where the store does not answer, this wait still ends by its own limit
            if news is not None and news.done():
                failure, news = news.result(), None
                if failure is not None:
                    raise failure
            if news is None and now >= next_look:
                news, next_look = self._asker.submit(self._look), now + every_s
            if now >= began + limit_s:
                raise TimeoutError(f"no answer within {limit_s:g} s")

        return turn

    # --- news ---

    def _look(self) -> StageFailed | None:
        """Find the first failure, None where there was none so far; a process gone in two queries counts as one."""
        known = self._ask_store()
        if known is not None:
            return known
        for number, (pulse, _) in sorted(self._last_pulses.items()):
            if pulse.at.startswith(LEFT_AFTER):
                return self._first(self._lost(number, pulse.at.removeprefix(LEFT_AFTER)))
        # Twice: a rank that has just ended may have reported its failure after the store was asked
        ended = {n for n, (p, _) in self._last_pulses.items() if p.at != LEFT and self.presence.has_ended(p)}
        gone, self._ended = ended & self._ended, ended
        return self._first(self._lost(min(gone), "its process has ended")) if gone else None

    def _ask_store(self) -> StageFailed | None:
        """Read the failure that was reported first, and the ranks' pulses."""
        if self._store_is_gone:
            return None
        try:
            known = self.presence.first_failure(self._key)
            if known is not None:
                return StageFailed(*json.loads(known))
            now = time.monotonic()
            for number, rank in enumerate(self.ranks):
                pulse = self.presence.pulse(rank) if rank != self.presence.rank else None
                if pulse is not None and (
                    number not in self._last_pulses or self._last_pulses[number][0].count != pulse.count
                ):
                    self._last_pulses[number] = pulse, now
            self._looked = now
        # The process that keeps the store may be the one that is gone
        except RuntimeError:
            self._store_is_gone = True
        return None

    def _lost(self, number: int, cause: str) -> StageFailed:
        at = self._last_pulses[number][0].at if number in self._last_pulses else ""
        if at.startswith(LEFT):
            return StageFailed(number, tuple(self.stages_of(number)), "its program, outside the pipeline", cause)
        place = f"its program, {at}" if at.startswith("after ") else at.removeprefix("in ")
        action = f"{place} (when last heard of)" if at else "an action that it did not tell of"
        return StageFailed(number, tuple(self.stages_of(number)), action, cause)

    def _first(self, failure: StageFailed) -> StageFailed:
        if not self._store_is_gone:
            try:
                return StageFailed(*json.loads(self.presence.report_failure(self._key, _to_json(failure))))
            except RuntimeError:
                self._store_is_gone = True
        return failure

    def report(self, failure: StageFailed) -> StageFailed:
        """Report `failure` to all ranks, unless another one came first; the one that did."""
        # Where the store does not answer in time, the other ranks find out by their own means
        return self._asked(lambda: self._first(failure)) or failure

    def explain(self, fallback: StageFailed, patience_s: float) -> StageFailed:
        """Find out why a wait of this rank has failed, and report it to all ranks.

        The cause is a failure that a rank has reported, or a process that was killed or stopped, that gives no sign of
        life, or that has ended by itself.

        Args:
            fallback: The failure where no other cause is found.
            patience_s: Seconds to look for one.
        """
        deadline = time.monotonic() + patience_s
        while True:
            # Pulses count only where the store has answered since: old ones would make all ranks look silent
            asked = time.monotonic()
            found = self._asked(self._look)
            if found is not None:
                return found
            now = time.monotonic()
            known = self._last_pulses.items() if self._looked >= asked else ()
            # The surest first: a stopped process is silent, too
            for cause, ranks in (
                (
                    "its process is stopped",
                    [n for n, (p, _) in self._last_pulses.items() if self.presence.is_stopped(p)],
                ),
                ("its program has ended", [n for n, (pulse, _) in known if pulse.at == LEFT]),
                (f"no sign of life for {SILENT_S:g} s or more", [n for n, (_, t) in known if now - t > SILENT_S]),
            ):
                if ranks:
                    return self.report(self._lost(min(ranks), cause))
            if now >= deadline:
                return self.report(fallback)
            time.sleep(TURN_S)

    def places(self) -> str:
        """Describe where the other ranks were by their last pulses."""
        return "; ".join(f"rank {n} {pulse.at}" for n, (pulse, _) in sorted(self._last_pulses.items()) if pulse.at)

    def _asked(self, call: Callable[[], T]) -> T | None:
        """Run a query of the store in its thread; None where it does not answer in time."""
        deadline = time.monotonic() + ASK_S

        def turn() -> None:
            if time.monotonic() >= deadline:
                raise TimeoutError

        with suppress(TimeoutError):
            return joined(self._asker.submit(call), turn)
        return None

    def close(self) -> None:
        """End the thread that asks the store."""
        self._asker.close()
