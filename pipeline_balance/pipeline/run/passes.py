"""Takes batches through the stages in force, forward and backward, and makes the updates that come of it.

Shape legend: M microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeline_balance.pipeline.model.layers import Batch, ChoosesCuts, Labels, NextBatch
from pipeline_balance.pipeline.model.ownership import Ownership, sum_of_bits
from pipeline_balance.pipeline.run.agreement import Passing, actions_of, agree_on_batch, batch_of
from pipeline_balance.pipeline.run.executor import Run
from pipeline_balance.pipeline.run.experts import StageExperts
from pipeline_balance.pipeline.run.gradients.scaler import PipelineScaler, check_scaler
from pipeline_balance.pipeline.run.optimizers import Optimizers
from pipeline_balance.pipeline.run.progress import Progress
from pipeline_balance.pipeline.run.replicas import start_alike
from pipeline_balance.pipeline.run.stages import PipelineConfig, StageBuilder, Stages
from pipeline_balance.pipeline.run.ties import share_tied_weights, ties_of
from pipeline_balance.pipeline.run.update import Gradients
from pipeline_balance.pipeline.run.zero1 import Owners
from prophet.errors import SpecError
from prophet.ranks.operation import Operation
from prophet.trials import evaluating


class Passes:
    """Runs batches through the stages in force and uses their gradients; see `ElasticPipeline`'s methods.

    Attributes:
        now: The stages in force.
        progress: Counts what was done.
        used: Whether an update has used the gradients that are still there.
        complete: Whether the gradients are those of a whole update, which is about to use them.
        before_update: Called then, on all ranks; layers may move meanwhile.
        before_pass: Called once, when ranks have agreed on the next batch.
        grad_norm: The last update's norm; None where it was not clipped.

    Args:
        builder: Makes stages, and has the settings in force.
        owned: Parameters and buffers of the model.
        optimizers: What updates them.
        experts: The layers that share experts.
        stages: The stages to begin with.
        owners: Who updates which parameter.
    """

    def __init__(
        self,
        builder: StageBuilder,
        owned: Ownership,
        optimizers: Optimizers,
        experts: StageExperts,
        stages: Stages,
        owners: Owners,
    ) -> None:
        self.builder, self.groups, self.meter = builder, builder.groups, builder.meter
        self.owned, self.optimizers, self.experts, self.now = owned, optimizers, experts, stages
        self.gradients = Gradients(owned, self.groups, experts, self.meter)
        self.owners = owners
        self.progress = Progress(first_ranks=self.groups.grid.pipeline_ranks)
        self.used = self.complete = False
        self.before_update: Callable[[], None] = lambda: None
        self.before_pass: Callable[[], None] | None = None
        self.grad_norm: float | None = None
        self._trainable = owned.trainable()
        self._scaler: PipelineScaler | None = None
        # digest of one layer's after the last update
        self._weights: torch.Tensor | None = None
        _watch_steps(self)

    @property
    def config(self) -> PipelineConfig:
        """The settings in force."""
        return self.builder.config

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `SpecError` if an optimizer with this pipeline's parameters steps outside of `step`."""
        # without gradients of a batch there are none that it would use twice, or too early
        if self.optimizers.stepping or not (self.used or self.progress.parts):
            return
        mine = {id(p) for p in self.owned.parameters.values()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            when = "has done so already" if self.used else "does so with update=True"
            raise SpecError(
                f"{type(optimizer).__name__}.step() outside of pipe.step, which {when}: leave the line out. In place "
                "of a GradScaler's step, write scaler = pipe.scaler() and pipe.step(inputs, labels, scaler=scaler)"
            )

    def stage_done(self, stage: int) -> None:
        """Note that a stage has run its last backward action of this pass."""
        self.gradients.stage_done(self.now.stage_map.layers_of(stage))

    def step(
        self, inputs: Batch, labels: Labels, *, update: bool, max_norm: float | None, scaler: PipelineScaler | None
    ) -> float:
        """Train on one batch, as `ElasticPipeline.step` describes it.

        Args:
            inputs: A batch, or its microbatches. An exception stands for a batch that could not be read.
            labels: Their labels.
            update: Whether the optimizers step.
            max_norm: What gradients are clipped to (None: not).
            scaler: Scales the loss (None: nothing does).

        Returns:
            The mean loss of the update so far, equal on all ranks.
        """
        passing = self._begin(inputs, labels, (update, max_norm), scaler)
        if self.before_pass is not None:
            # cleared first: what is called may ask for another call
            call_once, self.before_pass = self.before_pass, None
            call_once()
        # Replicas take the mean of their gradients, so each one's counts R times. The divisor is that of the update's
        # first batch: what later ones add is made up for in `_update`.
        factor = self.groups.replicas / self.progress.divisor * (scaler.get_scale() if scaler is not None else 1.0)
        run = Run(passing.parts, passing.shapes, self.progress.updates, scale=factor)
        self.gradients.open(update=update)
        with self.experts.passing(update=update):
            self._run(run)
        self.progress.add(self._shared_sum(run), self.groups.replicas * self.config.microbatches, passing.counted)
        loss = self.progress.loss
        if update:
            self._update(max_norm, scaler)
        else:
            self.gradients.keep()
        return loss

    def _begin(self, inputs: Batch, labels: Labels, arguments: tuple[Any, ...], scaler: Any) -> Passing:
        """The batch in microbatches with their shapes, once all ranks agree on it."""

        def prepare() -> Passing:
            if not torch.is_grad_enabled():
                raise SpecError("step trains, and gradients are off here (no_grad or inference_mode): call evaluate")
            check_scaler(scaler)
            self.read_model()
            self.gradients.check_left(used=self.used, midway=self.progress.parts > 0)
            if self.progress.parts:
                self.gradients.check_kept(scaler is self._scaler, self.owned.trainable() == self._trainable)
            # reading the batch failed on this rank: raised here, it is raised on all of them
            if isinstance(inputs, Exception):
                raise inputs
            if self.groups.spare:
                return Passing.nothing()
            self.owned.model.begin_batch(self.groups.world, self.now.stage_map)
            first = self.progress.parts + self.groups.replica * self.config.microbatches
            return batch_of(self.owned.model, inputs, labels, self.config.microbatches, first, self.config.device)

        def agreed() -> Passing:
            actions = actions_of(self.now.executor if self.groups.replicas > 1 else None, training=True)
            return self._agree(prepare, (*arguments, scaler is None), actions)

        passing = agreed()
        if passing.asks:
            # only now, as all ranks have the same batch: choosing is collective
            self._choose(passing)
            passing = agreed()
        # on a device waits end at once, and its stream waits: nothing to be noted on the host
        self.meter.noted.meet(self.progress.updates, enabled=self.meter.enabled and self.config.device.type == "cpu")
        # not before all ranks agree: an error must leave the gradients as they were
        if self.used:
            self.drop_gradients()
        self._scaler = scaler
        self.start_alike(self.owned.fresh())
        trainable = self.owned.trainable()
        if trainable != self._trainable:
            # times of layers that were frozen or thawed say nothing any more
            self._trainable = trainable
            self.meter.reset()
        if not self.progress.parts:
            self.progress.divisor = passing.counted or 1
        self.progress.rows = passing.rows
        return passing

    def _choose(self, passing: Passing) -> None:
        """Let the model choose how such batches are cut, and make the stages that run them; collective."""
        groups, stage_map, model = self.groups, self.now.stage_map, self.owned.model
        assert isinstance(model, ChoosesCuts)
        model.choose(
            NextBatch(
                world=groups.world,
                collective=groups.collective,
                stages=[stage_map.layers_of(s) for s in range(stage_map.stages)],
                ranks=stage_map.ranks,
                parts=passing.parts,
            )
        )
        # in between two batches an executor keeps nothing that the next one needs
        self.go_on(self.builder.build(stage_map, self.now.durations), self.owners)
        if self.before_pass is not None:
            # the meter has forgotten all times, so what was to begin with the step waits for its own
            self.before_pass, self.meter.enabled = None, True

    def _agree(
        self, prepare: Callable[[], Passing], given: tuple[Any, ...], actions: Callable[[Passing], str]
    ) -> Passing:
        owned, groups = self.owned, self.groups
        weights = int(self._weights) if self._weights is not None else 0
        schedule = self.now.schedule
        return agree_on_batch(prepare, owned, self.optimizers, given, groups, actions, weights, schedule)

    def _weights_of_next_layer(self) -> torch.Tensor | None:
        """A digest for the next agreement: replicas that came apart are found once it is that layer's turn."""
        # one layer per update: a digest of all weights would take longer than the comparison is worth
        mine = self._mine()
        # a column of one also means shards, which nobody else has
        if self.groups.column.size == 1 or not mine:
            return None
        names = self.owned.of([mine[self.progress.updates % len(mine)]])
        parameters = [self.owned.parameters[n] for n in names]
        return sum_of_bits(p for p in parameters if p not in self.experts.parameters)

    def read_model(self) -> None:
        """Take in what was added to the model since the last step; what belongs elsewhere goes to `meta`."""
        self.owned.read()
        self.owned.settle(self._mine(), self.config.device, self.groups.rank)

    def _mine(self) -> tuple[int, ...]:
        """The layers that run on this rank."""
        return self.now.stage_map.layers_on(self.groups.rank)

    def start_alike(self, fresh: Collection[str]) -> None:
        """Make tied parameters begin as on their first holder, and replicas as the first; collective if any are
        `fresh`.
        """
        if not fresh:
            return
        mine = self._mine()
        whole = torch.tensor([int(not self.owned.missing(mine))])
        if not bool(self.groups.world.all_gather(whole, op=Operation("starting a pipeline")).all()):
            # built on `meta`: a checkpoint brings the values
            return
        ties = [tie for tie in ties_of(self.owned) if tie.name in fresh]
        share_tied_weights(ties, self.now.stage_map, self.groups.collective)
        tensors = self.owned.tensors(mine, fresh)
        start_alike([t for t in tensors if t not in self.experts.parameters], self.groups.column)
        if self.groups.rank_assignment.copies is not None:
            start_alike([t for t in tensors if t in self.experts.parameters], self.groups.rank_assignment.copies)

    def _run(self, run: Run) -> None:
        executor = self.now.executor
        if executor is not None:
            self.meter.begin_step()
            executor.run(run)
            self.meter.end_step()

    def _shared_sum(self, run: Run) -> float:
        """The sum of a pass's losses on every rank."""
        reports = run.losses and self.owned.model.leads
        mine = torch.stack(run.losses).sum() if reports else torch.zeros((), dtype=torch.float64)
        world, op = self.groups.world, Operation("sharing the loss")
        every = world.all_gather(world.on_host(mine.reshape(1), op=op, limited=False), op=op)
        return float(every.sum())

    def _update(self, max_norm: float | None, scaler: PipelineScaler | None) -> None:
        """Use the gradients: one step of every optimizer, on every rank."""
        progress = self.progress
        self.gradients.complete(self.now.stage_map)
        self.complete = True
        try:
            self.before_update()
        finally:
            self.complete = False
        # another one, perhaps, from here on
        stage_map = self.now.stage_map
        # the batches of the update may have had other numbers of labels than its first one, whose count was assumed
        self.gradients.scale_(progress.divisor / (progress.counted or 1))
        if scaler is not None:
            self.optimizers.unscale_(scaler)
        if max_norm is not None:
            self.grad_norm = self.gradients.clip_(stage_map, max_norm, self.config.device)
        self.owners.drop_others(self.groups)
        self.optimizers.step(scaler)
        self.owners.share(self.groups)
        self.experts.finish()
        # inside one long autocast, weights would stay as they were before this update
        torch.clear_autocast_cache()
        progress.updated()
        self._weights = self._weights_of_next_layer()
        self.gradients.leave()
        self.used = True

    def evaluate(self, inputs: Batch, labels: Labels) -> float:
        """Compute the mean loss of a batch, as `ElasticPipeline.evaluate` describes it."""
        size = self.progress.rows

        def prepare() -> Passing:
            self.read_model()
            if isinstance(inputs, Exception):
                raise inputs
            if self.groups.spare:
                return Passing.nothing()
            model, config = self.owned.model, self.config
            return batch_of(model, inputs, labels, config.microbatches, 0, config.device, rows_each=size)

        # without shared experts or tokens, replicas need not run the same
        alike = self.experts.any or self.groups.grid.context > 1
        actions = actions_of(self.now.executor if alike else None, training=False)
        with torch.no_grad(), evaluating(self.owned.model.root), self.meter.paused():
            passing = self._agree(prepare, ("evaluate",), actions)
            run = Run(passing.parts, passing.shapes, self.progress.updates, training=False)
            self._run(run)
            return self._shared_sum(run) / (passing.counted or 1)

    def drop_gradients(self) -> None:
        """Forget all gradients, also those of an update under way."""
        self.gradients.drop()
        self.progress.restart()
        self.used = False

    def go_on(self, stages: Stages, owners: Owners) -> None:
        """Put other stages in force, and who updates what there; what was measured is of the ones from before."""
        self.now, self.owners = stages, owners
        self.meter.reset()

    def switch(self) -> None:
        """Go on with the communicators of the layout in force: other processes have the stages now."""
        self.gradients.close()
        self.experts.read()
        self.gradients = Gradients(self.owned, self.groups, self.experts, self.meter)
        self._weights = None

    def resume(self, progress: Progress) -> None:
        """Go on from a run that was as far as `progress`."""
        self.progress, self.used, self._weights = progress, False, None


# ranks may be threads of one process
_lock = threading.Lock()
# weak: torch's hooks are global, and a strong reference would keep every pipeline alive
_watched: WeakSet[Passes] = WeakSet()
_hooked: list[Any] = []


def _watch_steps(passes: Passes) -> None:
    """Call its `check_step` before every step of an optimizer, as long as it lives."""
    with _lock:
        _watched.add(passes)
        # One hook for all, which stays: torch iterates over its hooks, and a pipeline may be collected meanwhile
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_any_step))


@torch._compile._disable_dynamo
def _before_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    with _lock:
        watched = list(_watched)
    for passes in watched:
        passes.check_step(optimizer)
