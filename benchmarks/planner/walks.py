"""A planner led through layers of a trace, call by call, with a jump wherever one layer's routing follows another's.

Shape legend: R ranks, E experts, N calls.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from prophet.machine.presets import get_preset
from prophet.planner import Planner
from prophet.planner.model.cost import step_cost
from prophet.planner.model.withdraw import settled_cost
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import BoolArray, FloatArray, IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace
from prophet.traces.replay import predicted_load, routed_per_rank

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """The load [R, E] that is planned from, the one that came, and whether other routing was planned for before."""

    planned: IntArray
    present: IntArray
    jumped: bool


def calls_of(trace: RoutingTrace, layers: Sequence[int], iterations: int) -> list[Call]:
    """So many calls of each of these layers, one after the other; the parts of the run take turns.

    Planned from the mean of the iteration before; the iteration's microbatches take turns as what came.
    """
    slices = list(trace.iteration_slices())
    calls = []
    for i, layer in enumerate(layers):
        last = max(0, len(slices) - 1 - iterations)
        first = last * i // max(1, len(layers) - 1)
        for n in range(first, min(first + iterations, len(slices) - 1)):
            steps = slices[n + 1]
            step = steps.start + n % (steps.stop - steps.start)
            calls.append(Call(predicted_load(trace, slices[n], layer), trace.load(step, layer), n == first))
    return calls


def contexts(trace: RoutingTrace, presets: Sequence[str], slots: int, top_k: int = 2) -> dict[str, PlanContext]:
    """Every preset's context for this trace's ranks, experts and tokens; `top_k` where the trace does not say."""
    top_k = trace.meta.get("top_k", top_k)
    return {
        name: get_preset(name).context(
            trace.ranks, trace.experts, routed_per_rank=routed_per_rank(trace), top_k=int(top_k), slots_per_rank=slots
        )
        for name in presets
    }


def machine_of(preset: str) -> str:
    """The machine class of a preset's name."""
    return preset.partition(":")[0]


def alike(found: dict[str, PlanContext]) -> Iterator[tuple[list[str], PlanContext]]:
    """Presets whose layers are the same but for their names, and the context of one of them."""
    groups: dict[str, tuple[list[str], PlanContext]] = {}
    for name, context in found.items():
        nameless = dataclasses.replace(context, topology=dataclasses.replace(context.topology, name=""))
        groups.setdefault(repr(nameless), ([], context))[0].append(name)
    yield from groups.values()


@dataclass(frozen=True, eq=False, slots=True)
class Walked:
    """By call [N]: predicted seconds of the step, microseconds of processor time for plan and split, jumps."""

    step_s: FloatArray
    plan_us: FloatArray
    split_us: FloatArray
    jumped: BoolArray


def walk(
    planner: ProphetPlanner, context: PlanContext, calls: Sequence[Call], *, withdraw: bool = True
) -> tuple[Walked, list[Placement]]:
    """Plan and split every call with the placement of the one before in force, and predict the step.

    withdraw: replicas that no longer pay are withdrawn before the step, as the engine does.
    """
    step_s, plan_us, split_us = [], [], []
    placements: list[Placement] = []
    for call in calls:
        here = dataclasses.replace(context, previous=placements[-1] if placements else None)
        placement, us = timed(functools.partial(planner.place, call.planned, here))
        plan_us.append(us)
        split, us = timed(functools.partial(planner.split, call.present, placement, here))
        split_us.append(us)
        cost = settled_cost(call.present, split, placement, here)[1] if withdraw else step_cost(split, placement, here)
        step_s.append(cost.total_s)
        placements.append(placement)
    jumped = np.array([call.jumped for call in calls])
    return Walked(np.array(step_s), np.array(plan_us), np.array(split_us), jumped), placements


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """The result, and the microseconds of processor time it took."""
    start = time.thread_time_ns()
    result = function()
    return result, (time.thread_time_ns() - start) * 1e-3


def predicted_s(planner: Planner, load: IntArray, placement: Placement, context: PlanContext) -> float:
    """The step's seconds, by the performance model, where `planner` splits this load."""
    return step_cost(planner.split(load, placement, context), placement, context).total_s


def geomean(values: ArrayLike) -> float:
    return float(np.exp(np.log(values).mean()))


def plan_times(plan_us: Sequence[float]) -> dict[str, float]:
    """Columns of a row: what planning takes in the middle, on average and at most nearly always."""
    return {
        "plan_us_median": float(np.median(plan_us)),
        "plan_us_mean": float(np.mean(plan_us)),
        "plan_us_p99": float(np.percentile(plan_us, 99)),
    }
