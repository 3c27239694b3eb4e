"""What every planner makes of the workloads, and where ours is behind a published policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.planner.cases import Case
from benchmarks.planner.predictions import bounds, row_of
from benchmarks.planner.walks import alike, contexts, geomean
from benchmarks.planner.workloads import PERIOD, Sizes, trace_of
from prophet.traces.npz import RoutingTrace

RANKS = (8, 64)
EXPERTS_PER_RANK, MOST_EXPERTS = 4, 128  # with more of them published policies plan for seconds
TOKENS = 4096  # of a rank
STEPS = 2 * PERIOD
JUDGED = {"W7": 3}  # last steps, of which one has a burst, one comes after it and one is far from it; else one
STALE = ("W6", "W7")  # planned from the step before, too
PLANS = ("this step", "the step before")  # whose counts plans are made from
KEYS = ("workload", "plans", "ranks", "seed", "preset")
SAME = 1e-9  # share by which steps that are alike may differ
OURS, EVEN = "prophet", "forced-balance"  # all others are published policies


def workload_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every workload, number of ranks, seed, preset and policy; plans know the step's counts, or those of the last."""
    for workload in arguments.workload:
        for ranks in arguments.ranks or RANKS:
            own = min(EXPERTS_PER_RANK, max(1, MOST_EXPERTS // ranks))
            sizes = Sizes(ranks=ranks, experts=own * ranks, tokens=TOKENS, top_k=arguments.top_k)
            for seed in range(arguments.seeds):
                trace = trace_of(workload, seed, STEPS, sizes)
                groups = list(alike(contexts(trace, arguments.preset, arguments.slots)))
                for plans in PLANS if workload in STALE else PLANS[:1]:
                    cases = cases_of(trace, JUDGED.get(workload, 1), PLANS.index(plans))
                    for names, context in groups:
                        known = bounds(cases, context)
                        for policy in arguments.policy:
                            row = row_of(f"{workload}, seed {seed}", names[0], policy, cases, context, *known)
                            for name in names:
                                yield {"workload": workload, "plans": plans, "seed": seed, **row, "preset": name}


def cases_of(trace: RoutingTrace, judged: int, late: int) -> list[Case]:
    """The last steps of a trace of one layer, each planned from the counts of `late` steps before."""
    loads = [trace.load(step, 0) for step in range(trace.steps)]
    first = trace.steps - judged
    return [Case(0, loads[t - late], loads[t], tuple(loads[: t - late])) for t in range(first, trace.steps)]


def compared(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our predicted step over that of the best published policy and of `static`, by `KEYS`; where these were asked for.

    slowest: the largest of a single step over the same step with `static`.
    """
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in table:
        found.setdefault(tuple(row[key] for key in KEYS), {})[row["policy"]] = row
    lines = []
    for key, by_policy in found.items():
        published = [row for name, row in by_policy.items() if name not in (OURS, EVEN)]
        if OURS not in by_policy or "static" not in by_policy:
            continue
        ours, best = by_policy[OURS], min(published, key=lambda row: row["step_s_geomean"])
        lines.append(
            {
                **dict(zip(KEYS, key, strict=True)),
                "over_best": ours["step_s_geomean"] / best["step_s_geomean"],
                "policy": best["policy"],
                "over_static": ours["step_s_geomean"] / by_policy["static"]["step_s_geomean"],
                "slowest": ours["slowest_against_static"],
            }
        )
    return lines


def by_workload(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By workload, plans and ranks: the geometric mean over seeds and presets, and the worst of them."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in compared(table):
        groups.setdefault(tuple(line[key] for key in KEYS[:3]), []).append(line)
    lines = []
    for key, own in groups.items():
        worst = max(own, key=lambda line: line["over_best"])
        lines.append(
            {
                **dict(zip(KEYS, key, strict=False)),
                "cases": len(own),
                "over_best": geomean([line["over_best"] for line in own]),
                "worst": worst["over_best"],
                "on": f"{worst['preset']}, seed {worst['seed']}",
                "policy": worst["policy"],
                "over_static": geomean([line["over_static"] for line in own]),
                "worst_over_static": max(line["over_static"] for line in own),
                "slowest_step_over_static": max(line["slowest"] for line in own),
            }
        )
    return lines


def behind(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where a published policy is faster than ours, the worst first."""
    lines = [line for line in compared(table) if line["over_best"] > 1.0 + SAME]
    return sorted(lines, key=lambda line: -line["over_best"])
