"""How good and how fast is every planner? `python -m benchmarks.planner --help`.

Shape legend: R ranks, E experts, L layers, T steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write_json
from benchmarks.planner.break_even import break_even_rows, plot
from benchmarks.planner.optimum import gap_rows, optima
from prophet.errors import SpecError, TraceError
from prophet.machine.presets import PRESET_NAMES, get_preset
from prophet.planner import PLANNER_NAMES, Planner, get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.model.withdraw import settled_cost
from prophet.planner.policies.forced_balance import forced_balance
from prophet.planner.search.prophet import ProphetPlanner, Tuning
from prophet.spec import FloatArray, IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace, read_trace

POLICIES = tuple(n for n in PLANNER_NAMES if n != "top-k")
SCALE_PRESETS = ("h100-nvlink:Mixtral-8x7B", "h100-nvlink:Qwen3-30B-A3B")
ROUTING_CALLS = 60  # steps of the same routing that ours is timed in
EFFORTS = (0.0, 0.003, 0.01, 0.03, 0.06, 0.2, 1.0)  # of splits; others are compared with the last
COLD_BYTES = 1 << 27  # more than a processor's caches hold
SCALES = ((16, 32), (64, 64), (64, 256), (256, 256), (1024, 1024))


@dataclass(frozen=True)
class Case:
    """One layer of one step: the load planned from and the load that came; `earlier` are the loads of the layer's
    iterations before the planned one, in order.
    """

    layer: int
    planned: IntArray
    present: IntArray
    earlier: tuple[IntArray, ...] = ()


def cases_of(trace: RoutingTrace, *, exact: bool, count: int) -> list[Case]:
    """Evenly spaced (step, layer) pairs; the planned load is the mean of the iteration before, or with `exact` the
    present one.
    """
    counts, iteration = trace.counts, trace.iteration
    first = 0 if exact else int(np.searchsorted(iteration, iteration[0], side="right"))
    layers = counts.shape[1]
    pairs = (len(counts) - first) * layers
    chosen = np.unique(np.linspace(0, pairs - 1, min(count, pairs)).astype(np.int64)) if pairs > 0 else []
    slices = list(trace.iteration_slices())

    @functools.cache
    def mean(number: int, layer: int) -> IntArray:
        steps = slices[number]
        load: IntArray = counts[steps, layer].astype(np.int64).sum(axis=0) // (steps.stop - steps.start)
        return load

    cases = []
    for pair in chosen:
        step, layer = first + int(pair) // layers, int(pair) % layers
        present = np.ascontiguousarray(counts[step, layer], dtype=np.int64)
        if exact:
            cases.append(Case(layer, present, present))
            continue
        number = next(i for i, steps in enumerate(slices) if steps.start <= step < steps.stop)
        before = [mean(i, layer) for i in range(number)]
        cases.append(Case(layer, before[-1], present, tuple(before[:-1])))
    return cases


class Walk:
    """A planner that goes on from step to step, led through the iterations of every layer in order.

    Others plan every case by itself.
    """

    def __init__(self, planner: Planner, context: PlanContext) -> None:
        self.planner, self.context = planner, context
        self._done: dict[int, int] = {}
        self._placements: dict[int, Placement] = {}
        self.plan_us: list[float] = []

    def place(self, case: Case) -> Placement:
        """Plan `case`, and before it the iterations of its layer that were not planned yet."""
        loads = [case.planned]
        if self.planner.name == "prophet":
            loads = [*case.earlier[self._done.get(case.layer, 0) :], case.planned]
            self._done[case.layer] = len(case.earlier) + 1
        for load in loads:
            here = dataclasses.replace(self.context, previous=self._placements.get(case.layer))
            placement, us = timed(lambda at=load, c=here: self.planner.place(at, c))
            self.plan_us.append(us)
            if self.planner.name == "prophet":
                self._placements[case.layer] = placement
        return placement


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the microseconds it took."""
    start = time.perf_counter()
    result = function()
    return result, (time.perf_counter() - start) * 1e6


