"""What a split's effort buys."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.planner.cases import Case, Walk
from benchmarks.planner.predictions import traced
from benchmarks.planner.walks import geomean, timed
from prophet.planner import get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import FloatArray, Placement, PlanContext

EFFORTS = (0.0, 0.003, 0.01, 0.03, 0.06, 0.2, 1.0)  # of splits; others are compared with the last


def split_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a split's effort buys: how long it takes, and how much longer than with the most effort the step is."""
    for trace, preset, context, cases in traced(arguments):
        for policy in arguments.policy:
            walk = Walk(get_planner(policy), context)
            placed = [(case, walk.place(case)) for case in cases]
            found = [split_times(ProphetPlanner(split_effort=effort), context, placed) for effort in EFFORTS]
            for effort, (step_s, split_s) in zip(EFFORTS, found, strict=True):
                yield {
                    "trace": trace,
                    "preset": preset,
                    "policy": policy,
                    "split_effort": effort,
                    "cases": len(placed),
                    "split_us_mean": 1e6 * float(split_s.mean()),
                    "step_s_geomean": geomean(step_s),
                    "above_least": geomean(step_s / found[-1][0]) - 1,
                    "with_split_above_least": geomean((step_s + split_s) / found[-1][0]) - 1,
                }


def split_times(
    planner: ProphetPlanner, context: PlanContext, placed: list[tuple[Case, Placement]]
) -> tuple[FloatArray, FloatArray]:
    """Predicted seconds of every case's step, and the seconds that its split takes here: the median of three calls."""
    step_s, split_s = [], []
    for case, placement in placed:
        calls = [timed(functools.partial(planner.split, case.present, placement, context)) for _ in range(3)]
        step_s.append(step_cost(calls[0][0], placement, context).total_s)
        split_s.append(1e-6 * float(np.median([us for _, us in calls])))
    return np.array(step_s), np.array(split_s)
