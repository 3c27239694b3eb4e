"""Measure, decide, move only where it pays: the controller of an `ElasticPipeline`, or of a job's stages.

Shape legend: L layers, P ranks. It does not know why loads change. `decide` and `learn` work out what to do, from
figures that are equal on all ranks.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline_balance.control.decide import ControllerConfig, Decision, MoveCost, Policy, decide
from pipeline_balance.control.learn import Learner, MoveTime, without_frozen
from pipeline_balance.control.microbatches import Stretch, Trial
from pipeline_balance.control.report import BalanceReport, MicrobatchChoice, Move
from pipeline_balance.control.stages import BalancedStages, PipelineStages
from pipeline_balance.pipeline.measure.links import Noted
from pipeline_balance.pipeline.measure.slice_costs import unit_costs
from pipeline_balance.pipeline.model.shapes import trains
from pipeline_balance.pipeline.run.failures import agreed_by_all
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import MAX_BYTES, Imbalance, LayerCost, RankLimits, rank_loads_s
from prophet.errors import CollectiveError, PlanMismatch, SpecError, TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.waiting import Waiter
from prophet.spec import digest

if TYPE_CHECKING:
    from pipeline_balance.pipeline.model.layers import Batch, Labels
    from pipeline_balance.pipeline.move.transaction import Prepared, Switched
    from pipeline_balance.pipeline.trainer import ElasticPipeline

_log = logging.getLogger(__name__)

__all__ = ["Controller", "ControllerConfig", "Decision", "DecisionMismatch", "MoveCost", "Overhead", "Policy", "decide"]


class DecisionMismatch(PlanMismatch):
    """Ranks decided differently from what should be equal figures; the message names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """What balancing has cost this rank, in seconds.

    Attributes:
        total_s: All of its time since the start, training included.
        measure_s: Of that, measuring.
        decide_s: Deciding, or waiting for a decision that was made beside a step.
        move_s: Moving layers.
        moves: How many moves there were.
        moved_bytes: What this rank has sent in them.
    """

    total_s: float
    measure_s: float
    decide_s: float
    move_s: float
    moves: int
    moved_bytes: int

    @property
    def fraction(self) -> float:
        """The share of all the time that measuring, deciding and moving took."""
        spent = self.measure_s + self.decide_s + self.move_s
        return spent / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Ready:
    """A decision that is ready to be carried out.

    Attributes:
        costs: The costs that it was made from, of a microbatch.
        decision: The decision.
        prepared: What a move needs beforehand.
        foreseen: Whether the costs were worked out and not measured.
    """

    costs: list[LayerCost]
    decision: Decision
    prepared: Prepared | None = None
    foreseen: bool = False


