"""One MoE layer as the engine balances it: the layer's port, and all that the engine knows of the layer.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from prophet.engine.config import EngineConfig, Experiment
from prophet.engine.history import History
from prophet.engine.planning import PlanAhead
from prophet.engine.replan import KeptPlan, next_plan
from prophet.errors import SpecError
from prophet.experts.replica import Replica
from prophet.layer.counts import Counts, Row, compare_splits
from prophet.layer.gradient_watch import GradientWatch
from prophet.layer.moe import MoE
from prophet.layer.port import LayerWindow, Pass, PassCount, PlainPort, Port
from prophet.planner.base import Planner
from prophet.planner.model.withdraw import all_hidden, pays
from prophet.ranks.waiting import Waiter
from prophet.scheduler.actions import Window
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.pieces import Form
from prophet.scheduler.recording import ObservedCollective
from prophet.scheduler.replicas import BlockReplicas, State
from prophet.scheduler.runtime import Runtime
from prophet.scheduler.schedules import Schedule, runs_ahead
from prophet.scheduler.windows import BlockWindows, Stopwatch
from prophet.spec import IntArray, Placement, PlanContext, Split


class LayersEngine(Protocol):
    """What a layer asks of the engine that balances it; `prophet.engine.engine.Engine` says what each name means."""

    balanced: list[BalancedLayer]
    collective: ObservedCollective
    config: EngineConfig
    experiment: Experiment
    planner: Planner
    schedule: Schedule
    runtime: Runtime
    thread: Waiter
    stopwatch: Stopwatch
    watch: GradientWatch | None
    compared: bool
    step: int
    updates: int

    @property
    def split_digest(self) -> int: ...
    @property
    def checks(self) -> bool: ...
    def ensure_step(self) -> None: ...
    def last_split(self, split: Split) -> None: ...
    def upcoming(self) -> int: ...
    def confirm(self, upcoming: IntArray) -> None: ...
    def used_gradients(self) -> Tensor | None: ...
    def first_counts(self) -> None: ...


@dataclass(slots=True)
class StepCounts:
    """A layer's counts in one step, summed over its microbatches.

    Attributes:
        load: Choices [R, E] by source rank and expert.
        rank_load: Rows [R] that every rank computed.
        choices: Choices [E] before any drop.
        dropped: Choices dropped for lack of capacity.
        withdrawn: Whether the replicas were not worth the rest of their transfers.
    """

    load: IntArray
    rank_load: IntArray
    choices: IntArray
    dropped: int = 0
    withdrawn: bool = False

    @classmethod
    def none(cls, ranks: int, experts: int) -> StepCounts:
        """Return the counts of a step that begins."""
        load, rank_load, choices = (np.zeros(shape, dtype=np.int64) for shape in ((ranks, experts), ranks, experts))
        return cls(load, rank_load, choices)

    def add(self, counts: Counts, split: Split) -> None:
        """Add one microbatch."""
        self.load += counts.load
        self.rank_load += split.rank_load()
        self.choices += counts.undropped().sum(axis=0)
        self.dropped += int(counts.dropped.sum())


class BalancedLayer:
    """All that the engine knows of one layer; it is also the layer's port.

    Args:
        engine: The engine, whose group, planner and schedule are already set.
        index: The layer's place in the order of execution.
        layer: The layer.
        context: What its placements are planned for.

    Attributes:
        homes: The placement without replicas.
        placement: The placement in force.
        digest: Digest of the placement in force.
        plans: The plan that it came from, and the next one.
        counts: Counts of the step under way.
        last_rank_load: Rows [R] that every rank computed in a microbatch of the last step.
    """

    def __init__(self, engine: LayersEngine, index: int, layer: MoE, context: PlanContext) -> None:
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
        # of the pass under way, once its counts are known
        self._apart = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Port:
        watch = copy.deepcopy(self.layer.expert_watch, memo)
        # A copied layer is balanced only once it is attached itself
        return PlainPort(self.context.ranks, self.context.experts, watch)

    # --- the layer's port ---

    def begin(self, forward: Pass) -> None:
        self._pass = forward
        # For models whose forward pass the hook of `follow` does not see, as one that is called by its parts
        if forward is Pass.TRAINING:
            self._engine.ensure_step()

    def header(self) -> Row:
        engine, replicas = self._engine, self._replicas
        # A pass that is recomputed uses the replicas of its step, so it counts as training here
        training = self._pass is not Pass.EVALUATION
        # Placements are compared without a message for it. The first layer's counts carry the digests of all placements
        # in force: in time for every Trans but the first layer's, which starts before any counts. So the last layer's
        # counts carry, a step ahead, the digest of the placement that the first layer takes next.
        carries_placements = engine.compared and self.index == 0
        carries_upcoming = engine.compared and self is engine.balanced[-1]
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
            window_us=self.windows.own_us if engine.compared else (),
            placements=[layer.digest if training else 0 for layer in engine.balanced] if carries_placements else (),
            upcoming=[engine.upcoming()] if carries_upcoming else (),
            gradients=engine.used_gradients() if self._pass is Pass.TRAINING else None,
        )

    def agreed(self, counts: Counts) -> None:
        engine, replicas = self._engine, self._replicas
        # Not in a recomputed pass: its rows repeat those of the first run
        if self._pass is Pass.TRAINING:
            if engine.compared:
                self.windows.agree(counts.window_us)
            if counts.upcoming.size:
                engine.confirm(counts.upcoming[:, 0])
            if counts.gradients is not None and engine.watch is not None:
                engine.watch.compare(counts.gradients)
            if engine.runtime.recording is not None:
                engine.runtime.recording.enter(f"route({self.index})")
        # On all ranks if one asks for it, since sending parameters again takes all of them
        if replicas is not None and counts.stale.any():
            replicas.refresh()

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        with self.stopwatch("split"):
            return self._split(counts.load)

    def remember(self, counts: Counts, split: Split) -> None:
        if self._pass is not Pass.TRAINING:
            return
        self.counts.add(counts, split)
        # Before the plan: from here on, what ranks said of the first layer's next placement is out of date
        if self.index == 0:
            self._engine.first_counts()
        # With every microbatch: the last one's plan, from the whole step's counts, is the one that is used
        self._plan_next()

    def apart(self) -> bool:
        replicas = self._replicas
        if not self._apart or replicas is None:
            return False
        # before any of the next block's Trans, whose first chunk the FEC window launches: one order on all ranks
        replicas.launch_all()
        return True

    def replicas(self) -> list[Replica]:
        return [] if self._replicas is None else self._replicas.arrived()

    def copies_done(self) -> None:
        step = self._engine.runtime.step
        if step is not None:
            step.copies_done(self.index)

    def window(self, kind: LayerWindow) -> None:
        if kind == "FNEC":
            # The layer's work is under way on a device: to hash its split now keeps nothing waiting
            _ = self._engine.split_digest
        step = self._engine.runtime.step
        if step is None or (kind in ("FEC", "FNEC") and self._pass is not Pass.TRAINING):
            return
        block = self.index - 1 if kind == "BNEC" else self.index
        # Nothing comes before the first block: what belongs to the end starts under the rest of the backward pass
        step.enter(Window(kind, block) if block >= 0 else Window("END"))

    @property
    def _replicas(self) -> BlockReplicas | None:
        """The replicas of the step under way; None in evaluation."""
        step = self._engine.runtime.step
        return None if step is None or self._pass is Pass.EVALUATION else step.blocks[self.index]

    # --- the split ---

    def _split(self, load: IntArray) -> tuple[Placement, Split]:
        """Split the exact counts under the placement in force; without replicas in evaluation or if they do not pay."""
        engine, replicas = self._engine, self._replicas
        self._apart = False
        if replicas is None or replicas.state is State.NONE:
            return self.homes, Split.to_homes(load, self.homes)
        placement = self.placement
        split = engine.planner.split(load, placement, self.context)
        # Replicas that an earlier microbatch of the step has used hold gradients, which must go home in any case
        keep = replicas.in_use or self._pays(load, split)
        self._apart = keep and self._runs_apart(load)
        replicas.use(keep, np.flatnonzero(load.sum(axis=0)).tolist(), apart=self._apart)
        if not keep:
            self.counts.withdrawn = True
            placement = self.homes
            split = Split.to_homes(load, placement)
        engine.last_split(split)
        if engine.checks:
            compare_splits(engine.split_digest, self.index, engine.step, engine.collective)
            split.check(load, placement)
        return placement, split

    def _pays(self, load: IntArray, split: Split) -> bool:
        """Whether replicas are worth what is left to pay for them; the same on every rank, and in every run."""
        engine = self._engine
        if not engine.planner.withdraws:
            return True
        _, trans, agg = self._forms.prepare(self.placement, self.context)
        microbatches = engine.config.accumulation_steps
        return pays(load, split, self.context, trans, agg, ahead=self._ahead, microbatches=microbatches)

    def _runs_apart(self, load: IntArray) -> bool:
        """Whether replicas run apart: where compute before them and after them does not hide their transfers.

        The same on every rank, and in every run: sums may have other last bits for it.
        """
        # published policies run as they were published
        if not (self._ahead and self._engine.planner.withdraws):
            return False
        _, trans, agg = self._forms.prepare(self.placement, self.context)
        return not all_hidden(load, self.context, trans, agg)

    # --- the next placement ---

    def _plan_next(self) -> None:
        """Plan the next step from the counts so far, on the planning thread."""
        engine, kept, seen = self._engine, self.plans.kept, self.counts.load.copy()
        expected = self.history.forecast(seen, engine.experiment.replan.predict)
        # No plan yet, and none to go on with: the planner then starts without a previous placement
        begins = kept is None and self.placement.is_static
        context = replace(self.context, previous=None if begins else self.placement)

        def plan() -> KeptPlan:
            found = next_plan(kept, seen, expected, engine.planner, context, engine.experiment.replan)
            placement = found.placement
            fits = placement.experts == context.experts and placement.ranks == context.ranks
            # Here, beside the step, and not when the plan is taken, while all ranks wait for it. A placement that
            # does not fit is refused by `check` on the thread that takes it.
            if fits and not placement.is_static:
                self._forms.prepare(placement, context)
            return found

        self.plans.start(plan)

    def take_plan(self) -> None:
        """Put the planned placement into force."""
        planned_s = self.plans.take()
        if planned_s is not None and self.plans.kept is not None:
            self.placement = self.plans.kept.placement
            self.stopwatch.add("plan", planned_s)

    def check(self, placement: Placement) -> None:
        """Raise `SpecError` for a placement outside the layer's context: a user's planner may be wrong."""
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
        """Go on from saved state: `plan` comes into force with the next step."""
        self.history, self.placement = history, self.homes
        self.plans.resume(plan)

    def move_to(self, context: PlanContext) -> None:
        """Plan for another machine from now on."""
        self.context = context
        # The old one remembers forms by placement, whose costs were those of the old machine
        self._forms = FormChooser(self._engine.experiment.transfers)

    # --- the step ---

    def form(self, schedule: Schedule, window_us: Mapping[Window, int]) -> Form:
        """Choose how Trans and Agg travel in the step that begins.

        Args:
            schedule: When the transfers start and end.
            window_us: Microseconds of compute by window, under which they can be hidden.
        """
        return self._forms.form_under(schedule, self.index, self.placement, self.context, window_us)

    @property
    def spreads(self) -> bool:
        """Whether ranks may pass on parts of experts that they have no replica of."""
        return self._forms.spreads(self.context.topology)

    def imbalance(self) -> float:
        """Largest over mean rank load of the last step without replicas; 1 before the first."""
        return Split.to_homes(self.history.predict(), self.homes).max_mean() if self.history.observed else 1.0

    def end_step(self) -> StepCounts:
        """Remember the step's counts, and return them."""
        counts, self.counts = self.counts, StepCounts.none(self.context.ranks, self.context.experts)
        # Of one microbatch, as windows are: each microbatch runs through all of them
        self.last_rank_load = counts.rank_load // self._engine.config.accumulation_steps
        self.history.observe(counts.load)
        return counts
