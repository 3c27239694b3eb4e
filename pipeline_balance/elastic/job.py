"""A training job whose parallel layout changes while it runs, in place and exactly: see `Job`.

Shape legend: N processes, M microbatches of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from pipeline_balance.elastic.adapters import Adapters
from pipeline_balance.elastic.balance import Balance, BalanceConfig
from pipeline_balance.elastic.data import GlobalBatches, Stream, cuts, microbatches_of, rows_from, rows_of
from pipeline_balance.elastic.describe import Rule
from pipeline_balance.elastic.experts import (
    ExpertReseater,
    check_experts,
    check_unsplit,
    has_experts,
    nobody,
    share_out,
    stacks,
)
from pipeline_balance.elastic.groups import Groups, Members, met
from pipeline_balance.elastic.layouts import layout_of
from pipeline_balance.elastic.materialize import materialize
from pipeline_balance.elastic.order import ordered
from pipeline_balance.elastic.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.reshape import Reshaper, ShardedArrangement, describe, is_sharded, mesh_axes, shards_in
from pipeline_balance.elastic.saving import load_job, save_job
from pipeline_balance.elastic.sharded import check_shardable
from pipeline_balance.elastic.styles import rules_for, styles_of
from pipeline_balance.pipeline.adapter import TransformersModel
from pipeline_balance.pipeline.agreement import from_all, refuse_where
from pipeline_balance.pipeline.model import CountLabels, LossFn, PipelineModel
from pipeline_balance.pipeline.optimizers import MakeOptimizer
from pipeline_balance.pipeline.owners import Owners
from pipeline_balance.pipeline.replicas import Grid
from pipeline_balance.pipeline.reseat import Arrangement, Reseater, Switched, Way
from pipeline_balance.pipeline.saved import Also
from pipeline_balance.pipeline.scaler import PipelineScaler
from pipeline_balance.pipeline.stages import Seats, alone
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.pipeline.training_state import gather_json, in_words
from pipeline_balance.slices import SliceOptions
from pipeline_balance.spec import StageMap
from prophet.engine.engine import Engine
from prophet.errors import SpecError, TransitionError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Operation
from prophet.ranks.process_group import meet, process_rank, processes
from prophet.ranks.waiting import joined
from prophet.state.transition import Mode

_WHOLE = "the job goes on in the layout that it has"


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What was made ahead of a switch, or in words why it could not be; `broken`: ranks have lost each other."""

    problem: str = ""
    broken: bool = False
    layout: Parallelism | None = None
    target: Arrangement | None = None
    way: Way | None = None


