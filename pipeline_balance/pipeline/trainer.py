"""`ElasticPipeline`: training over pipeline stages that can be cut anew between updates.

Shape legend: L layers, P ranks, M microbatches. `run` has what runs a stage map and compares ranks before a step,
`move` takes the training state to another map, and this module is what users call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.measure.links import LinkTimes, Noted, gather_links
from pipeline_balance.pipeline.measure.meter import Meter, RankTimes, gather_costs, local_costs
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.layers import (
    Batch,
    CountLabels,
    Labels,
    LossFn,
    ModuleChain,
    PipelineModel,
    SharesTokens,
    Slicer,
)
from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.move.export import write_pretrained
from pipeline_balance.pipeline.move.files import Also, Checkpoint, load_state, save_state
from pipeline_balance.pipeline.move.pipeline_state import PipelineState
from pipeline_balance.pipeline.move.stage_map import StageMove, StateMover
from pipeline_balance.pipeline.move.transaction import Prepared, Switched, run
from pipeline_balance.pipeline.run.agreement import agree_on_model, agree_on_optimizers, alike, refuse_where
from pipeline_balance.pipeline.run.experts import Balancer, StageExperts
from pipeline_balance.pipeline.run.failures import Failures, fails_together
from pipeline_balance.pipeline.run.gradients.scaler import PipelineScaler
from pipeline_balance.pipeline.run.optimizers import MakeOptimizer, Optimizers
from pipeline_balance.pipeline.run.passes import Passes
from pipeline_balance.pipeline.run.progress import Progress
from pipeline_balance.pipeline.run.replicas import check_units
from pipeline_balance.pipeline.run.stages import PipelineConfig, PipelineGroups, RankAssignment, StageBuilder, Stages
from pipeline_balance.pipeline.run.zero1 import Owners
from pipeline_balance.schedules.named import MakeSchedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.device.clocks import clock_on
from prophet.ranks.device.side_stream import SideStream
from prophet.ranks.operation import Operation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ElasticPipeline:
    """A model of L layers in a row, trained over the ranks of `group`, with stages that may change between updates.

    Every rank keeps all modules and parameters of the model for the whole run; what lives elsewhere is on `meta`.
    Collective.

    Args:
        model: The whole model on every rank, or a function that makes it.
        stage_map: Which rank runs which layers (None: spread evenly).
        make_optimizer: `make_optimizer(named_parameters)` is called once, with all of them, and returns one optimizer
            of torch or several.
        microbatches: M, how many parts a batch is cut into.
        replicas: R. The ranks are R pipelines with one stage map, each with a part of the batch.
        seed: By which layers draw random numbers, wherever they run.
        device: Where this rank computes; the CPU by default.
        split_backward: Whether weight gradients are computed apart from input gradients where that fills a wait.
        budget_bytes: Bounds the buffers of a move on a rank.
        timeout_s: Bounds every wait for another rank, in seconds.
        group: The processes that train (None: all).
        meter: Takes the place of one with the wall clock.
        joins: Whether this process enters a group whose others call `change_group`. It has no layers at first and takes
            map, rates and counters from them.
        rank_assignment: Has other processes run the stages than the first ones in a row, and spare ones none.
        zero: With 1, one replica alone updates each tensor and keeps its optimizer state.
        schedule: A name or a function, asked on every rank for every stage map: see `pipeline_balance.schedules.named`.

    Raises:
        SpecError: On all ranks where an argument is wrong on one of them, or ranks differ. The model is as it was then,
            unless it was `make_optimizer` that failed.
    """

    def __init__(
        self,
        model: PipelineModel | Callable[[], PipelineModel],
        stage_map: StageMap | None = None,
        *,
        make_optimizer: MakeOptimizer,
        microbatches: int,
        replicas: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        split_backward: bool = False,
        budget_bytes: int = 64 << 20,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: ProcessGroup | None = None,
        meter: Meter | None = None,
        joins: bool = False,
        rank_assignment: RankAssignment | None = None,
        zero: int = 0,
        schedule: str | MakeSchedule | None = None,
    ) -> None:
        self.groups, self.in_job = PipelineGroups(group, timeout_s), rank_assignment is not None
        # the number in force may become another, see `change_microbatches`; in a trial it is not the one to go on with
        self.first_microbatches = self.settled_microbatches = microbatches
        at = device if device is not None else torch.device("cpu")
        # A controller measures the steps that it needs. On a device marks take host time, so others have none.
        self.meter = meter if meter is not None else Meter(clock=clock_on(at), enabled=at.type == "cpu")

        # a list, as `check` and `make` below fill it in
        built: list[Stages] = []

        # what a rank can get wrong alone runs in here, so that its error is one on all ranks
        def check() -> dict[str, Any]:
            config = PipelineConfig(
                microbatches=microbatches,
                seed=seed,
                device=at,
                split_backward=split_backward,
                budget_bytes=budget_bytes,
                timeout_s=timeout_s,
                schedule=schedule,
            )
            self.groups.arrange(replicas, rank_assignment)
            made = model if isinstance(model, PipelineModel) else model()
            check_units(made.units, made.root)
            if made.vocabulary is not None and (joins or self.in_job):
                raise SpecError(f"split_vocabulary: {_STAYS}")
            _check_context(_context_of(made), replicas, changes=joins or self.in_job)
            self.owned = Ownership(made)
            self.builder = StageBuilder(
                model=made, config=config, groups=self.groups, meter=self.meter, on_stage_done=self._stage_done
            )
            if not joins:
                first = stage_map if stage_map is not None else self.builder.first_map()
                self.builder.check_map(first)
                built.append(self.builder.build(first))
            return self._description(None if joins else built[0], Progress(first_ranks=self.ranks))

        agreed, now, progress = agree_on_model(check, self.groups.world)
        self._cut_into(*now)
        # making communicators is collective, so it waits until all have the same replicas
        if rank_assignment is None:
            self.groups.divide()
        if self.model.vocabulary is not None:
            self.groups.share_vocabulary()
        if (context := _context_of(self.model)) > 1:
            assert isinstance(self.model, SharesTokens)
            self.model.share_tokens(self.groups.share_tokens(context))

        def make() -> Optimizers:
            column = self.groups.grid.column(self.rank) if rank_assignment is None else ()
            self.experts = StageExperts(self.model.units, self.groups.world.rank, column, self.meter)
            if not built:
                built.append(self.builder.build(agreed))
            # before the device: only this rank's part must fit there
            self.owned.keep_only(() if joins else agreed.layers_on(self.rank))
            self.owned.split_over(self.rank, self.ranks)
            self.owned.to_device(at)
            # with all parameters, those on `meta` too: groups and rates are the same on all ranks
            optimizers = Optimizers(make_optimizer, self.owned.parameters)
            if self.model.vocabulary is not None:
                self.model.vocabulary.check_optimizers(optimizers.all)
            return optimizers

        self.optimizers = agree_on_optimizers(make, self.owned, self.groups.world, joins=joins)
        for collective in self.experts.collectives:
            self.groups.include(collective)
        if self.experts.any and rank_assignment is None:
            self.groups.share_experts()
        self.mover = StateMover(self.builder, self.owned, self.optimizers, budget_bytes)
        self._side = SideStream(at)
        owners = Owners(self.owned, self.groups.grid, agreed, zero)
        self._passes = Passes(self.builder, self.owned, self.optimizers, self.experts, built[0], owners)
        self.progress.take(progress)
        # also where nothing is sent: later calls are to find only what is new then
        fresh = self.owned.fresh()
        if not joins:
            self._passes.start_alike(fresh)

    @classmethod
    def from_modules(
        cls,
        layers: nn.Module | Sequence[nn.Module],
        loss_fn: LossFn,
        stage_map: StageMap | None = None,
        *,
        counted: CountLabels | None = None,
        slices: Slicer | Literal["auto"] | None = None,
        split_vocabulary: bool = False,
        **options: Any,
    ) -> ElasticPipeline:
        """Make a pipeline of modules, each called with what the one before it returns; see `ModuleChain`.

        Args:
            layers: The modules in order, or one module whose children they are.
            loss_fn: `loss_fn(output, labels)`, a mean over `counted(labels)` labels.
            stage_map: Which rank runs which layers (None: spread evenly).
            counted: From labels to how many of them count (None: as `ModuleChain` finds by the loss).
            slices: Options of `pipeline_balance.slices`, which cut every sequence; "auto" is its `AutoSlices()` (None:
                microbatches pass whole).
            split_vocabulary: Whether every rank of a replica has some rows of the first layer, an `nn.Embedding`, and
                of the last one, an `nn.Linear`, and computes their part of the loss. It must be the plain cross
                entropy.
            **options: Those of the constructor.
        """

        def make() -> PipelineModel:
            kind = ModuleChain if slices is None else partial(_models_of(slices).chain, slices)
            given: dict[str, Any] = {"device": options.get("device"), "split_vocabulary": split_vocabulary}
            return kind(layers, loss_fn, counted=counted, **given)

        return cls(make, stage_map, **options)

    @classmethod
    def from_transformers(
        cls,
        model: nn.Module,
        stage_map: StageMap | None = None,
        *,
        layers: str | None = None,
        example: Mapping[str, Tensor] | None = None,
        slices: Slicer | Literal["auto"] | None = None,
        split_vocabulary: bool = False,
        **options: Any,
    ) -> ElasticPipeline:
        """Make a pipeline of a transformers model, or of one built like them, as it is; see `TransformersModel`.

        Layer 0 of the pipeline is all in front of the model's layers, the last one all behind them. `step` takes what
        the model's forward takes, and the labels; the loss is the model's own.

        Args:
            model: The whole model.
            stage_map: Which rank runs which layers (None: spread evenly).
            layers: Dotted name of the model's list of layers, where it has several.
            example: Inputs for one forward of what comes before the layers (None: token ids).
            slices: `pipeline_balance.slices.SliceOptions`, which cut every sequence; "auto" is its `AutoSlices()`
                (None: microbatches pass whole).
            split_vocabulary: Whether every rank of a replica has some rows of the embedding and of the head, tied or
                not, and computes their part of the loss. It must be the plain cross entropy.
            **options: Those of the constructor.
        """

        def make() -> PipelineModel:
            kind = TransformersModel if slices is None else partial(_models_of(slices).transformers, slices)
            given: dict[str, Any] = {"device": options.get("device"), "split_vocabulary": split_vocabulary}
            return kind(model, layers=layers, example=example, **given)

        return cls(make, stage_map, **options)

    # --- what is in force -------------------------------------------------------------------------------------

    @property
    def config(self) -> PipelineConfig:
        """The settings in force."""
        return self.builder.config

    @property
    def model(self) -> PipelineModel:
        """What runs the layers; a switch may put another one of the same modules in its place."""
        return self.owned.model

    @property
    def module(self) -> nn.Module:
        """The unsplit model, with the parameters that live elsewhere on `meta`."""
        return self.model.root

    @property
    def stages(self) -> Stages:
        """The stages in force: their map, and what runs those of this rank."""
        return self._passes.now

    @property
    def stage_map(self) -> StageMap:
        """The stage map in force."""
        return self.stages.stage_map

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers that run on this rank, by number; empty without a stage."""
        return {i: self.model.units[i] for i in self.stage_map.layers_on(self.rank)}

    @property
    def optimizer(self) -> Any:
        """What `make_optimizer` returned; the same object for the whole run, on every rank."""
        return self.optimizers.made

    @property
    def collective(self) -> Collective:
        """Communication among all ranks, of all replicas, whether they run a stage or not."""
        return self.groups.world

    @property
    def failures(self) -> Failures:
        """Makes one rank's failure that of all of them."""
        return self.groups.failures

    @property
    def replica(self) -> int:
        """The replica of the pipeline that this process is in, from 0 on."""
        return self.groups.replica

    @property
    def rank(self) -> int:
        """This rank in its replica."""
        return self.groups.rank

    @property
    def ranks(self) -> int:
        """Ranks of a replica that could run a stage, whether they do or not."""
        return self.groups.grid.pipeline_ranks

    @property
    def progress(self) -> Progress:
        """How far the run is: its counters, equal on all ranks."""
        return self._passes.progress

    @property
    def owners(self) -> Owners:
        """Who updates which parameter."""
        return self._passes.owners

    @property
    def grad_norm(self) -> float | None:
        """The gradients' norm of the last update with `max_norm`, before it was clipped; equal on all ranks."""
        return self._passes.grad_norm

    def _stage_done(self, stage: int) -> None:
        self._passes.stage_done(stage)

    # --- training ---------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Batch,
        labels: Labels,
        *,
        update: bool = True,
        max_norm: float | None = None,
        scaler: Any = None,
    ) -> float:
        """Train on one batch. Collective over all ranks, idle ones included.

        With `update=False` gradients are only added up. The call with `update=True` averages them over replicas, clips
        them, steps the optimizers, and ends the update.

        Args:
            inputs: A batch, or a sequence of its microbatches, whose lengths may differ. The same on every rank of a
                replica, and of replicas that share slices.
            labels: Labels, in the same form.
            update: Whether this batch ends the update.
            max_norm: What the gradients' norm is clipped to (None: not).
            scaler: What `pipeline.scaler()` makes (None: the loss is not scaled).

        Returns:
            The mean loss over all labels of the update so far that count, equal on all ranks.

        Raises:
            SpecError: On all ranks, before any data moves, where ranks disagree or the batch does not fit.
        """
        self._refuse_in_job("trains by job.step(), which reads its data")
        return self.train(inputs, labels, update=update, max_norm=max_norm, scaler=scaler)

    @fails_together("step")
    def train(self, inputs: Batch, labels: Labels, **how: Any) -> float:
        """Train on one batch as `step` does, for a job."""
        return self._passes.step(inputs, labels, **how)

    def _refuse_in_job(self, does: str) -> None:
        if self.in_job:
            raise SpecError(f"this pipeline is a job's, which {does}")

    def scaler(self, **arguments: Any) -> PipelineScaler:
        """Make a `torch.amp.GradScaler` for `step(scaler=)`, the same on all ranks; it takes that class's arguments by
        name.

        Call it on every rank. Its `state_dict` belongs into checkpoints.
        """
        return PipelineScaler(lambda: self.collective, self.config.device, **arguments)

    @fails_together("balancing experts before step")
    def balance_experts(self, attach: Callable[[nn.Module], Balancer]) -> Balancer | None:
        """Balance the expert-parallel layers of this rank's stages; call it on every rank.

        `attach` gets these layers as one module. Returns what `attach` returned, None on a rank without such layers.
        Where such layers come or go in a move, what it returned is closed, and it is called again. The new one goes on
        with what the old ones remembered, and is the `balancer` from then on. Close one by hand on all ranks or none:
        layers that join those of a closed one are not balanced.

        >>> config = prophet.EngineConfig(accumulation_steps=microbatches)  # doctest: +SKIP
        >>> pipe.balance_experts(lambda layers: prophet.attach(layers, config=config))  # doctest: +SKIP
        """
        # a balancer counts backward passes, and each slice has one
        passes = self.config.microbatches * (self.model.slicing.slices if self.model.slicing is not None else 1)
        return self.experts.balance(attach, self.stage_map.layers_on(self.rank), passes, self.collective)

    @property
    def balancer(self) -> Balancer | None:
        """What balances the experts of this rank's stages now; None where nothing does."""
        return self.experts.balancer

    @fails_together("evaluation before step")
    def evaluate(self, inputs: Batch, labels: Labels) -> float:
        """Compute the mean loss over the labels that count, without a backward pass; equal on all ranks, collective.

        The batch may have any number of rows: it is cut into microbatches of about the training's size. Modules are in
        evaluation mode meanwhile.
        """
        return self._passes.evaluate(inputs, labels)

    def drop_gradients(self) -> None:
        """Forget all gradients, also those of an update under way, which begins anew with the next step."""
        self._passes.drop_gradients()

    def state_dict(self, *, rank: int = 0) -> dict[str, Tensor]:
        """Gather the unsplit model's whole `state_dict` in the host's memory of `rank`; empty elsewhere. Collective.

        `rank` counts all processes: the first replica's come first. `save_pretrained` writes it for transformers.
        """
        self.experts.check_static("gather or save a model")
        self._check_unsharded("gather or save a model")
        return self.state().whole_state(rank, nn.Module.state_dict)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write the whole model to `folder` by its own `save_pretrained`, for transformers to load. Collective.

        Rank 0 writes. `options` are those of the model's method.
        """
        write_pretrained(self.module, self.state_dict(), folder, options, self.collective, self.config)

    # --- measuring --------------------------------------------------------------------------------------------

    @fails_together("measuring before step")
    def measure(self) -> list[LayerCost]:
        """Measure all layers: costs since the last rebuild or `meter.reset()`; collective over all ranks, equal on
        all.

        On a device a pipeline without a controller measures nothing, and these are zeros, until you set
        `meter.enabled = True` for some steps.
        """
        # a shard's times and bytes are not those of the layer
        self._check_unsharded("measure layers")
        costs = self.gather_costs(self.local_costs(), self.collective)
        return self.gather_links(self.meter.noted, self.collective).added_to(costs)

    def gather_costs(self, local: Mapping[int, LayerCost], collective: Collective) -> list[LayerCost]:
        """Gather the costs of all layers from every rank's own; a layer's are its slowest replica's. Collective."""
        layers, rows = self.stage_map.layers, self.groups.grid.rows
        return gather_costs(local, layers, collective, rows=rows)

    def local_costs(self) -> dict[int, LayerCost]:
        """Return the costs of this rank's layers."""
        self._catch_up()
        stages = {s: self.stage_map.layers_of(s) for s in self.stage_map.stages_on(self.rank)}
        staying = {id(self.owned.parameters[name]) for name in self.owned.split}
        return local_costs(self.layers, stages, self.meter, self.optimizers.state(), staying)

    @fails_together("measuring before step")
    def measure_links(self) -> LinkTimes:
        """Measure what messages between stages take, and means of gradients over replicas; collective over all ranks.

        They are of the last measured steps on the stages in force. On a device nothing is measured.
        """
        return self.gather_links(self.meter.noted, self.collective)

    def gather_links(self, noted: Noted, collective: Collective) -> LinkTimes:
        """Work out what links take from what every rank has noted. Collective.

        Args:
            noted: What this one has.
            collective: Over all ranks.
        """
        units = self.config.microbatches * (self.model.slicing.slices if self.model.slicing is not None else 1)
        return gather_links(noted, self.stage_map, units, collective, rows=self.groups.grid.rows)

    def times(self) -> RankTimes:
        """Return where this rank's time went since the last rebuild."""
        self._catch_up()
        return self.meter.times()

    def _catch_up(self) -> None:
        """Wait, within the limit, for what a device has to do before the meter can be read."""
        if self.meter.behind:
            op = Operation("reading the times of layers")
            self.groups.world.on_host(torch.zeros(1, device=self.config.device), op=op)

    # --- changing stages --------------------------------------------------------------------------------------

    @property
    def within_step(self) -> bool:
        """Whether a step has the gradients of its whole update and has not used them, see `before_update`."""
        return self._passes.complete

    def before_update(self, call: Callable[[], None]) -> None:
        """Have `call` called in the coming steps, on all ranks, once gradients are those of the whole update.

        Args:
            call: It may change the stages.
        """
        self._passes.before_update = call

    def before_pass(self, call: Callable[[], None] | None) -> None:
        """Have `call` called once in the coming step, on all ranks, when they have agreed on its batch.

        A step that chooses its slices anew does not call it.

        Args:
            call: What begins with the step, such as a thread beside it; None: nothing.
        """
        self._passes.before_pass = call

    def prepare(self, stage_map: StageMap, collective: Collective, *, early: bool = False) -> Prepared:
        """Do ahead what a change to `stage_map` needs besides the state itself; collective over all ranks.

        With the `side_collective` it may run in another thread while a step is under way.

        Args:
            stage_map: The map to go to.
            collective: Over all ranks.
            early: Whether to send now what only an update changes, for a change before this step's update.
        """
        return self.mover.prepare(self.stages, self.owners, stage_map, collective, early=early)

    def beside(self, call: Callable[[], T]) -> Callable[[], T]:
        """Wrap `call`, for another thread: on a device what it launches starts after what was launched until now.

        Args:
            call: What that thread does.
        """
        return self._side.after_now(call)

    def side_collective(self) -> Collective:
        """Return a separate communicator over all ranks, for use beside a step; made at the first call, by all
        ranks.
        """
        return self.groups.side()

    def rebuild(
        self, stage_map: StageMap, *, durations: Durations | None = None, prepared: Prepared | None = None
    ) -> Switched:
        """Change to another stage map, between steps; collective over all ranks, whether they run a stage or not.

        A controller may also do it within a step, before its update: see `before_update`.

        Gradients that an update has used are dropped. With zero=1 optimizer state goes to its owners under the new map.
        Layers whose balanced experts are shared move only between updates.

        Args:
            stage_map: The map to go to, equal on all ranks.
            durations: Expected seconds of the new stages, equal on all ranks. They let the schedule order what is ready
                by when it will be (None: not known).
            prepared: What `prepare` made for this map; where a rank's state has another shape by now it is not used.

        Returns:
            What the move took on this process.

        Raises:
            TransitionError: On every rank, with everything as it was, if the state cannot be moved.
            SpecError: On every rank, if ranks are given different maps, or replicas differ. Also if layers have moved,
                and their experts cannot be balanced any more.
        """
        self._refuse_in_job("moves layers by job.switch(dataclasses.replace(job.layout, stages=(...)))")
        return self.move(stage_map, durations, prepared)

    @fails_together("move before step")
    def move(
        self, stage_map: StageMap, durations: Durations | None = None, prepared: Prepared | None = None
    ) -> Switched:
        """Change to another stage map as `rebuild` does, for a job whose processes keep their places.

        Args:
            stage_map: As there.
            durations: As there.
            prepared: As there.
        """
        move = StageMove(self.mover, self._passes, stage_map, durations, prepared or Prepared())
        began, before = time.perf_counter(), self.stage_map.layers_on(self.rank)
        done = run(move, world=self.groups.world, carrier=self.mover.carrier(self.owners))
        self.experts.follow(before, stage_map.layers_on(self.rank), move.remembered, self.groups.world)
        return replace(move.counted(done), seconds=time.perf_counter() - began)

    @property
    def fixed_microbatches(self) -> str:
        """Why the number of microbatches cannot change; empty where it can."""
        if self.in_job:
            return "a job reads its data by microbatch"
        if self.model.slicing is not None:
            return "microbatches are cut into slices"
        # it was told how many backward passes a step has
        return "experts are balanced, and their balancer counts passes" if self.experts.balanced else ""

    @fails_together("changing microbatches before step")
    def change_microbatches(self, microbatches: int) -> None:
        """Cut later batches into another number of parts; collective over all ranks, between updates.

        Loss and gradients stay the same but for rounding, unless a model treats a microbatch as a whole: dropout draws
        by it, batch norm and the router's capacity count it, and router losses are its means. Stages stay, gradients
        too; what was measured is forgotten.

        Args:
            microbatches: M, equal on all ranks.

        Raises:
            SpecError: On all ranks, with all as it was, where one refuses, or ranks differ.
        """
        made: list[tuple[PipelineConfig, Stages]] = []

        def build() -> str:
            if self.fixed_microbatches:
                raise SpecError(f"the number of microbatches cannot change: {self.fixed_microbatches}")
            if self.progress.parts:
                raise SpecError("an update is under way: change the number of microbatches after step(update=True)")
            config = replace(self.config, microbatches=microbatches)
            # durations are other ones now, but in the same proportions, which are all that orders a schedule
            stages = self.builder.build(self.stage_map, self.stages.durations, config=config)
            made.append((config, stages))
            return f"{microbatches} {stages.schedule}"

        op = Operation("changing the number of microbatches")
        refuse_where(alike(build, self.collective, op), "were given another number of microbatches, or schedule,")
        ((config, stages),) = made
        before, self.builder.config = self.config.microbatches, config
        self._settle(before)
        self._passes.go_on(stages, self.owners)

    def _settle(self, before: int) -> None:
        """Go on with the number of microbatches in force, in place of `before`."""
        now, known = self.config.microbatches, self.meter.activation_bytes
        # until they are counted anew
        known.update({i: -(-n * before // now) for i, n in known.items()})
        self.settled_microbatches = now

    def _cut_into(self, microbatches: int, settled: int) -> None:
        self.settled_microbatches = settled
        if microbatches != self.config.microbatches:
            self.builder.config = replace(self.config, microbatches=microbatches)

    def state(self) -> PipelineState:
        """Return the training state, to be taken elsewhere; see `pipeline_balance.elastic`."""
        return PipelineState(self.mover, self._passes)

    def save(
        self, folder: str | Path, *, step: int | None = None, stage_map: StageMap | None = None, also: Also = None
    ) -> None:
        """Write parameters, buffers, optimizers with their groups, and the run's counters; collective, between updates.

        Names are the unsplit model's. The checkpoint that is in `folder` is replaced once the new one is whole.

        Args:
            folder: Where to write, a place that all ranks reach.
            step: Number of the next step (None: of updates so far).
            stage_map: For the run that reads it, on any number of ranks (None: the one in force).
            also: Schedulers and the like, equal on all ranks, by a name of yours.

        Raises:
            SpecError: On all ranks where it cannot be written.
        """
        step, after = self.progress.updates if step is None else step, stage_map or self.stage_map
        # a trial's number is none to go on with
        run = {_MICROBATCHES: [self.first_microbatches, self.settled_microbatches]}
        save_state(self.state(), folder, step=step, stage_map=after, also=also, run=run)

    def load(self, folder: str | Path, *, also: Also = None) -> Checkpoint:
        """Take over the state that other ranks, of any number, have saved; collective, between updates.

        The pipeline keeps its stage map: build it with `read_checkpoint(folder).stage_map` to use the saved one. `also`
        gets what was saved under the same names. Where the saved run had changed its number of microbatches, this one
        goes on with that number. It does not if it was made with another number than the saved run, or if its number
        cannot change; then the log says so.

        Raises:
            SpecError: On all ranks, with all as it was, for a checkpoint of another model or other optimizer groups,
                and for damaged or missing files.
        """
        state, before = self.state(), self.config.microbatches
        # the number to go on with, filled by `check`; 0 leaves the one in force
        found: list[int] = []

        def check(saved: Checkpoint) -> None:
            given, settled = _saved_microbatches(saved, folder)
            goes_on = given == self.first_microbatches and not self.fixed_microbatches
            found.append(settled if goes_on else 0)

        def cut(saved: Checkpoint, config: PipelineConfig) -> PipelineConfig:
            return replace(config, microbatches=found[0] or config.microbatches)

        def settle() -> None:
            if found[0]:
                self._settle(before)

        saved = load_state(state, state.in_force(), folder, also=also, check=check, configured=cut, then=[settle])
        given, settled = _saved_microbatches(saved, folder)
        if settled not in (given, self.settled_microbatches) and self.collective.rank == 0:
            why = self.fixed_microbatches or f"it was made with {self.first_microbatches}"
            now = self.settled_microbatches
            _log.warning("%s: saved with %d microbatches, this run has %d: %s", folder, settled, now, why)
        return saved

    def _check_unsharded(self, what: str) -> None:
        if self.owners.sharded:
            raise SpecError(f"a pipeline cannot {what} in shards: switch to zero=0 without tp first")

    # --- changing groups --------------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Let go of the present group's communicators, before it is destroyed; `change_group` goes on in another."""
        self.groups.leave()

    def change_group(self, group: ProcessGroup | None, number: Mapping[int, int] | None) -> None:
        """Go on in another group (None: all processes); collective over its members, between steps.

        `number` maps this rank's old group's ranks to the new one's and must hold every rank that runs a stage; None
        where this process comes back, and takes the others' map and counters. There are as many replicas as before,
        each of ranks in a row. `release.membership.Membership` calls this.

        Raises:
            SpecError: A vocabulary is split over the ranks, or slices are shared.
        """
        if self.model.vocabulary is not None:
            raise SpecError(f"split_vocabulary: {_STAYS}")
        _check_context(_context_of(self.model), self.groups.replicas, changes=True)
        before, now = self.groups.grid, self.stage_map
        self.groups.enter(group)
        self.groups.arrange(before.replicas)
        known: Stages | None = None
        # a process that comes back, with number None, knows no map
        if number is not None:
            # the same layers on the same processes, which have other numbers in the new group
            ranks = before.renumbered(self.groups.grid, number, now.used_ranks)
            known = replace(self.stages, stage_map=StageMap(now.boundaries, tuple(ranks[r] for r in now.ranks)))
        world = self.groups.world
        agreed, microbatches, progress = agree_on_model(lambda: self._description(known, self.progress), world)
        self._cut_into(*microbatches)
        self.groups.divide()
        # its means over replicas use the new columns
        self._passes.switch()

        def build() -> Optimizers:
            self._passes.now = self.builder.build(agreed, self.stages.durations)
            # its table has the numbers that ranks have in the new group
            self._passes.owners = Owners(self.owned, self.groups.grid, agreed, self.owners.zero)
            return self.optimizers

        # also on ranks that stay: whoever joins takes the groups' rates from them
        agree_on_optimizers(build, self.owned, world, joins=known is None)
        if known is None:
            self.progress.take(progress)
        self.meter.reset()

    def _description(self, stages: Stages | None, progress: Progress) -> dict[str, Any]:
        """What ranks compare when they meet; without `stages`, this one takes those of the others."""
        # what must be equal for ranks to send what others wait for, and to draw the same numbers
        settings = {name: getattr(self.config, name) for name in ("seed", "split_backward")}
        settings["microbatches"] = self.first_microbatches
        known = stages.stage_map if stages is not None else None
        return {
            "model": self.owned.structure(),
            "settings": {**settings, "replicas": self.groups.replicas, "slices": str(self.model.slicing)}
            | {"split_vocabulary": self.model.vocabulary is not None},
            "map": [list(known.boundaries), list(known.ranks)] if known is not None else None,
            "schedule": stages.schedule if stages is not None else 0,
            "microbatches": [self.config.microbatches, self.settled_microbatches],
            "progress": progress.to_json(),
        }


def _saved_microbatches(saved: Checkpoint, folder: str | Path) -> tuple[int, int]:
    """How many microbatches the saved run was made with, and went on with; zeros where a job was saved, or before."""
    found = saved.run.get(_MICROBATCHES, [0, 0])
    # the file is anybody's: `True` is an int
    if not isinstance(found, list) or [type(n) for n in found] != [int, int] or min(found) < 0:
        raise SpecError(f"{folder}: run.{_MICROBATCHES}: expected two whole numbers, got {found!r:.60}")
    return found[0], found[1]


_MICROBATCHES = "microbatches"
_SLICED = "pipeline_balance.slices.models"
_STAYS = "rows stay on their ranks, so ranks cannot change, nor layouts: save, and load in a run on other ranks"


def _context_of(model: PipelineModel) -> int:
    """How many replicas in a row share the tokens of slices."""
    return model.slicing.context_parallel if model.slicing is not None else 1


def _check_context(context: int, replicas: int, *, changes: bool) -> None:
    """Raise `SpecError` unless so many replicas in a row can share tokens.

    Args:
        context: How many.
        replicas: How many there are.
        changes: Whether ranks may come and go.
    """
    if context == 1:
        return
    if replicas % context:
        raise SpecError(
            f"context_parallel={context}: as many replicas in a row share every slice, so it must divide replicas="
            f"{replicas}"
        )
    if changes:
        raise SpecError("context_parallel: ranks that share slices stay, so it is not for jobs and changing groups")


def _models_of(slices: Slicer | Literal["auto"]) -> Any:
    """The module that makes models which run in these slices; by name, as the room of slices builds on this one."""
    name = _SLICED if slices == "auto" else getattr(slices, "models", None)
    if not isinstance(name, str):
        raise SpecError(f"slices: expected pipeline_balance.slices.SliceOptions(...), got {slices!r:.60}")
    return import_module(name)
