"""What is every mechanism of our planner worth? Predicted steps without it over those with all.

A mechanism is an edit of the core's sources (`cores.py`) or another value in `Tuning`; the product has no switches.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.cores import Edit, build, edited, in_place, load
from benchmarks.planner.walks import Call, Walked, alike, calls_of, contexts, geomean, machine_of, walk
from prophet.planner.search.prophet import ProphetPlanner, Tuning
from prophet.spec import PlanContext
from prophet.traces.npz import read_trace

HELD_OUT = (3, 7, 11, 15)  # layers of the shared trace that nothing is tuned on
ITERATIONS = 75  # of every layer
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What the planner does without it: edits of its core, other numbers, or no withdrawing of replicas."""

    name: str
    edits: tuple[Edit, ...] = ()
    tuning: Mapping[str, float] = field(default_factory=dict)
    withdraw: bool = True


def _plan(name: str, old: str, new: str) -> Mechanism:
    return Mechanism(name, (Edit("plan.cpp", old, new),))


def _tries(name: str, old: str, new: str) -> Mechanism:
    return Mechanism(name, (Edit("tries.cpp", old, new),))


def _growth(name: str, old: str, new: str) -> Mechanism:
    return Mechanism(name, (Edit("growth.cpp", old, new),))


def _kind(name: str, old: str, new: str) -> Mechanism:
    """Without this kind of a try: others are drawn in its place."""
    return _plan(f"tries: {name}", old, new)


