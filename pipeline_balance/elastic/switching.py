"""What takes a job from layout to layout: process groups, what was prepared, what is balanced in the one in force."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from pipeline_balance.elastic.adapters import Adapters
from pipeline_balance.elastic.balance import Balance
from pipeline_balance.elastic.data import microbatches_of
from pipeline_balance.elastic.groups import Groups, Members, on_all_processes
from pipeline_balance.elastic.layouts.boxes import How, layout_of
from pipeline_balance.elastic.layouts.order import ordered
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.rank_assignment import groups_of, rank_assignment_of
from pipeline_balance.elastic.shards.experts import has_experts
from pipeline_balance.elastic.shards.job_state import (
    Ahead,
    JobLayout,
    JobState,
    ShardedLayout,
    describe,
    is_sharded,
    shards_in,
)
from pipeline_balance.elastic.stages import JobStages
from pipeline_balance.elastic.trainable import check, check_mode
from pipeline_balance.pipeline.model.layers import PipelineModel
from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.move.layout_move import LayoutMove
from pipeline_balance.pipeline.move.layout_move import switch as move_to
from pipeline_balance.pipeline.move.pipeline_state import TrainingLayout
from pipeline_balance.pipeline.move.state import spec_rows, specs_of
from pipeline_balance.pipeline.move.transaction import Prepared, Switched
from pipeline_balance.pipeline.run.agreement import alike, refuse_where
from pipeline_balance.pipeline.run.stages import RankAssignment
from pipeline_balance.pipeline.run.zero1 import Owners
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed, TransitionError
from prophet.ranks.json_messages import gather_json, reasons_text
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import at_work, process_rank, processes
from prophet.ranks.waiting import joined
from prophet.state.transition import Mode

_WHOLE = "the job goes on in the layout that it has"


class Switching:
    """Takes a job to other layouts; see `Job.prepare` and `Job.switch`.

    `pipeline` runs the `layout` in force, and `shards` say how its parameters are cut, None where they are not.
    `stages` balances them. Both are set once they can be made.

    Args:
        layout: In force.
        groups: The process groups of all layouts.
        adapters: Make the models that layouts run.
        experts: Balances experts.
        position: Says how far the data is, in samples.
        microbatches: M, those of a global batch.
        nodes: The node of every process [N]; None: all on one.
        device: Where this process computes.
    """

    pipeline: ElasticPipeline
    stages: JobStages

    def __init__(
        self,
        layout: Parallelism,
        groups: Groups,
        adapters: Adapters,
        experts: Balance,
        position: Callable[[], int],
        microbatches: int,
        nodes: Sequence[int] | None,
        device: torch.device,
    ) -> None:
        self.layout, self.groups, self.adapters, self.experts = layout, groups, adapters, experts
        self.position, self.microbatches, self.nodes, self.device = position, microbatches, nodes, device
        self.shards: ShardedLayout | None = None
        # The group that carries state: apart from the stages' groups, and replaced where a move fails
        self._carrier: tuple[Members, str] = (tuple(range(processes())), "state")
        # The group of the threads that prepare, which talk while training goes on
        self._preparers: tuple[Members, str] = (tuple(range(processes())), "preparation")
        self.preparing: Future[Prepared] | None = None
        # Whether there may be groups that only layouts from before have used
        self._left = False

    def prepare(self, layout: Parallelism, *, mode: Mode = "safe") -> None:
        """See `Job.prepare`."""
        pipe, broken = self.pipeline, self.prepared().broken
        # `description` fills these in, and raises on all processes where it fails on one
        runs, rules = self.adapters.plain, dict[str, How]()

        def description() -> str:
            nonlocal layout, runs, rules
            check_mode(mode)
            rules = check(layout, self.adapters.plain, processes())
            layout = self.stages.filled(layout, microbatches_of(self.microbatches, layout.dp))
            self.experts.check(layout)
            runs = self.adapters.of(layout, pipe.model)
            return json.dumps([str(layout), broken])

        with pipe.failures.during(f"preparing a switch before step {pipe.progress.updates}", pipe.stage_map):
            descriptions = alike(description, pipe.collective, Operation("comparing layouts"))
            every = [json.loads(text) for text in descriptions]
            self.preparing = None
            # a preparation that was never used may have failed, too
            self._give_up([lost for _, lost in every])
            differ = [r for r, (text, _) in enumerate(every) if text != every[0][0]]
            if differ:
                raise SpecError(f"ranks {differ} were given another layout than rank 0 ({every[0][0]})")
            # The live model is read here, on the main thread. The other thread works on what was read, while training
            # goes on and changes the model.
            read, world = pipe.owned.as_read(), processes()
            present, rules_now = self.layout, self.rules
            pipeline_state = self.state(layout, read)
            found = pipeline_state.items()
            ahead = pipeline_state.ahead(runs) if is_sharded(layout) else None

        def made() -> Prepared:
            self.groups.keep()
            held, stage_map = pipeline_state.described(found), layout.stage_map(len(read.model.units))
            specs = specs_of(held)
            chosen = layout
            if layout.order == FEWEST_BYTES:
                now = layout_of(describe(read, rules_now), present, ranks=world)
                chosen = ordered(describe(read, rules), now, layout, nodes=self.nodes)
            # a problem of the model is reported only after the groups: all processes must make them
            problem = self.groups.make(self.wanted(chosen)) or (held if isinstance(held, str) else "")
            preparers = self.groups.get(*self._preparers)
            every = gather_json([problem, spec_rows(specs)], preparers, Operation("preparing a layout"))
            if any(theirs for theirs, _ in every):
                self.groups.undo()
                problem = f"{chosen} could not be prepared ({reasons_text([theirs for theirs, _ in every])})"
                return Prepared(problem=problem)
            target = self.training_layout(chosen, stage_map, rules, runs, pipeline_state, ahead)
            route_schedule = pipeline_state.route_schedule([rows for _, rows in every], target, preparers.rank)
            # what the switch would have to compute while everybody waits
            route_schedule.precompute(pipe.mover.budget_bytes, in_place=mode == "in-place")
            return Prepared(target=target, specs=specs, route=route_schedule)

        self.preparing = self.groups.beside(made)

    def prepared(self) -> Prepared:
        """What was made in the background, waited for."""
        if self.preparing is None:
            return Prepared(problem="no layout was prepared: call prepare(layout) first")
        pipe = self.pipeline
        with pipe.failures.during(f"preparing a switch before step {pipe.progress.updates}", pipe.stage_map):
            try:
                # no limit: it is this process's own thread, whose waits have limits; failures of others are seen in
                # between
                return joined(self.preparing, pipe.failures.watch.turns(math.inf))
            except StageFailed:
                raise
            except Exception as error:
                # the first line is enough for the vote, and all ranks' problems are joined
                return Prepared(problem=f"{type(error).__name__}: {error}".splitlines()[0], broken=True)

    def _give_up(self, broken: Sequence[bool]) -> None:
        """Forget groups that may be stuck, where a preparation has broken off on any process; on all alike."""
        if any(broken):
            self.groups.undo()
            self.groups.drop([self._carrier, self._preparers])

    def change_stages(self, layout: Parallelism, durations: Durations) -> Switched:
        """Go to a layout that a controller asks for; what a user has prepared meanwhile stays so."""
        # a user may have prepared a switch; moving layers must not use it up
        kept, self.preparing = self.preparing, None
        try:
            self.prepare(layout)
            done = self.go("safe", durations)
            self.experts.begin(self.pipeline, self.layout)
            return done
        finally:
            self.preparing = kept

    def move_stages(
        self, layout: Parallelism, stage_map: StageMap, durations: Durations, prepared: Prepared
    ) -> Switched:
        """Go to other stages of the same processes before a step's update; collective. Groups stay as they are.

        Args:
            layout: The one in force with other stages.
            stage_map: These, with the pipeline's numbers.
            durations: How long they are expected to take.
            prepared: What the pipeline has made ahead.
        """
        if self.preparing is not None:
            # what a user prepares reads who runs what
            self.prepared()
        pipe = self.pipeline
        try:
            return pipe.move(stage_map, durations, prepared)
        finally:
            # where experts cannot be balanced any more, layers have moved all the same
            if pipe.stage_map == stage_map:
                self.layout = layout
                self.experts.follow(pipe)

    def balance(self) -> None:
        """Balance experts and stages in the layout in force; collective."""
        self.experts.begin(self.pipeline, self.layout)
        self.stages.begin(self.layout)

    def go(self, mode: Mode, durations: Durations | None = None) -> Switched:
        """Go to the prepared layout; see `Job.switch`. Collective.

        Args:
            mode: As `Job.switch` takes it.
            durations: How long its stages are expected to take; None: not known.
        """
        pipe, ready = self.pipeline, self.prepared()
        target: JobLayout | None = ready.target
        layout = target.layout if target is not None else None
        remembered = list[Any]()
        if target is not None and durations is not None:
            target = replace(target, durations=durations)

        def extra_vote() -> list[Any]:
            return [ready.problem, ready.broken, mode, self.experts.export_memory(self.layout)]

        def on_votes(every: list[Any]) -> None:
            # before anything else: in the two modes processes would send different things
            refuse_where([mode for _, _, mode, *_ in every], "switch in another mode")
            check_mode(mode)
            self.preparing = None
            failed = reasons_text([problem for problem, *_ in every])
            self._give_up([broken for _, broken, *_ in every])
            if failed:
                raise TransitionError(f"{failed}; {_WHOLE}")
            # balancing remembers by group of ranks, which the switch changes
            remembered.extend(memory for *_, memory in every)

        def put() -> None:
            assert layout is not None
            self.layout, self.shards = layout, _job_layout(target)

        compared = {"have another layout": str(layout), "have another data position": self.position()}
        carrier = self.groups.get(*self._carrier) if target is not None else pipe.collective
        pipeline_state = self.state(layout or self.layout)
        try:
            done = move_to(
                LayoutMove(pipeline_state, target, compared, ready, extra_vote, on_votes, mode), carrier, [put]
            )
        except TransitionError:
            if remembered:  # the state's group may be of no more use: another one is made the next time
                self.groups.drop([self._carrier])
            raise
        self.experts.learn(remembered)
        self._left = True
        return done

    def give_back_groups(self) -> None:
        """Destroy the groups of layouts that the job has left; on all processes, which have all trained since.

        They are made anew where the job returns: that happens ahead, beside training. What is prepared has its groups
        already, so all stay until that is in force.
        """
        pipe = self.pipeline
        if not self._left or self.preparing is not None:
            return
        with pipe.failures.during(f"giving back groups before step {pipe.progress.updates}", pipe.stage_map):
            self.groups.give_back(self.wanted(self.layout), pipe.failures.watch.turns(self.groups.timeout_s))
        self._left = False

    def close(self) -> None:
        """End the thread that makes groups; those that are there stay."""
        self._left = False
        self.groups.close()

    def wanted(self, layout: Parallelism) -> list[tuple[Members, str]]:
        """The groups of a job in this layout, in the order in which all processes make them."""
        return [self._preparers, self._carrier, *groups_of(layout, experts=self._has_experts)]

    @property
    def _has_experts(self) -> bool:
        return has_experts(self.adapters.plain.root)

    @property
    def rules(self) -> Mapping[str, How]:
        """How tp cuts the model now."""
        return self.shards.rules if self.shards is not None else {}

    def state(self, layout: Parallelism, read: Ownership | None = None) -> JobState:
        """The training state, to be taken to `layout`.

        Args:
            layout: Where it is to go.
            read: What was read of the live model, for use on another thread; None: the live model itself.
        """
        plain = self.pipeline.state()
        mover = plain.mover if read is None else replace(plain.mover, owned=read)
        # torch shards modules for good, so a layout with shards on either side needs other modules
        remakes = self.shards is not None or is_sharded(layout)
        return JobState(mover, plain.passes, self.adapters.plain, self.layout, self.shards, remakes)

    def training_layout(
        self,
        layout: Parallelism,
        stage_map: StageMap,
        rules: Mapping[str, How],
        model: PipelineModel,
        pipeline_state: JobState,
        ahead: Ahead | None = None,
    ) -> JobLayout:
        """The layout as a pipeline takes it, once its groups were made.

        Args:
            layout: With its order chosen.
            stage_map: Which stage runs which layers.
            rules: How tp cuts the model.
            model: What runs in it.
            pipeline_state: The state that goes there.
            ahead: Makes its modules before the switch; None: the switch makes them.
        """
        rank_assignment, owned, read = self.rank_assignment(layout), self.pipeline.owned, pipeline_state.mover.owned
        given: dict[str, Any] = {
            "rank_assignment": rank_assignment,
            "stage_map": stage_map,
            "model": model,
            "nodes": self.nodes,
        }
        given |= {"microbatches": microbatches_of(self.microbatches, layout.dp), "layout": layout, "rules": rules}
        cut = {p.name: layout.tp for p in describe(read, rules).parameters if p.dim is not None}
        shards = cut if is_sharded(layout) else None
        given["owners"] = Owners(
            owned,
            rank_assignment.grid,
            stage_map,
            layout.zero,
            shards=shards,
            shapes=pipeline_state.shapes(),
            read=read,
        )
        if not is_sharded(layout):
            return JobLayout(**given)
        mine = shards_in(layout, self.adapters.plain.root, self.groups, process_rank(), self.device)
        made = ahead(mine) if ahead is not None and mine is not None else None
        return ShardedLayout(shards=mine, ahead=made, **given)

    def rank_assignment(self, layout: Parallelism) -> RankAssignment:
        """Which process runs which stages in it, once its groups were made."""
        return rank_assignment_of(layout, self.groups, experts=self._has_experts)

    def renew(self) -> None:
        """Make all communicators anew: those from before a failure are of no use. Collective."""
        limit_s, pipe = self.groups.timeout_s, self.pipeline
        # all processes must have come to the load before groups are made
        on_all_processes("loading after a failure", lambda: None, limit_s)

        def ended() -> None:
            with at_work("what was being prepared"):
                self.groups.idle()

        # Its thread makes groups, in an order with these
        on_all_processes("ending what was being prepared", ended, limit_s)
        self.preparing = None
        self.groups.close()
        self.groups = Groups(limit_s)
        lost = pipe.failures.error
        try:
            on_all_processes("making the world's process groups", lambda: pipe.groups.enter(None), limit_s)
            self.groups.make_everywhere(self.wanted(self.layout))
        except BaseException:
            # Still failed: the next load makes them
            pipe.failures.error = lost
            raise
        pipe.groups.assign(self.rank_assignment(self.layout))


def _job_layout(target: TrainingLayout | None) -> ShardedLayout | None:
    """The layout of shards without the model that was made ahead, which is in force by now; None without shards."""
    return replace(target, ahead=None) if isinstance(target, ShardedLayout) else None
