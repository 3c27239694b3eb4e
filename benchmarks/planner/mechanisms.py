"""What is every mechanism of our planner worth? Predicted steps without it over those with all.

A mechanism is an edit of the core's sources (`cores.py`); the product has no switches.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.cores import Edit, build, edited, in_place, load
from benchmarks.planner.walks import Call, Walked, alike, calls_of, contexts, geomean, machine_of, walk
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import PlanContext
from prophet.traces.npz import read_trace

APART = 4  # every fourth layer of a deep trace in one draw, the others in the next ones
DEEP = 16
LIMIT_S = 1800.0
ITERATIONS = 40  # of every layer


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What the planner does without it: edits of its core, no descent, or no withdrawing of replicas."""

    name: str
    edits: tuple[Edit, ...] = ()
    descends: bool = True
    withdraw: bool = True


def _without(name: str, file: str, old: str, new: str) -> Mechanism:
    return Mechanism(name, (Edit(file, old, new),))


CONTROL = "none: other draws"  # what chance alone makes of the figures
MECHANISMS = (
    _without(CONTROL, "plan.cpp", "for (Int tokens : problem.total_E) mix(tokens);", "mix(problem.total_E[0]);"),
    _without(
        "first plan: levelling",
        "plan.cpp",
        "        Placement spared(problem_, limit_R_, room_);",
        "        if (growing_) first.copy_from(Placement(problem_, limit_R_, room_));\n"
        "        if (growing_) first_s = base_.total;\n        Placement spared(problem_, limit_R_, room_);",
    ),
    _without("first plan: spares", "plan.cpp", "Int SPARES = 8;", "Int SPARES = 0;"),
    _without("first plan: growth", "plan.cpp", "                attempt(first, placed_s, true);", ""),
    _without("first plan: tries", "plan.cpp", "double left_s = BURST *", "double left_s = 0.0 * BURST *"),
    _without("replicas that gain little", "plan.cpp", "double GAINED = 0.01;", "double GAINED = 0.0;"),
    _without("placement in force kept by a margin", "plan.cpp", "double KEPT = 0.002;", "double KEPT = 0.0;"),
    _without("tries where exchanges are short, too", "plan.cpp", "> FROM * base_.total", ">= 0.0 * FROM"),
    _without("tries and growth", "plan.cpp", "> FROM * base_.total", "> (2.0 + FROM) * base_.total"),
    _without(
        "jumps noticed",
        "plan.cpp",
        "if (keeps && first_s >= cost.total * (1.0 - margin))",
        "if (keeps && (growing_ || first_s >= cost.total * (1.0 - margin)))",
    ),
    _without(
        "no look for jumps where products are even",
        "plan.cpp",
        "(growing_ ? UNEVEN : margin)",
        "(growing_ ? 0.0 * UNEVEN - 1.0 : margin)",
    ),
    _without(
        "tries",
        "plan.cpp",
        "growing_ && draws_.affords(try_s_, budget_s_)",
        "growing_ && draws_.affords(try_s_, 0.0 * budget_s_)",
    ),
    _without("tries: fresh", "plan.cpp", "draws_.one_of(4) == 0", "false"),
    _without("tries: others", "plan.cpp", "draws_.one_of(4) == 0", "true"),
    _without("tries: one put elsewhere", "plan.cpp", "add_one(growth, q, draws);", "(void)add_one;"),
    _without("tries: growth by three prices", "plan.cpp", "SMOOTH << draws.one_of(3)", "SMOOTH"),
    _without("tries: no token is sent", "plan.cpp", "if (growth.close(q))", "if (false && growth.close(q))"),
    _without("growth: patience", "growth.cpp", "flow.arcs - kept < PATIENCE", "flow.arcs - kept < PATIENCE - 1"),
    _without("growth: few experts valued", "growth.cpp", "n < VALUED", "n < (VALUED << 20)"),
    _without(
        "growth: exposed transfers priced",
        "growth.cpp",
        "gain_R[d] - (exposed_with(",
        "gain_R[d] - 0.0 * (exposed_with(",
    ),
    Mechanism("split: descent", descends=False),
    _without(
        "split: few sweeps from low q",
        "split.cpp",
        "above_s > FAR_ABOVE * cost.total",
        "above_s > (1e9 + FAR_ABOVE) * cost.total",
    ),
    _without("split: no descent for little", "split.cpp", "double WORTH_IT = 0.01;", "double WORTH_IT = 0.0;"),
    _without(
        "split: none where homes are better",
        "split.cpp",
        "if (effort > 0.0 && at_home.total < split.cost.total)",
        "if (false && at_home.total < split.cost.total)",
    ),
    Mechanism(
        "split: nodes first",
        (
            Edit("exact.cpp", "if (problem_.nodes() == 1) return", "if (problem_.nodes() > 0) return"),
            Edit("exact.cpp", "&& problem_.nodes() > 1;", "&& problem_.nodes() < 0;"),
            Edit("exact.cpp", "if (node_R_[r] != before)", "if (before == NONE)"),
        ),
    ),
    _without(
        "hidden transfers in the price",
        "cost.cpp",
        "FORWARD_AND_BACKWARD - exposed.hidden",
        "FORWARD_AND_BACKWARD - 0.0 * exposed.hidden",
    ),
    _without(
        "transfers in two phases",
        "cost.cpp",
        "return {exposed_s + overlap_cost * covered_s, hidden};",
        "return {1e6 + exposed_s + overlap_cost * covered_s, hidden};",
    ),
    Mechanism("replicas withdrawn", withdraw=False),
)
ALL = Mechanism("all")


