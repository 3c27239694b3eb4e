"""A monitored run as a report page: as it ran, beside what the same routing would have been without replicas.

Shape legend: T steps with details, L layers, R ranks, E experts.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from prophet.errors import MonitorError
from prophet.monitor.read import Steps
from prophet.monitor.sinks import FILE, Row
from prophet.report import Report, Run, Table
from prophet.spec import FloatArray


def _detailed(steps: Steps) -> list[Row]:
    # Only some lines carry them, as many numbers would make the file large
    rows = [r for r in steps.rows if {"experts", "rank_load", "rank_load_static"} <= r.keys()]
    if not rows:
        raise MonitorError("no step of this run has the loads of its experts and ranks; was it cut short?")
    return rows


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def layers_table(steps: Steps) -> Table:
    """Every layer in figures, over all steps that were kept."""
    rows = steps.rows
    predicted = [r["gain_predicted"] for r in rows if r.get("gain_predicted")]
    counts = np.sum([r["experts"] for r in _detailed(steps)], axis=0)
    lines = []
    for layer in range(steps.header["layers"]):
        load = counts[layer]
        hot = [int(e) for e in np.argsort(-load, kind="stable")[:3]]
        lines.append(
            (
                str(layer),
                f"{statistics.median(r['max_mean_static'][layer] for r in rows):.3f}",
                f"{statistics.median(r['max_mean'][layer] for r in rows):.3f}",
                f"{_mean([r['copies'][layer] for r in rows]):.1f}",
                f"{_mean([g[layer] for g in predicted]):.2f} ×" if predicted else "",
                f"{sum(r['dropped'][layer] for r in rows):,}",
                ", ".join(f"{e} (×{load[e] / max(load.mean(), 1e-12):.1f})" for e in hot),
            )
        )
    return Table(
        title="Layers",
        caption="Busiest rank over the mean (median over steps) without replicas and as it ran; copies on all ranks "
        "together; the performance model's gain of the layer; the experts with the most tokens, over the mean.",
        columns=("layer", "without", "as it ran", "copies", "predicted gain", "dropped", "hottest experts"),
        rows=lines,
    )


def summarise(steps: Steps) -> dict[str, Any]:
    """A run in figures; None for what was not measured. Medians and means are over its steps, copies over all ranks."""
    rows = steps.rows
    step_s = [r["step_s"] for r in rows if r.get("step_s")]
    gains = [r["gain_measured"] for r in rows if r.get("gain_measured")]
    return {
        "first_step": rows[0]["step"],
        "last_step": rows[-1]["step"],
        "layers": steps.header["layers"],
        "ranks": steps.header["ranks"],
        "planner": steps.header.get("planner", "unknown"),
        "max_mean_static_median": float(np.median([np.mean(r["max_mean_static"]) for r in rows])),
        "max_mean_median": float(np.median([np.mean(r["max_mean"]) for r in rows])),
        "exposed_s_median": statistics.median(r["exposed_s"] for r in rows),
        "copies_per_step_mean": _mean([float(np.sum(r["copies"])) for r in rows]),
        "dropped": sum(sum(r["dropped"]) for r in rows),
        "step_s_median": statistics.median(step_s) if step_s else None,
        "gain_measured_median": statistics.median(gains) if gains else None,
    }


def _losses(rows: Sequence[Row], at: Sequence[Row]) -> FloatArray:
    """The latest loss at each of some rows, NaN before the first one; losses may be logged every few steps."""
    known = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    # Rows are in order of their steps, so the latest loss is found by bisection
    before = [bisect_right(known, row["step"], key=itemgetter(0)) for row in at]
    return np.array([known[n - 1][1] if n else np.nan for n in before])


def make_report(steps: Steps, *, name: str, timelines: Sequence[tuple[str, str]] = ()) -> Report:
    """The page of a run.

    Args:
        steps: Its last start.
        name: Name for the page's title.
        timelines: A file's name for readers, and its path from the page, for every timeline.

    Raises:
        MonitorError: The run has too little to show.
    """
    rows, detailed = steps.rows, _detailed(steps)
    static = np.array([r["rank_load_static"] for r in detailed])
    balanced = np.array([r["rank_load"] for r in detailed])
    # The run without replicas did not take place, so it has no losses
    unknown = np.full(len(detailed), np.nan)
    found = summarise(steps)
    ratios = f"{found['max_mean_static_median']:.2f} → {found['max_mean_median']:.2f}"
    figures = [
        (ratios, "busiest rank / mean, without replicas and as it ran"),
        (f"{1e3 * found['exposed_s_median']:.2f} ms", "per step waiting for Trans, Agg or a plan, median"),
        (f"{found['copies_per_step_mean']:.1f}", "copies of experts per step, on average"),
        (f"{found['dropped']:,}", "choices dropped"),
    ]
    if found["step_s_median"] is not None:
        figures.append((f"{1e3 * found['step_s_median']:.1f} ms", "step time, median"))
    if found["gain_measured_median"] is not None:
        figures.append((f"{found['gain_measured_median']:.2f} ×", "measured gain of the experts' time"))
    header = steps.header
    notes = [f"{k}: {v}" for k, v in header.get("notes", {}).items()]
    return Report(
        title=f"Balance of {name}",
        lead=f"Steps {rows[0]['step'] + 1} to {rows[-1]['step'] + 1} of {header['layers']} MoE layers on "
        f"{header['ranks']} ranks, planner {header.get('planner', 'unknown')}.",
        # The same routing sent to the experts' homes: the engine counts it in every step
        before=Run(name="without replicas (counted)", loss=unknown, rank_load=static),
        after=Run(name="as it ran", loss=_losses(rows, detailed), rank_load=balanced),
        # A line has sums over ranks; the page wants [T, L, R, E], so they go in as those of one rank
        counts=np.array([r["experts"] for r in detailed])[:, :, None, :],
        figures=figures,
        tables=(layers_table(steps),),
        timelines=timelines,
        remarks=(
            *notes,
            *([f"{FILE}: {steps.left_out}."] if steps.left_out.count else []),
            "“Without replicas” was not run: it is what every rank would have computed of the same routing, which is "
            "exact in rows.",
            "The measured gain takes the seconds per row that the first rank has measured, for both, and counts all "
            "that transfers and planning left exposed.",
            f"Loads of all experts and ranks were kept for {len(detailed)} of {len(rows)} steps; figures of steps "
            "number those.",
        ),
    )
