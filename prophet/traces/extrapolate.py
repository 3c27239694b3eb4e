"""How long a step would take on more ranks than there are: the simulator on a stretched topology, with an error bar.

Ranks are numbered group by group, and groups stage by stage. Each expert-parallel group has separate loads. They meet
once a step, when gradients are averaged, so a step is as long as that of the slowest group. A run of many steps is
planned as the engine plans it, and its last step is simulated. The error bar comes from steps that were both simulated
and measured. Those ran on few hosts, so for more ranks it is a lower bound of the error.

Shape legend: P ranks of one expert-parallel group, G groups, L layers, E experts of a group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from prophet.errors import SpecError
from prophet.files import is_number, read_json, shown
from prophet.planner import Planner, get_planner
from prophet.planner.base import EFFORT
from prophet.planner.model.cost import step_cost
from prophet.planner.model.withdraw import all_hidden, pays
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.schedules import runs_ahead, schedule_named
from prophet.scheduler.simulate import SimulatedStep, StepDurations, predicted_durations, simulate
from prophet.scheduler.windows import predicted_window_us
from prophet.spec import IntArray, Placement, PlanContext, Split, Topology

MAX_FILE_BYTES = 1 << 24
# Errors in a message
_SHOWN = 4
# Not a planner: the routing itself is perfectly even
BALANCED = "forced-balance"
# Assumed seconds of one slow core, a call's and those of one rank and expert: see
# benchmarks/results/2026-11-25-planner-times.md.
_PLAN_S, _PLAN_PAIR_S = 2e-5, 1e-8
_SPLIT_S, _SPLIT_PAIR_S = 1e-5, 8e-9

Part = Literal["experts", "all-to-all", "transfers", "dense", "average", "host", "bubble"]
PARTS: tuple[Part, ...] = get_args(Part)


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
        """Seconds between which a measured step would lie if its error were one of those in `errors`."""
        # error = simulated / measured - 1, so measured = simulated / (1 + error); 0 keeps the simulated time inside.
        return simulated_s / (1.0 + max(*self.errors, 0.0)), simulated_s / (1.0 + min(*self.errors, 0.0))


# The last rows of that page: static, fastermoe, pro-prophet and prophet on four hosts, and all but fastermoe on eight,
# without ports that four share and with them
MEASURED = ErrorBar(
    errors=(0.018, 0.005, -0.010, -0.019, 0.006, -0.096, -0.060, 0.042, -0.083, -0.111),
    source="10 cases on 4 and 8 emulated hosts (benchmarks/results/2026-11-30-cluster-steered.md)",
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
        # A policy that was not simulated has null there
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
    """A job, and the routing that its steps have.

    Args:
        context: One expert-parallel group of P ranks, and a block with experts.
        layers: Blocks with experts, of all pipeline stages together.
        routed_per_rank: Choices of one rank in a microbatch.
        groups: Expert-parallel groups side by side, which train the same experts on other tokens.
        stages: Pipeline stages, each of P x G ranks.
        microbatches: Passes of a step; the gradients of all are averaged once.
        steps: Steps of the run; the last one is simulated, and each is planned from the one before.
        skew: Expert e of a layer is chosen in proportion to (place in the order of popularity)^-skew.
        dense_s: Forward seconds of one microbatch outside of the blocks with experts, of all stages together.
        dense_bytes: Gradients that are not those of experts, of all stages together.
        schedule: One of `prophet.scheduler.schedules.NAMES`.
        ranks_per_node: Of the machine, where a group is smaller than a node; 0: as the context has it.
        samples: Groups that are simulated in place of all of them where there are more.
        seed: Of the loads.

    Raises:
        SpecError: A number is out of its range.
    """

    context: PlanContext
    layers: int
    routed_per_rank: int
    groups: int = 1
    stages: int = 1
    microbatches: int = 1
    steps: int = 300
    skew: float = 0.5
    dense_s: float = 0.0
    dense_bytes: int = 0
    schedule: str = "block-wise"
    ranks_per_node: int = 0
    samples: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "routed_per_rank", "groups", "stages", "microbatches", "steps", "samples"):
            if getattr(self, name) < 1:
                raise SpecError(f"Scenario.{name} must be at least 1, got {getattr(self, name)}")
        if self.stages > self.layers:
            raise SpecError(f"Scenario.stages: expected at most the {self.layers} layers, got {self.stages}")
        if not (self.skew >= 0 and np.isfinite(self.skew)):
            raise SpecError(f"Scenario.skew must not be negative, got {self.skew!r}")

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.context.ranks * self.groups * self.stages

    @property
    def samples_of(self) -> int:
        """Groups that are simulated."""
        return min(self.groups, self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolated:
    """Seconds of a step with one planner.

    Attributes:
        ranks: Of the job.
        group: Ranks of one expert-parallel group.
        planner: Its name.
        step_s: The slowest group's step.
        low_s: Lower end of the error bar.
        high_s: Upper end of the error bar.
        parts_s: What the slowest group's step consists of. In every layer the busiest rank counts, so the sum may lie
            above step_s. "transfers" is the mean over ranks of what Trans and Agg lengthen a step by.
        exposed_s: Means over ranks, by operation, of the microbatch with transfers.
        idle_s: The same mean of a rank's idle time.
        max_mean: Largest rank load over the mean one, averaged over layers and groups.
        copies_per_rank: Mean replicas of a rank.
        replica_bytes: Of all layers on the fullest rank, parameters and gradients.
        plan_s: Host seconds of planning all layers of a stage, most of them beside the step.
    """

    ranks: int
    group: int
    planner: str
    step_s: float
    low_s: float
    high_s: float
    parts_s: dict[Part, float]
    exposed_s: dict[str, float]
    idle_s: float
    max_mean: float
    copies_per_rank: float
    replica_bytes: int
    plan_s: float

    @property
    def limited_by(self) -> Part:
        """The largest part."""
        return max(PARTS, key=lambda part: self.parts_s[part])

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, and `limited_by`, as `--json` prints them."""
        return {name: getattr(self, name) for name in self.__slots__} | {"limited_by": self.limited_by}


