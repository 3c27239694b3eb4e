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
from benchmarks.pipeline.policies import ORACLE, STATIC_OPTIMAL, simulated_step_s, smoothed
from benchmarks.tables import cell, columns
from pipeline_balance.spec import Imbalance, LayerCost, RankLimits, StageMap, rank_loads_s

LEAST_GAIN = 0.03
"""What an oracle must gain over the static optimum, so that there is something to gain."""
NOT_SLOWER = 0.99

COLUMNS = (
    "case",
    "policy",
    "step_s_median",
    "time_to_end_s",
    "of_static_optimal",
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
            ("of_static_optimal", STATIC_OPTIMAL),
            ("of_oracle", ORACLE),
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
        "time_to_end_s": total_s,
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


def verdict(case: Case, repetitions: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the rows of all repetitions say of a case: median, least and most of every ratio, and the targets.

    Ratios are of the time to the end, all that balancing takes included. A case in which the oracle gains less than
    `LEAST_GAIN` has nothing to gain, and balancing must not be slower, which is all that is asked of it.
    """
    found: dict[str, Any] = {"case": case.name, "repetitions": len(repetitions)}
    for name in ("of_static_optimal", "of_oracle"):
        for policy in dict.fromkeys(row["policy"] for rows in repetitions for row in rows):
            if policy == {"of_static_optimal": STATIC_OPTIMAL, "of_oracle": ORACLE}[name]:
                continue
            ratios = [r[name] for rows in repetitions for r in rows if r["policy"] == policy and r[name] is not None]
            if ratios:
                found[f"{policy} {name}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    gained = found.get(f"{ORACLE} of_static_optimal", [None])[0]
    if gained is None:
        return found
    found["nothing_to_gain"] = gained < 1 + LEAST_GAIN
    found["missed"] = missed = []
    for policy, of_oracle in (("partition", 0.97), ("diffusion", 0.95)):
        over_static = found.get(f"{policy} of_static_optimal", [None])[0]
        if over_static is None:
            continue
        least = NOT_SLOWER if found["nothing_to_gain"] else min(case.gain, 1 + 0.9 * (gained - 1))
        if policy == "partition" and over_static < least:
            missed.append(f"{policy} {over_static:.3f} of the static optimum, needs {least:.3f}")
        reached = found[f"{policy} of_oracle"][0]
        if reached < of_oracle and not found["nothing_to_gain"]:
            missed.append(f"{policy} {reached:.3f} of the oracle, needs {of_oracle}")
    return found


def verdict_text(found: Mapping[str, Any]) -> str:
    """A verdict as lines: every ratio with its spread, then what it comes to."""
    lines = [
        f"{found['case']}: {name} {v[0]:.3f} ({v[1]:.3f} to {v[2]:.3f}, {found['repetitions']} repetitions)"
        for name, v in found.items()
        if isinstance(v, list) and name != "missed"
    ]
    if "missed" in found:
        outcome = "; ".join(found["missed"]) or "all targets met"
        lines.append(f"{found['case']}: " + ("nothing to gain; " if found["nothing_to_gain"] else "") + outcome)
    return "\n".join(lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text."""
    return columns(COLUMNS, [[cell(row.get(name), 4) for name in COLUMNS] for row in rows])
