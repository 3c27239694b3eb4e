"""From every rank's figures to one row per policy.

Shape legend: L layers, P ranks, M microbatches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.policies import simulated_step_s, smoothed
from benchmarks.tables import cell, columns
from pipeline_balance.spec import Imbalance, LayerCost, RankLimits, StageMap, rank_loads_s

COLUMNS = (
    "case",
    "policy",
    "step_s_median",
    "tokens_per_s",
    "gain_over_uniform",
    "of_oracle",
    "bubble_ratio",
    "max_mean",
    "rebalances",
    "moved_bytes",
    "ranks_used_mean",
    "simulated_step_s",
    "loss_final",
)


def summarise(
    case: Case,
    by_rank: Sequence[Mapping[str, Any]],
    costs: Sequence[Sequence[LayerCost]],
    *,
    ranks: int,
    transfer_s: float,
    optimizer_s_per_byte: float,
    replicas: int = 1,
    between_s: float = 0.0,
    metering_s: float = 0.0,
    measured: bool = True,
) -> list[dict[str, Any]]:
    """Rows in the order of policies. `by_rank` holds every rank's {policy: figures}; a simulated run has one entry.

    `ranks` are those of one replica.
    """
    step = partial(
        simulated_step_s,
        microbatches=case.microbatches,
        transfer_s=transfer_s,
        optimizer_s_per_byte=optimizer_s_per_byte,
        between_s=between_s,
    )
    rows = [
        _row(case, policy, [r[policy] for r in by_rank], costs, ranks, step, metering_s, measured)
        for policy in by_rank[0]
    ]
    for row in rows:
        row["replicas"] = replicas
        row["tokens_per_s"] *= replicas
    speed = {r["policy"]: r["tokens_per_s"] for r in rows}
    for row in rows:
        for column, against in (
            ("gain_over_uniform", "uniform"),
            ("of_static_optimal", "optimal-at-start"),
            ("of_oracle", "oracle"),
        ):
            row[column] = row["tokens_per_s"] / speed[against] if against in speed else None
    return rows


def _row(
    case: Case,
    policy: str,
    figures: Sequence[Mapping[str, Any]],
    costs: Sequence[Sequence[LayerCost]],
    ranks: int,
    simulated_s: Callable[[Sequence[LayerCost], StageMap], float],
    metering_s: float,
    measured: bool,
) -> dict[str, Any]:
    # a step is over when its slowest rank is
    step_s = np.max([f["step_s"] for f in figures], axis=0)
    # the step without what balancing adds after it
    plain_s = step_s if not measured else np.max([np.subtract(f["step_s"], f["balance_s"]) for f in figures], axis=0)
    maps = [StageMap(tuple(b), tuple(r)) for b, r in figures[0]["maps"]]
    used = [len(m.used_ranks) for m in maps]
    limits = RankLimits.uniform(ranks)
    work_s, imbalances, simulated = [], [], []
    for step, stage_map in enumerate(maps):
        now = smoothed(costs[: step + 1]) if measured else costs[step]
        loads = rank_loads_s(now, stage_map, limits)
        work_s.append(sum(loads) * case.microbatches)
        imbalances.append(Imbalance.of([loads[r] for r in stage_map.used_ranks]))
        simulated.append(simulated_s(now, stage_map))
    losses = figures[0]["losses"]  # equal on all ranks
    total_s = float(step_s.sum())
    # Ranks meet to measure: those that are done early wait there for the slowest one, which alone tells the cost.
    overhead = {"measure": min(f["overhead"]["measure"] for f in figures) / total_s}
    overhead |= {k: max(f["overhead"][k] for f in figures) / total_s for k in ("decide", "move")}
    if policy_measures := any(f["overhead"]["measure"] for f in figures):
        # hooks on every layer and microbatch of the steps that are measured, on the rank that has most layers
        share = max(f["measured_steps"] for f in figures) / len(maps)
        layers = statistics.mean(max(len(m.layers_on(r)) for r in range(ranks)) for m in maps)
        overhead["measure"] += metering_s * layers * case.microbatches * share * len(maps) / total_s
    row: dict[str, Any] = {
        "case": case.name,
        "policy": policy,
        "layers": case.layers,
        "ranks": ranks,
        "steps": len(maps),
        "step_s_median": float(np.median(step_s)),
        "tokens_per_s": case.tokens_per_step * len(maps) / total_s,
        "bubble_ratio": float(1 - sum(work_s) / float((plain_s * np.asarray(used)).sum())),
        "max_mean": statistics.mean(i.max_mean for i in imbalances),
        "max_minus_min_over_mean": statistics.mean(i.max_minus_min_over_mean for i in imbalances),
        "rebalances": figures[0]["rebalances"],
        "moved_bytes": sum(f["moved_bytes"] for f in figures),
        "overhead_fraction": overhead,
        "measures": policy_measures,
        "looks": figures[0]["looks"],
        "ranks_used_mean": statistics.mean(used),
        "loss_final": statistics.mean(losses[-5:]),
        "last_map": list(maps[-1].boundaries),
        # every change as [step, boundaries, ranks], the first map included
        "map_changes": [
            [step, list(m.boundaries), list(m.ranks)] for step, m in enumerate(maps) if step == 0 or m != maps[step - 1]
        ],
        "measured": measured,
        "step_s": [round(float(x), 5) for x in step_s],
        "simulated_s": [round(float(x), 5) for x in simulated],
        "simulated_step_s": float(np.median(simulated)),
    }
    row["simulated_error"] = float(np.median(simulated) / np.median(plain_s) - 1) if measured else None
    row["simulated_error_by_step"] = float(np.mean(np.abs(np.asarray(simulated) / plain_s - 1))) if measured else None
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text."""
    return columns(COLUMNS, [[cell(row.get(name), 4) for name in COLUMNS] for row in rows])
