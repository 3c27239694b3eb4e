"""Whole steps of a paper's models on its machines, simulated: loads, policies, and what is assumed of either.

Shape legend: R ranks, E experts (as many), L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from benchmarks.papers.rows import Assumption
from prophet.machine.presets import Preset, get_preset
from prophet.planner import Planner, get_planner
from prophet.planner.model.cost import mean_bandwidth, step_cost
from prophet.planner.model.withdraw import pays
from prophet.scheduler.forms import FormChooser, Transfers
from prophet.scheduler.pieces import Form
from prophet.scheduler.schedules import schedule_named
from prophet.scheduler.simulate import SimulatedStep, StepDurations, predicted_durations, simulate
from prophet.scheduler.windows import predicted_window_us
from prophet.spec import FloatArray, FormName, IntArray, Placement, PlanContext, Split, Windows
from prophet.traces.npz import RoutingTrace

ASSUMPTIONS: Mapping[str, Assumption] = {
    "padding": Assumption(assumed="DeepSpeed padded to its largest pair", instead="DeepSpeed without padding"),
    "port": Assumption(assumed="a port that four cards share", instead="a quarter of it for each card"),
    "node-once": Assumption(assumed="direct and two-phase transfers", instead="transfers as Eq. 4 and 5 count them"),
    "rest of the step": Assumption(assumed="head, all-reduce and Adam", instead="layers alone"),
    "load": Assumption(assumed="load T", instead="load Z"),
    "slots": Assumption(assumed="a slot for every expert", instead="two slots per card"),
    "precision": Assumption(assumed="float32", instead="half precision"),
}
FIRST = 100  # iterations, of which the paper reports
SKEW = 1.1  # of load Z: the three heaviest of 16 experts then have 58 %, the three lightest 5 %
DRIFT = (0.8, 1.2)  # of load Z, by which each rank's own popularity differs
NO_COVER = Windows(experts=False)
# Bytes of memory that Adam reads and writes for a float32 parameter: itself, gradient and both moments
ADAM_BYTES = 28
# Bytes per second of a card's memory (NVIDIA: GA102 and Turing whitepapers)
MEMORY = {"hpwnv": 936e9, "hpnv": 936e9, "lpwnv": 616e9}
# Planners under other names: with their options
VARIANTS: Mapping[str, tuple[str, dict[str, int]]] = {"pro-prophet-6": ("pro-prophet", {"equation": 6})}
# These decide once the counts of the step are known, as published; others plan from the counts before
PRESENT = ("fastermoe", "top2", "top3")
PADDED = "static-padded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A model on so many cards of a cluster, each with so many tokens that choose `top_k` experts."""

    cluster: str
    model: str
    ranks: int
    tokens: int
    top_k: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Plan:
    """What a policy makes of one step, by layer [L]; contexts: what it was told."""

    placements: list[Placement]
    splits: list[Split]
    contexts: list[PlanContext]

    def layers_s(self) -> FloatArray:
        """Seconds of every layer alone, [L]."""
        by_layer = zip(self.splits, self.placements, self.contexts, strict=True)
        return np.array([step_cost(split, placement, context).total_s for split, placement, context in by_layer])

    def loads_LR(self) -> IntArray:
        """Rows that every rank computes, [L, R]."""
        return np.array([split.rank_load() for split in self.splits])


def transfers_of(policy: str) -> Transfers | tuple[FormName, ...]:
    """The forms that a policy's transfers may take: the one place to choose them.

    Published policies are given the direct and the two-phase form only, whatever else the runtime learns.
    """
    return "auto" if policy == "prophet" else ("direct", "two-phase")


