"""How far from the optimum of the performance model? Small cases against a mixed-integer program.

Shape legend: R ranks, E experts.

Cases run over all presets in turn, 4 to 8 ranks with one or two experts each, 1, 2 or 4 slots, real loads (ranks of a
trace drawn without replacement, its experts merged into as few as needed) and random ones; half of them with the ranks
on two nodes, so that both levels of the network count. Everything follows from the case's number. Solved optima are
kept in a file, since the solver takes seconds to minutes and no planner changes them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.walks import predicted_s, timed
from prophet.machine.presets import PRESET_NAMES, get_preset
from prophet.planner import Planner, get_planner
from prophet.planner.oracle.optimum import solve_exactly
from prophet.spec import IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace

KNOWN = 100  # calls whose plan the solver has to beat, so that it need not look at longer steps
PROVEN = 0.002  # an optimum counts as proven when the solver's bound is this close


@dataclass(frozen=True)
class SmallCase:
    """One layer small enough to solve."""

    number: int
    preset: str
    real: bool
    load: IntArray
    context: PlanContext


def small_case(number: int, trace: RoutingTrace | None) -> SmallCase:
    """The case of this number; real loads need a trace of at least 8 ranks, and are random ones without it."""
    rng = np.random.default_rng(90_000 + number)
    preset = PRESET_NAMES[number % len(PRESET_NAMES)]
    ranks = int(rng.choice([4, 4, 5, 6, 8]))
    experts = ranks * int(rng.choice([1, 2]))
    slots = int(rng.choice([1, 2, 4]))
    two_nodes = bool(rng.integers(0, 2)) and ranks % 2 == 0
    real = (number // len(PRESET_NAMES)) % 2 == 0 and trace is not None and trace.counts.shape[2] >= ranks
    if real and trace is not None:
        step = int(rng.integers(0, trace.counts.shape[0]))
        layer = int(rng.integers(0, trace.counts.shape[1]))
        chosen = rng.choice(trace.counts.shape[2], ranks, replace=False)
        counts = trace.counts[step, layer][chosen].astype(np.int64)
        merged = rng.permutation(counts.shape[1]) % experts
        load = np.zeros((ranks, experts), dtype=np.int64)
        np.add.at(load.T, merged, counts.T)
    else:
        popular = rng.dirichlet(np.full(experts, float(rng.choice([0.3, 1.0, 3.0]))))
        load = np.stack([rng.multinomial(4096, rng.dirichlet(popular * experts * 4 + 1e-3)) for _ in range(ranks)])
    context = get_preset(preset).context(ranks, experts, routed_per_rank=4096, slots_per_rank=slots)
    if two_nodes:
        topology = dataclasses.replace(context.topology, ranks_per_node=ranks // 2)
        context = dataclasses.replace(context, topology=topology)
    return SmallCase(number, preset, real, load.astype(np.int64), context)


def _solve(task: tuple[SmallCase, float]) -> dict[str, Any]:
    case, limit_s = task
    start = time.perf_counter()
    planner = get_planner("prophet")
    placement, _ = placed(case, planner, KNOWN)
    known_s = predicted_s(planner, case.load, placement, case.context)
    found = solve_exactly(case.load, case.context, known_s=known_s, time_limit_s=limit_s)
    return {
        "case": case.number,
        "preset": case.preset,
        "seconds": found.seconds,
        "bound": found.bound,
        "solver_s": time.perf_counter() - start,
    }


def optima(
    trace: RoutingTrace | None, proven: int, *, limit_s: float, path: Path | None, processes: int, first: int = 0
) -> Iterator[tuple[SmallCase, dict[str, Any]]]:
    """Solved cases, counting up from `first` until `proven` of them are; those in `path` are not solved again."""
    known: dict[int, dict[str, Any]] = {}
    if path is not None and path.exists():
        known = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}
    count = 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        number = first
        while count < proven:
            batch = [small_case(n, trace) for n in range(number, number + 4 * processes)]
            number += len(batch)
            asked = [(case, limit_s) for case in batch if case.number not in known]
            # four forms each, and the solver looks at its clock only now and then
            patience_s = 60.0 + 10.0 * limit_s * (1 + len(asked) // processes)
            solved = pool.map_async(_solve, asked, chunksize=1).get(patience_s)
            known.update({row["case"]: row for row in solved})
            if path is not None and solved:
                with path.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in solved)
            for case in batch:
                row = known[case.number]
                if row["seconds"] <= row["bound"] * (1 + PROVEN) and count < proven:
                    count += 1
                    yield case, row


def placed(case: SmallCase, planner: Planner, calls: int) -> tuple[Placement, list[float]]:
    """The placement for a case's load after so many calls, and their microseconds.

    All but the last see counts drawn around the case's, each with the placement of the one before in force. A single
    call is timed when it is repeated.
    """
    rng = np.random.default_rng(case.number)
    routed = case.load.sum(axis=1)
    share = case.load / np.maximum(routed, 1)[:, None]
    context, plan_us = case.context, []
    planner.place(case.load, context)
    for call in range(calls):
        load = case.load
        if call < calls - 1:
            load = np.stack([rng.multinomial(n, p) for n, p in zip(routed, share, strict=True)]).astype(np.int64)
        placement, us = timed(functools.partial(planner.place, load, context))
        plan_us.append(us)
        context = dataclasses.replace(context, previous=placement)
    return placement, plan_us


def gap_rows(
    solved: list[tuple[SmallCase, dict[str, Any]]], planners: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """One row per planner: how much longer its steps are than the proven optimum. The option `calls` is `placed`'s."""
    for label, given in planners.items():
        options = dict(given)
        calls = options.pop("calls", 1)
        planner = get_planner(label.partition(",")[0], **options)
        gaps: list[float] = []
        plan_us: list[float] = []
        for case, row in solved:
            placement, taken_us = placed(case, planner, calls)
            plan_us += taken_us[1:] or taken_us
            gaps.append(predicted_s(planner, case.load, placement, case.context) / row["seconds"] - 1)
        real = np.array([case.real for case, _ in solved])
        values = np.array(gaps)
        yield {
            "policy": label,
            "cases": len(gaps),
            "gap_median": float(np.median(values)),
            "gap_median_real": float(np.median(values[real])) if real.any() else None,
            "gap_p90": float(np.percentile(values, 90)),
            "gap_p99": float(np.percentile(values, 99)),
            "gap_max": float(values.max()),
            "plan_us_median": float(np.median(plan_us)),
            "plan_us_mean": float(np.mean(plan_us)),
        }
