"""The planning thread: a layer's next placement is planned beside the step, and handed to the step that begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from prophet.engine.replan import KeptPlan
from prophet.layer.counts import UNKNOWN
from prophet.ranks.waiting import Waiter
from prophet.spec import Placement


class PlanAhead:
    """One layer's plans. kept: the plan in force, None before the first.

    thread: where plans are made, shared by the layers. check: raises where a placement breaks its planner's promises.
    timeout_s: how long a step waits for its plan. who: rank and layer, for messages.
    """

    def __init__(self, thread: Waiter, check: Callable[[Placement], None], timeout_s: float, who: str) -> None:
        self.kept: KeptPlan | None = None
        self._thread, self._check, self._timeout_s, self._who = thread, check, timeout_s, who
        self._coming: Future[tuple[KeptPlan, float]] | None = None

    def start(self, plan: Callable[[], KeptPlan]) -> None:
        """Plan for the next step, instead of what is being planned for it."""
        self.cancel()

        def timed() -> tuple[KeptPlan, float]:
            before = time.perf_counter()
            return plan(), time.perf_counter() - before

        self._coming = self._thread.submit(timed)

    def take(self) -> float | None:
        """Hand over: the coming plan is the kept one from now on. Seconds that it took, None where none was coming."""
        if self._coming is None:
            return None
        self.kept, planned_s = self._result(self._coming)
        self._coming = None
        return planned_s

    def latest(self) -> KeptPlan | None:
        """The plan for the next step, waited for where it is under way."""
        return self.kept if self._coming is None else self._result(self._coming)[0]

    def upcoming(self, in_force: int) -> int:
        """Digest of the next placement, where that is known by now. in_force: that of the present one."""
        if self._coming is None:
            return in_force
        if not self._coming.done() or self._coming.cancelled() or self._coming.exception() is not None:
            return UNKNOWN
        return self._coming.result()[0].placement.digest()

    def cancel(self) -> None:
        """Give up the plan that is coming, unless it is under way."""
        if self._coming is not None:
            self._coming.cancel()

    def drop(self) -> None:
        """Throw away the plan that is under way."""
        if self._coming is not None and not self._coming.cancel():
            self._coming.exception(timeout=self._timeout_s)
        self._coming = None

    def resume(self, plan: KeptPlan | None) -> None:
        """Go on from what was saved: `plan` is handed over to the next step."""
        self.kept = self._coming = None
        if plan is not None:
            self._coming = Future()
            self._coming.set_result((plan, 0.0))

    def _result(self, coming: Future[tuple[KeptPlan, float]]) -> tuple[KeptPlan, float]:
        try:
            plan, planned_s = coming.result(timeout=self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self._who}: planning took more than {self._timeout_s:g} s") from None
        self._check(plan.placement)
        return plan, planned_s
