"""The engine: balances a model's MoE layers while the user's own loop trains it; `prophet.engine.attach` attaches it.

One training step of the engine spans all microbatches between two `optimizer.step()` calls:

  the model's forward begins      placements planned during the last step come into force; Trans(0) starts
  every MoE layer, forward        exact counts -> split; the plan for the next step starts on a host thread
  every backward pass ends        the replicas' gradients are home, before the user's next line (clipping, ...)
  optimizer.step() has returned   replicas vanish; the step's report is written

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prophet.engine.agreement import (
    check_placement,
    compare_placements,
    compare_splits,
    placements_differ,
)
from prophet.engine.config import EngineConfig, check_budget, context_of
from prophet.engine.history import History
from prophet.engine.parallel import DriftWatch, clip_grad_norm_, update_biases
from prophet.engine.replan import KeptPlan, next_plan
from prophet.engine.report import StepReport
from prophet.engine.resume import EngineState
from prophet.experts.bank import Replica, ReplicaPool
from prophet.layer.moe import MoE, Port, plain_port
from prophet.planner import get_planner, warm
from prophet.planner.base import Planner
from prophet.planner.settle import pays
from prophet.ranks.collective import Collective
from prophet.scheduler.actions import Action, Window, WindowKind
from prophet.scheduler.budget import within_budget
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.notes import UNKNOWN, Notes, predicted_weights
from prophet.scheduler.pieces import Form
from prophet.scheduler.recording import ObservedCollective, Recording
from prophet.scheduler.runtime import Runtime
from prophet.scheduler.schedules import (
    cover_of,
    cut_of,
    depth_within,
    runs_ahead,
    schedule_named,
)
from prophet.scheduler.windows import Stopwatch
from prophet.spec import IntArray, Placement, PlanContext, Split, Topology, Windows


class LayerPort:
    """The engine's side of one layer."""

    def __init__(self, engine: Engine, index: int) -> None:
        self.index: int | None = index
        self._at = index
        self._engine = engine
        self.stopwatch = engine.stopwatch

    def ensure_step(self) -> None:
        self._engine.ensure_step()

    def header(self, training: bool) -> tuple[int, int, int]:
        return self._engine.header(self._at, training)

    def notes(self, training: bool) -> list[int]:
        return self._engine.notes(self._at, training)

    def noted(self, table: IntArray) -> None:
        self._engine.noted(self._at, table)

    def stale(self, training: bool) -> bool:
        return training and self._engine.runtime.stale(self._at)

    def refresh(self) -> None:
        self._engine.runtime.refresh(self._at)

    def plan(self, load: IntArray, training: bool) -> tuple[Placement, Split]:
        return self._engine.plan(self._at, load, training)

    def observe(self, load: IntArray, split: Split, choices: IntArray, dropped: int) -> None:
        self._engine.observe(self._at, load, split, choices, dropped)

    def replicas(self, training: bool) -> list[Replica]:
        return self._engine.runtime.replicas(self._at) if training else []

    def enter(self, kind: WindowKind) -> None:
        at = self._at - 1 if kind == "BNEC" else self._at
        # nothing comes before the first block: what belongs to the end starts under the rest of the backward pass
        self._engine.runtime.enter(Window(kind, at) if at >= 0 else Window("END"))

    def backward_ran(self) -> None:
        self._engine.runtime.backward_ran(self._at)

    def __deepcopy__(self, memo: dict[int, Any]) -> Port:
        layer = self._engine.layers[self._at]
        return plain_port(layer)  # a copied layer is balanced only once it is attached itself