@dataclass(eq=False, slots=True)
class Lab:
    """Simulates steps once and remembers them.

    Attributes:
        trace: Real routing, for load T.
        iterations: How many of a run are simulated.
        layers: At most so many layers of a model; None for all.
    """

    trace: RoutingTrace
    iterations: int = 10
    layers: int | None = None
    _plans: dict[tuple[Cell, str, str | None], list[Plan]] = field(default_factory=dict)
    _steps: dict[tuple[Cell, str, str | None], list[SimulatedStep]] = field(default_factory=dict)
    _loads: dict[tuple[Cell, str], list[list[tuple[IntArray, IntArray]]]] = field(default_factory=dict)

    def plans(self, cell: Cell, policy: str, changed: str | None = None) -> list[Plan]:
        """Plan a policy's steps.

        Args:
            cell: The job.
            policy: A planner and where its transfers are launched, such as "fastermoe:blocking"; block-wise if it does
                not say.
            changed: The assumption that is changed.
        """
        if changed == "padding" and policy.startswith(PADDED):
            policy = policy.replace(PADDED, "static")
        # The others change what a plan takes, and no plan
        changed = changed if changed in ("port", "load", "slots", "precision") else None
        key = (cell, policy, changed)
        if key not in self._plans:
            loads = self.loads(cell, "Z" if changed == "load" else "T")
            policy_led = _Policy(policy, len(loads[0]))
            machine = _Machine(cell, changed)
            self._plans[key] = [policy_led.plan(by_layer, machine.context) for by_layer in loads]
        return self._plans[key]

    def steps(self, cell: Cell, policy: str, changed: str | None = None) -> list[SimulatedStep]:
        """Simulate a policy's steps; see `plans`."""
        key = (cell, policy, changed)
        if key not in self._steps:
            machine = _Machine(cell, changed)
            self._steps[key] = [_played(plan, policy, machine) for plan in self.plans(cell, policy, changed)]
        return self._steps[key]

    def seconds(self, cell: Cell, policy: str, changed: str | None = None) -> float:
        """Mean seconds of a policy's steps; see `plans`."""
        return float(np.mean([s.makespan_s for s in self.steps(cell, policy, changed)]))

    def context(self, cell: Cell) -> PlanContext:
        """Return what a planner knows of a cell's machine and layers."""
        return _Machine(cell, None).context

    def loads(self, cell: Cell, load: str) -> list[list[tuple[IntArray, IntArray]]]:
        """Counts [R, E] before a step and in it, by iteration and layer; drawn from one seed."""
        key = (cell, load)
        if key not in self._loads:
            rng = np.random.default_rng(0)
            layers = self._depth(cell)
            make = self._recorded if load == "T" else _drawn
            at = self._first_iterations(self.iterations)
            self._loads[key] = [[make(cell, n, layer, rng) for layer in range(layers)] for n in at]
        return self._loads[key]

    def _depth(self, cell: Cell) -> int:
        layers = get_preset(f"{cell.cluster}:MoE-GPT-{cell.model}").model.layers
        return min(layers, self.layers or layers)

    def _first_iterations(self, n: int) -> list[int]:
        """Numbers of n recorded iterations among the first of a training run, evenly spread."""
        numbers = [int(self.trace.iteration[steps.start]) for steps in self.trace.iteration_slices()]
        early = max(1, sum(number < FIRST for number in numbers))
        return [round(i) for i in np.linspace(0, early - 1, n)]

    def _recorded(self, cell: Cell, iteration: int, layer: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Load T: two neighbouring microbatches of the trace, folded to these ranks, with the cell's tokens."""
        start = list(self.trace.iteration_slices())[iteration].start
        before, now = (
            folded(self.trace.load(start + i, layer % self.trace.layers), cell.ranks, cell.tokens * cell.top_k, rng)
            for i in (0, 1)
        )
        return before, now


def folded(load: IntArray, ranks: int, choices: int, rng: np.random.Generator) -> IntArray:
    """Counts [R, E] of as many experts as ranks: neighbours together, every rank with so many choices.

    Args:
        load: Recorded counts.
        ranks: R. Where more than were recorded, each recorded rank stands for several.
        choices: Of a rank.
        rng: Draws them in proportion to the recorded counts.
    """
    rows, experts = load.shape
    load = load.reshape(ranks, -1, experts).sum(axis=1) if rows > ranks else np.repeat(load, ranks // rows, axis=0)
    load = load.reshape(ranks, ranks, -1).sum(axis=2)
    return np.stack([rng.multinomial(choices, row / row.sum()) for row in load]).astype(np.int64)


def _drawn(cell: Cell, iteration: int, layer: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Load Z: popularity place^-1.1; the experts of a token differ from each other."""
    del iteration, layer
    experts = cell.ranks
    popularity = rng.permutation((np.arange(experts) + 1.0) ** -SKEW)

    def counts() -> IntArray:
        rows = []
        for _ in range(cell.ranks):
            own = popularity * rng.uniform(*DRIFT, experts)
            # Gumbel noise: the largest k are k draws without replacement
            noisy = np.log(own) + rng.gumbel(size=(cell.tokens, experts))
            chosen = np.argsort(-noisy, axis=1)[:, : cell.top_k]
            rows.append(np.bincount(chosen.ravel(), minlength=experts))
        return np.stack(rows).astype(np.int64)

    return counts(), counts()


@dataclass(eq=False)
class _Machine:
    """A cell's machine and model with one assumption changed."""

    cell: Cell
    changed: str | None

    @cached_property
    def preset(self) -> Preset:
        found = get_preset(f"{self.cell.cluster}:MoE-GPT-{self.cell.model}")
        cluster = found.cluster
        if self.changed == "port":
            quarter = cluster.inter_bytes_per_s / (cluster.ranks_per_node or 1)
            cluster = replace(cluster, shared_port_bytes_per_s=None, inter_bytes_per_s=quarter)
        elif self.changed == "precision":
            cluster = replace(cluster, element_bytes=2, peak_flops_per_s=2 * cluster.peak_flops_per_s)
        return Preset(cluster=cluster, model=found.model)

    @cached_property
    def context(self) -> PlanContext:
        cell = self.cell
        return self.preset.context(
            cell.ranks,
            cell.ranks,
            routed_per_rank=cell.tokens * cell.top_k,
            top_k=cell.top_k,
            slots_per_rank=2 if self.changed == "slots" else cell.ranks,
        )

    @property
    def has_rest(self) -> bool:
        return self.changed != "rest of the step"

    @cached_property
    def head_s(self) -> float:
        """Forward seconds of the output head."""
        model = self.preset.model
        flops = 2.0 * self.cell.tokens * model.dim * model.vocabulary
        return flops / self.context.topology.flops_per_s[0] if self.has_rest else 0.0

    @cached_property
    def update_s(self) -> float:
        """Averaging dense gradients by a ring over all cards, then Adam on what each of them has."""
        if not self.has_rest:
            return 0.0
        model, ranks, n_bytes = self.preset.model, self.cell.ranks, self.preset.cluster.element_bytes
        dense = model.layers * model.met_by_every_token + model.vocabulary * model.dim
        ring_s = self.context.topology.inter.seconds(2.0 * dense * n_bytes * (ranks - 1) / ranks)
        own = dense + model.layers * self.context.shape.expert_params
        return ring_s + own * ADAM_BYTES / MEMORY[self.cell.cluster]


class _Policy:
    """A policy, led from step to step: what it has placed stays in force until it places anew.

    Args:
        policy: See `Lab.plans`.
        blocks: L.
    """

    def __init__(self, policy: str, blocks: int) -> None:
        self.name, _, self.schedule = policy.partition(":")
        planner, options = VARIANTS.get(self.name, ("static" if self.name == PADDED else self.name, {}))
        self.planner: Planner = get_planner(planner, **options)
        self.in_force: list[Placement | None] = [None] * blocks

    def plan(self, loads: list[tuple[IntArray, IntArray]], context: PlanContext) -> Plan:
        """Place and split one step; loads: counts before and now, by layer."""
        planner, hidden = self.planner, self.schedule != "blocking"
        # No window covers what blocks
        context = context if hidden else replace(context, windows=NO_COVER)
        # Before the first block nothing computes but its attention
        first = replace(context, windows=replace(context.windows, experts=False))
        contexts = [first, *[context] * (len(loads) - 1)]
        placements, splits = [], []
        for layer, ((before, now), here) in enumerate(zip(loads, contexts, strict=True)):
            previous = self.in_force[layer]
            known = now if planner.name in PRESENT else before
            placement = planner.place(known, replace(here, previous=previous) if previous else here)
            self.in_force[layer] = placement
            rows = np.full_like(now, now.max()) if self.name == PADDED else now
            split = planner.split(rows, placement, here)
            if planner.withdraws and not placement.is_static:
                _, trans, agg = FormChooser(transfers_of(self.name)).prepare(placement, here)
                if not pays(now, split, here, trans, agg):
                    placement = here.homes_only()
                    split = Split.to_homes(now, placement)
            placements.append(placement)
            splits.append(split)
        return Plan(placements=placements, splits=splits, contexts=contexts)


def _played(plan: Plan, policy: str, machine: _Machine) -> SimulatedStep:
    """Simulate a planned step."""
    name, _, where = policy.partition(":")
    blocks = len(plan.placements)
    schedule = schedule_named(where or "block-wise", blocks)
    own = [tuple(action for action in schedule if action.block == i) for i in range(blocks)]
    weights = predicted_window_us(plan.contexts, [s.rank_load() for s in plan.splits])
    forms = [
        FormChooser(transfers_of(name)).form_under(own[i], i, placement, here, weights)
        for i, (placement, here) in enumerate(zip(plan.placements, plan.contexts, strict=True))
    ]
    attention = machine.context.windows
    durations = predicted_durations(
        plan.placements,
        plan.splits,
        plan.contexts,
        forms=forms,
        start_s=attention.fnec_s,
        end_s=attention.bnec_s,
        update_s=machine.update_s,
    )
    durations = _with_attention(durations, attention, machine.head_s)
    if machine.changed == "node-once":
        durations = _as_printed(durations, plan.placements, forms, machine.context)
    return simulate(schedule, durations)


def _with_attention(durations: StepDurations, attention: Windows, head_s: float) -> StepDurations:
    """Behind every block but the last comes the next one's attention, behind the last the head."""
    ranks = durations.ranks
    rest = np.full((durations.blocks, ranks), attention.fnec_s)
    rest[-1] = head_s
    return replace(durations, fnec_s=rest, bnec_s=2.0 * rest)


def _as_printed(
    durations: StepDurations, placements: list[Placement], forms: list[Form], context: PlanContext
) -> StepDurations:
    """Transfers by Eq. 4 and 5: an expert with copies on n of D cards takes (n + 1) / D of its bytes' time."""
    bandwidth = mean_bandwidth(context.topology)
    trans, agg = np.zeros_like(durations.trans_s), np.zeros_like(durations.agg_s)
    for block, (placement, form) in enumerate(zip(placements, forms, strict=True)):
        copies = placement.holds.sum(axis=1)
        reach = float(copies[copies > 1].sum()) / placement.ranks
        for chunks, cut, n_bytes in (
            (trans, form.trans_cut, context.trans_bytes),
            (agg, form.agg_cut, context.agg_bytes),
        ):
            shares = np.diff(np.asarray(cut)) / cut[-1]
            chunks[block, : len(shares)] = (shares * reach * n_bytes / bandwidth)[:, None]
    return replace(durations, trans_s=trans, agg_s=agg)