def stretched(topology: Topology, ranks: int) -> Topology:
    """The same kind of machine with `ranks` ranks: nodes of the same size, and the ranks' own figures repeated."""
    if ranks < 1:
        raise SpecError(f"a topology needs at least one rank, got {ranks}")
    repeats = -(-ranks // topology.ranks)
    return replace(
        topology,
        ranks=ranks,
        # A machine of one node grows as one node; of several, by nodes of the same size.
        ranks_per_node=min(topology.ranks_per_node, ranks) if topology.nodes > 1 else min(topology.ranks, ranks),
        flops_per_s=(topology.flops_per_s * repeats)[:ranks],
        free_bytes=(topology.free_bytes * repeats)[:ranks],
    )


def even_load(scenario: Scenario) -> IntArray:
    """Every expert chosen equally often, to within one; [P, E]."""
    ranks, experts = scenario.context.ranks, scenario.context.experts
    load = np.full((ranks, experts), scenario.routed_per_rank // experts, dtype=np.int64)
    rest = scenario.routed_per_rank % experts
    for r in range(ranks):
        # The rest begins at another expert on every rank, so that sums over ranks are even, too.
        load[r, (r * rest + np.arange(rest)) % experts] += 1
    return load


def load_of(scenario: Scenario, group: int, layer: int, step: int) -> IntArray:
    """Draw what a group's ranks choose in a layer of a step.

    Popular experts stay popular from step to step, and counts differ.

    Args:
        scenario: The job; its seed, the group, the layer and the step seed the draw.
        group: Number of the group.
        layer: Number of the layer.
        step: From 1.

    Returns:
        [P, E].
    """
    ranks, experts = scenario.context.ranks, scenario.context.experts
    # Without the step: which experts are popular does not change
    order = np.random.default_rng([scenario.seed, group, layer])
    popularity = order.permutation(np.arange(1, experts + 1, dtype=np.float64) ** -scenario.skew)
    popularity /= popularity.sum()
    rng = np.random.default_rng([scenario.seed, group, layer, step])
    return rng.multinomial(scenario.routed_per_rank, popularity, size=ranks).astype(np.int64)


def placed(scenario: Scenario, planner: Planner, context: PlanContext, group: int, layer: int) -> Placement:
    """Find the placement of the run's last step.

    It is planned after every step, from its load and the placement then in force.

    Args:
        scenario: The job.
        planner: Plans it.
        context: Of this layer.
        group: Number of the group.
        layer: Number of the layer.
    """
    placement = None
    # Other planners forget: their last plan needs the last load only
    first = 1 if planner.goes_on else max(1, scenario.steps - 1)
    for step in range(first, scenario.steps):
        placement = planner.place(
            load_of(scenario, group, layer, step), replace(context, previous=placement) if placement else context
        )
    return context.homes_only() if placement is None else placement


def extrapolate(
    scenario: Scenario,
    planner: str,
    error: ErrorBar,
    *,
    over: Callable[[Callable[[int], list[_Stage]], Iterable[int]], Iterable[list[_Stage]]] = map,
    done: Callable[[], object] = lambda: None,
) -> Extrapolated:
    """Simulate the last step of the run.

    Args:
        scenario: The job.
        planner: Its name, or "forced-balance".
        error: How far simulated steps are from measured ones.
        over: Applies a function to the groups that are simulated; that of a pool of processes does it at once.
        done: Called after each of `scenario.samples_of` groups.
    """
    found = []
    for stages in over(partial(_group, scenario, planner), range(scenario.samples_of)):
        found += stages
        done()
    # Gradients are averaged once a step, so all groups and stages wait for the slowest.
    worst = max(found, key=lambda stage: stage.step_s)
    low_s, high_s = error.around(worst.step_s)
    return Extrapolated(
        ranks=scenario.ranks,
        group=scenario.context.ranks,
        planner=planner,
        step_s=worst.step_s,
        low_s=low_s,
        high_s=high_s,
        parts_s=worst.parts_s,
        exposed_s=worst.simulated.exposed_s,
        idle_s=float(worst.simulated.idle_s.mean()),
        max_mean=float(np.mean([m for stage in found for m in stage.max_mean_L])),
        copies_per_rank=float(np.mean([stage.copies_R.mean() for stage in found])),
        replica_bytes=max(int(stage.copies_R.max()) for stage in found) * scenario.context.shape.replica_bytes,
        plan_s=worst.plan_s,
    )


def _group(scenario: Scenario, planner: str, group: int) -> list[_Stage]:
    """All pipeline stages of a group."""
    average_s = _average_seconds(scenario)
    return [_stage(scenario, planner, group, layers, average_s) for layers in _stages(scenario)]


def _stages(scenario: Scenario) -> list[range]:
    """The layers of every pipeline stage, as evenly as they divide."""
    cuts = [scenario.layers * stage // scenario.stages for stage in range(scenario.stages + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def _average_seconds(scenario: Scenario) -> float:
    """Seconds of averaging a stage's gradients: a ring over all its ranks, and for each expert one over the groups."""
    context, groups = scenario.context, scenario.groups
    topology, ranks = context.topology, context.ranks * groups
    alone = ranks <= (scenario.ranks_per_node or topology.ranks_per_node)
    # A ring over all ranks leaves a node once; of those over the groups, all of a node's ranks have one
    ring, rings = (topology.intra, topology.intra) if alone else (topology.inter, topology.even_inter)
    # By rank: each is home to an equal share of the experts
    expert_bytes = scenario.layers * context.experts / context.ranks * context.shape.expert_grad_bytes
    shared_s = ring.seconds(2.0 * scenario.dense_bytes / scenario.stages * (ranks - 1) / ranks)
    return shared_s + rings.seconds(2.0 * expert_bytes / scenario.stages * (groups - 1) / groups)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Stage:
    """What one group makes of a stage's layers; copies_R: replicas on every rank, of all layers."""

    step_s: float
    parts_s: dict[Part, float]
    simulated: SimulatedStep
    max_mean_L: list[float]
    copies_R: IntArray
    plan_s: float


def _stage(scenario: Scenario, name: str, group: int, layers: range, average_s: float) -> _Stage:
    planner = get_planner("static" if name == BALANCED else name)
    context = scenario.context
    # There are no experts before the first block to hide a transfer under.
    first = replace(context, windows=replace(context.windows, experts=False))
    contexts = [first if layer == layers[0] else context for layer in layers]
    placements, splits = [], []
    for layer, here in zip(layers, contexts, strict=True):
        even = name == BALANCED
        load = even_load(scenario) if even else load_of(scenario, group, layer, scenario.steps)
        placement = here.homes_only() if even else placed(scenario, planner, here, group, layer)
        placements.append(placement)
        splits.append(Split.to_homes(load, placement) if placement.is_static else planner.split(load, placement, here))
    schedule = schedule_named(scenario.schedule, len(layers))
    weights = predicted_window_us(contexts, [s.rank_load() for s in splits])
    forms, apart = [], []
    for i, (here, placement) in enumerate(zip(contexts, placements, strict=True)):
        chooser = FormChooser()
        forms.append(chooser.form_under(schedule, i, placement, here, weights))
        apart.append(False)
        if planner.withdraws and not placement.is_static:
            _, trans, agg = chooser.prepare(placement, here)
            load, ahead = splits[i].load(), runs_ahead(schedule, i)
            apart[i] = ahead and not all_hidden(load, here, trans, agg)
            # What has been sent of a Trans by then is not played: it ran beside compute.
            if not pays(load, splits[i], here, trans, agg, ahead=ahead, microbatches=scenario.microbatches):
                placements[i] = context.homes_only()
                splits[i] = Split.to_homes(load, placements[i])
    plan_s, wait_s = _host_seconds(planner, contexts[-1], splits[-1])
    dense_s = scenario.dense_s / scenario.stages
    durations = predicted_durations(
        placements,
        splits,
        contexts,
        forms=forms,
        # What comes before the first block is like what comes before the others. The last block's rest is the head.
        start_s=context.windows.fnec_s + dense_s,
        end_s=context.windows.bnec_s + 2.0 * dense_s,
        plan_s=plan_s,
        counts_s=wait_s,
        apart=apart,
    )
    simulated = simulate(schedule, durations)
    others, bubbles = scenario.microbatches - 1, scenario.stages - 1
    # Trans, Agg and planning belong to a step, not to its microbatches.
    alone_s = simulate(schedule, _without_transfers(durations)).makespan_s if others + bubbles else 0.0
    parts_s = _parts(durations, simulated, scenario.microbatches)
    parts_s |= {"average": average_s, "bubble": bubbles * alone_s}
    return _Stage(
        # A pipeline of S stages takes S - 1 microbatches longer than one stage's own.
        step_s=simulated.makespan_s + (others + bubbles) * alone_s + average_s,
        parts_s=parts_s,
        simulated=simulated,
        max_mean_L=[s.max_mean() for s in splits],
        copies_R=np.sum([p.copies_per_rank() for p in placements], axis=0),
        plan_s=plan_s * len(layers),
    )


def _host_seconds(planner: Planner, context: PlanContext, split: Split) -> tuple[float, float]:
    """Host seconds of a layer.

    Published planners are taken to be as fast as this library's.

    Returns:
        Seconds to plan, beside the step, and to exchange counts and split, for which the step waits.
    """
    ranks, experts, topology = context.ranks, context.experts, context.topology
    link = topology.even_inter if topology.nodes > 1 else topology.intra
    # A rank sends its int64 count of every expert to all others
    counts_s = link.seconds(8.0 * experts * (ranks - 1))
    if not planner.replicates:
        return 0.0, counts_s
    pairs = ranks * experts
    plan_s = _PLAN_S + _PLAN_PAIR_S * pairs
    if planner.goes_on:
        load = split.load()
        homes = context.homes_only()
        # A planner that improves its plan spends a share of a step on it
        plan_s += EFFORT * step_cost(Split.to_homes(load, homes), homes, context).total_s
    return plan_s, counts_s + _SPLIT_S + _SPLIT_PAIR_S * pairs


def _without_transfers(durations: StepDurations) -> StepDurations:
    nothing = {name: np.zeros_like(getattr(durations, name)) for name in ("trans_s", "agg_s", "plan_s")}
    return replace(durations, **nothing)


def _parts(durations: StepDurations, simulated: SimulatedStep, microbatches: int) -> dict[Part, float]:
    """The parts of a step's microbatches; in every layer the busiest rank counts."""
    d = durations
    dense_R = d.fnec_s.sum(axis=0) + d.bnec_s.sum(axis=0) + d.start_s + d.end_s
    lengthened_R = simulated.exposed_trans_s + simulated.exposed_agg_s + simulated.slowed_s + simulated.shared_s
    return {
        "experts": microbatches * float((d.fec_s + d.bec_s).max(axis=1).sum()),
        "all-to-all": microbatches * float(d.a2a_s.max(axis=2).sum()),
        "transfers": float(lengthened_R.mean()),
        "dense": microbatches * float(dense_R.max()),
        "host": microbatches * d.blocks * d.counts_s + float(simulated.exposed_plan_s.mean()),
    }