class Controller:
    """Runs the steps of an `ElasticPipeline` and keeps its stages balanced. All ranks drive theirs in step.

    Args:
        pipeline: The pipeline to balance.
        limits: [P] the ranks' memory and speed, equal on all ranks (None: all alike, without a limit). Layer times
            measured on a rank of speed v are taken as v times as long on a rank of speed 1.
        config: How often to measure and when a move pays; equal on all ranks.
        stages: What is balanced, where that is not the whole pipeline's own.

    Attributes:
        learner: What earlier decisions have taught.
        decisions: All decisions so far.
        costs: [L] costs of a microbatch that the last decision was made from, once it was carried out.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        limits: Sequence[RankLimits] | None = None,
        config: ControllerConfig | None = None,
        *,
        stages: BalancedStages | None = None,
    ) -> None:
        slicing = pipeline.model.slicing
        if stages is None and pipeline.in_job:
            raise SpecError(
                "this pipeline is a job's, which counts the data: give Job(balance_stages=...) a configuration"
            )
        if stages is None and slicing is not None and slicing.stages_per_rank > 1:
            raise SpecError(
                f"balancing gives every rank one stage, these slices ask for {slicing.stages_per_rank}: "
                "change the stages with rebuild()"
            )
        config = config or ControllerConfig()
        bounded = any(limit.memory_bytes < MAX_BYTES for limit in limits or ())
        if pipeline.model.vocabulary is not None and (bounded or config.repack_slowdown is not None):
            raise SpecError(
                "with split_vocabulary the balancer knows no limits of memory, as it counts neither a rank's rows nor "
                "the microbatch more, and no fewer ranks, as every rank has rows"
            )
        self.pipeline = pipeline
        self.stages: BalancedStages = stages if stages is not None else PipelineStages(pipeline)
        self.config = config
        self.decisions: list[Decision] = []
        self.costs: list[LayerCost] = []
        self._spent_s = {"total": 0.0, "measure": 0.0, "decide": 0.0, "move": 0.0}
        self._moves: list[Switched] = []
        self._report: list[Move] = []
        self._choices: list[MicrobatchChoice] = []
        # of the batch that the last step was given; 0 where it came by microbatch
        self._rows = 0
        # of this rank, since the last decision
        self._steps_s: list[float] = []
        self._thread = Waiter("prepares a move") if self.config.prepare_in_backward else None
        self._learned: Learner | None = None
        self.restart(limits)

    def restart(self, limits: Sequence[RankLimits] | None = None) -> None:
        """Go on with the stages as they are now, on other ranks than before or on as many; on all ranks.

        How far gains are trusted, what a move costs and the report stay.
        """
        stages = self.stages
        self.limits = tuple(limits) if limits is not None else RankLimits.uniform(stages.ranks)
        if len(self.limits) != stages.ranks:
            raise SpecError(f"limits needs one entry per rank ({stages.ranks}), got {len(self.limits)}")
        self.learner = Learner(self.limits, stages.microbatches * stages.slices, self.config, stages.first_ranks)
        if self._learned is not None:
            self.learner.trust, self.learner.move_cost = self._learned.trust, self._learned.move_cost
        self._learned = self.learner
        self.imbalance: Imbalance | None = None
        self._ahead: Future[_Ready] | None = None
        # raised once the step is done
        self._late: SpecError | None = None
        self._chosen = threading.Event()
        # for what was worked out beside a step
        self._waited_s = 0.0
        # costs of this step's decision, where layers have just been frozen
        self._foreseen: list[LayerCost] | None = None
        # made after the last step, carried out when the next one begins
        self._decided: _Ready | None = None
        # two numbers of microbatches, and the number that the next step is to have (None: the one in force)
        self._trial: Trial | None = None
        # another controller may have been trying a number when it was replaced
        settled = None if self.pipeline.fixed_microbatches else self.pipeline.settled_microbatches
        self._wanted: int | None = settled if settled != stages.microbatches else None
        # layers that have not gone backward since they came here have no times yet
        self.learner.timer.timed_from = 1
        self._trainable, self._trains = self.pipeline.owned.trainable(), self._training()
        # a job's microbatches have as many rows in all of its layouts
        self._cut_into = stages.microbatches
        # which layers trained when `costs` were found
        self._costs_of = self._trains
        meter = self.pipeline.meter
        self._forget()
        if self._thread is not None:
            # made here, where all ranks are: later only a thread asks for it
            self.pipeline.side_collective()
        self._count()
        meter.enabled = self.learner.timer.measuring

    def _count(self) -> None:
        """Follow the numbers of microbatches, which a user may have changed by hand, and of slices."""
        microbatches = self.stages.microbatches
        if microbatches != self._cut_into:
            # costs are of a microbatch, and those were larger or smaller
            self._cut_into, self.costs = microbatches, []
        self.learner.count(microbatches * self.stages.slices)
        if self._thread is not None:
            # without a reset between decisions, so that samples of the last measured steps are what is left
            self.pipeline.meter.max_samples = self.config.measure_steps * microbatches

    def step(
        self,
        inputs: Batch,
        labels: Labels,
        *,
        update: bool = True,
        max_norm: float | None = None,
        scaler: Any = None,
    ) -> float:
        """Train as `ElasticPipeline.step` does, and decide where a decision is due, after an update.

        A decided move is made when the next step begins, or with `prepare_in_backward` before this step's update.
        Either way `p.grad` is afterwards what the step has left, for the layers that are here then.

        Args:
            inputs: A batch, or a sequence of its microbatches.
            labels: Labels, in the same form.
            update: Whether this batch ends the update.
            max_norm: What the gradients' norm is clipped to (None: not).
            scaler: What `pipeline.scaler()` makes (None: the loss is not scaled).

        Returns:
            The mean loss of the update so far, equal on all ranks.
        """
        if len(self.limits) != self.stages.ranks:
            now = f"the group has {self.stages.ranks} ranks now, the controller was made for {len(self.limits)}"
            raise SpecError(f"{now}: attach again after the group has changed")
        self._rows = _rows_of(inputs)
        return self.around(
            lambda: self.pipeline.step(inputs, labels, update=update, max_norm=max_norm, scaler=scaler), update=update
        )

    def around(self, train: Callable[[], float], *, update: bool) -> float:
        """Call `train`, one step of the pipeline; before it a decided move is made, after it a decision is due."""
        with self._spending("total"):
            if self._decided is not None:
                with self._concluding():
                    self._carry_out(self._decided)
            timer = self.learner.timer
            self._cut_as_wanted()
            trainable = self.pipeline.owned.trainable()
            # frozen or thawed layers: loads have changed for certain
            foreseen = self._foreseen = None
            before = self._trainable, self._trains
            if trainable != self._trainable:
                self._trainable, self._trains = trainable, self._training()
                if update and self._thread is not None and self.costs:
                    # what others have frozen is agreed on with the batch, when the decision begins
                    foreseen = self._foreseen = without_frozen(self.costs, self._costs_of, self._trains)
                timer.loads_changed(known=foreseen is not None)
                if foreseen is None:
                    # this step forgets all times, and begins without any of its own
                    timer.timed_from = timer.step + 1
                # half of a trial would be of other loads
                self._give_up_trial()
                self._cut_as_wanted()
            due = foreseen is not None or (update and timer.due)
            self.pipeline.meter.enabled = timer.measuring
            done = timer.step + int(update)
            beside = self._thread is not None and self._trial is None
            if due and beside:
                # the whole step hides the work, also on a rank without a backward pass
                self.pipeline.before_pass(self._begin)
                self.pipeline.before_update(lambda: self._within(done))
            began, moves = time.perf_counter(), len(self._moves)
            try:
                loss = train()
            except BaseException:
                self._forget()
                if foreseen is not None:
                    # found again by the next step, where a batch was refused
                    self._trainable, self._trains = before
                raise
            # a step with a move in it is of neither map
            if len(self._moves) == moves:
                self._steps_s.append(time.perf_counter() - began)
            if self._late is not None:
                late, self._late = self._late, None
                raise late
            # a decision before the update has counted the step already
            if due and timer.step != done:
                timer.step = done
                with self._concluding():
                    if self._trial is not None:
                        self._tried(self._trial)
                    else:
                        self._decided = self._next_decision()
            timer.step = done
        return loss

    def _within(self, done: int) -> None:
        """Move before a step's update where that was prepared; else the decision waits for the end of the step.

        Args:
            done: How many steps there are with this one.
        """
        self.pipeline.before_update(_nothing)
        timer = self.learner.timer
        with self._concluding():
            ahead = self._begun()
            failed = ahead.exception()
            # The others may be waiting in their threads for what this one was to send. Raised here, it ends their waits
            if failed is not None and not agreed_by_all(failed):
                raise failed
            found = ahead.result() if failed is None else None
            prepared = found.prepared if found is not None else None
            # what all threads have raised is raised after the step
            moves = torch.tensor([int(prepared is not None and prepared.early is not None)])
            op = Operation("agreeing on a move before the update")
            agreed = bool(self.pipeline.groups.world.all_gather(moves, op=op).all())
            if not agreed or found is None:
                return
            ready = found
            self._ahead, timer.step = None, done
            try:
                self._carry_out(ready)
            except TransitionError as error:
                if isinstance(error.__cause__, CollectiveError):
                    raise
                # nothing has moved: made between the steps, where it says what is wrong
                self._decided = replace(ready, prepared=None)
            except SpecError as error:
                # on all ranks, perhaps once layers have moved: the update is made where they are
                self._late, timer.timed_from = error, done + 1

    def _forget(self) -> None:
        """Drop what was to happen in a step that has failed, or in those of other stages."""
        self._ahead = self._late = self._foreseen = None
        self.pipeline.before_pass(None)
        self.pipeline.before_update(_nothing)

    def rebalance(self) -> Decision:
        """Decide and, where it pays, move now; collective over all ranks, between steps. Used gradients are dropped.

        Costs are those of the steps measured last.
        """
        with self._concluding():
            ready = self._next_decision()
            self._carry_out(ready)
        return ready.decision

    def _concluding(self) -> AbstractContextManager[None]:
        """What one rank raises inside is raised on all of them."""
        what = f"decision before step {self.pipeline.progress.updates}"
        return self.pipeline.failures.during(what, self.pipeline.stage_map)

    def _next_decision(self) -> _Ready:
        return self._decide_now() if self._thread is None else self._decided_ahead()

    def _carry_out(self, ready: _Ready) -> None:
        """Move where the decision says so, unless the stages were changed by hand since, and learn from it."""
        self._decided, self.costs, self._costs_of = None, ready.costs, self._trains
        with self._spending("move"):
            # a user may have called `rebuild` in between
            moves = ready.decision.move and ready.decision.current == self.stages.stage_map
            move = self._move(ready) if moves else None
            self.learner.learn(ready.decision, move)
            if ready.foreseen:
                self.learner.timer.loads_changed()
            self._note(ready.decision, move)
            if move is not None:
                self._microbatches_after(ready.decision)
            if self._thread is None:
                self.pipeline.meter.reset()
            elif move is not None:
                # the move has reset the meter, and the next step begins without times
                self.learner.timer.timed_from = self.learner.timer.step + 1

    def _note(self, decision: Decision, move: MoveTime | None) -> None:
        """Keep what a decision came to, and what the steps since the last one say of the move before them."""
        step_s = self._close_move()
        if self.pipeline.collective.rank == 0:
            _log.debug("step %d: %s", self.pipeline.progress.updates, decision.reason)
        if move is not None:
            made = Move(
                step=self.pipeline.progress.updates,
                layers=decision.current.moves_to(decision.best),
                predicted_gain_s=decision.gain_s,
                before_s=step_s,
                after_s=None,
                seconds=move.seconds,
                early=move.early,
            )
            self._report.append(made)
            self._log(made)

    def _close_move(self) -> float | None:
        """Note what the steps until now say of the last move; their median, None where there was no step."""
        step_s = statistics.median(self._steps_s) if self._steps_s else None
        self._steps_s.clear()
        if self._report and self._report[-1].after_s is None:
            self._report[-1] = replace(self._report[-1], after_s=step_s)
            self._log(self._report[-1])
        return step_s

    def _log(self, made: Move | MicrobatchChoice) -> None:
        if self.pipeline.collective.rank == 0:
            _log.info("%s", made)

    def choose_microbatches(self) -> None:
        """Choose the number of microbatches again from the coming steps; between two steps, on all ranks.

        `ControllerConfig.choose_microbatches` does so after a move to fewer ranks. Call it yourself where you have
        moved layers by hand, or attached the controller after ranks have left.
        """
        self._give_up_trial()
        now = self._wanted or self.stages.microbatches
        most = self.pipeline.first_microbatches
        self._trial = Trial(stage_map=self.stages.stage_map, limits=self.limits, now=now, most=most)
        self.learner.timer.loads_changed()
        self.pipeline.meter.reset()

    def _microbatches_after(self, decision: Decision) -> None:
        """Have the number of microbatches follow the number of ranks in use, once layers have moved."""
        self._give_up_trial()
        before, after = (len(m.used_ranks) for m in (decision.current, decision.best))
        if self.config.choose_microbatches and after < before:
            self.choose_microbatches()
        elif self.config.choose_microbatches and after > before and not self.pipeline.fixed_microbatches:
            # what fewer ranks needed says nothing of these
            self._wanted = self.pipeline.first_microbatches

    def _give_up_trial(self) -> None:
        if self._trial is not None:
            self._wanted = self._trial.now
            self._trial = None

    def _cut_as_wanted(self) -> None:
        """Go to the number of microbatches that is wanted, between two updates; collective."""
        wanted = self._wanted
        if wanted is not None and not self.pipeline.progress.parts:
            self._wanted = None
            if wanted != self.stages.microbatches:
                # a move's gain is that of the map alone
                self._close_move()
                with self._spending("move"):
                    self.pipeline.change_microbatches(wanted)
                if self._trial is not None:
                    self.pipeline.settled_microbatches = self._trial.now
                # samples are of the coming steps alone
                self.learner.timer.timed_from = self.learner.timer.step + 1
        self._count()

    def _tried(self, trial: Trial) -> None:
        """Take in what the last steps have shown, and go on to the next number of microbatches; collective."""
        timer = self.learner.timer
        timer.decided(quiet=False)
        if trial.stage_map != self.stages.stage_map or trial.microbatches != self.stages.microbatches:
            # changed by hand
            self._trial = None
            return
        with self._spending("measure"):
            local, noted = self.pipeline.local_costs(), self.pipeline.meter.noted
            costs = self._measure(local, noted, self.pipeline.collective)
            between_s = self._between_s()
            self.pipeline.meter.reset()
        tried = Stretch(
            microbatches=trial.microbatches, costs=costs, transfer_s=self.learner.transfer_s, between_s=between_s
        )
        trial.stretches.append(tried)
        if len(trial.stretches) == 1 and (why := self._cannot_go_on(trial)):
            self._trial = None
            now, step = trial.now, self.pipeline.progress.updates
            reason = f"{now} microbatches stay: {why}"
            choice = MicrobatchChoice(step=step, before=now, after=now, reason=reason)
        elif not trial.done:
            timer.loads_changed()
            self._wanted = trial.microbatches
            return
        else:
            with self._spending("decide"):
                choice = trial.choose(step=self.pipeline.progress.updates, min_gain=self.config.min_gain)
            self._trial, self._wanted = None, choice.after
        self._choices.append(choice)
        self._log(choice)

    def _cannot_go_on(self, trial: Trial) -> str:
        """Find the other number to try; why there is none, or nothing; collective."""
        fixed = self.pipeline.fixed_microbatches
        mine = torch.tensor([0 if fixed else self._rows])
        every = self.pipeline.collective.all_gather(mine, op=Operation("comparing the rows of batches")).flatten()
        if not every.all():
            return fixed or "batches come by microbatch"
        # replicas may have batches of other sizes
        if trial.go_on(math.gcd(*every.tolist())):
            return ""
        return "no other number divides the batch, keeps the ranks busy and fits their memory"

    def _between_s(self) -> float:
        """What the runtime takes between two actions, by the rank that waits least; collective."""
        times = self.pipeline.times()
        # a rank without a stage has no actions
        mine = torch.tensor([times.between_s if times.steps else math.inf], dtype=torch.float64)
        op = Operation("comparing what the runtime takes")
        least = float(self.pipeline.collective.all_gather(mine, op=op).min())
        return least if math.isfinite(least) else 0.0

    @property
    def report(self) -> BalanceReport:
        """What moved so far, when, and what it gained; prints as a line for each move."""
        moves = list(self._report)
        if moves and moves[-1].after_s is None and self._steps_s:
            moves[-1] = replace(moves[-1], after_s=statistics.median(self._steps_s))
        reason = self.decisions[-1].reason if self.decisions else "no decision yet"
        steps, choices = self.pipeline.progress.updates, tuple(self._choices)
        return BalanceReport(steps=steps, moves=tuple(moves), reason=reason, microbatches=choices)

    def _decide_now(self) -> _Ready:
        with self._spending("measure"):
            local, noted = self.pipeline.local_costs(), self.pipeline.meter.noted
            costs = self._measure(local, noted, self.pipeline.collective)
        with self._spending("decide"):
            return _Ready(costs, self._decide(costs, self.pipeline.collective))

    def _begin(self) -> None:
        """Start to work out the next decision beside the step that begins now."""
        assert self._thread is not None
        with self._spending("measure"):
            foreseen = self._foreseen
            # costs are read here, in the step's thread: the meter goes on changing
            local = self.pipeline.local_costs() if foreseen is None else {}
            noted = self.pipeline.meter.noted.copy()
            self._chosen.clear()
            beside = self.pipeline.beside(lambda: self._decide_beside(foreseen, local, noted))
            self._ahead = self._thread.submit(beside)

    def _decide_beside(self, foreseen: list[LayerCost] | None, local: Mapping[int, LayerCost], noted: Noted) -> _Ready:
        """A decision, and what its move needs, on the side communicator; runs in the controller's thread."""
        side = self.pipeline.side_collective()
        costs = foreseen if foreseen is not None else self._measure(local, noted, side)
        decision = self._decide(costs, side)
        self._chosen.set()
        prepared = self.stages.prepare(decision.best, side) if decision.move else None
        return _Ready(costs, decision, prepared, foreseen=foreseen is not None)

    def _training(self) -> tuple[bool, ...]:
        """Whether any parameter of a layer trains, by layer."""
        return tuple(map(trains, self.pipeline.model.units))

    def _begun(self) -> Future[_Ready]:
        """What is worked out beside a step, once its gradients are there."""
        if self._ahead is None:
            # the step has chosen its slices, and its own times are all there are; or there is none, in `rebalance`
            self._begin()
        assert self._ahead is not None
        began = time.perf_counter()
        with self._spending("decide"):
            limit_s = self.pipeline.config.timeout_s
            if not wait([self._ahead], limit_s).done and not self._chosen.is_set():
                raise TimeoutError(f"no decision was worked out within {limit_s:g} s")
            # what is sent then may take longer; each of its messages has a limit
            wait([self._ahead])
        self._waited_s = time.perf_counter() - began
        return self._ahead

    def _decided_ahead(self) -> _Ready:
        """What was worked out beside the step; raises what went wrong there."""
        ahead = self._begun()
        self._ahead = None
        return ahead.result()

    def _measure(self, local: Mapping[int, LayerCost], noted: Noted, collective: Collective) -> list[LayerCost]:
        """All layers' costs of a microbatch as they would be on a rank of speed 1, from every rank's own; collective.

        The learner gets what messages take.
        """
        # slices may have been chosen within the step: messages are of those
        self._count()
        stage_map = self.stages.stage_map
        costs = self.pipeline.gather_costs(local, collective)
        links = self.pipeline.gather_links(noted, collective)
        self.learner.learn_links(links.transfer_s)
        every = zip(links.added_to(costs), stage_map.assignment(), strict=True)
        return [_scaled(c, self.limits[r].speed) for c, r in every]

    def _of_units(self, costs: Sequence[LayerCost]) -> list[LayerCost]:
        """What microbatches cost, or slices of them, from the costs of a microbatch."""
        return unit_costs(costs, self.stages.slices)

    def _decide(self, costs: Sequence[LayerCost], collective: Collective) -> Decision:
        """A decision that all ranks share, not carried out yet; collective.

        Args:
            costs: Of a microbatch.
            collective: Over all ranks.
        """
        # slices may have been chosen within the step
        self._count()
        costs, current = self._of_units(costs), self.stages.stage_map
        self.imbalance = Imbalance.of([x for x in rank_loads_s(costs, current, self.limits) if x > 0] or [0.0])
        decision = self.learner.decide(costs, current)
        self._check_agreed(decision, collective)
        self.decisions.append(decision)
        return decision

    def _check_agreed(self, decision: Decision, collective: Collective) -> None:
        """Raise `DecisionMismatch` unless all ranks go to the same map; collective."""
        next_map = decision.best if decision.move else decision.current
        # the map and not the prediction: figures may differ in their last bits without harm
        array = np.array([*next_map.boundaries, *next_map.ranks])
        mine = torch.tensor([digest(array)])
        every = collective.all_gather(mine, op=Operation("comparing decisions")).reshape(-1).tolist()
        differ = [r for r, d in enumerate(every) if d != every[0]]
        if differ:
            raise DecisionMismatch(f"ranks {differ} decided on another stage map than rank 0")

    def _move(self, ready: _Ready) -> MoveTime:
        """Go to the decision's map; what that took on the slowest rank, equal on all ranks."""
        best = ready.decision.best
        speeds = [r.speed for r in self.limits]
        costs = self._of_units(ready.costs)
        durations = Durations.of_stages(costs, best, speeds=speeds, transfer_s=self.learner.transfer_s)
        done = self.stages.change(best, durations, ready.prepared)
        self._moves.append(done)
        # the move has taken no time for what had travelled before
        late = done.sent_bytes + done.received_bytes - done.early_bytes
        figures = [done.seconds, float(late), float(done.early_bytes), self._waited_s]
        mine = torch.tensor(figures, dtype=torch.float64)
        every = self.pipeline.collective.all_gather(mine, op=Operation("timing a move"))
        # the slowest rank holds all others up, and equal figures keep later decisions equal
        slowest_s, busiest, *_ = every.amax(dim=0).tolist()
        # ranks that were done early have waited for the last one, which tells what preparing has added
        waited_s = float(every[:, 3].min())
        rest, early = every[:, 1:3].sum(dim=0).tolist()
        return MoveTime(seconds=waited_s + slowest_s, busiest_bytes=busiest, early=early / max(1.0, rest + early))

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        """Seconds from here to the end of the block count as spent on `what`."""
        began = time.perf_counter()
        yield
        self._spent_s[what] += time.perf_counter() - began

    def overhead(self) -> Overhead:
        """Return what balancing has taken so far on this rank."""
        return Overhead(
            total_s=self._spent_s["total"],
            measure_s=self._spent_s["measure"],
            decide_s=self._spent_s["decide"],
            move_s=self._spent_s["move"],
            moves=len(self._moves),
            moved_bytes=sum(m.sent_bytes for m in self._moves),
        )


def _rows_of(inputs: Batch) -> int:
    """Rows of a batch; 0 where it comes by microbatch."""
    given = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    # an input with a single row goes to every microbatch
    return max((t.shape[0] for t in given if isinstance(t, torch.Tensor) and t.dim()), default=0)


def _nothing() -> None:
    """Called before updates in which nothing is decided."""


def _scaled(cost: LayerCost, speed: float) -> LayerCost:
    return replace(
        cost,
        forward_s=cost.forward_s * speed,
        backward_input_s=cost.backward_input_s * speed,
        backward_weight_s=cost.backward_weight_s * speed,
    )
