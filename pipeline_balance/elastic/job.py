"""A training job whose parallel layout changes while it runs, in place and exactly: see `Job`.

Shape legend: N processes, M microbatches of a global batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.control.controller import Controller
from pipeline_balance.control.decide import ControllerConfig
from pipeline_balance.control.measure import Meter
from pipeline_balance.elastic.adapters import Adapters
from pipeline_balance.elastic.balance import Balance, BalanceConfig
from pipeline_balance.elastic.data import GlobalBatches, Stream, microbatches_of, read_part, rows_of, shared_out
from pipeline_balance.elastic.describe import Rule
from pipeline_balance.elastic.experts import check_unsplit, has_experts, share_out
from pipeline_balance.elastic.groups import Groups, Members, met
from pipeline_balance.elastic.layouts import layout_of
from pipeline_balance.elastic.materialize import materialize
from pipeline_balance.elastic.order import ordered
from pipeline_balance.elastic.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.reshape import (
    Ahead,
    JobArrangement,
    Reshaper,
    ShardedArrangement,
    describe,
    is_sharded,
    shards_in,
)
from pipeline_balance.elastic.saving import load_job, save_job
from pipeline_balance.elastic.seats import groups_of, seats_of
from pipeline_balance.elastic.stages import JobStages, check_stages
from pipeline_balance.elastic.switching import Prepared
from pipeline_balance.elastic.trainable import check, check_alike, check_mode, check_nodes
from pipeline_balance.pipeline.agreement import alike, refuse_where
from pipeline_balance.pipeline.model import CountLabels, LossFn, PipelineModel
from pipeline_balance.pipeline.optimizers import MakeOptimizer
from pipeline_balance.pipeline.owners import Owners
from pipeline_balance.pipeline.ownership import Ownership
from pipeline_balance.pipeline.pretrained import load_pretrained
from pipeline_balance.pipeline.reseat import Arrangement, Switched
from pipeline_balance.pipeline.saved import Also
from pipeline_balance.pipeline.scaler import PipelineScaler
from pipeline_balance.pipeline.stages import Seats
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.pipeline.training_state import Held, gather_json, in_words, spec_rows
from pipeline_balance.schedules.named import MakeSchedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.slices import SliceOptions
from pipeline_balance.spec import RankLimits, StageMap
from prophet.engine.engine import Engine
from prophet.errors import SpecError, StageFailed, TransitionError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Operation
from prophet.ranks.process_group import process_rank, processes
from prophet.ranks.waiting import joined
from prophet.state.transition import Mode

_WHOLE = "the job goes on in the layout that it has"


class Job:
    """Trains the model that `build` makes, in a layout that `switch` changes between two steps.

    Every process of the world makes one and calls the same methods; those beyond a layout hold nothing. `build()`
    returns the whole unsplit model: layers in a row (a list, `nn.ModuleList` or `nn.Sequential`, with `loss_fn`), or a
    transformers model. What is on `meta` is drawn from `seed` where it is needed; with `weights` each process reads its
    layers from this folder of a transformers model instead. `make_optimizer(named_parameters)` is called once; the
    optimizer is the same object for the whole run, so schedulers and step hooks go on. So are modules and parameters in
    layouts of pp and dp with zero 0 and 1. With tp, and with zero 2 and 3, `job.model` is a copy whose parameters are
    `DTensor`s, but for layers of experts, which stay the same.

    `data` gives global batches: `elastic.Batches`, or any iterable of `(inputs, labels)` that is the same on every
    process. A batch is cut into `microbatches` M, which are divided among the dp replicas. Where dp does not divide M
    there are more of them, as many as it does; the loss stays the mean over the batch. Random numbers are drawn by
    `seed`, layer and microbatch: a layout whose dp divides M draws the same as any other. `loss_fn` and `counted` are
    as `ModuleChain` takes them. `timeout_s` bounds every wait, `budget_bytes` the buffers of a switch. `nodes` [N] says
    on which node a process runs. An order of "fewest-bytes" is chosen at every switch from the layout in force.

    `prophet.MoE` layers are built whole, with `group=elastic.one_rank()`; ep processes of a stage share their experts,
    tp ranks among them. Of the tokens that tp ranks have alike, each takes a part to the experts.
    `balance_experts` has them balanced where ep > 1; it may be a function from a layout to its configuration. The job
    sets `accumulation_steps`. `balance_stages` has the stages follow the load in layouts with several, where v and tp
    are 1; `limits` [N] are the processes' memory and speed. `layout.stages` is then the map in force, and a layout
    without `stages` begins with those that suit the last costs.

    `slices` are what layouts with slices take beside their number and that of stages per rank, as
    `SliceOptions(1, order="aligned")`. `SliceOptions.recompute` holds in other layouts of pp and dp, too. Layers of
    one's own call `pipeline_balance.slices.attend` in every layout. `schedule` is as `ElasticPipeline` takes it.

    Raises `SpecError` for a layout that cannot be trained yet: pp or experts with zero 2 and 3, slices with tp.
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
        self._groups = Groups(timeout_s)
        self._state: tuple[Members, str] = (tuple(range(processes())), "state")  # carries it
        self._words: tuple[Members, str] = (tuple(range(processes())), "words")  # of the thread that prepares
        self._nodes, self._balance = nodes, Balance(balance_experts)
        self._preparing: Future[Prepared] | None = None
        self._began = 0  # the data's position when the update under way began
        self._device = at = device if device is not None else torch.device("cpu")
        first: list[PipelineModel] = []

        def begin() -> str:
            self._adapters = Adapters(build(), loss_fn, counted, slices, at)
            check_unsplit(self._plain.root)
            self._balance.check(layout)
            check(layout, self._plain, processes())
            check_nodes(nodes, processes())
            check_stages(balance_stages, limits, processes())
            first.append(self._adapters.of(layout))
            return ""

        met("beginning a job", begin, timeout_s)
        check_alike(layout, nodes, timeout_s)
        wanted = layout = replace(layout, order=None) if layout.order == FEWEST_BYTES else layout
        if is_sharded(layout):  # begin with the model spread out, and go there
            layout = Parallelism(pp=min(layout.ranks, len(self._plain.units)))
        self.layout, self._shards = layout, _arranged(None)
        self._groups.together(self._wanted(layout))
        seats, stage_map = self._seats(layout), layout.stage_map(len(self._plain.units))

        def filled() -> PipelineModel:
            share_out(self._plain.root, seats)
            if weights is None:
                mine = stage_map.layers_on(seats.grid.pipeline_rank_of(process_rank()))
                materialize(self._plain, mine, seed, at)
            return first[0]

        self.pipeline = ElasticPipeline(
            filled,
            stage_map,
            make_optimizer=make_optimizer,
            microbatches=microbatches_of(microbatches, layout.dp),
            seed=seed,
            device=at,
            timeout_s=timeout_s,
            budget_bytes=budget_bytes,
            seats=seats,
            zero=layout.zero,
            split_backward=split_backward,
            meter=meter,
            schedule=schedule,
        )
        self._stages = JobStages(self.pipeline, balance_stages, limits, self._change_stages)
        if weights is not None:
            load_pretrained(self.pipeline, weights)
        self._begin_balancing() if wanted == layout else self.switch(wanted)

    @property
    def optimizer(self) -> Any:
        """What `make_optimizer` returned."""
        return self.pipeline.optimizer

    @property
    def engine(self) -> Engine | None:
        """What balances this process's experts in the layout in force, if `balance` was given; None without any."""
        return self._balance.engine

    @property
    def controller(self) -> Controller | None:
        """What balances the stages, with its decisions and its report; None before a layout has stages to balance."""
        return self._stages.controller

    @property
    def grad_norm(self) -> float | None:
        """The gradients' norm of the last update with `max_norm`, before it was clipped; equal on all processes."""
        return self.pipeline.grad_norm

    @property
    def _plain(self) -> PipelineModel:
        return self._adapters.plain

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
        """Train on the next global batch; its mean loss, equal on all processes. Collective, spare ones included.

        With `update=False` gradients are only added up, and the loss is the mean over the update so far.

        `max_norm` clips the gradients, `scaler` is what `job.scaler()` makes. The data's position moves on once the
        batch is done. With `balance_stages`, layers that are to move do so before the batch is trained on.
        """

        def train() -> float:
            inputs, labels = self._microbatches()
            loss = self.pipeline.step(inputs, labels, update=update, max_norm=max_norm, scaler=scaler)
            self.data.advance()
            return loss

        if not self.pipeline.progress.parts:
            self._began = self.data.position
        return self._stages.around(train, update=update)

    def drop_gradients(self) -> None:
        """Forget all gradients. An update under way begins anew with the next step, at its first batch."""
        if self.pipeline.progress.parts:
            self.data.reach(self._began)()
        self.pipeline.drop_gradients()

    def _microbatches(self) -> tuple[Any, Any]:
        """This replica's part of the next batch, in microbatches; a failure is in their place, and told to all."""
        groups = self.pipeline.groups
        try:
            rows = self.data.rows()
            if groups.spare:
                return None, None
            return read_part(self.data, rows, self.pipeline.config.microbatches, groups.replica, groups.replicas)
        except Exception as error:
            return error, None

    def evaluate(self, inputs: Any, labels: Any) -> float:
        """The mean loss of a global batch of any size without a backward pass, equal on all processes. Collective.

        Every process is given the batch; one that has none must still call, and is named.
        """
        groups = self.pipeline.groups
        if not groups.spare and inputs is not None:
            try:
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
        pipe, first = self.pipeline, self.layout.rank_of_place[0]
        with pipe.failures.during(f"collecting the model before step {self.steps}", pipe.stage_map):
            return self._reseater(self.layout).whole_state(pipe.groups.world, first)

    def save(self, folder: str | Path, *, also: Also = None) -> None:
        """Write all that training goes on from, for any layout and number of processes; between steps, collective.

        `also` holds schedulers, scalers and the like, equal on all processes, by a name of yours. The checkpoint that
        is in `folder` is replaced once the new one is whole. Raises `SpecError` on all processes where it cannot be.
        """
        save_job(self, folder, also)

    def load(self, folder: str | Path, *, also: Also = None) -> None:
        """Go on from what `save` has written, in the layout in force; collective, after a `StageFailed` too.

        `also` gets what was saved under the same names. Raises `SpecError` on all processes, with all as it was, for
        a checkpoint of another model or optimizer, and for damaged or missing files.
        """
        load_job(self, folder, also)

    # --- switching --------------------------------------------------------------------------------------------

    def prepare(self, layout: Parallelism, *, mode: Mode = "safe") -> None:
        """Make groups, a route and modules for a switch to `layout`, in the background; training goes on. Collective.

        `mode` is what `switch` will be given; in another one it has more to do itself. Meanwhile the program must not
        make process groups itself. Raises `SpecError` on all processes for a layout that cannot be trained, for a mode
        that does not exist, or where they are given different layouts.
        """
        pipe, broken = self.pipeline, self._prepared().broken
        runs, rules = self._plain, dict[str, Rule]()

        def said() -> str:
            nonlocal layout, runs, rules
            check_mode(mode)
            rules = check(layout, self._plain, processes())
            layout = self._stages.filled(layout, microbatches_of(self.microbatches, layout.dp))
            self._balance.check(layout)
            runs = self._adapters.of(layout, pipe.model)
            return json.dumps([str(layout), broken])

        with pipe.failures.during(f"preparing a switch before step {self.steps}", pipe.stage_map):
            told = alike(said, pipe.collective, pipe.config.device, Operation("comparing layouts"))
            every = [json.loads(text) for text in told]
            self._preparing = None
            self._give_up([lost for _, lost in every])
            differ = [r for r, (text, _) in enumerate(every) if text != every[0][0]]
            if differ:
                raise SpecError(f"ranks {differ} were given another layout than rank 0 ({every[0][0]})")
        # the live model is read here; the thread works on what was read
        read, world = pipe.owned.as_read(), processes()
        present, rules_now = self.layout, self._rules
        reseater = self._reseater(layout, read)
        found = reseater.items()
        ahead = reseater.ahead() if is_sharded(layout) else None

        def made() -> Prepared:
            self._groups.keep()
            held, stage_map = reseater.described(found), layout.stage_map(len(read.model.units))
            chosen = layout
            if layout.order == FEWEST_BYTES:
                now = layout_of(describe(read, rules_now), present, ranks=world)
                chosen = ordered(describe(read, rules), now, layout, nodes=self._nodes)
            problem = self._groups.make(self._wanted(chosen)) or (held if isinstance(held, str) else "")
            words, specs = self._groups.get(*self._words), held.specs if isinstance(held, Held) else []
            every = gather_json([problem, spec_rows(specs)], words, pipe.config.device, Operation("preparing a layout"))
            if any(said for said, _ in every):
                self._groups.undo()
                problem = f"{chosen} could not be prepared ({in_words([said for said, _ in every])})"
                return Prepared(problem=problem)
            target = self._arrangement(chosen, stage_map, rules, runs, reseater, ahead)
            way = reseater.way_from([rows for _, rows in every], specs, target, words.rank)
            way.itinerary.foresee(pipe.mover.budget_bytes, in_place=mode == "in-place")
            return Prepared(layout=chosen, target=target, way=way)

        self._preparing = self._groups.beside(made)

    def _prepared(self) -> Prepared:
        """What was made in the background, waited for."""
        if self._preparing is None:
            return Prepared(problem="no layout was prepared: call prepare(layout) first")
        pipe = self.pipeline
        with pipe.failures.during(f"preparing a switch before step {self.steps}", pipe.stage_map):
            try:
                return joined(self._preparing, pipe.failures.watch.turns(math.inf))
            except StageFailed:
                raise
            except Exception as error:
                return Prepared(problem=f"{type(error).__name__}: {error}".splitlines()[0], broken=True)

    def _give_up(self, broken: Sequence[bool]) -> None:
        """Make groups anew the next time where a preparation has `broken` off on any process; on all alike."""
        if any(broken):
            self._groups.undo()
            self._groups.drop([self._state, self._words])

    def switch(self, layout: Parallelism | None = None, *, mode: Mode = "safe") -> Switched:
        """Go to the prepared layout, or prepare `layout` and go there; between two steps, collective.

        What has not been prepared by now is waited for. Raises `TransitionError` on all processes, with the job as it
        was, where something fails. After that, prepare again. Raises `SpecError` for a mode that does not exist, and
        what was prepared stays.

        With `mode="in-place"` memory of the old state goes back while the new one comes, so the peak is about the
        larger of the two. What does not fit into `budget_bytes` beyond that is refused before anything moves. What
        fails on the way is a `StageFailed` on all processes: the state is lost, and `load` goes on from a checkpoint.
        """
        if layout is not None:
            self.prepare(layout, mode=mode)
        done = self._go(mode)
        self._begin_balancing()
        return done

    def _change_stages(self, layout: Parallelism, durations: Durations) -> Switched:
        """Go to a layout that a controller asks for; what a user has prepared meanwhile stays so."""
        kept, self._preparing = self._preparing, None
        try:
            self.prepare(layout)
            done = self._go("safe", durations)
            self._balance.begin(self.pipeline, self.layout)
            return done
        finally:
            self._preparing = kept

    def _begin_balancing(self) -> None:
        """Balance experts and stages in the layout in force; collective."""
        self._balance.begin(self.pipeline, self.layout)
        self._stages.begin(self.layout)

    def _go(self, mode: Mode, durations: Durations | None = None) -> Switched:
        """Go to the prepared layout, whose stages are expected to take `durations`; see `switch`."""
        pipe, ready = self.pipeline, self._prepared()
        target, remembered = ready.target, list[Any]()
        if target is not None and durations is not None:
            target = replace(target, durations=durations)

        def told() -> list[Any]:
            return [ready.problem, ready.broken, mode, self._balance.told(self.layout)]

        def heard(every: list[Any]) -> None:
            refuse_where([mode for _, _, mode, *_ in every], "switch in another mode")
            check_mode(mode)
            self._preparing = None
            failed = in_words([problem for problem, *_ in every])
            self._give_up([broken for _, broken, *_ in every])
            if failed:
                raise TransitionError(f"{failed}; {_WHOLE}")
            remembered.extend(told for *_, told in every)

        words: Mapping[str, Any] = {"layout": str(ready.layout), "data position": self.data.position}
        try:
            reseater = self._reseater(ready.layout or self.layout)
            reseater.mode = mode
            state = self._groups.get(*self._state) if target is not None else pipe.collective
            done = pipe.reseat(reseater, target, state, words, way=ready.way, told=told, heard=heard)
        except TransitionError:
            if remembered:  # the state's group may be of no more use: another one is made the next time
                self._groups.drop([self._state])
            raise
        assert ready.layout is not None
        self.layout, self._shards = ready.layout, _arranged(target)
        self._balance.learn(remembered)
        return done

    def _wanted(self, layout: Parallelism) -> list[tuple[Members, str]]:
        """The groups of a job in this layout, in the order in which all processes make them."""
        return [self._words, self._state, *groups_of(layout, experts=has_experts(self._plain.root))]

    @property
    def _rules(self) -> Mapping[str, Rule]:
        """How tp cuts the model now."""
        return self._shards.rules if self._shards is not None else {}

    def _reseater(self, layout: Parallelism, read: Ownership | None = None) -> Reshaper:
        """What takes the pipeline to `layout`; with `read`, it works on what was read of the model."""
        plain = self.pipeline.reseater()
        mover = plain.mover if read is None else replace(plain.mover, owned=read)
        remakes = self._shards is not None or is_sharded(layout)
        return Reshaper(mover, plain.passes, plain.now, self._plain, self.layout, self._shards, remakes)

    def _arrangement(
        self,
        layout: Parallelism,
        stage_map: StageMap,
        rules: Mapping[str, Rule],
        model: PipelineModel,
        to: Reshaper,
        ahead: Ahead | None = None,
    ) -> JobArrangement:
        """The layout as a pipeline takes it, once its groups were made; `ahead` makes its modules."""
        seats, owned, read = self._seats(layout), self.pipeline.owned, to.mover.owned
        given: dict[str, Any] = {"seats": seats, "stage_map": stage_map, "model": model, "nodes": self._nodes}
        given |= {"microbatches": microbatches_of(self.microbatches, layout.dp), "layout": layout, "rules": rules}
        cut = {p.name: layout.tp for p in describe(read, rules).parameters if p.dim is not None}
        shards = cut if is_sharded(layout) else None
        given["owners"] = Owners(
            owned, seats.grid, stage_map, layout.zero, shards=shards, shapes=to.shapes(), read=read
        )
        if not is_sharded(layout):
            return JobArrangement(**given)
        mine = shards_in(layout, self._plain.root, self._groups, process_rank(), self._device)
        return ShardedArrangement(
            shards=mine, ahead=ahead(mine) if ahead is not None and mine is not None else None, **given
        )

    def _seats(self, layout: Parallelism) -> Seats:
        return seats_of(layout, self._groups, experts=has_experts(self._plain.root))

    def close(self) -> None:
        """End the job's threads and balancing. Its groups stay until the process group is destroyed."""
        self.pipeline.experts.release()
        self._groups.close()


def _arranged(target: Arrangement | None) -> ShardedArrangement | None:
    return replace(target, ahead=None) if isinstance(target, ShardedArrangement) else None