class Job:
    """Trains the model that `build` makes, in a layout that `switch` changes between two steps.

    Every process of the world makes one and calls the same methods; those beyond a layout hold nothing. `build()`
    returns the whole unsplit model: layers in a row (a list, `nn.ModuleList` or `nn.Sequential`, with `loss_fn`), or a
    transformers model. What is on `meta` is drawn from `seed` where it is needed. `make_optimizer(named_parameters)` is
    called once; the optimizer is the same object for the whole run, so schedulers and step hooks go on. So are modules
    and parameters in layouts of pp and dp with zero 0 and 1. With tp, and with zero 2 and 3, `job.model` is a copy
    whose parameters are `DTensor`s.

    `data` gives global batches: `elastic.Batches`, or any iterable of `(inputs, labels)` that is the same on every
    process. A batch is cut into `microbatches` M, which are divided among the dp replicas. Where dp does not divide M
    there are more of them, as many as it does; the loss stays the mean over the batch. Random numbers are drawn by
    `seed`, layer and microbatch: a layout whose dp divides M draws the same as any other. `loss_fn` and `counted` are
    as `ModuleChain` takes them. `timeout_s` bounds every wait, `budget_bytes` the buffers of a switch. `nodes` [N] says
    on which node a process runs. An order of "fewest-bytes" is chosen at every switch from the layout in force.

    `prophet.MoE` layers are built whole, with `group=elastic.one_rank()`; ep processes of a stage share their experts.
    `balance` has them balanced where ep > 1; it may be a function from a layout to its configuration. The job sets
    `accumulation_steps`.

    `slices` are what layouts with slices take beside their number and that of stages per rank, as
    `SliceOptions(1, order="aligned")`. `SliceOptions.recompute` holds in other layouts of pp and dp, too. Layers of
    one's own call `pipeline_balance.slices.attend` in every layout.

    Raises `SpecError` for a layout that cannot be trained yet: experts with tp or slices, pp or experts with zero 2
    and 3, slices with tp.
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
        balance: BalanceConfig | None = None,
        slices: SliceOptions | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.data: GlobalBatches = data if isinstance(data, GlobalBatches) else Stream(data if data is not None else ())
        self._groups = Groups(timeout_s)
        everyone = tuple(range(processes()))
        self._state: tuple[Members, str] = (everyone, "state")  # carries it
        self._words: tuple[Members, str] = (everyone, "words")  # of the thread that prepares
        self._nodes = nodes
        self._balance = Balance(balance)
        self._preparing: Future[_Prepared] | None = None
        self._device = at = device if device is not None else torch.device("cpu")
        first: list[PipelineModel] = []

        def begin() -> str:
            self._adapters = Adapters(build(), loss_fn, counted, slices, at)
            check_unsplit(self._plain.root)
            self._balance.check(layout)
            check(layout, self._plain, processes())
            check_nodes(nodes, processes())
            first.append(self._adapters.of(layout))
            return ""

        met("beginning a job", begin, timeout_s)
        text = str(layout) if nodes is None else f"{layout} on nodes {[int(n) for n in nodes]}"
        if len(set(texts := meet(Operation("comparing layouts"), text, timeout_s=timeout_s))) > 1:
            raise SpecError(f"ranks begin with different layouts: {texts}")
        wanted = layout = replace(layout, order=None) if layout.order == FEWEST_BYTES else layout
        if is_sharded(layout):  # begin with the model spread out, and go there
            layout = Parallelism(pp=min(layout.ranks, len(self._plain.units)))
        self.layout, self._shards = layout, _arranged(None)
        self._experts = has_experts(self._plain.root)
        met("making process groups", lambda: self._groups.make(self._wanted(layout)), timeout_s)
        seats = self._seats(layout)
        stage_map = layout.stage_map(len(self._plain.units))

        def filled() -> PipelineModel:
            share_out(self._plain.root, seats)
            materialize(self._plain, stage_map.layers_on(seats.grid.pipeline_rank_of(process_rank())), seed, at)
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
        )
        if wanted != layout:
            self.switch(wanted)
        else:
            self._balance.begin(self.pipeline, layout)

    @property
    def optimizer(self) -> Any:
        """What `make_optimizer` returned."""
        return self.pipeline.optimizer

    @property
    def engine(self) -> Engine | None:
        """What balances this process's experts in the layout in force, if `balance` was given; None without any."""
        return self._balance.engine

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

    def step(self, *, max_norm: float | None = None, scaler: PipelineScaler | None = None) -> float:
        """Train on the next global batch; its mean loss, equal on all processes. Collective, spare ones included.

        `max_norm` clips the gradients, `scaler` is what `job.scaler()` makes. The data's position moves on once the
        update is done.
        """
        inputs, labels = self._microbatches()
        loss = self.pipeline.step(inputs, labels, max_norm=max_norm, scaler=scaler)
        self.data.advance()
        return loss

    def _microbatches(self) -> tuple[Any, Any]:
        """This replica's part of the next batch, in microbatches; a failure is in their place, and told to all."""
        groups, each = self.pipeline.groups, self.pipeline.config.microbatches
        try:
            rows = self.data.rows()
            if groups.spare:
                return None, None
            first = groups.replica * each
            mine = cuts(rows, each * groups.replicas)[first : first + each]
            parts = [self.data.read(a, b) for a, b in mine]
        except Exception as error:
            return error, None
        return [inputs for inputs, _ in parts], [labels for _, labels in parts]

    def evaluate(self, inputs: Any, labels: Any) -> float:
        """The mean loss of a global batch of any size without a backward pass, equal on all processes. Collective.

        Every process is given the batch; one that has none must still call, and is named.
        """
        groups = self.pipeline.groups
        if not groups.spare and inputs is not None:
            try:
                inputs, labels = self._shared_out(inputs, labels)
            except Exception as error:
                inputs, labels = error, None
        return self.pipeline.evaluate(inputs, labels)

    def _shared_out(self, inputs: Any, labels: Any) -> tuple[list[Any], list[Any]]:
        """This replica's microbatches of a batch, of about the training's size.

        Every replica has as many: those that share shards or experts exchange them at the same times. Of fewer rows
        than replicas each takes all.
        """
        rows, groups = rows_of(inputs), self.pipeline.groups
        if not rows:
            raise SpecError("there is no row to evaluate")
        each = self.pipeline.progress.rows or -(-rows // self.microbatches)
        many = min(-(-rows // (each * groups.replicas)), rows // groups.replicas)
        mine = cuts(rows, many * groups.replicas)[groups.replica * many :][:many] if many else [(0, rows)]
        return [rows_from(inputs, a, b) for a, b in mine], [rows_from(labels, a, b) for a, b in mine]

    def scaler(self, **arguments: Any) -> PipelineScaler:
        """A `torch.amp.GradScaler` for `step(scaler=)`; see `ElasticPipeline.scaler`."""
        return self.pipeline.scaler(**arguments)

    def state_dict(self) -> dict[str, Tensor]:
        """The unsplit model's whole `state_dict` on the layout's first rank, empty elsewhere. Collective."""
        pipe, first = self.pipeline, self.pipeline.groups.grid.rows[0][0]
        if not pipe.experts.any:
            return pipe.state_dict(rank=first)
        reseater = self._reseater(self.layout)
        assert isinstance(reseater, ExpertReseater)
        with pipe.failures.during(f"collecting the model before step {self.steps}", pipe.stage_map):
            return reseater.whole_state(self._groups.get(*self._state), first)

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

    def prepare(self, layout: Parallelism) -> None:
        """Make groups and find the route for a switch to `layout`, in the background; training goes on. Collective.

        Meanwhile the program must not make process groups itself. Raises `SpecError` on all processes for a layout that
        cannot be trained, or where they are given different ones.
        """
        pipe = self.pipeline
        self._prepared()
        self._preparing = None

        runs = self._plain

        def said() -> str:
            nonlocal runs
            check(layout, self._plain, processes())
            self._balance.check(layout)
            runs = self._adapters.of(layout, pipe.model)
            return str(layout)

        with pipe.failures.during(f"preparing a switch before step {self.steps}", pipe.stage_map):
            every = from_all(said, pipe.collective, pipe.config.device, Operation("comparing layouts"))
            differ = [r for r, text in enumerate(every) if text != every[0]]
            if differ:
                raise SpecError(f"ranks {differ} were given another layout than rank 0 ({every[0]})")
        # the live model is read here; the thread works on what was read
        rules, present, world = self._rules(layout), self.layout, processes()
        model, model_now = describe(pipe.owned, rules), describe(pipe.owned, self._rules(present))
        stage_map, reseater = layout.stage_map(len(pipe.model.units)), self._reseater(layout)
        described = reseater.describe()
        specs = described.specs if not isinstance(described, str) else []

        def made() -> _Prepared:
            chosen = ordered(model, layout_of(model_now, present, ranks=world), layout, nodes=self._nodes)
            problem = self._groups.make(self._wanted(chosen)) or (described if isinstance(described, str) else "")
            words = self._groups.get(*self._words)
            every = gather_json(problem, words, pipe.config.device, Operation("preparing a layout"))
            if any(every):
                self._groups.undo()
                return _Prepared(problem=f"{chosen} could not be prepared ({in_words(every)})")
            target = self._arrangement(chosen, stage_map, rules, runs)
            return _Prepared(layout=chosen, target=target, way=reseater.way(specs, target, words))

        self._preparing = self._groups.beside(made)

    def _prepared(self) -> _Prepared:
        """What was made in the background, waited for."""
        if self._preparing is None:
            return _Prepared(problem="no layout was prepared: call prepare(layout) first")
        try:
            return joined(self._preparing)
        except Exception as error:
            return _Prepared(problem=f"{type(error).__name__}: {error}".splitlines()[0], broken=True)

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
            self.prepare(layout)
        pipe, ready = self.pipeline, self._prepared()
        with pipe.failures.during(f"switch before step {self.steps}", pipe.stage_map):
            op = Operation("meeting for a switch")
            said = [ready.problem, ready.broken, mode, self._balance.told(self.layout)]
            every = gather_json(said, pipe.collective, pipe.config.device, op)
            refuse_where([mode for _, _, mode, *_ in every], "switch in another mode")
            if mode not in get_args(Mode):
                raise SpecError(f"mode {mode!r}: expected {' or '.join(get_args(Mode))}; {_WHOLE}")
            self._preparing = None
            failed = in_words([problem for problem, *_ in every])
            if any(broken for _, broken, *_ in every):
                self._groups.drop([self._state, self._words])
            if failed:
                raise TransitionError(f"{failed}; {_WHOLE}")
        assert ready.target is not None
        assert ready.layout is not None
        words: Mapping[str, Any] = {"layout": str(ready.layout), "data position": self.data.position}
        try:
            reseater = self._reseater(ready.layout)
            reseater.mode = mode
            done = pipe.reseat(reseater, ready.target, self._groups.get(*self._state), words, ready.way)
        except TransitionError:
            self._groups.drop([self._state])  # it may be of no more use: another one is made the next time
            raise
        self.layout, self._shards = ready.layout, _arranged(ready.target)
        self._balance.learn([told for *_, told in every])
        self._balance.begin(pipe, self.layout)
        return done

    def _wanted(self, layout: Parallelism) -> list[tuple[Members, str]]:
        """The groups of a job in this layout, in the order in which all processes make them."""
        rows = [(members, "stages") for members in layout.groups("pp")]
        columns = [(members, "replicas") for members in layout.groups("dp")]
        shards = [(group, "shards") for axis in mesh_axes(layout) for group in layout.groups(axis)]
        experts = [(group, "experts") for group in layout.groups("ep")] if layout.ep > 1 else []
        copies = [(group, "copies of experts") for group in layout.groups("edp")] if layout.ep > 1 else []
        return [self._words, self._state, *rows, *columns, *shards, *experts, *copies]

    def _rules(self, layout: Parallelism) -> dict[str, Rule]:
        """How tp cuts the model."""
        return rules_for(styles_of(self._plain.root, layout.tp)) if layout.tp > 1 else {}

    def _reseater(self, layout: Parallelism) -> Reseater:
        """What takes the pipeline to `layout`."""
        plain = self.pipeline.reseater()
        if self._experts:
            return ExpertReseater(plain.mover, plain.passes, plain.now)
        if self._shards is None and not is_sharded(layout):
            return plain
        return Reshaper(plain.mover, plain.passes, plain.now, self._plain, self._shards)

    def _arrangement(
        self, layout: Parallelism, stage_map: StageMap, rules: dict[str, Rule], model: PipelineModel
    ) -> Arrangement:
        """The layout as a pipeline takes it, once its groups were made."""
        seats, owned = self._seats(layout), self.pipeline.owned
        given: dict[str, Any] = {"seats": seats, "stage_map": stage_map, "model": model, "nodes": self._nodes}
        given["microbatches"] = microbatches_of(self.microbatches, layout.dp)
        if not is_sharded(layout):
            shapes = {name: stack.shape for name, stack in stacks(self._plain.root).items()}
            owners = Owners(owned, seats.grid, stage_map, layout.zero, shapes=shapes)
            return Arrangement(owners=owners, **given)
        shards = shards_in(layout, self._plain.root, self._groups, process_rank(), self._device)
        cut = {p.name: layout.tp for p in describe(owned, rules).parameters if p.dim is not None}
        owners = Owners(owned, seats.grid, stage_map, layout.zero, shards=cut)
        return ShardedArrangement(owners=owners, layout=layout, rules=rules, shards=shards, **given)

    def _seats(self, layout: Parallelism) -> Seats:
        """The places of a layout whose groups were made."""
        here = process_rank()
        place = layout.place(here)
        tp, every = place.tp if place is not None else 0, layout.grid.tolist()

        def rows_of_shard(t: int) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(stage[d][t] for stage in every) for d in range(layout.dp))

        grid = Grid(
            rows=rows_of_shard(tp), beside=tuple(rows_of_shard(t) for t in range(layout.tp) if t != tp), ep=layout.ep
        )
        experts: dict[str, Any] = {}
        if layout.ep > 1:
            group, same = layout.group("ep", here), layout.group("edp", here)
            experts["experts"] = self._groups.get(group, "experts") if group else nobody(layout.ep)
            experts["copies"] = self._groups.get(same, "copies of experts") if same else alone()
        if grid.replica_of(here) == grid.replicas:
            return Seats(grid=grid, collective=alone(grid.pipeline_ranks), column=alone(), **experts)
        row, column = grid.replica(grid.replica_of(here)), grid.column(grid.pipeline_rank_of(here))
        stages, replicas = self._groups.get(row, "stages"), self._groups.get(column, "replicas")
        if layout.zero > 1:  # torch averages what it shards
            replicas = alone()
        shards = tuple(self._groups.get(layout.group(axis, here), "shards") for axis in mesh_axes(layout))
        return Seats(grid=grid, collective=stages, column=replicas, shards=shards, **experts)

    def close(self) -> None:
        """End the job's threads and balancing. Its groups stay until the process group is destroyed."""
        self.pipeline.experts.release()
        self._groups.close()


def _arranged(target: Arrangement | None) -> ShardedArrangement | None:
    return target if isinstance(target, ShardedArrangement) else None


def check(layout: Parallelism, model: PipelineModel, world: int) -> None:
    """Raise `SpecError` unless a `Job` of `world` processes can train `model` in this layout."""
    if not isinstance(layout, Parallelism):
        raise SpecError(f"expected a layout, such as elastic.Parallelism(pp=2), got {layout!r:.100}")
    if is_sharded(layout) and layout.pp > 1 and layout.zero > 1:
        raise SpecError(
            f"{layout}: a job cannot train pp{layout.pp} with zero{layout.zero} yet; expected pp x dp x tp or "
            "pp x dp x ep with zero 0 or 1, or dp x tp with zero 2 or 3"
        )
    check_experts(model.root, layout)
    last = layout.ranks - 1 if isinstance(layout.order, str) else max(layout.rank_of_place)
    if last >= world:
        raise SpecError(f"{layout} needs rank {last}, the world has {world} ranks")
    layout.stage_map(len(model.units))
    if layout.tp > 1:
        styles_of(model.root, layout.tp)
        if not isinstance(model, TransformersModel):
            raise SpecError(f"{layout}: tp needs a transformers model, got a {type(model.root).__name__}")
    if is_sharded(layout):
        check_shardable(model)


def check_nodes(nodes: Any, world: int) -> None:
    """Raise `SpecError` unless `nodes` has the node of every one of `world` processes; None is all on one."""
    if nodes is None:
        return
    whole = all(isinstance(n, Integral) and int(n) >= 0 for n in nodes)
    if not whole or len(nodes) != world:
        raise SpecError(f"nodes: expected {world} whole numbers from 0 on, a process's node each, got {nodes!r:.100}")
