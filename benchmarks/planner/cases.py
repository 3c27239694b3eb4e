"""Layer-steps of a trace, and planners that are led to them.

Shape legend: R ranks, E experts, L layers, T steps.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.walks import timed
from prophet.planner import Planner
from prophet.spec import IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace


@dataclass(frozen=True)
class Case:
    """One layer of one step: the load planned from and the load that came; `earlier` are the loads of the layer's
    iterations before the planned one, in order.
    """

    layer: int
    planned: IntArray
    present: IntArray
    earlier: tuple[IntArray, ...] = ()


def cases_of(trace: RoutingTrace, *, exact: bool, count: int) -> list[Case]:
    """Evenly spaced (step, layer) pairs; the planned load is the mean of the iteration before, or with `exact` the
    present one.
    """
    counts, iteration = trace.counts, trace.iteration
    first = 0 if exact else int(np.searchsorted(iteration, iteration[0], side="right"))
    layers = counts.shape[1]
    pairs = (len(counts) - first) * layers
    chosen = np.unique(np.linspace(0, pairs - 1, min(count, pairs)).astype(np.int64)) if pairs > 0 else []
    slices = list(trace.iteration_slices())

    @functools.cache
    def mean(number: int, layer: int) -> IntArray:
        steps = slices[number]
        load: IntArray = counts[steps, layer].astype(np.int64).sum(axis=0) // (steps.stop - steps.start)
        return load

    cases = []
    for pair in chosen:
        step, layer = first + int(pair) // layers, int(pair) % layers
        present = np.ascontiguousarray(counts[step, layer], dtype=np.int64)
        if exact:
            cases.append(Case(layer, present, present))
            continue
        number = next(i for i, steps in enumerate(slices) if steps.start <= step < steps.stop)
        before = [mean(i, layer) for i in range(number)]
        cases.append(Case(layer, before[-1], present, tuple(before[:-1])))
    return cases


class Walk:
    """A planner that goes on from step to step, led through the iterations of every layer in order.

    Others plan every case by itself.
    """

    def __init__(self, planner: Planner, context: PlanContext) -> None:
        self.planner, self.context = planner, context
        self._done: dict[int, int] = {}
        self._placements: dict[int, Placement] = {}
        self.plan_us: list[float] = []

    def place(self, case: Case) -> Placement:
        """Plan `case`, and before it the iterations of its layer that were not planned yet."""
        loads = [case.planned]
        if self.planner.name == "prophet":
            loads = [*case.earlier[self._done.get(case.layer, 0) :], case.planned]
            self._done[case.layer] = len(case.earlier) + 1
        for load in loads:
            here = dataclasses.replace(self.context, previous=self._placements.get(case.layer))
            placement, us = timed(lambda at=load, c=here: self.planner.place(at, c))
            self.plan_us.append(us)
            if self.planner.name == "prophet":
                self._placements[case.layer] = placement
        return placement
