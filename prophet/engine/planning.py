"""Planning in the background: a layer's next placement is planned during a step, and taken by the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from prophet.engine.replan import KeptPlan
from prophet.layer.counts import UNKNOWN
from prophet.ranks.waiting import Waiter
from prophet.spec import Placement


class PlanAhead:
    """One layer's plans.

    Args:
        thread: Where plans are made, shared by the layers.
        check: Raises for a placement that a planner must not return.
        timeout_s: Seconds that a step waits for its plan.
        who: Rank and layer, for messages.

    Attributes:
        kept: The plan in force; None before the first.
    """

    def __init__(self, thread: Waiter, check: Callable[[Placement], None], timeout_s: float, who: str) -> None:
        self.kept: KeptPlan | None = None
        self._thread, self._check, self._timeout_s, self._who = thread, check, timeout_s, who
        self._coming: Future[tuple[KeptPlan, float]] | None = None

    def start(self, plan: Callable[[], KeptPlan]) -> None:
        """Plan for the next step, in place of an earlier plan for it."""
        # One that has started runs to its end, and its result is dropped; the thread takes one at a time
        self.cancel()

        def timed() -> tuple[KeptPlan, float]:
            before = time.perf_counter()
            return plan(), time.perf_counter() - before

        self._coming = self._thread.submit(timed)

    def take(self) -> float | None:
        """Put the coming plan into force; the seconds that it took, None where none was coming."""
        if self._coming is None:
            return None
        self.kept, planned_s = self._result(self._coming)
        self._coming = None
        return planned_s

    def latest(self) -> KeptPlan | None:
        """Return the plan for the next step, waited for where it is under way."""
        return self.kept if self._coming is None else self._result(self._coming)[0]

    def upcoming(self, in_force: int) -> int:
        """Return the digest of the next placement, `UNKNOWN` unless its plan is ready; `in_force` if none is coming."""
        if self._coming is None:
            return in_force
        # Never waited for: a rank that is late with its plan must not delay the counts of all
        if not self._coming.done() or self._coming.cancelled() or self._coming.exception() is not None:
            return UNKNOWN
        return self._coming.result()[0].placement.digest()

    def cancel(self) -> None:
        """Give up the plan that is coming, unless it is under way."""
        if self._coming is not None:
            self._coming.cancel()

    def drop(self) -> None:
        """Throw away the plan that is under way."""
        # One that has started is waited for: it reads state that the caller is about to change
        if self._coming is not None and not self._coming.cancel():
            self._coming.exception(timeout=self._timeout_s)
        self._coming = None

    def resume(self, plan: KeptPlan | None) -> None:
        """Go on from a saved plan, which the next step takes."""
        # A future that is done: from here on a saved plan takes the way of a new one
        self.kept = self._coming = None
        if plan is not None:
            self._coming = Future()
            self._coming.set_result((plan, 0.0))

    def _result(self, coming: Future[tuple[KeptPlan, float]]) -> tuple[KeptPlan, float]:
        try:
            plan, planned_s = coming.result(timeout=self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self._who}: planning took more than {self._timeout_s:g} s") from None
        # Here and not on the thread, so that the error is raised in the user's loop
        self._check(plan.placement)
        return plan, planned_s
