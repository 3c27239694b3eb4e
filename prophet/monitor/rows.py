"""One step's line: a StepReport as plain numbers, and what the performance model makes of it; pure.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prophet.engine.step_report import StepReport
from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.spec import IntArray, PlanContext, Split

# Experts that are named per layer
HOTTEST = 4
# Details are written as often as keeps their mean below this
NUMBERS_PER_STEP = 2048


def detail_period(layers: int, ranks: int, experts: int) -> int:
    """Every how many steps the loads of all experts and ranks are written by default.

    Args:
        layers: MoE layers.
        ranks: Ranks of the group.
        experts: Experts of the largest layer.
    """
    return max(1, layers * (experts + 3 * ranks) // NUMBERS_PER_STEP)


def ratios(load: IntArray) -> list[float]:
    """Largest rank load over the mean of every layer, [L, R] to [L]; 1 where there are no rows."""
    mean = load.mean(axis=1)
    return [float(x) for x in np.divide(load.max(axis=1), mean, out=np.ones(len(load)), where=mean > 0).round(4)]


def hottest(experts: IntArray, count: int = HOTTEST) -> list[list[list[float]]]:
    """The experts with the most choices of every layer, [L, E] to [L][count][expert, choices over the mean]."""
    mean = np.maximum(experts.mean(axis=1), 1e-12)
    # Stable, so that equal experts stay in the same order from step to step
    order = np.argsort(-experts, axis=1, kind="stable")[:, :count]
    return [
        [[int(e), round(float(row[e] / m), 3)] for e in chosen if row[e] > 0]
        for row, m, chosen in zip(experts, mean, order, strict=True)
    ]


def measured_gain(report: StepReport, rank: int) -> float | None:
    """The busiest ranks' time without replicas, over their time with them and all that they left exposed.

    The step without replicas did not run: its seconds are its rows, which are exact, at the seconds per row that `rank`
    has measured in this step. None where nothing was measured.
    """
    rows, expert_s = int(report.rank_load[:, rank].sum()), report.seconds.get("expert", 0.0)
    if not rows or not expert_s > 0:
        return None
    per_row = expert_s / rows
    balanced = per_row * float(report.rank_load.max(axis=1).sum()) + report.exposed_s
    return per_row * float(report.rank_load_static.max(axis=1).sum()) / balanced


def predicted_gains(report: StepReport, planner: Planner, contexts: Sequence[PlanContext]) -> list[float]:
    """Predicted seconds of every layer without replicas over those with them, [L].

    Counts are those of the whole step, as if they had come in one microbatch.

    Args:
        report: The step's report.
        planner: The planner, which splits the tokens.
        contexts: Machine and sizes of every layer.
    """
    gains = []
    for load, placement, context in zip(report.counts, report.placements, contexts, strict=True):
        # Counts have as many columns as the layer with the most experts
        counts = load[:, : context.experts]
        # Without replicas, both are the same step
        if placement.is_static or not counts.any():
            gains.append(1.0)
            continue

        own = replace(context, previous=None)
        homes = context.homes_only()
        static = step_cost(Split.to_homes(counts, homes), homes, own).total_s
        balanced = step_cost(planner.split(counts, placement, own), placement, own).total_s
        gains.append(round(static / balanced, 4) if balanced > 0 else 1.0)
    return gains


def step_row(report: StepReport, *, time_s: float, step_s: float | None, detail: bool, rank: int = 0) -> dict[str, Any]:
    """One step's line, without the predicted gain.

    Args:
        report: The step's report.
        time_s: Seconds since the epoch.
        step_s: Seconds since the last step ended; None in the first.
        detail: Whether all experts' and ranks' loads are in it.
        rank: The rank that has measured the seconds.
    """
    experts = report.counts.sum(axis=1)
    gain = measured_gain(report, rank)
    row: dict[str, Any] = {
        "step": report.step,
        "time_s": round(time_s, 3),
        "step_s": None if step_s is None else round(step_s, 6),
        "max_mean": ratios(report.rank_load),
        "max_mean_static": ratios(report.rank_load_static),
        "copies": report.copies.sum(axis=1).tolist(),
        "dropped": report.dropped.tolist(),
        "rows": report.rank_load.sum(axis=1).tolist(),
        "hottest": hottest(experts),
        "gain_measured": None if gain is None else round(gain, 4),
        "exposed_s": round(report.exposed_s, 6),
        "seconds": {name: round(s, 6) for name, s in report.seconds.items()},
        "planned": list(report.planned),
        "withdrawn": list(report.withdrawn),
    }
    if detail:
        row["experts"] = experts.tolist()
        row["rank_load"] = report.rank_load.tolist()
        row["rank_load_static"] = report.rank_load_static.tolist()
    return row
