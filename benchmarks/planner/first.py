"""How good, and how fast, is a first plan: a run's first call, and the first after another layer's routing came?

A first plan is compared with a search that goes on from it on the same counts, until many tries in a row have failed.
The search is the planner's own, with a try in every call, another draw for each, and on all machines. First plans are
made with bursts of several lengths: how many mean calls their tries may take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.cores import Edit, build, edited, in_place, load
from benchmarks.planner.walks import Walked, alike, calls_of, contexts, predicted_s, walk
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
TODAY = "8"
BURSTS: dict[str, tuple[Edit, ...]] = {  # by mean calls
    "no tries": (Edit("plan.cpp", "if (growing_) {", "if (growing_ && false) {"),),
    **{str(n): (Edit("plan.cpp", "BURST = 8.0;", f"BURST = {n}.0;"),) for n in (0, 4, 8, 16, 32, 128, 512)},
}
ALWAYS = 1e12  # effort that affords a try in every call
FAILED = 1000  # tries in a row that bring nothing
MOST_CALLS = 100 * FAILED
LAYERS, ITERATIONS = 6, 40  # of a trace; the next layer's routing takes the last one's place


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


def first_rows(
    paths: Sequence[Path],
    presets: Sequence[str],
    *,
    slots: int,
    folder: Path,
    layers: int = LAYERS,
    iterations: int = ITERATIONS,
    failed: int = FAILED,
) -> Iterator[dict[str, Any]]:
    """One row per trace, preset, length of the burst and kind of call: time over the mean other call's, predicted step
    over that of the search that goes on from today's plan.
    """
    search = load(build(edited(SEARCHES), folder))
    cores = {burst: load(build(edited(edits), folder)) for burst, edits in BURSTS.items()}
    for path in paths:
        trace = read_trace(path)
        chosen = np.unique(np.linspace(0, trace.layers - 1, layers).astype(int)).tolist()
        calls = calls_of(trace, chosen, iterations)
        firsts = [i for i, call in enumerate(calls) if call.jumped]
        for names, context in alike(contexts(trace, presets, slots)):
            walks = {}
            for burst, core in cores.items():
                with in_place(core):
                    walks[burst] = walk(ProphetPlanner(), context, calls)
            with in_place(search):
                searches = [searched(calls[i].planned, walks[TODAY][1][i], context, failed) for i in firsts]
            planned = [calls[i].planned for i in firsts]
            least = _seconds(planned, searches, context)
            for burst, (walked, placements) in walks.items():
                step = _seconds(planned, [placements[i] for i in firsts], context) / least
                for kind, part in (("first", slice(0, 1)), ("after layers are swapped", slice(1, None))):
                    for name in names:
                        about = {"trace": path.name, "preset": name, "burst": burst, "call": kind}
                        yield about | _figures(walked, np.array(firsts)[part], step[part])


def _seconds(loads: Sequence[IntArray], placements: Sequence[Placement], context: PlanContext) -> FloatArray:
    planner = ProphetPlanner()
    return np.array([predicted_s(planner, load, at, context) for load, at in zip(loads, placements, strict=True)])


def _figures(walked: Walked, firsts: IntArray, step: FloatArray) -> dict[str, Any]:
    own_us, others_us = float(np.mean(walked.plan_us[firsts])), float(walked.plan_us[~walked.jumped].mean())
    return {
        "cases": len(firsts),
        "step_median": float(np.median(step)),
        "step_worst": float(step.max()),
        "steps": step.tolist(),
        "plan_us": own_us,
        "plan_us_mean_other": others_us,
        "time": own_us / others_us,
    }


def first_summary(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By trace, kind of call and burst, over all presets: the median of steps, how many are far off, the times."""
    lines = []
    keys = ("trace", "call", "burst")
    for key in dict.fromkeys(tuple(r[k] for k in keys) for r in sorted(table, key=lambda r: (r["trace"], r["call"]))):
        own = [r for r in table if tuple(r[k] for k in keys) == key]
        steps = np.concatenate([r["steps"] for r in own])
        worst = max(own, key=lambda r: float(r["time"]))
        lines.append(
            {
                **dict(zip(keys, key, strict=True)),
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
