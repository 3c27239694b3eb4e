"""What a move adds to its step: layers go to and fro in every step, within it or after it, beside copies that stay.

One policy stays on the equal map, one on a map that differs by a layer at the first and at the last cut. Two more swing
between these maps and move the same layers: one after each step, one before each update, with parameters and optimizer
state on their way beside the step. What is added to a step is its time less that of the copy that stays on the
map with which it began.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from torch import Tensor

from pipeline_balance.pipeline.move.transaction import Prepared, Switched
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.ranks.waiting import Waiter

STILL = ("stays", "stays-shifted")
SWINGING = ("moves-after", "moves-within")
POLICIES = (*STILL, *SWINGING)
MOST = 0.4
"""Of what a move after a step adds, the share that a move within it may add."""


def maps_of(layers: int, ranks: int) -> tuple[StageMap, StageMap]:
    """The equal map, and the one whose first and last stages have a layer less and more."""
    even = StageMap.even(layers, ranks)
    cuts = list(even.boundaries)
    cuts[1] -= 1
    cuts[-2] += ranks > 2
    return even, StageMap.contiguous(cuts)


class Swing:
    """Trains a pipeline with a move in every step.

    Attributes:
        moves: What they took on this rank.
    """

    def __init__(self, pipeline: ElasticPipeline, *, within: bool, timeout_s: float) -> None:
        self.pipeline, self.within, self.timeout_s = pipeline, within, timeout_s
        self.maps = maps_of(len(pipeline.model.units), pipeline.ranks)
        self.moves: list[Switched] = []
        self._thread, self._side = Waiter("prepares a move"), pipeline.side_collective()

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """Train on a batch and move to the other map."""
        pipeline = self.pipeline
        to = self.maps[int(pipeline.stage_map == self.maps[0])]
        ahead: list[Future[Prepared]] = []

        def begin() -> None:
            # either way the route is found beside the step
            ahead.append(self._thread.submit(lambda: pipeline.prepare(to, self._side, early=self.within)))

        def move() -> None:
            pipeline.before_update(lambda: None)
            self.moves.append(pipeline.rebuild(to, prepared=ahead[0].result(self.timeout_s)))

        pipeline.before_pass(begin)
        if self.within:
            pipeline.before_update(move)
        loss = pipeline.step(inputs, labels)
        if not self.within:
            move()
        return loss


def row_of(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What moves add, from every rank's {policy: figures}."""
    step_s = {p: np.max([r[p]["step_s"] for r in by_rank], axis=0) for p in POLICIES}
    still_s = [statistics.median(step_s[p].tolist()) for p in STILL]
    added: dict[str, list[float]] = {}
    for policy in SWINGING:
        began = [STILL.index("stays") if by_rank[0][policy]["even"][k] else 1 for k in range(len(step_s[policy]))]
        added[policy] = [float(s) - still_s[b] for s, b in zip(step_s[policy], began, strict=True)]
    medians = {p: statistics.median(a) for p, a in added.items()}
    early, sent = (sum(r["moves-within"][name] for r in by_rank) for name in ("early_bytes", "bytes"))
    return {
        "still_s": still_s,
        "added_s": medians,
        "added_s_by_step": {p: [round(x, 5) for x in a] for p, a in added.items()},
        "within_of_after": medians["moves-within"] / medians["moves-after"],
        "early_share": early / max(1, sent),
        "losses_apart": max(
            abs(a - b)
            for p in SWINGING
            for a, b in zip(by_rank[0][p]["losses"], by_rank[0]["stays"]["losses"], strict=True)
        ),
    }
