"""The next decision, worked out beside the backward pass: measured, decided and, where layers will move, prepared."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline_balance.control.measure import gather_costs
from pipeline_balance.spec import LayerCost

if TYPE_CHECKING:
    from pipeline_balance.control.controller import Controller, Decision
    from pipeline_balance.pipeline.trainer import Prepared


class Ahead:
    """A decision, and what a move needs, worked out in a thread of its own on the side communicator."""

    def __init__(self, controller: Controller, local: Mapping[int, LayerCost]) -> None:
        self.costs: list[LayerCost] = []
        self.prepared: Prepared | None = None
        self._decision: Decision | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(controller, local), name="prepare-move", daemon=True)
        self._thread.start()

    def _run(self, controller: Controller, local: Mapping[int, LayerCost]) -> None:
        pipeline = controller.pipeline
        side = pipeline.side_collective()
        try:
            gathered = gather_costs(local, pipeline.stage_map.layers, side, pipeline.device)
            self.costs = controller.at_unit_speed(gathered)
            decision = controller.decide_from(self.costs, side)
            if decision.move:
                self.prepared = pipeline.prepare(decision.best, side)
            self._decision = decision
        except BaseException as error:  # raised again where the decision is taken up
            self._error = error

    def result(self, timeout_s: float) -> Decision:
        """The decision; raises what went wrong in the thread."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._decision is None:
            raise TimeoutError(f"no decision was worked out within {timeout_s:g} s")
        return self._decision