def row_of(
    trace: str, preset: str, policy: str, cases: list[Case], context: PlanContext, static_s: list[float]
) -> dict[str, Any]:
    """One row of the table; `static_s` are the cases' seconds without replicas."""
    planner = get_planner(policy) if policy != "forced-balance" else None
    walk = Walk(planner, context) if planner is not None else None
    max_mean, copies, seconds, fraction, experts, split_us = ([] for _ in range(6))  # type: list[list[float]]
    for case in cases:
        ceiling, homes = forced_balance(case.present, context)
        ceiling_s = step_cost(ceiling, homes, context).total_s
        split, placement = ceiling, homes
        if planner is not None and walk is not None:
            placement = walk.place(case)
            split, us = timed(lambda p=planner, c=case, at=placement: p.split(c.present, at, context))
            split_us.append(us)
        cost = step_cost(split, placement, context)
        if planner is not None and planner.withdraws:
            split, cost = settled_cost(case.present, split, placement, context)
        max_mean.append(split.max_mean())
        copies.append(float(placement.copies_per_rank().mean()))
        seconds.append(cost.total_s)
        fraction.append(ceiling_s / seconds[-1])
        experts.append(cost.expert_s / cost.total_s)
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
        "step_s_geomean": float(np.exp(np.mean(np.log(seconds)))),
        "slowest_against_static": float(max(s / b for s, b in zip(seconds, static_s, strict=True))),
        "expert_share_median": float(np.median(experts)),
        "copies_per_rank_mean": float(np.mean(copies)),
        "plan_us_median": float(np.median(plan_us)),
        "plan_us_mean": float(np.mean(plan_us)),
        "plan_us_p99": float(np.percentile(plan_us, 99)),
        "split_us_median": float(np.median(split_us)) if split_us else 0.0,
    }


def traced(arguments: argparse.Namespace) -> Iterator[tuple[str, str, PlanContext, list[Case]]]:
    """Every trace and preset: their names, the context, and the trace's cases."""
    for path in arguments.trace:
        trace = read_trace(path)
        cases = cases_of(trace, exact=arguments.exact, count=arguments.cases)
        if not cases:
            raise SystemExit(f"{path}: one iteration only; nothing came before it to plan from (try --exact)")
        _, _, ranks, experts = trace.counts.shape
        routed = float(trace.counts.sum(axis=(2, 3)).mean()) / ranks
        top_k = trace.meta.get("top_k", arguments.top_k) if trace.meta else arguments.top_k
        for name in arguments.preset:
            context = get_preset(name).context(
                ranks, experts, routed_per_rank=routed, top_k=int(top_k), slots_per_rank=arguments.slots
            )
            yield Path(path).name, name, context, cases


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every trace, preset and policy."""
    for trace, preset, context, cases in traced(arguments):
        homes, static = context.homes_only(), get_planner("static")
        static_s = [step_cost(static.split(c.present, homes, context), homes, context).total_s for c in cases]
        for policy in arguments.policy:
            yield row_of(trace, preset, policy, cases, context, static_s)


def optimum_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How far from the optimum of small cases: the default planner, as it trains and with more effort, and others."""
    trace = read_trace(arguments.trace[0]) if arguments.trace else None
    solved = list(
        optima(
            trace,
            arguments.optimum,
            limit_s=arguments.limit,
            path=arguments.optima,
            processes=arguments.processes,
            first=arguments.first_case,
        )
    )
    bare = {"tuning": Tuning(gain_margin=0.0, spare=0)}
    yield from gap_rows(
        solved,
        {
            **{f"prophet, {n} calls": {"calls": n} for n in (1, 10, 50, 100, 200, 400)},
            "prophet, 100 calls, bare": {"calls": 100, **bare},
            "prophet, 100 calls, effort 1, bare": {"calls": 100, "effort": 1.0, **bare},
            "static": {},
            "pro-prophet": {},
            "laer": {},
            "fine-ep": {},
        },
    )


def split_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a split's effort buys: how long it takes, and how much longer than with the most effort the step is."""
    for trace, preset, context, cases in traced(arguments):
        for policy in arguments.policy:
            walk = Walk(get_planner(policy), context)
            placed = [(case, walk.place(case)) for case in cases]
            found = [
                split_times(ProphetPlanner(tuning=Tuning(split_effort=effort)), context, placed) for effort in EFFORTS
            ]
            for effort, (step_s, split_s) in zip(EFFORTS, found, strict=True):
                yield {
                    "trace": trace,
                    "preset": preset,
                    "policy": policy,
                    "split_effort": effort,
                    "cases": len(placed),
                    "split_us_mean": 1e6 * float(split_s.mean()),
                    "step_s_geomean": float(np.exp(np.log(step_s).mean())),
                    "above_least": float(np.exp(np.log(step_s / found[-1][0]).mean())) - 1,
                    "with_split_above_least": float(np.exp(np.log((step_s + split_s) / found[-1][0]).mean())) - 1,
                }


