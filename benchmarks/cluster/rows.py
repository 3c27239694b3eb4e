"""From what every rank measured to one row per policy; pure.

Shape legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.cluster.policies import EVEN, policy
from benchmarks.tables import columns
from prophet.report import median_interval

COLUMNS = (
    ("policy", "policy", "{}"),
    ("step_s_median", "step s", "{:.3f}"),
    ("step_s_quartiles", "25 to 75 %", "{0[0]:.3f} to {0[1]:.3f}"),
    ("tokens_per_s", "tokens/s", "{:.0f}"),
    ("fraction_of_even_routing", "of even", "{:.3f}"),
    ("max_mean_median", "max/mean", "{:.3f}"),
    ("copies_per_rank_mean", "copies", "{:.1f}"),
    ("exposed_fraction", "exposed", "{:.3f}"),
    ("a2a_s", "a2a s", "{:.3f}"),
    ("expert_s", "expert s", "{:.3f}"),
    ("simulated_error", "sim. error", "{:+.3f}"),
    ("loss_final", "loss", "{:.4f}"),
    ("dropped_fraction", "dropped", "{:.3f}"),
    ("mode", "mode", "{}"),
)


def summarise(
    results: Sequence[Mapping[str, Any]], *, tokens_per_step: int, policies: Sequence[str], replayed: str | None = None
) -> list[dict[str, Any]]:
    """One row per policy from the R hosts' results.

    A step lasts as long as its mean over ranks (all ranks wait for each other in every step); medians run over the
    steps of all repetitions. replayed: the trace whose routing every policy was given but those of even routing.
    """
    rows = [
        {
            **_row(results, name, tokens_per_step),
            "routing": "even" if policy(name).even else replayed or "the router's own",
            "mode": policy(name).mode,
        }
        for name in policies
    ]
    even = next((r["tokens_per_s"] for r in rows if r["policy"] == EVEN), None)
    for row in rows:
        row["fraction_of_even_routing"] = None if even is None else row["tokens_per_s"] / even
    return rows


def against(rows: Sequence[Mapping[str, Any]], others: Sequence[str]) -> list[dict[str, Any]]:
    """Every other policy's step over that of the fastest of `others`: the median over repetitions and its interval.

    The ratios are those of one repetition's median steps. The interval holds the median with a confidence of 90 %;
    None where there are too few repetitions.
    """
    best = min((r for r in rows if r["policy"] in others), key=lambda r: float(r["step_s_median"]))
    table = []
    for row in rows:
        if row["policy"] in others:
            continue
        ratios = np.array(row["step_s_by_repetition"]) / np.array(best["step_s_by_repetition"])
        found = median_interval(ratios, confidence=0.9)
        table.append(
            {
                "policy": row["policy"],
                "over": best["policy"],
                "ratios": ratios.tolist(),
                "ratio_median": float(np.median(ratios)),
                "interval": None if found is None else [found.low, found.high],
            }
        )
    return table


def _row(results: Sequence[Mapping[str, Any]], name: str, tokens_per_step: int) -> dict[str, Any]:
    per_rank = [[run for run in result["runs"] if run["policy"] == name] for result in results]
    first = per_rank[0]
    # [repetitions, steps]
    steps = np.mean([[run["step_s"] for run in runs] for runs in per_rank], axis=0)
    median = float(np.median(steps))
    simulated = [s for run in first for s in run.get("simulated_s", ())]
    simulated_s = _median([s["step"] for s in simulated])
    exposed = {k: _mean_seconds(per_rank, f"exposed_{k}") for k in ("plan", "trans", "agg")}
    known = [v for v in exposed.values() if v is not None]
    return {
        "policy": name,
        "hosts": len(results),
        "step_s_median": median,
        "step_s_quartiles": np.quantile(steps, (0.25, 0.75)).tolist(),
        "step_s_by_repetition": [float(np.median(s)) for s in steps],
        "tokens_per_s": tokens_per_step / median,
        "fraction_of_even_routing": None,
        "max_mean_median": _median([x for run in first for x in run["max_mean"]]),
        "max_mean_static_median": _median([x for run in first for x in run.get("max_mean_static", ())]),
        "dropped_fraction": _mean([x for run in first for x in run.get("dropped", ())]),
        "copies_per_rank_mean": float(np.mean([x for run in first for x in run["copies_per_rank"]])),
        "exposed_s": exposed,
        "exposed_fraction": sum(known) / median if known else None,
        **{f"{k}_s": _mean_seconds(per_rank, k) for k in ("a2a", "expert", "plan", "counts", "split")},
        "simulated_step_s": simulated_s,
        "simulated_error": None if simulated_s is None else simulated_s / median - 1.0,
        "simulated_parts_s": {p: _median([s[p] for s in simulated]) for p in (simulated[0] if simulated else {})},
        "loss_final": first[-1]["losses"][-1],
        "losses": first[-1]["losses"],
        "resident_growth_bytes": max(
            (_growth(run["resident_bytes"]) for runs in per_rank for run in runs if run.get("resident_bytes")),
            default=None,
        ),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for runs in per_rank for run in runs),
    }


def _growth(resident_bytes: Sequence[int]) -> int:
    """Bytes that a process holds after the last step more than after the first tenth of the steps."""
    return resident_bytes[-1] - resident_bytes[len(resident_bytes) // 10]


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _mean_seconds(per_rank: Sequence[Sequence[Mapping[str, Any]]], name: str) -> float | None:
    """Mean over ranks of the median over repetitions; None where the policy has no such figure."""
    found = [[run["seconds"][name] for run in runs if name in run.get("seconds", {})] for runs in per_rank]
    return float(np.mean([np.median(values) for values in found])) if all(found) else None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [["-" if row[key] is None else shape.format(row[key]) for key, _, shape in COLUMNS] for row in rows]
    return columns([title for _, title, _ in COLUMNS], lines)
