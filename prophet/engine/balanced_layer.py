"""One MoE layer as the engine balances it: the layer's port, and all that is known of the layer.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prophet.engine.history import History
from prophet.engine.planning import PlanAhead
from prophet.engine.replan import KeptPlan, next_plan
from prophet.errors import SpecError
from prophet.experts.replica import Replica
from prophet.layer.counts import Counts, Row, compare_splits
from prophet.layer.moe import MoE
from prophet.layer.port import LayerWindow, Pass, PassCount, PlainPort, Port
from prophet.planner.model.withdraw import pays
from prophet.scheduler.actions import Window
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.pieces import Form
from prophet.scheduler.replicas import BlockReplicas, State
from prophet.scheduler.schedules import Schedule, runs_ahead
from prophet.scheduler.windows import BlockWindows
from prophet.spec import IntArray, Placement, PlanContext, Split

if TYPE_CHECKING:
    from prophet.engine.engine import Engine


@dataclass(slots=True)
class StepCounts:
    """A layer's counts in one step, summed over its microbatches.

    load: [R, E]. rank_load: [R] rows that every rank computed. choices: [E] before any drop. dropped: choices dropped
    for lack of capacity. withdrawn: whether the replicas were not worth the rest of their transfers.
    """

    load: IntArray
    rank_load: IntArray
    choices: IntArray
    dropped: int = 0
    withdrawn: bool = False

    @classmethod
    def none(cls, ranks: int, experts: int) -> StepCounts:
        """Those of a step that begins."""
        load, rank_load, choices = (np.zeros(shape, dtype=np.int64) for shape in ((ranks, experts), ranks, experts))
        return cls(load, rank_load, choices)

    def add(self, counts: Counts, split: Split) -> None:
        """Take in one microbatch."""
        self.load += counts.load
        self.rank_load += split.rank_load()
        self.choices += counts.undropped().sum(axis=0)
        self.dropped += int(counts.dropped.sum())


class BalancedLayer:
    """The layer with this place in the order of execution.

    homes: the placement without replicas. placement, digest: in force. plans: the one it came from, and the next.
    counts: of the step under way. last_rank_load: [R] rows that every rank computed in a microbatch of the last step.
    """

    def __init__(self, engine: Engine, index: int, layer: MoE, context: PlanContext) -> None:
        self.index = index
        self.layer = layer
        self.context = context
        self.homes = self.placement = context.homes_only()
        self.digest = self.homes.digest()
        collective = engine.collective
        who = f"rank {collective.rank}, MoE layer {index}"
        self.plans = PlanAhead(engine.thread, self.check, collective.timeout_s, who)
        self.history = History(context.ranks, context.experts, adaptive=engine.experiment.replan.predict == "best")
        self.windows = BlockWindows(index)
        self.counts = StepCounts.none(context.ranks, context.experts)
        self.last_rank_load: IntArray = np.zeros(context.ranks, dtype=np.int64)
        self.stopwatch = engine.stopwatch
        self._engine = engine
        self._ahead = runs_ahead(engine.schedule, index)
        self._forms = FormChooser(engine.experiment.transfers)
        self._pass, self._passes = Pass.EVALUATION, PassCount()

    def __deepcopy__(self, memo: dict[int, Any]) -> Port:
        watch = copy.deepcopy(self.layer.expert_watch, memo)
        return PlainPort(
            self.context.ranks, self.context.experts, watch
        )  # a copied layer is balanced only once it is attached itself

    # --- the layer's port ---

    def begin(self, forward: Pass) -> None:
        self._pass = forward
        if forward is Pass.TRAINING:
            self._engine.ensure_step()

    def header(self) -> Row:
        engine, replicas = self._engine, self._replicas
        training = self._pass is not Pass.EVALUATION
        layers = engine.balanced if engine.compared else []
        first, last = bool(layers) and self.index == 0, bool(layers) and self is layers[-1]
        return Row(
            forward=self._passes.next(self._pass),
            kind=self._pass.value,
            step=engine.step,
            updates=engine.updates,
            averaged=self._pass.averaged,
            placement=self.digest if training else 0,
            split=engine.split_digest,
            structure=self.layer.experts.structure_digest() if training else 0,
            stale=replicas is not None and replicas.stale,
            window_us=self.windows.own_us if layers else (),
            placements=[layer.digest if training else 0 for layer in layers] if first else (),
            upcoming=[engine.upcoming()] if last else (),
            gradients=engine.used_gradients() if self._pass is Pass.TRAINING else None,
        )

    def agreed(self, counts: Counts) -> None:
        engine, replicas = self._engine, self._replicas
        if self._pass is Pass.TRAINING:
            if engine.compared:
                self.windows.agree(counts.window_us)
            if counts.upcoming.size:
                engine.confirm(counts.upcoming[:, 0])
            if counts.gradients is not None and engine.watch is not None:
                engine.watch.compare(counts.gradients)
            if engine.runtime.recording is not None:
                engine.runtime.recording.enter(f"route({self.index})")
        if replicas is not None and counts.stale.any():
            replicas.refresh()

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        with self.stopwatch("split"):
            placement, split = self._split(counts.load)
        if self._pass is Pass.TRAINING:
            self.counts.add(counts, split)
            if self.index == 0:
                self._engine.first_counts()
            self._plan_next()
        return placement, split

    def replicas(self) -> list[Replica]:
        return [] if self._replicas is None else self._replicas.arrived()

    def window(self, kind: LayerWindow) -> None:
        step = self._engine.runtime.step
        if step is None or (kind in ("FEC", "FNEC") and self._pass is not Pass.TRAINING):
            return
        block = self.index - 1 if kind == "BNEC" else self.index
        # nothing comes before the first block: what belongs to the end starts under the rest of the backward pass
        step.enter(Window(kind, block) if block >= 0 else Window("END"))

    @property
    def _replicas(self) -> BlockReplicas | None:
        """The replicas of the step under way; None in evaluation."""
        step = self._engine.runtime.step
        return None if step is None or self._pass is Pass.EVALUATION else step.blocks[self.index]

    # --- the split ---

    def _split(self, load: IntArray) -> tuple[Placement, Split]:
        """Placement in force and split of the exact counts; no replicas in evaluation, and where they do not pay."""
        engine, replicas = self._engine, self._replicas
        if replicas is None or replicas.state is State.NONE:
            return self.homes, Split.to_homes(load, self.homes)
        placement = self.placement
        split = engine.planner.split(load, placement, self.context)
        keep = replicas.in_use or self._pays(load, split)
        replicas.use(keep, np.flatnonzero(load.sum(axis=0)).tolist())
        if not keep:
            self.counts.withdrawn = True
            placement = self.homes
            split = Split.to_homes(load, placement)
        engine.split_digest = split.digest()
        if engine.checks:
            compare_splits(engine.split_digest, self.index, engine.step, engine.collective, engine.device)
            split.check(load, placement)
        return placement, split

    def _pays(self, load: IntArray, split: Split) -> bool:
        """Whether replicas are worth what is left to pay for them; the same on every rank, and in every run."""
        engine = self._engine
        if not engine.planner.withdraws:
            return True
        trans, agg = self._forms.prepare(self.placement, self.context)
        microbatches = engine.config.accumulation_steps
        return pays(load, split, self.context, trans, agg, ahead=self._ahead, microbatches=microbatches)

    # --- the next placement ---

    def _plan_next(self) -> None:
        """Plan the next step from the counts so far, on the planning thread."""
        engine, kept, seen = self._engine, self.plans.kept, self.counts.load.copy()
        expected = self.history.forecast(seen, engine.experiment.replan.predict)
        begins = kept is None and self.placement.is_static  # no plan yet, and none to go on with
        context = replace(self.context, previous=None if begins else self.placement)

        def plan() -> KeptPlan:
            found = next_plan(kept, seen, expected, engine.planner, context, engine.experiment.replan)
            placement = found.placement
            fits = placement.experts == context.experts and placement.ranks == context.ranks
            if fits and not placement.is_static:
                self._forms.prepare(placement, context)  # remembered for the step that uses it
            return found

        self.plans.start(plan)

    def take_plan(self) -> None:
        """What was planned comes into force."""
        planned_s = self.plans.take()
        if planned_s is not None and self.plans.kept is not None:
            self.placement = self.plans.kept.placement
            self.stopwatch.add("plan", planned_s)

    def check(self, placement: Placement) -> None:
        """Raise `SpecError` where a planner has not kept to the layer's context: an own planner may be wrong."""
        who, context = f"planner {self._engine.planner.name!r}, MoE layer {self.index}", self.context
        shape = (placement.experts, placement.ranks)
        if shape != (context.experts, context.ranks):
            raise SpecError(f"{who}: placed {shape} experts and ranks, expected {(context.experts, context.ranks)}")
        if not np.array_equal(placement.home, context.home):
            raise SpecError(f"{who}: the placement moves homes; expected those of the context")
        copies, limits = placement.copies_per_rank().tolist(), context.slot_limits().tolist()
        if any(c > limit for c, limit in zip(copies, limits, strict=True)):
            raise SpecError(f"{who}: {copies} replicas by rank; slots_per_rank and memory allow {limits}")

    def resume(self, plan: KeptPlan | None, history: History) -> None:
        """Go on from what was saved: `plan` comes into force with the next step."""
        self.history, self.placement = history, self.homes
        self.plans.resume(plan)

    def move_to(self, context: PlanContext) -> None:
        """Plan for another machine from now on."""
        self.context = context
        self._forms = FormChooser(self._engine.experiment.transfers)

    # --- the step ---

    def form(self, schedule: Schedule, window_us: Mapping[Window, int]) -> Form:
        """How Trans and Agg travel in the step that begins."""
        return self._forms.form_under(schedule, self.index, self.placement, self.context, window_us)

    def imbalance(self) -> float:
        """Largest over mean rank load of the last step without replicas; 1 before the first."""
        return Split.to_homes(self.history.predict(), self.homes).max_mean() if self.history.observed else 1.0

    def end_step(self) -> StepCounts:
        """Remember the step's counts, and return them."""
        counts, self.counts = self.counts, StepCounts.none(self.context.ranks, self.context.experts)
        self.last_rank_load = counts.rank_load // self._engine.config.accumulation_steps
        self.history.observe(counts.load)
        return counts