class Engine:
    """Balances the MoE layers of one model on one rank; made by `attach`."""

    def __init__(
        self,
        layers: list[MoE],
        collective: Collective,
        config: EngineConfig,
    ) -> None:
        self.layers = layers
        self.collective = collective
        self.config = config
        self.stopwatch = Stopwatch()
        self.step = 0
        self.last_step: StepReport | None = None
        self.on_step: list[Callable[[StepReport], None]] = []
        self.watch: DriftWatch | None = None
        self._watched_step = -1
        self._closed = False
        self._hooks: list[Any] = []
        self._originals = [(layer.collective, layer._port) for layer in layers]
        self._planner: Planner = get_planner(config.planner) if isinstance(config.planner, str) else config.planner
        self._withdraws = bool(getattr(self._planner, "withdraws", False))
        if self._planner.name.startswith("prophet") and collective.size > 1:
            warm()  # compiles now, so that no step does
        self._actions: list[Action] = []
        self.pool = ReplicaPool(config.replica_memory_bytes)
        self._contexts = [context_of(layer, collective.size, config) for layer in layers]
        self._contexts[0] = replace(self._contexts[0], windows=replace(config.windows, experts=False))
        check_budget(config, self._contexts)
        self._forms = FormChooser(len(layers), config.transfers)
        self._refetch = config.replica_memory == "refetch"
        self._depth = 1 if config.schedule != "look-ahead" else config.look_ahead_blocks
        if self._refetch:
            wanted = [config.slots_per_rank * c.shape.expert_bytes for c in self._contexts]
            self._depth = depth_within(wanted, config.replica_memory_bytes, self._depth)
        self.schedule = schedule_named(config.schedule, len(layers), depth=self._depth, refetch=self._refetch)
        self._notes = Notes(self.schedule, len(layers))
        self._ahead = [runs_ahead(self.schedule, i) for i in range(len(layers))]
        self._compared = collective.size > 1 and self._planner.name != "static"
        self.runtime = Runtime(
            layers,
            collective,
            self.pool,
            self.schedule,
            accumulation_steps=config.accumulation_steps,
            refetch=self._refetch,
            form=self._form,
            stopwatch=self.stopwatch,
            on_launch=self._actions.append,
        )
        self._static = [c.homes_only() for c in self._contexts]
        self._placements = list(self._static)
        self._digests = [p.digest() for p in self._placements]
        self._split_digest = 0
        self._on_host = self._device.type == "cpu"
        self._last_rank_load = np.zeros((len(layers), collective.size), dtype=np.int64)
        self._plans: list[Future[tuple[KeptPlan, float]] | None] = [None] * len(layers)
        self._kept: list[KeptPlan | None] = [None] * len(layers)
        # one history per layer, since layers may differ in their number of experts
        adaptive = config.predict == "best"
        self.histories = [History(1, collective.size, layer.num_experts, adaptive=adaptive) for layer in layers]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prophet-plan")
        self._clear_step()
        for index, layer in enumerate(layers):
            layer.collective = collective
            layer._port = LayerPort(self, index)

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """From now on begin steps with the model's forward passes, and end them with the optimizer's steps."""
        self.watch = DriftWatch(model)
        self._hooks.append(
            # a copy of the model has the hook, too: it must not drive this engine
            model.register_forward_pre_hook(lambda m, _: self.ensure_step() if m is model and m.training else None)
        )
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer))
            self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer))

    @property
    def _device(self) -> torch.device:
        return self.layers[0].experts.w_in.device

    def _form(self, layer: int, placement: Placement) -> Form:
        """How a layer's Trans and Agg travel in the step that begins."""
        weights = self._notes.weights() or predicted_weights(self._contexts, self._last_rank_load)
        return self._forms.form(
            layer,
            placement,
            self._contexts[layer],
            trans_cut=cut_of(self.schedule, "TRANS", layer, weights),
            agg_cut=cut_of(self.schedule, "AGG", layer, weights),
            fetch_cut=cut_of(self.schedule, "FETCH", layer, weights),
            trans_cover_s=1e-6 * cover_of(self.schedule, "TRANS", layer, weights),
            agg_cover_s=1e-6 * cover_of(self.schedule, "AGG", layer, weights),
        )

    # --- the step, driven by hooks ---

    @torch._compile._disable_dynamo
    def ensure_step(self) -> None:
        """Begin a step unless one is under way: planned placements come into force and Trans starts."""
        if self.runtime.running:
            self.runtime.resume()
            return
        if self.runtime.recording is not None:
            self.runtime.recording.begin()
        before = time.perf_counter()
        for i, future in enumerate(self._plans):
            if future is not None:
                plan, planned_s = self._result(i, future)
                self._kept[i], self._placements[i] = plan, plan.placement
                self.stopwatch.add("plan", planned_s)
                self._plans[i] = None
        self._fit_memory()
        self._digests = [p.digest() for p in self._placements]
        if self._compared and not self._notes.confirmed:
            compare_placements(self._digests, self.step, self.collective, self._device)
        self._notes.confirmed = False
        self.stopwatch.add("exposed_plan", time.perf_counter() - before)
        self.runtime.begin(self._placements)

    def _result(self, layer: int, future: Future[tuple[KeptPlan, float]]) -> tuple[KeptPlan, float]:
        try:
            plan, seconds = future.result(timeout=self.collective.timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"rank {self.collective.rank}: planning of layer {layer} took more than {self.collective.timeout_s:g} s"
            ) from None
        self._check_placement(layer, plan.placement)
        return plan, seconds

    def _check_placement(self, layer: int, placement: Placement) -> None:
        check_placement(placement, self._contexts[layer], f"planner {self._planner.name!r}, MoE layer {layer}")

    def _fit_memory(self) -> None:
        """Drop replicas until every rank is within the budget: planned per layer, they share one pool."""
        budget = self.config.replica_memory_bytes
        if budget is None:
            return
        # the layers with the worst imbalance come first; ties go to the earlier layer
        order = sorted(range(len(self.layers)), key=lambda i: (-self._imbalance(i), i))
        shapes = [c.shape for c in self._contexts]
        self._placements = within_budget(
            self._placements,
            [s.expert_bytes for s in shapes],
            [s.expert_grad_bytes for s in shapes],
            budget,
            order,
            span=self._depth + 1 if self._refetch else None,
        )

    def _imbalance(self, layer: int) -> float:
        history = self.histories[layer]
        if not history.observed(0):
            return 1.0
        load = history.predict(0, "last")
        return Split.to_homes(load, self._static[layer]).max_mean()

    def _before_optimizer(self, *_: Any) -> None:
        if self.runtime.finish_gradients():
            warnings.warn(
                f"optimizer.step() came before {self.config.accumulation_steps} backward passes had run outside "
                f"engine.no_sync(): the gradients were completed just now, so code that read them earlier (gradient "
                f"clipping) saw them without the replicas' part",
                stacklevel=2,
            )

    def _after_optimizer(self, *_: Any) -> None:
        self.finish_step()

    def finish_step(self) -> None:
        """End the step: replicas vanish and the report is written. Called by the optimizer's hook."""
        if not self.runtime.running:
            return
        self.runtime.end()
        if self.runtime.recording is not None:
            self.runtime.recording.end()
        update_biases(self.layers, self._choices)
        if self._on_host:
            self._notes.measured(self.runtime.windows.take())
        self._last_rank_load = self._rank_load // self.config.accumulation_steps
        self.last_step = self._report()
        self.step += 1
        for i, load in enumerate(self._load):
            self.histories[i].observe(0, load)
        self._clear_step()
        for listener in self.on_step:
            listener(self.last_step)

    def _clear_step(self) -> None:
        ranks = self.collective.size
        self._load = [np.zeros((ranks, x.num_experts), dtype=np.int64) for x in self.layers]
        self._rank_load = np.zeros((len(self.layers), ranks), dtype=np.int64)
        self._choices = [np.zeros(x.num_experts, dtype=np.int64) for x in self.layers]
        self._dropped = np.zeros(len(self.layers), dtype=np.int64)
        self._withdrawn: set[int] = set()

    def _report(self) -> StepReport:
        experts = max(x.num_experts for x in self.layers)
        counts = np.zeros((len(self.layers), self.collective.size, experts), dtype=np.int64)
        static = np.zeros_like(self._rank_load)
        for i, load in enumerate(self._load):
            counts[i, :, : load.shape[1]] = load
            np.add.at(static[i], self._static[i].home, load.sum(axis=0))
        actions, self._actions[:] = tuple(self._actions), []
        placements = [self._static[i] if i in self._withdrawn else p for i, p in enumerate(self._placements)]
        return StepReport(
            step=self.step,
            counts=counts,
            rank_load=self._rank_load,
            rank_load_static=static,
            copies=np.stack([p.copies_per_rank() for p in placements]),
            dropped=self._dropped,
            seconds=self.stopwatch.take(),
            actions=actions,
            placements=tuple(placements),
            forms=self.runtime.forms,
            planned=tuple(plan.reason for plan in self._kept if plan is not None),
            withdrawn=tuple(sorted(self._withdrawn)),
        )

    # --- called by the layers ---

    def header(self, layer: int, training: bool) -> tuple[int, int, int]:
        """Step, placement digest and last split digest, for comparison over ranks."""
        return self.step, self._digests[layer] if training else 0, self._split_digest

    def notes(self, layer: int, training: bool) -> list[int]:
        """What this rank tells the others with the layer's counts; as many integers in every pass."""
        if not self._compared:
            return []
        digests = self._digests if training else [0] * len(self.layers)
        return self._notes.write(layer, digests, self._upcoming() if layer == len(self.layers) - 1 else UNKNOWN)

    def _upcoming(self) -> int:
        """Digest of the first layer's next placement, where it is known and final by now."""
        future = self._plans[0]
        if self.config.replica_memory_bytes is not None:
            return UNKNOWN  # the other layers' placements decide what is dropped for lack of memory
        if future is None:
            return self._digests[0]
        if not future.done() or future.cancelled() or future.exception() is not None:
            return UNKNOWN
        return future.result()[0].placement.digest()

    def noted(self, layer: int, table: IntArray) -> None:
        """Take in what all ranks have told with the layer's counts, [R, n]."""
        if self._compared:
            differ = self._notes.read(layer, table)
            if differ is not None:
                at, ranks = differ
                raise placements_differ(at, self.step, ranks)

    def plan(self, layer: int, load: IntArray, training: bool) -> tuple[Placement, Split]:
        """Placement in force and split of the exact counts; no replicas in evaluation, and where they do not pay."""
        in_force = self.runtime.placement(layer) if training else None
        placement = self._static[layer] if in_force is None else in_force
        if placement.is_static:
            return placement, Split.to_homes(load, placement)
        split = self._planner.split(load, placement, self._contexts[layer])
        if self.runtime.decided(layer):
            self.runtime.counted(layer)
        else:
            if not self._pays(layer, load, split, placement):
                self._withdrawn.add(layer)
                placement = self._static[layer]
                split = Split.to_homes(load, placement)
            self.runtime.decide(layer, placement)
        self._split_digest = split.digest()
        if self.step % self.config.check_split_every == 0 or self.step < 2:
            compare_splits(self._split_digest, layer, self.step, self.collective, self._device)
            split.check(load, placement)
        return placement, split

    def _pays(self, layer: int, load: IntArray, split: Split, placement: Placement) -> bool:
        """Whether replicas are worth what is left to pay for them; the same on every rank, and in every run."""
        if not self._withdraws:
            return True
        context = self._contexts[layer]
        trans_s, agg_s = self._forms.cheapest(layer, placement, context)
        microbatches = self.config.accumulation_steps
        return pays(load, split, context, trans_s, agg_s, ahead=self._ahead[layer], microbatches=microbatches)

    def observe(self, layer: int, load: IntArray, split: Split, choices: IntArray, dropped: int) -> None:
        """Take in a microbatch's counts, and plan the next step from them on the host thread."""
        self._load[layer] += load
        self._rank_load[layer] += split.rank_load()
        self._choices[layer] += choices
        self._dropped[layer] += dropped
        if layer == 0:
            self._notes.confirmed = False  # it is planned anew
            self._watch()
        previous = self._plans[layer]
        if previous is not None:
            previous.cancel()
        seen = self._load[layer].copy()
        expected = self.histories[layer].forecast(0, seen, self.config.predict)
        placement = self._placements[layer]
        begins = self._kept[layer] is None and placement.is_static  # no plan yet, and none to go on with
        context = replace(self._contexts[layer], previous=None if begins else placement)
        self._plans[layer] = self._thread.submit(self._plan_ahead, layer, self._kept[layer], seen, expected, context)

    def _watch(self) -> None:
        """Now and then, in the first microbatch of a step: are the shared parameters still the same on all ranks?"""
        due = self.step < 2 or self.step % self.config.check_split_every == 0
        if self.watch is not None and due and self._watched_step != self.step:
            self._watched_step = self.step
            self.watch.compare(self.collective)

    def _plan_ahead(
        self, layer: int, kept: KeptPlan | None, seen: IntArray, expected: IntArray, context: PlanContext
    ) -> tuple[KeptPlan, float]:
        before = time.perf_counter()
        plan = next_plan(kept, seen, expected, self._planner, context, self.config.replan)
        placement = plan.placement
        fits = placement.experts == context.experts and placement.ranks == context.ranks
        if fits and not placement.is_static:
            self._forms.prepare(layer, placement, context)  # remembered for the step that uses it
        return plan, time.perf_counter() - before

    # --- for the user ---

    @property
    def measured_windows(self) -> Windows | None:
        """What `EngineConfig.windows` would say of this run: the non-MoE compute of a block, mean over ranks and last
        steps, median over blocks; to be read between two steps. None before the third, with one rank or
        `planner="static"`, and on devices that compute behind the host's back, whose windows the host cannot time.
        """
        weights = self._notes.weights()
        if not weights:
            return None
        inner = range(max(len(self.layers) - 1, 1))  # no block comes after the last one, and the loss is computed there
        fnec_us, bnec_us = (float(np.median([weights[Window(k, i)] for i in inner])) for k in ("FNEC", "BNEC"))
        return Windows(fnec_s=1e-6 * fnec_us, bnec_s=1e-6 * bnec_us)

    @property
    def planner(self) -> Planner:
        """What places and splits."""
        return self._planner

    @property
    def contexts(self) -> tuple[PlanContext, ...]:
        """What each layer is planned for, by layer."""
        return tuple(self._contexts)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep the replicas' gradients where they are; the next one outside brings all home."""
        self.runtime.sync_gradients, before = False, self.runtime.sync_gradients
        try:
            yield
        finally:
            self.runtime.sync_gradients = before

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip by the norm over *all* ranks' experts and the (replicated) other parameters; the same on every rank."""
        return clip_grad_norm_(parameters, max_norm, self.collective, self._device)

    @contextmanager
    def recording(self, *, limit: int = 100_000) -> Iterator[Recording]:
        """Record what this rank does in the steps inside: `recording.spans()` is one of them, for `write_trace`.

        Enter and leave it between steps. limit: spans that are kept. On a device that computes behind the host's back
        the spans are the host's.
        """
        recording = Recording(self.collective.rank, len(self.layers), limit=limit)
        plain, observed = self.collective, ObservedCollective(self.collective, recording.recorder)
        self._use(observed, recording)
        try:
            yield recording
        finally:
            self._use(plain, None)

    def _use(self, collective: Collective, recording: Recording | None) -> None:
        self.collective = self.runtime.collective = collective
        self.runtime.recording = recording
        if not self._closed:
            for layer in self.layers:
                layer.collective = collective

    def set_topology(self, topology: Topology) -> None:
        """Plan for another machine from now on, as after measuring that a rank or a link has become slower.

        Collective in effect: call it with the same topology on all ranks, between two steps. Plans that are under way
        are thrown away; the placements in force stay for one more step. ValueError for another number of ranks;
        RuntimeError within a step.
        """
        if topology.ranks != self.collective.size:
            raise ValueError(f"expected a topology of {self.collective.size} ranks, got {topology.ranks}")
        self._between_steps("set_topology()")
        self._drop_plans()
        self._contexts = [replace(c, topology=topology) for c in self._contexts]
        self._forms = FormChooser(len(self.layers), self.config.transfers)

    def state_dict(self) -> dict[str, Any]:
        """What balancing remembers between two steps, as numbers and tensors: the histories, and the next plans.

        A run that loads it on as many ranks uses the placements that this one is going to use, and so goes on bit by
        bit; without it the first step has no replicas, and its sums another order. Not collective, and the same on
        every rank. RuntimeError within a step.
        """
        self._between_steps("state_dict()")
        plans = [
            kept if future is None else self._result(i, future)[0]
            for i, (kept, future) in enumerate(zip(self._kept, self._plans, strict=True))
        ]
        return EngineState(self.step, plans, self.histories).to_dict(self.collective.size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; collective in effect: call it with the same state on all ranks.

        Raises `SpecError`, nothing changed, for the state of another number of ranks or of other layers; RuntimeError
        within a step.
        """
        self._between_steps("load_state_dict()")
        found = EngineState.from_dict(state, self._static, self.histories)
        for i, plan in enumerate(found.plans):
            if plan is not None:
                self._check_placement(i, plan.placement)
        self._drop_plans()
        for i, plan in enumerate(found.plans):
            self._kept[i] = None
            self._placements[i] = self._static[i]
            if plan is not None:
                done: Future[tuple[KeptPlan, float]] = Future()
                done.set_result((plan, 0.0))
                self._plans[i] = done
        self.histories = found.histories
        self.step = found.step

    def _between_steps(self, what: str) -> None:
        if self.runtime.running:
            raise RuntimeError(f"{what} belongs between two steps, and one is under way")

    def _drop_plans(self) -> None:
        """Throw away the plans that are under way."""
        for i, future in enumerate(self._plans):
            if future is not None and not future.cancel():
                future.exception(timeout=self.collective.timeout_s)
            self._plans[i] = None
        self._notes.confirmed = False

    def close(self) -> None:
        """Detach: layers go back to plain expert parallelism, hooks and threads end; again is harmless.

        Not collective, so it can follow an error: transfers under way are left to themselves. Gradients that replicas
        still hold are lost; `runtime.finish_gradients()` brings them home first.
        """
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.runtime.end(wait=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for layer, (collective, port) in zip(self.layers, self._originals, strict=True):
            layer.collective, layer._port = collective, port