@dataclass(frozen=True, slots=True)
class Part:
    """A trace's calls and a context; `presets` are those whose layers are alike."""

    trace: str
    presets: tuple[str, ...]
    context: PlanContext
    calls: Sequence[Call]


def parts_of(paths: Sequence[Path], presets: Sequence[str], slots: int, iterations: int, draw: int = 0) -> list[Part]:
    """Every trace with every preset; another draw walks through other layers, or through few ones in another order."""
    parts = []
    for path in paths:
        trace = read_trace(path)
        layers = [(n + draw) % trace.layers for n in range(trace.layers)]
        if trace.layers >= DEEP:
            layers = list(range((APART - 1 - draw) % APART, trace.layers, APART))
        calls = calls_of(trace, layers, iterations)
        parts += [
            Part(path.name, tuple(names), context, calls) for names, context in alike(contexts(trace, presets, slots))
        ]
    return parts


def walked(task: tuple[Mechanism, Path, Sequence[Part], int]) -> list[Walked]:
    """Every part's walk without a mechanism, by cores in a folder, in a draw."""
    mechanism, folder, parts, draw = task
    planner = ProphetPlanner() if mechanism.descends else ProphetPlanner(split_effort=0.0)
    edits = (*mechanism.edits, Edit("plan.cpp", "Int seed_ = 1;", f"Int seed_ = {1 + draw};"))
    with in_place(load(build(edited(edits), folder))):
        return [walk(planner, p.context, p.calls, withdraw=mechanism.withdraw)[0] for p in parts]


def study_rows(
    paths: Sequence[Path],
    presets: Sequence[str],
    *,
    slots: int,
    folder: Path,
    processes: int,
    iterations: int = ITERATIONS,
    draws: int = 1,
    only: str = "",
) -> Iterator[dict[str, Any]]:
    """One row per mechanism, draw, trace and preset: what its absence does to the step and to the time of calls."""
    parts = [parts_of(paths, presets, slots, iterations, draw) for draw in range(draws)]
    mechanisms = [m for m in MECHANISMS if only in m.name]
    build(edited(()), folder)  # whose objects the others share
    tasks = [(m, folder, parts[draw], draw) for m in (ALL, *mechanisms) for draw in range(draws)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap(walked, tasks)
        whole = [results.next(LIMIT_S) for _ in range(draws)]
        for mechanism in mechanisms:
            for draw in range(draws):
                for part, now, before in zip(parts[draw], results.next(LIMIT_S), whole[draw], strict=True):
                    for preset in part.presets:
                        yield {"draw": draw, **_row(mechanism, part, preset, now, before)}


def _row(mechanism: Mechanism, part: Part, preset: str, now: Walked, before: Walked) -> dict[str, Any]:
    steps = now.step_s / before.step_s
    return {
        "without": mechanism.name,
        "trace": part.trace,
        "preset": preset,
        "calls": len(part.calls),
        "step": geomean(steps),
        "step_after_jump": geomean(steps[now.jumped]),
        "plan_us": float(now.plan_us.mean()),
        "plan_us_with": float(before.plan_us.mean()),
        "split_us": float(now.split_us.mean()),
        "split_us_with": float(before.split_us.mean()),
    }


def losses(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per mechanism: the loss in the machine class that loses most, on the preset that does, and the times.

    Losses are geometric means over draws; the error of the preset's is that of its mean.
    """
    table = []
    for name in dict.fromkeys(r["without"] for r in rows):
        own = [r for r in rows if r["without"] == name]
        by_class = {
            m: geomean([r["step"] for r in own if machine_of(r["preset"]) == m])
            for m in dict.fromkeys(machine_of(r["preset"]) for r in own)
        }
        machine = max(by_class, key=lambda m: by_class[m])
        by_preset = {
            key: np.log([r["step"] for r in own if (r["trace"], r["preset"]) == key])
            for key in dict.fromkeys((r["trace"], r["preset"]) for r in own)
        }
        worst = max(by_preset, key=lambda key: by_preset[key].mean())
        logs = by_preset[worst]
        loss = float(np.exp(logs.mean())) - 1
        table.append(
            {
                "without": name,
                "all": geomean([r["step"] for r in own]) - 1,
                "machines": machine,
                "machines_loss": by_class[machine] - 1,
                "preset": worst[1],
                "preset_loss": loss,
                "preset_error": float(logs.std(ddof=1) / len(logs) ** 0.5) if len(logs) > 1 else 0.0,
                "trace": worst[0],
                "after_jump": geomean([r["step_after_jump"] for r in own]) - 1,
                "plan_time": float(np.mean([r["plan_us"] for r in own]) / np.mean([r["plan_us_with"] for r in own])),
                "split_time": float(np.mean([r["split_us"] for r in own]) / np.mean([r["split_us_with"] for r in own])),
                "stays": by_class[machine] > 1.01 or loss > 0.05,
            }
        )
    return table