def split_times(
    planner: ProphetPlanner, context: PlanContext, placed: list[tuple[Case, Placement]]
) -> tuple[FloatArray, FloatArray]:
    """Predicted seconds of every case's step, and the seconds that its split takes here: the median of three calls."""
    step_s, split_s = [], []
    for case, placement in placed:
        calls = [timed(functools.partial(planner.flows, case.present, placement, context)) for _ in range(3)]
        step_s.append(step_cost(calls[0][0].dense(), placement, context).total_s)
        split_s.append(1e-6 * float(np.median([us for _, us in calls])))
    return np.array(step_s), np.array(split_s)


def even_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The gain over tokens per rank, link rate and skew, for loads of the first trace, or drawn ones."""
    if arguments.trace:
        loads = [case.present for case in cases_of(read_trace(arguments.trace[0]), exact=True, count=arguments.cases)]
    else:
        loads = [skewed_load(16, 32, seed) for seed in range(arguments.cases)]
    yield from break_even_rows(loads, arguments.preset, arguments.policy, arguments.slots)


def skewed_load(ranks: int, experts: int, seed: int, draw: int = 0) -> IntArray:
    """Routing of 8192 tokens per rank with a few hot experts, drawn from a fixed seed; others of the same experts'
    popularity by `draw`.
    """
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.5, experts) + 0.05
    noisy = weight * rng.uniform(0.7, 1.3, (ranks, experts))
    if draw > 0:
        rng = np.random.default_rng((seed, draw))
    return rng.poisson(8192 * noisy / noisy.sum(axis=1, keepdims=True)).astype(np.int64)


def scale_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time to plan and to split at several sizes; large sizes repeat less and leave out what takes minutes."""
    for (ranks, experts), preset in itertools.product(SCALES, arguments.preset):
        context = get_preset(preset).context(ranks, experts, routed_per_rank=8192, slots_per_rank=arguments.slots)
        repeats = max(3, min(60, 400_000 // (ranks * experts)))
        for policy in arguments.policy:
            if policy == "forced-balance" or (policy not in ("prophet", "static", "top2", "top3") and ranks > 64):
                continue
            planner = get_planner(policy)
            plan_us, split_us = times(planner, context, repeats, ranks, experts, cold=arguments.cold)
            yield {
                "preset": preset,
                "ranks": ranks,
                "experts": experts,
                "policy": policy,
                "cases": len(plan_us),
                "plan_us_median": float(np.median(plan_us)),
                "plan_us_mean": float(np.mean(plan_us)),
                "plan_us_p99": float(np.percentile(plan_us, 99)),
                "split_us_median": float(np.median(split_us)) if split_us else None,
            }


def times(
    planner: Planner, context: PlanContext, repeats: int, ranks: int, experts: int, *, cold: bool = False
) -> tuple[list[float], list[float]]:
    """Microseconds of planning and splitting, as in a run: on counts drawn anew, with a placement in force.

    Ours split in sparse form.

    A planner that goes on from step to step is led through steps of a few routings, and the first calls of every one
    are not timed. cold: other data fills the processor's caches before every timed call.
    """
    plan_us, split_us = [], []
    other = np.ones(COLD_BYTES // 8 if cold else 0)
    goes_on = planner.name == "prophet"
    for seed in range(max(1, repeats // 2) if goes_on else repeats):
        load = skewed_load(ranks, experts, seed)
        placement = planner.place(load, context)
        for draw in range(1, ROUTING_CALLS if goes_on else 2):
            here = dataclasses.replace(context, previous=placement)
            load = skewed_load(ranks, experts, seed, draw)
            other += 1.0
            placement, us = timed(lambda at=load, c=here: planner.place(at, c))
            if goes_on and draw < ROUTING_CALLS // 4:
                continue
            plan_us.append(us)
            present = load.copy()
            other += 1.0
            if isinstance(planner, ProphetPlanner):
                split_us.append(timed(lambda p=planner, c=present, at=placement: p.flows(c, at, context))[1])
            elif ranks <= 64:
                split_us.append(timed(lambda c=present, at=placement: planner.split(c, at, context))[1])
    return plan_us, split_us


def print_table(table: list[dict[str, Any]]) -> None:
    """Print rows with their keys as columns."""
    if not table:
        return
    columns = list(table[0])
    text = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in table]
    widths = [max(len(c), *(len(line[i]) for line in text)) for i, c in enumerate(columns)]
    for line in (columns, *text):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--trace", action="append", default=[], help="a routing trace (npz); may be repeated")
    parser.add_argument("--preset", action="append", help="cluster or cluster:model, or all; may be repeated")
    parser.add_argument("--policy", action="append", help="a planner, forced-balance, or all (default)")
    parser.add_argument("--cases", type=_count, default=200, help="layer-steps per trace, evenly spaced (default 200)")
    parser.add_argument("--slots", type=_count, default=16, help="replica slots per rank (default 16)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token where the trace does not say")
    parser.add_argument("--exact", action="store_true", help="plan from the present counts")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--optimum", type=_count, metavar="N", help="compare with the optimum of N small cases instead"
    )
    parser.add_argument("--optima", type=Path, metavar="FILE", help="solved optima, read and added to (--optimum)")
    parser.add_argument("--limit", type=float, default=10.0, help="solver's seconds per form (--optimum, default 10)")
    parser.add_argument("--processes", type=_count, default=1, help="solvers at a time (--optimum, default 1)")
    parser.add_argument(
        "--first-case", type=int, default=0, metavar="K", help="number of the first small case (--optimum, default 0)"
    )
    instead.add_argument("--scale", action="store_true", help="time planning and splitting at several sizes instead")
    parser.add_argument("--cold", action="store_true", help="with --scale: other data in the caches before every call")
    instead.add_argument("--splits", action="store_true", help="what a split's effort buys, with --trace, instead")
    instead.add_argument(
        "--break-even", action="store_true", help="where replicas pay: tokens, link rate, skew instead"
    )
    parser.add_argument("--plot", type=Path, help="write the picture of --break-even here (PNG)")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    if arguments.splits and not arguments.trace:
        parser.error("--splits goes with --trace FILE")
    if not (arguments.scale or arguments.trace or arguments.optimum or arguments.break_even):
        parser.error("give --trace FILE, --scale, --optimum N or --break-even")
    if arguments.plot and not arguments.break_even:
        parser.error("--plot goes with --break-even")
    if arguments.cold and not arguments.scale:
        parser.error("--cold goes with --scale")
    if arguments.splits and not set(arguments.policy or ()) <= {"prophet"}:
        parser.error("--splits: expected --policy to be one of prophet, whose splits have an effort")
    if not arguments.limit > 0:
        parser.error(f"--limit: expected a positive number of seconds, got {arguments.limit}")
    if arguments.first_case < 0:
        parser.error(f"--first-case: expected a case's number, at least 0, got {arguments.first_case}")
    chosen = arguments.preset or (list(SCALE_PRESETS) if arguments.break_even or arguments.scale else ["all"])
    arguments.preset = list(PRESET_NAMES) if "all" in chosen else chosen
    source, usual = rows, ["all"]
    for asked, other, policies in (
        (arguments.break_even, even_rows, ["prophet"]),
        (arguments.optimum, optimum_rows, ["all"]),
        (arguments.scale, scale_rows, ["all"]),
        (arguments.splits, split_rows, ["prophet"]),
    ):
        if asked:
            source, usual = other, policies
    policies = arguments.policy or usual
    arguments.policy = ["forced-balance", *POLICIES] if "all" in policies else policies
    table = []
    try:
        for row in source(arguments):
            table.append(row)
            print(".", end="", file=sys.stderr, flush=True)
    except (TraceError, SpecError) as error:
        print(file=sys.stderr)
        parser.error(str(error))
    print(file=sys.stderr)
    print_table(table)
    if arguments.plot:
        plot(table, arguments.plot)
    if arguments.json:
        write_json(arguments.json, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
