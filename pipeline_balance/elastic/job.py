"""A training job whose parallel layout changes while it runs, in place and exactly: see `Job`.

Shape legend: N processes, M microbatches of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.control.controller import Controller
from pipeline_balance.control.decide import ControllerConfig
from pipeline_balance.elastic.adapters import Adapters
from pipeline_balance.elastic.balance import Balance, BalanceConfig
from pipeline_balance.elastic.data import GlobalBatches, Stream, microbatches_of, read_part, rows_of, shared_out
from pipeline_balance.elastic.groups import Groups, on_all_processes
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.materialize import materialize
from pipeline_balance.elastic.saving import load_job, save_job
from pipeline_balance.elastic.shards.experts import check_unsplit, share_out
from pipeline_balance.elastic.shards.job_state import is_sharded
from pipeline_balance.elastic.stages import JobStages, check_stages
from pipeline_balance.elastic.switching import Switching
from pipeline_balance.elastic.trainable import check, check_alike, check_nodes
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.model.layers import CountLabels, LossFn, PipelineModel
from pipeline_balance.pipeline.move.export import write_pretrained
from pipeline_balance.pipeline.move.files import Also
from pipeline_balance.pipeline.move.transaction import Switched
from pipeline_balance.pipeline.pretrained import load_pretrained
from pipeline_balance.pipeline.run.gradients.scaler import PipelineScaler
from pipeline_balance.pipeline.run.optimizers import MakeOptimizer
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.named import MakeSchedule
from pipeline_balance.slices import SliceOptions
from pipeline_balance.spec import RankLimits
from prophet.convert.layers.routed import with_originals
from prophet.convert.state import original_state_dict
from prophet.engine.engine import Engine
from prophet.ranks.collective import DEFAULT_TIMEOUT_S
from prophet.ranks.process_group import process_rank, processes
from prophet.state.transition import Mode


class Job:
    """Trains the model that `build` makes, in a layout that `switch` changes between two steps.

    Every process of the world makes one and calls the same methods; those beyond a layout hold nothing.

    The optimizer is the same object for the whole run, so schedulers and step hooks go on. So are modules and
    parameters in layouts of pp and dp with zero 0 and 1. With tp, and with zero 2 and 3, `job.model` is a copy whose
    parameters are `DTensor`s, but for layers of experts, which stay the same.

    A global batch is cut into M microbatches, which are divided among the dp replicas. Where dp does not divide M
    there are more of them, as many as it does; the loss stays the mean over the batch. Random numbers are drawn by
    `seed`, layer and microbatch: a layout whose dp divides M draws the same as any other.

    `prophet.MoE` layers are built whole, with `group=elastic.one_rank()`; ep processes of a stage share their experts,
    tp ranks among them. Of the tokens that tp ranks have alike, each takes a part to the experts.

    Layers in a row that attend call `pipeline_balance.slices.attend` in every layout.

    Args:
        build: Returns the whole unsplit model: layers in a row (a list, `nn.ModuleList` or `nn.Sequential`, with
            `loss_fn`), or a transformers model. What it leaves on `meta` gets memory only where it is needed.
        make_optimizer: Called once with the named parameters.
        layout: The first one. An order of "fewest-bytes" is chosen at every switch from the layout in force.
        data: Global batches: `elastic.Batches`, or any iterable of `(inputs, labels)` that is the same on every
            process.
        loss_fn: As `ModuleChain` takes it.
        counted: As `ModuleChain` takes it.
        microbatches: M.
        seed: Of weights on `meta`, and of random numbers in layers.
        device: Of this process; None: the CPU.
        timeout_s: Seconds that every wait may take.
        budget_bytes: Of the buffers of a switch.
        nodes: The node of every process [N]; None: all on one.
        balance_experts: How experts are balanced where ep > 1, or a function from a layout to that. The job sets
            `accumulation_steps`.
        balance_stages: Has the stages follow the load in layouts with several, where v and tp are 1. `layout.stages`
            is then the map in force, and a layout without `stages` begins with those that suit the last costs.
        limits: Memory and speed of every process [N], for `balance_stages`.
        slices: What layouts with slices take beside their number and that of stages per rank, as `SliceOptions(1,
            order="aligned")`. `SliceOptions.recompute` holds without slices, too, but not with zero 2 and 3.
        weights: A folder of a transformers model: each process reads its layers from it, rather than draw what is on
            `meta`.
        split_backward: As `ElasticPipeline` takes it.
        meter: As `ElasticPipeline` takes it.
        schedule: As `ElasticPipeline` takes it.

    Raises:
        SpecError: For a layout that cannot be trained yet: pp, experts or slices with zero 2 and 3.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module | Sequence[nn.Module] | PipelineModel],
        make_optimizer: MakeOptimizer,
        layout: Parallelism,
        *,
        data: Any = None,
        loss_fn: LossFn | None = None,
        counted: CountLabels | None = None,
        microbatches: int,
        seed: int = 0,
        device: torch.device | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        budget_bytes: int = 64 << 20,
        nodes: Sequence[int] | None = None,
        balance_experts: BalanceConfig | None = None,
        balance_stages: ControllerConfig | None = None,
        limits: Sequence[RankLimits] | None = None,
        slices: SliceOptions | None = None,
        weights: str | Path | None = None,
        split_backward: bool = False,
        meter: Meter | None = None,
        schedule: str | MakeSchedule | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.data: GlobalBatches = data if isinstance(data, GlobalBatches) else Stream(data if data is not None else ())
        # The data's position when the update under way began
        self._began = 0
        at = device if device is not None else torch.device("cpu")
        first: list[PipelineModel] = []
        experts, adapters = Balance(balance_experts), list[Adapters]()

        # what can fail on one process is done here, and fails on all
        def begin() -> None:
            adapters.append(Adapters(build(), loss_fn, counted, slices, at))
            plain = adapters[0].plain
            check_unsplit(plain.root)
            experts.check(layout)
            check(layout, plain, processes())
            check_nodes(nodes, processes())
            check_stages(balance_stages, limits, processes())
            runs = adapters[0].of(layout)
            # shards are made by a switch, from the model spread out
            first.append(plain if is_sharded(layout) else runs)

        on_all_processes("beginning a job", begin, timeout_s)
        check_alike(layout, nodes, timeout_s)
        plain = adapters[0].plain
        # nothing is in force yet, so no order saves bytes
        wanted = layout = replace(layout, order=None) if layout.order == FEWEST_BYTES else layout
        # Begin with the model spread out, so that no process ever needs all of it, and switch to shards from there
        if is_sharded(layout):
            layout = Parallelism(pp=min(layout.ranks, len(plain.units)))
        self._switching = to = Switching(
            layout, Groups(timeout_s), adapters[0], experts, lambda: self.data.position, microbatches, nodes, at
        )
        to.groups.make_everywhere(to.wanted(layout))
        rank_assignment, stage_map = to.rank_assignment(layout), layout.stage_map(len(plain.units))

        # after groups exist: which layers and experts are this process's depends on them
        def filled() -> PipelineModel:
            share_out(plain.root, rank_assignment)
            if weights is None:
                mine = stage_map.layers_on(rank_assignment.grid.pipeline_rank_of(process_rank()))
                materialize(plain, mine, seed, at)
            return first[0]

        self.pipeline = to.pipeline = ElasticPipeline(
            filled,
            stage_map,
            make_optimizer=make_optimizer,
            microbatches=microbatches_of(microbatches, layout.dp),
            seed=seed,
            device=at,
            timeout_s=timeout_s,
            budget_bytes=budget_bytes,
            rank_assignment=rank_assignment,
            zero=layout.zero,
            split_backward=split_backward,
            meter=meter,
            schedule=schedule,
        )
        to.stages = JobStages(self.pipeline, balance_stages, limits, to)
        if weights is not None:
            load_pretrained(self.pipeline, weights)
        # `switch` balances, too
        to.balance() if wanted == layout else self.switch(wanted)

    @property
    def layout(self) -> Parallelism:
        """The layout in force, with the stages that balancing has chosen."""
        return self._switching.layout

    @property
    def optimizer(self) -> Any:
        """What `make_optimizer` returned."""
        return self.pipeline.optimizer

    @property
    def engine(self) -> Engine | None:
        """What balances this process's experts in the layout in force, if `balance` was given; None without any."""
        return self._switching.experts.engine

    @property
    def controller(self) -> Controller | None:
        """What balances the stages, with its decisions and its report; None before a layout has stages to balance."""
        return self._switching.stages.controller

    @property
    def grad_norm(self) -> float | None:
        """The gradients' norm of the last update with `max_norm`, before it was clipped; equal on all processes."""
        return self.pipeline.grad_norm

    @property
    def model(self) -> nn.Module:
        """The unsplit model, with the parameters that live elsewhere on `meta`."""
        return self.pipeline.module

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self.pipeline.progress.updates

    # --- training ---------------------------------------------------------------------------------------------

    def step(
        self, *, update: bool = True, max_norm: float | None = None, scaler: PipelineScaler | None = None
    ) -> float:
        """Train on the next global batch. Collective, spare processes included.

        The data's position moves on once the batch is done. With `balance_stages`, layers that are to move do so
        before the batch is trained on, or with `prepare_in_backward` before the optimizer runs.

        Args:
            update: Whether the optimizer runs afterwards. If not, gradients are only added up.
            max_norm: Clips the gradients to this norm; None: not at all.
            scaler: What `job.scaler()` makes.

        Returns:
            The batch's mean loss, equal on all processes; without `update`, the mean over the update so far.
        """

        def train() -> float:
            inputs, labels = self._microbatches()
            loss = self.pipeline.train(inputs, labels, update=update, max_norm=max_norm, scaler=scaler)
            self.data.advance()
            # all processes have told their loss, so all have left the layout before
            self._switching.give_back_groups()
            return loss

        # `drop_gradients` goes back to the first batch of an update
        if not self.pipeline.progress.parts:
            self._began = self.data.position
        return self._switching.stages.around(train, update=update)

    def drop_gradients(self) -> None:
        """Forget all gradients. An update under way begins anew with the next step, at its first batch."""
        if self.pipeline.progress.parts:
            self.data.reach(self._began)()
        self.pipeline.drop_gradients()

    def _microbatches(self) -> tuple[Any, Any]:
        """This replica's microbatches of the next batch; a failure takes their place, and reaches all processes."""
        groups = self.pipeline.groups
        try:
            rows = self.data.rows()
            if groups.spare:
                return None, None
            return read_part(self.data, rows, self.pipeline.config.microbatches, groups.replica, groups.replicas)
        except Exception as error:
            # the pipeline reports it to all processes, which would wait for this one otherwise
            return error, None

    def evaluate(self, inputs: Any, labels: Any) -> float:
        """The mean loss of a global batch of any size without a backward pass, equal on all processes. Collective.

        Every process is given the batch; one that has none must still call, and is named.
        """
        groups = self.pipeline.groups
        if not groups.spare and inputs is not None:
            try:
                # microbatches as large as in training: memory is known to last for those
                rows = self.pipeline.progress.rows or -(-rows_of(inputs) // self.microbatches)
                inputs, labels = shared_out(inputs, labels, rows, groups.replica, groups.replicas)
            except Exception as error:
                inputs, labels = error, None
        return self.pipeline.evaluate(inputs, labels)

    def scaler(self, **arguments: Any) -> PipelineScaler:
        """A `torch.amp.GradScaler` for `step(scaler=)`; see `ElasticPipeline.scaler`."""
        return self.pipeline.scaler(**arguments)

    def state_dict(self) -> dict[str, Tensor]:
        """The unsplit model's whole `state_dict` on the layout's first rank, empty elsewhere. Collective."""
        return self._switching.state(self.layout).whole_state(self.layout.rank_of_place[0], nn.Module.state_dict)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write the whole model by its `save_pretrained`, a converted one in its original layout. Collective.

        Process 0 writes: on others transformers writes nothing.

        Args:
            folder: Where to.
            **options: Those of the model's method.
        """
        pipe = self.pipeline
        # gathered on process 0, whichever layers it runs
        state = self._switching.state(self.layout).whole_state(0, original_state_dict)
        with with_originals(self.model):
            write_pretrained(self.model, state, folder, options, pipe.collective, pipe.config)

    def save(self, folder: str | Path, *, also: Also = None) -> None:
        """Write all that training goes on from, for any layout and number of processes; between steps, collective.

        `also` holds schedulers, scalers and the like, equal on all processes, by a name of yours. The checkpoint that
        is in `folder` is replaced once the new one is whole. Raises `SpecError` on all processes where it cannot be.
        """
        save_job(self._switching, folder, self.data.position, also)

    def load(self, folder: str | Path, *, also: Also = None) -> None:
        """Go on from what `save` has written, in the layout in force; collective, after a `StageFailed` too.

        `also` gets what was saved under the same names. Raises `SpecError` on all processes, with all as it was, for
        a checkpoint of another model or optimizer, and for damaged or missing files.
        """
        load_job(self._switching, folder, self.data, also)

    # --- switching --------------------------------------------------------------------------------------------

    def prepare(self, layout: Parallelism, *, mode: Mode = "safe") -> None:
        """Make groups, a route and modules for a switch to `layout`, in the background; training goes on. Collective.

        `mode` is what `switch` will be given; in another one it has more to do itself. Meanwhile the program must not
        make process groups itself. Raises `SpecError` on all processes for a layout that cannot be trained, for a mode
        that does not exist, or where they are given different layouts.
        """
        self._switching.prepare(layout, mode=mode)

    def switch(self, layout: Parallelism | None = None, *, mode: Mode = "safe") -> Switched:
        """Go to the prepared layout, or prepare `layout` and go there; between two steps, collective.

        What has not been prepared by now is waited for. Raises `TransitionError` on all processes, with the job as it
        was, where something fails. After that, prepare again. Raises `SpecError` for a mode that does not exist, and
        what was prepared stays. Process groups that only the old layout has used are destroyed after the next step.

        With `mode="in-place"` memory of the old state goes back while the new one comes, so the peak is about the
        larger of the two. What does not fit into `budget_bytes` beyond that is refused before anything moves. What
        fails on the way is a `StageFailed` on all processes: the state is lost, and `load` goes on from a checkpoint.
        """
        if layout is not None:
            self.prepare(layout, mode=mode)
        done = self._switching.go(mode)
        self._switching.balance()
        return done

    def close(self) -> None:
        """End the job's threads and balancing. Groups of the last layout stay until the process group is destroyed."""
        self.pipeline.experts.release()
        self._switching.close()
