"""What every planner's placements are worth on a trace, by the performance model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.planner.cases import Case, Walk, cases_of
from benchmarks.planner.walks import contexts, geomean, machine_of, plan_times, timed
from prophet.planner import get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.model.withdraw import settled_cost
from prophet.planner.policies.forced_balance import forced_balance
from prophet.spec import PlanContext, Split
from prophet.traces.npz import read_trace

EARLY = 20  # iterations of every layer, in which routing changes fastest


def bounds(cases: Sequence[Case], context: PlanContext) -> tuple[list[float], list[float]]:
    """Every case's seconds without replicas, and with routing that is even."""
    homes = context.homes_only()
    alone = [Split.to_homes(case.present, homes) for case in cases]
    even = [forced_balance(case.present, context)[0] for case in cases]
    static_s, even_s = ([step_cost(split, homes, context).total_s for split in splits] for splits in (alone, even))
    return static_s, even_s


def row_of(
    trace: str,
    preset: str,
    policy: str,
    cases: Sequence[Case],
    context: PlanContext,
    static_s: Sequence[float],
    even_s: Sequence[float],
) -> dict[str, Any]:
    """One row of the table; `static_s`, `even_s`: `bounds`."""
    planner = get_planner(policy) if policy != "forced-balance" else None
    walk = Walk(planner, context) if planner is not None else None
    max_mean, copies, seconds, experts, split_us = ([] for _ in range(5))  # type: list[list[float]]
    late = np.array([len(case.earlier) >= EARLY for case in cases])
    for case in cases:
        if planner is not None and walk is not None:
            placement = walk.place(case)
            split, us = timed(lambda p=planner, c=case, at=placement: p.split(c.present, at, context))
            split_us.append(us)
        else:
            split, placement = forced_balance(case.present, context)
        if planner is not None and planner.withdraws:
            split, cost = settled_cost(case.present, split, placement, context)
        else:
            cost = step_cost(split, placement, context)
        max_mean.append(split.max_mean())
        copies.append(float(placement.copies_per_rank().mean()))
        seconds.append(cost.total_s)
        experts.append(cost.expert_s / cost.total_s)
    fraction = np.array(even_s) / np.array(seconds)
    plan_us = walk.plan_us if walk is not None else [0.0]
    return {
        "trace": trace,
        "preset": preset,
        "policy": policy,
        "ranks": context.ranks,
        "experts": context.experts,
        "cases": len(cases),
        "max_mean_median": float(np.median(max_mean)),
        "max_mean_p95": float(np.percentile(max_mean, 95)),
        "forced_balance_fraction_median": float(np.median(fraction)),
        "forced_balance_fraction_p05": float(np.percentile(fraction, 5)),
        "step_s_median": float(np.median(seconds)),
        "step_s_geomean": geomean(seconds),
        "step_s_geomean_late": geomean(np.array(seconds)[late]) if late.any() else None,
        "slowest_against_static": float(max(s / b for s, b in zip(seconds, static_s, strict=True))),
        "expert_share_median": float(np.median(experts)),
        "copies_per_rank_mean": float(np.mean(copies)),
        **plan_times(plan_us),
        "split_us_median": float(np.median(split_us)) if split_us else 0.0,
    }


def traced(arguments: argparse.Namespace) -> Iterator[tuple[str, str, PlanContext, list[Case]]]:
    """Every trace and preset: their names, the context, and the trace's cases."""
    for path in arguments.trace:
        trace = read_trace(path)
        cases = cases_of(trace, exact=arguments.exact, count=arguments.cases)
        if not cases:
            raise SystemExit(f"{path}: one iteration only; nothing came before it to plan from (try --exact)")
        for name, context in contexts(trace, arguments.preset, arguments.slots, arguments.top_k).items():
            yield path.name, name, context, cases


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every trace, preset and policy."""
    for trace, preset, context, cases in traced(arguments):
        known = bounds(cases, context)
        for policy in arguments.policy:
            yield row_of(trace, preset, policy, cases, context, *known)


def summary(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By trace and machine class: `pro-prophet`'s step over ours, and ours over the best published policy's.

    Geometric means over presets; late: without the first iterations of every layer. Empty without both policies.
    """
    found: dict[tuple[str, str, str], Mapping[str, Any]] = {(r["trace"], r["preset"], r["policy"]): r for r in table}
    ours = [r for r in table if r["policy"] == "prophet" and (r["trace"], r["preset"], "pro-prophet") in found]
    lines = []
    for trace in dict.fromkeys(r["trace"] for r in ours):
        machines = list(dict.fromkeys(machine_of(r["preset"]) for r in ours))
        for machine in ["all", *machines]:
            own = [r for r in ours if r["trace"] == trace and machine in ("all", machine_of(r["preset"]))]
            line: dict[str, Any] = {"trace": trace, "machines": machine, "presets": len(own)}
            for name, key in (("pro-prophet", "step_s_geomean"), ("pro-prophet_late", "step_s_geomean_late")):
                pairs = [(found[trace, r["preset"], "pro-prophet"][key], r[key]) for r in own if r[key] is not None]
                line[name] = geomean([t / r for t, r in pairs]) if pairs else None
            behind = [
                (r["step_s_geomean"] / other["step_s_geomean"], r["preset"], other["policy"])
                for r in own
                for other in table
                if (other["trace"], other["preset"]) == (trace, r["preset"])
                and other["policy"] not in ("prophet", "forced-balance")
            ]
            line["over_best"], line["on"], line["policy"] = max(behind)
            line["slowest_against_static"] = max(r["slowest_against_static"] for r in own)
            lines.append(line)
    return lines