CONTROL = "none: other draws"  # what chance alone makes of the figures
MECHANISMS = (
    _tries(CONTROL, "Draws draws(1);", "Draws draws(2);"),
    _plan(
        "first plan: levelling",
        "        Int most = *std::max_element(limit_R_.begin(), limit_R_.end());",
        "        if (growing_) first.used = 0;\n        if (growing_) first_s = base_.total;\n"
        "        Int most = growing_ ? 1 : *std::max_element(limit_R_.begin(), limit_R_.end());",
    ),
    _plan(
        "first plan: levelling into fewer slots",
        "for (Int slots = 1; slots < most; slots *= 2) {",
        "for (Int slots = most; slots < most; slots *= 2) {",
    ),
    Mechanism("first plan: spares", tuning={"spare": 0}),
    _plan("first plan: growth", "if (try_s_ <= FRESH_S) attempt(first, Change::FRESH, limit_R_);", ""),
    _plan("first plan: growth into fewer slots", "Int slots = most / 2;", "Int slots = 0;"),
    _plan("first plan: tries", "double left_s = BURST *", "double left_s = 0.0 * BURST *"),
    Mechanism("gain_margin", tuning={"gain_margin": 0.0}),
    Mechanism("keep_margin", tuning={"keep_margin": 0.0}),
    _plan("tries where exchanges are short, too", "> FROM * base_.total", ">= 0.0 * FROM"),
    _plan("tries and growth", "> FROM * base_.total", "> (2.0 + FROM) * base_.total"),
    _plan(
        "jumps noticed",
        "if (keeps && first_s >= cost.total * (1.0 - margin))",
        "if (keeps && (growing_ || first_s >= cost.total * (1.0 - margin)))",
    ),
    _plan(
        "no look for jumps where products are even",
        "(growing_ ? UNEVEN : margin)",
        "(growing_ ? 0.0 * UNEVEN - 1.0 : margin)",
    ),
    _plan("haste", "budget_s_ * haste", "budget_s_ + 0.0 * haste"),
    _plan("tries", "draws_.affords(try_s_, budget_s_ * haste)", "draws_.affords(try_s_, 0.0 * budget_s_ * haste)"),
    Mechanism("least_search_s", tuning={"least_search_s": 0.0}),
    _kind("fresh", "n == 0 ? Change::FRESH : ", ""),
    _kind("everywhere", "n == 1 ? Change::EVERYWHERE : ", ""),
    _kind("fewer", "n < 5 ? Change::FEWER : ", ""),
    _kind("others", "n < 5 ? Change::FEWER : Change::OTHERS", "Change::FEWER"),
    _tries("tries: growth by three prices", "SMOOTH << ((draws.seed() >> 16) % 3)", "SMOOTH"),
    _tries("tries: ruled out by sweeps", "before_s * (1.0 + MAYBE)", "before_s * (1e9 + MAYBE)"),
    _growth("growth: patience", "flow.arcs - kept < PATIENCE", "flow.arcs - kept < PATIENCE - 1"),
    _growth("growth: few experts valued", "n < VALUED", "n < (VALUED << 20)"),
    _growth(
        "growth: exposed transfers priced",
        "gain - (with.trans_s - shown.trans_s + with.agg_s - shown.agg_s)",
        "gain; (void)with",
    ),
    _growth("growth: falling prices foreseen", "gain = part * gain - 0.5 * part * part * bend;", ""),
    Mechanism("split: descent", tuning={"split_effort": 0.0}),
    Mechanism(
        "split: few sweeps from low q",
        (Edit("split.cpp", "above_s > FAR_ABOVE * cost.total", "above_s > (1e9 + FAR_ABOVE) * cost.total"),),
    ),
    Mechanism(
        "split: no descent for little", (Edit("split.cpp", "double WORTH_IT = 0.01;", "double WORTH_IT = 0.0;"),)
    ),
    Mechanism(
        "split: none where homes are better",
        (
            Edit(
                "split.cpp",
                "if (effort > 0.0 && unused.total < split.cost.total)",
                "if (false && unused.total < split.cost.total)",
            ),
        ),
    ),
    Mechanism("split: nodes first", (Edit("exact.cpp", "one_node_(node_R[node_R.size - 1] == 0)", "one_node_(true)"),)),
    Mechanism(
        "descent: hidden transfers in the price",
        (
            Edit(
                "descent.cpp",
                "return std::max(FORWARD_AND_BACKWARD - hiding(moved, forward_s, figures), 0.1);",
                "(void)moved; (void)forward_s; (void)figures; return FORWARD_AND_BACKWARD;",
            ),
        ),
    ),
    Mechanism(
        "transfers in two phases",
        (
            Edit(
                "cost.cpp",
                "return std::min(direct_s, scatter_s +",
                "return std::min(direct_s, 1e6 * direct_s + scatter_s +",
            ),
        ),
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


def parts_of(paths: Sequence[Path], presets: Sequence[str], slots: int, iterations: int) -> list[Part]:
    """Every trace with every preset: held-out layers of a trace that has so many, all of another."""
    parts = []
    for path in paths:
        trace = read_trace(path)
        layers = [n for n in HELD_OUT if trace.layers > max(HELD_OUT)] or list(range(trace.layers))
        calls = calls_of(trace, layers, iterations)
        parts += [
            Part(path.name, tuple(names), context, calls) for names, context in alike(contexts(trace, presets, slots))
        ]
    return parts


def walked(mechanism: Mechanism, folder: Path, parts: Sequence[Part]) -> list[Walked]:
    """Every part's walk without this mechanism."""
    planner = ProphetPlanner(tuning=Tuning(**mechanism.tuning))
    own = nullcontext() if not mechanism.edits else in_place(load(build(edited(mechanism.edits), folder)))
    with own:
        return [walk(planner, p.context, p.calls, withdraw=mechanism.withdraw)[0] for p in parts]


def _task(task: tuple[Mechanism, Path, Sequence[Part]]) -> list[Walked]:
    return walked(*task)


def study_rows(
    paths: Sequence[Path],
    presets: Sequence[str],
    *,
    slots: int,
    folder: Path,
    iterations: int,
    processes: int,
    only: str = "",
) -> Iterator[dict[str, Any]]:
    """One row per mechanism, trace and preset: what its absence does to the step and to the time of calls."""
    parts = parts_of(paths, presets, slots, iterations)
    mechanisms = [m for m in MECHANISMS if only in m.name]
    build(edited(()), folder)  # whose objects the others share
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap(_task, [(m, folder, parts) for m in (ALL, *mechanisms)])
        whole = results.next(LIMIT_S)
        for mechanism in mechanisms:
            for part, now, before in zip(parts, results.next(LIMIT_S), whole, strict=True):
                for preset in part.presets:
                    yield _row(mechanism, part, preset, now, before)


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
    """One row per mechanism: the loss in the machine class that loses most, on the preset that does, and the times."""
    table = []
    for name in dict.fromkeys(r["without"] for r in rows):
        own = [r for r in rows if r["without"] == name]
        by_class = {
            m: geomean(np.array([r["step"] for r in own if machine_of(r["preset"]) == m]))
            for m in dict.fromkeys(machine_of(r["preset"]) for r in own)
        }
        machine = max(by_class, key=lambda m: by_class[m])
        worst = max(own, key=lambda r: r["step"])
        table.append(
            {
                "without": name,
                "all": geomean(np.array([r["step"] for r in own])) - 1,
                "machines": machine,
                "machines_loss": by_class[machine] - 1,
                "preset": worst["preset"],
                "preset_loss": worst["step"] - 1,
                "trace": worst["trace"],
                "after_jump": geomean(np.array([r["step_after_jump"] for r in own])) - 1,
                "plan_time": float(np.mean([r["plan_us"] for r in own]) / np.mean([r["plan_us_with"] for r in own])),
                "split_time": float(np.mean([r["split_us"] for r in own]) / np.mean([r["split_us_with"] for r in own])),
                "stays": by_class[machine] > 1.01 or worst["step"] > 1.05,
            }
        )
    return table
