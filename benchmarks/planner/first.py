"""How good, and how fast, is a first plan: a run's first call, and the first after another layer's routing came?

A first plan is compared with a search that goes on from it on the same counts, until many tries in a row have failed.
The search is the planner's own, with a try in every call, another draw for each, and on all machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.cores import Edit, build, edited, in_place, load
from benchmarks.planner.walks import alike, calls_of, contexts, walk
from prophet.planner.model.cost import step_cost
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import FloatArray, IntArray, Placement, PlanContext
from prophet.traces.npz import read_trace

SEARCHES = (  # what makes of every call one try more
    Edit(
        "plan.cpp",
        "draws_(problem)",
        "draws_([&] { static thread_local Int n = 0; Draws own(problem); own.mix(++n); return own; }())",
    ),
    Edit("plan.cpp", "> FROM * base_.total", ">= 0.0 * FROM"),
)
ALWAYS = 1e12  # effort that affords a try in every call
FAILED = 1000  # tries in a row that bring nothing
MOST_CALLS = 100 * FAILED


def searched(load: IntArray, placement: Placement, context: PlanContext, failed: int) -> Placement:
    """What becomes of `placement` by tries, until so many in a row have failed; inside `in_place` of `SEARCHES`."""
    planner = ProphetPlanner(effort=ALWAYS)
    unchanged = 0
    for _ in range(MOST_CALLS):
        found = planner.place(load, dataclasses.replace(context, previous=placement))
        unchanged = unchanged + 1 if np.array_equal(found.holds, placement.holds) else 0
        placement = found
        if unchanged == failed:
            break
    return placement


def predicted_s(load: IntArray, placement: Placement, context: PlanContext) -> float:
    return step_cost(ProphetPlanner().split(load, placement, context), placement, context).total_s


def first_rows(
    paths: Sequence[Path],
    presets: Sequence[str],
    *,
    slots: int,
    folder: Path,
    layers: int,
    iterations: int,
    failed: int = FAILED,
) -> Iterator[dict[str, Any]]:
    """One row per trace, kind of call and preset: time over the mean call's, predicted step over the searched one's."""
    search = load(build(edited(SEARCHES), folder))
    for path in paths:
        trace = read_trace(path)
        chosen = np.unique(np.linspace(0, trace.layers - 1, layers).astype(int)).tolist()
        calls = calls_of(trace, chosen, iterations)
        firsts = [i for i, call in enumerate(calls) if call.jumped]
        for names, context in alike(contexts(trace, presets, slots)):
            planner = ProphetPlanner()
            walked, placements = walk(planner, context, calls)
            with in_place(search):
                searches = [searched(calls[i].planned, placements[i], context, failed) for i in firsts]
            step = np.array(
                [
                    predicted_s(calls[i].planned, placements[i], context) / predicted_s(calls[i].planned, best, context)
                    for i, best in zip(firsts, searches, strict=True)
                ]
            )
            for kind, own in (("first", slice(0, 1)), ("after layers are swapped", slice(1, None))):
                for name in names:
                    yield _row(path.name, name, kind, walked.plan_us, np.array(firsts)[own], step[own])


def _row(trace: str, preset: str, kind: str, plan_us: FloatArray, firsts: IntArray, step: FloatArray) -> dict[str, Any]:
    return {
        "trace": trace,
        "preset": preset,
        "call": kind,
        "cases": len(firsts),
        "step_median": float(np.median(step)),
        "step_worst": float(step.max()),
        "steps": step.tolist(),
        "plan_us": float(np.mean(plan_us[firsts])),
        "plan_us_mean_call": float(plan_us.mean()),
        "time": float(np.mean(plan_us[firsts]) / plan_us.mean()),
    }


def first_summary(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By trace and kind of call, over all presets: the median of steps, how many are far off, the times."""
    lines = []
    for trace, kind in dict.fromkeys((r["trace"], r["call"]) for r in table):
        own = [r for r in table if (r["trace"], r["call"]) == (trace, kind)]
        steps = np.concatenate([r["steps"] for r in own])
        worst = max(own, key=lambda r: float(r["time"]))
        lines.append(
            {
                "trace": trace,
                "call": kind,
                "cases": len(steps),
                "step_median": float(np.median(steps)),
                "step_p90": float(np.percentile(steps, 90)),
                "step_worst": float(steps.max()),
                "beyond_1.1": float((steps > 1.1).mean()),
                "time_median": float(np.median([r["time"] for r in own])),
                "time_worst": worst["time"],
                "on": worst["preset"],
            }
        )
    return lines
