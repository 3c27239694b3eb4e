"""How long a step would take on more ranks than there are: the simulator on a stretched topology, with an error bar.

The ranks form expert-parallel groups with different loads. The groups meet once, when dense gradients are averaged, so
a step is as long as that of the slowest group. The error bar comes from steps that were both simulated and measured.
Those ran on few hosts, so for more ranks it is a lower bound of the error.

Shape legend: R ranks, P ranks of one expert-parallel group, G groups, L layers, E experts of a group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prophet.errors import SpecError
from prophet.files import is_number, read_json, shown
from prophet.planner import get_planner
from prophet.planner.model.withdraw import pays
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.schedules import runs_ahead, schedule_named
from prophet.scheduler.simulate import SimulatedStep, predicted_durations, simulate
from prophet.scheduler.windows import predicted_window_us
from prophet.spec import IntArray, Placement, PlanContext, Split, Topology, check_experts_per_rank

MAX_FILE_BYTES = 1 << 24
_SHOWN = 4  # errors in a message
BALANCED = "forced-balance"  # not a planner: the routing itself is perfectly even


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBar:
    """Relative errors of simulated step times, simulated / measured - 1, and where they were measured."""

    errors: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.errors or not all(-1.0 < e < float("inf") for e in self.errors):
            shown = [round(e, 3) for e in self.errors[:_SHOWN]]
            raise SpecError(f"{self.source}: simulated_error: expected finite numbers above -1, got {shown}")

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return float(np.mean(np.abs(self.errors)))

    def around(self, simulated_s: float) -> tuple[float, float]:
        """Seconds between which a measured step would lie if its error were one of those seen."""
        return simulated_s / (1.0 + max(*self.errors, 0.0)), simulated_s / (1.0 + min(*self.errors, 0.0))


# static, pro-prophet and prophet of every profile of that page, and prophet-blocking of the first
MEASURED = ErrorBar(
    errors=(-0.024, -0.049, -0.070, -0.063, 0.019, 0.033, -0.043, 0.031, -0.032, -0.136),
    source="10 cases on 4 and 8 emulated hosts (benchmarks/results/2026-11-22-cluster-peers.md)",
)


def read_error_bar(path: str | os.PathLike[str]) -> ErrorBar:
    """The error bar from a file that `python -m benchmarks.cluster --json` wrote; `SpecError` for any other file."""
    file = Path(path)
    rows_of = "rows of the cluster benchmark"
    table = read_json(file, most_bytes=MAX_FILE_BYTES, expected=rows_of, error=SpecError)
    rows = table.get("rows") if isinstance(table, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise SpecError(f"{file}: rows: expected a list of objects with simulated_error and hosts")
    errors, hosts = [], set()
    for i, row in enumerate(rows):
        if row.get("simulated_error", "") is None:
            continue
        for name in ("simulated_error", "hosts"):
            if not is_number(row.get(name)):
                raise SpecError(f"{file}: rows[{i}].{name}: expected a number, got {shown(row.get(name))}")
        errors.append(float(row["simulated_error"]))
        hosts.add(int(row["hosts"]))
    return ErrorBar(errors=tuple(errors), source=f"{len(errors)} policies on {sorted(hosts)} hosts ({file})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is trained. skew: expert e of a layer is chosen in proportion to (place in the order of popularity)^-skew.

    routed_per_rank: choices of one rank in a step. dense_bytes: gradients that all R ranks average. samples: groups of
    expert parallelism that are simulated in place of all of them where there are more.
    """

    context: PlanContext
    layers: int
    routed_per_rank: int
    skew: float = 0.5
    dense_bytes: int = 0
    schedule: str = "block-wise"
    samples: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "routed_per_rank", "samples"):
            if getattr(self, name) < 1:
                raise SpecError(f"Scenario.{name} must be at least 1, got {getattr(self, name)}")
        if not (self.skew >= 0 and np.isfinite(self.skew)):
            raise SpecError(f"Scenario.skew must not be negative, got {self.skew!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolated:
    """Seconds of a step with one planner on R ranks; max_mean is the mean over layers and groups."""

    ranks: int
    group: int
    planner: str
    step_s: float
    low_s: float
    high_s: float
    exposed_s: dict[str, float]
    idle_s: float
    max_mean: float
    copies_per_rank: float

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them."""
        return {name: getattr(self, name) for name in self.__slots__}


def stretched(topology: Topology, ranks: int) -> Topology:
    """The same kind of machine with `ranks` ranks: nodes of the same size, and the ranks' own figures repeated."""
    if ranks < 1:
        raise SpecError(f"a topology needs at least one rank, got {ranks}")
    repeats = -(-ranks // topology.ranks)
    return replace(
        topology,
        ranks=ranks,
        ranks_per_node=min(topology.ranks_per_node, ranks) if topology.nodes > 1 else min(topology.ranks, ranks),
        flops_per_s=(topology.flops_per_s * repeats)[:ranks],
        free_bytes=(topology.free_bytes * repeats)[:ranks],
    )


def resized(context: PlanContext, ranks: int) -> PlanContext:
    """The context with another number of ranks, and as many experts on each."""
    m = check_experts_per_rank(context.experts, context.ranks)
    return replace(
        context,
        topology=stretched(context.topology, ranks),
        home=tuple(e // m for e in range(m * ranks)),
        budget_bytes=None,
        previous=None,
    )


def loads(scenario: Scenario, ranks: int, experts: int, group: int) -> list[tuple[IntArray, IntArray]]:
    """By layer: the load of the step before, and that of this step; [P, E] each."""
    found = []
    for layer in range(scenario.layers):
        rng = np.random.default_rng([scenario.seed, group, layer])
        popularity = rng.permutation(np.arange(1, experts + 1, dtype=np.float64) ** -scenario.skew)
        popularity /= popularity.sum()
        before, now = (rng.multinomial(scenario.routed_per_rank, popularity, size=ranks) for _ in range(2))
        found.append((before.astype(np.int64), now.astype(np.int64)))
    return found


def even_load(scenario: Scenario, ranks: int, experts: int) -> IntArray:
    """Every expert chosen equally often, to within one; [P, E]."""
    load = np.full((ranks, experts), scenario.routed_per_rank // experts, dtype=np.int64)
    rest = scenario.routed_per_rank % experts
    for r in range(ranks):
        load[r, (r * rest + np.arange(rest)) % experts] += 1
    return load


def extrapolate(scenario: Scenario, planner: str, ranks: int, group: int, error: ErrorBar) -> Extrapolated:
    """One step of R ranks in groups of P; `SpecError` if they do not divide.

    planner: its name, or "forced-balance".
    """
    if group < 1 or ranks % group:
        raise SpecError(f"{ranks} ranks cannot form groups of {group}: expected a multiple of the group's size")
    context = resized(scenario.context, group)
    groups = ranks // group
    slowest = context.topology.inter if ranks > context.topology.ranks_per_node else context.topology.intra
    update_s = slowest.seconds(2.0 * scenario.dense_bytes * (ranks - 1) / ranks)
    steps, balances, copies = [], [], []
    for at in range(min(groups, scenario.samples)):
        step, balance, held = _group_step(scenario, planner, context, at, update_s)
        steps.append(step)
        balances.append(balance)
        copies.append(held)
    worst = max(steps, key=lambda s: s.makespan_s)
    low, high = error.around(worst.makespan_s)
    return Extrapolated(
        ranks=ranks,
        group=group,
        planner=planner,
        step_s=worst.makespan_s,
        low_s=low,
        high_s=high,
        exposed_s=worst.exposed_s,
        idle_s=float(worst.idle_s.mean()),
        max_mean=float(np.mean(balances)),
        copies_per_rank=float(np.mean(copies)),
    )


def _group_step(
    scenario: Scenario, name: str, context: PlanContext, group: int, update_s: float
) -> tuple[SimulatedStep, float, float]:
    """(the step, mean max/mean of its layers, replicas per rank over all layers) of one group."""
    ranks, experts = context.ranks, context.experts
    planner = get_planner("static" if name == BALANCED else name)
    first = replace(context, windows=replace(context.windows, experts=False))
    contexts: Sequence[PlanContext] = [first, *[context] * (scenario.layers - 1)]
    placements: list[Placement] = []
    splits: list[Split] = []
    present: list[IntArray] = []
    for here, (before, now) in zip(contexts, loads(scenario, ranks, experts, group), strict=True):
        even = even_load(scenario, ranks, experts) if name == BALANCED else None
        placement = planner.place(before if even is None else even, here)
        load = now if even is None else even
        placements.append(placement)
        present.append(load)
        splits.append(Split.to_homes(load, placement) if placement.is_static else planner.split(load, placement, here))
    schedule = schedule_named(scenario.schedule, scenario.layers)
    weights = predicted_window_us(contexts, [s.rank_load() for s in splits])
    forms = []
    for i, (here, placement) in enumerate(zip(contexts, placements, strict=True)):
        chooser = FormChooser()
        forms.append(chooser.form_under(schedule, i, placement, here, weights))
        # what has been sent of a Trans by then is not played: it ran beside compute
        trans, agg = chooser.prepare(placement, here)
        withdraws = planner.withdraws and not placement.is_static
        if withdraws and not pays(present[i], splits[i], here, trans, agg, ahead=runs_ahead(schedule, i)):
            placements[i] = context.homes_only()
            splits[i] = Split.to_homes(present[i], placements[i])
    durations = predicted_durations(
        placements,
        splits,
        contexts,
        forms=forms,
        # what comes before the first block is like what comes before the others; the last block's rest is the head
        start_s=context.windows.fnec_s,
        end_s=context.windows.bnec_s,
        update_s=update_s,
    )
    held = sum(len(p.replicas()) for p in placements) / ranks
    return simulate(schedule, durations), float(np.mean([s.max_mean() for s in splits])), held
