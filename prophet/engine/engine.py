"""The engine: balances a model's MoE layers while the user's own loop trains it; `prophet.engine.attach` attaches it.

One training step of the engine spans all microbatches between two `optimizer.step()` calls:

  the model's forward begins      placements planned during the last step come into force; Trans(0) starts
  every MoE layer, forward        exact counts -> split; the plan for the next step starts on a host thread
  every backward pass ends        the replicas' gradients are home, before the user's next line (clipping, ...)
  optimizer.step() has returned   replicas vanish; the step's report is written

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prophet.engine.balanced_layer import BalancedLayer, StepCounts
from prophet.engine.checkpoint.balancing import engine_state, engine_state_from
from prophet.engine.config import EngineConfig, Experiment, check_budget, context_of, planner_of
from prophet.engine.identical_experts import check_not_copies
from prophet.engine.overflow import Following
from prophet.engine.parallel import clip_grad_norm_, update_biases
from prophet.engine.step_report import StepReport
from prophet.experts.replica import ReplicaPool
from prophet.layer.counts import UNKNOWN, compare_placements
from prophet.layer.gradient_watch import GradientWatch
from prophet.layer.moe import MoE
from prophet.planner.base import Planner
from prophet.ranks.collective import Collective
from prophet.ranks.waiting import Waiter
from prophet.scheduler.actions import Window
from prophet.scheduler.budget import within_budget
from prophet.scheduler.recording import ObservedCollective, Recording
from prophet.scheduler.runtime import Runtime, Step
from prophet.scheduler.schedules import Schedule, depth_within, schedule_named
from prophet.scheduler.windows import Stopwatch, predicted_window_us
from prophet.spec import IntArray, PlanContext, Topology, Windows

_log = logging.getLogger(__name__)
_SEEN = 4  # shared parameters whose gradients tell what the user has thrown away


class Engine:
    """Balances the MoE layers of one model on one rank; made by `attach`.

    layers: the model's; balanced: what is known of each. last_step: the report of the last step; on_step: called with
    every report. updates: how often the optimizer has run, also where no step was under way. compared: whether ranks
    compare placements. split_digest: of the last split that had a choice.
    """

    def __init__(self, layers: list[MoE], collective: Collective, config: EngineConfig, experiment: Experiment) -> None:
        self.layers = layers
        self.collective = ObservedCollective(collective)
        self.config, self.experiment = config, experiment
        self.planner: Planner = planner_of(config, collective.rank)
        self.compared = collective.size > 1 and self.planner.replicates
        contexts = [context_of(layer, collective.size, config) for layer in layers]
        contexts[0] = replace(contexts[0], windows=replace(config.windows, experts=False))
        check_budget(config, self.planner, contexts)
        self.step = self.updates = 0
        self.last_step: StepReport | None = None
        self.on_step: list[Callable[[StepReport], None]] = []
        self.watch: GradientWatch | None = None
        self.stopwatch = Stopwatch()
        self.split_digest = 0
        self.pool = ReplicaPool(config.replica_memory_bytes)
        self._depth = self._look_ahead(contexts)
        self.schedule: Schedule = schedule_named(
            experiment.schedule, len(layers), depth=self._depth, refetch=config.refetch
        )
        self.runtime = Runtime(
            layers,
            self.collective,
            self.pool,
            self.schedule,
            accumulation_steps=config.accumulation_steps,
            refetch=config.refetch,
            stopwatch=self.stopwatch,
        )
        self.thread = Waiter("plans placements")
        self.balanced = [BalancedLayer(self, i, *both) for i, both in enumerate(zip(layers, contexts, strict=True))]
        early = {a.block for a in self.schedule if a.kind == "TRANS" and a.window == Window("START")}
        self._can_confirm = len(layers) > 1 and early <= {0}
        self._confirmed = self._experts_compared = False
        self._closed = False
        self._hooks: list[Any] = []
        self._originals = [(layer.collective, layer._port) for layer in layers]
        for layer, balanced in zip(layers, self.balanced, strict=True):
            layer.collective, layer._port = self.collective, balanced
            layer.expert_watch.every = experiment.check_every

    def __repr__(self) -> str:
        layers, ranks = len(self.layers), self.collective.size
        sizes = f"{layers} layer{'s' * (layers != 1)}, {ranks} rank{'s' * (ranks != 1)}"
        return f"Engine({sizes}, planner {self.planner.name})"

    def _look_ahead(self, contexts: list[PlanContext]) -> int:
        """Over how many blocks transfers are spread."""
        config = self.config
        depth = self.experiment.look_ahead_blocks if self.experiment.schedule == "look-ahead" else 1
        if config.refetch:
            wanted = [config.slots_per_rank * c.shape.expert_bytes for c in contexts]
            depth = depth_within(wanted, config.replica_memory_bytes, depth)
        return depth

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """From now on begin steps with the model's forward passes, and end them with the optimizer's steps."""
        shared = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]
        shared = [p for p in shared if not getattr(p, "prophet_expert", False)]
        self.runtime.shared = sorted(shared, key=lambda p: p.numel())[:_SEEN]
        self._hooks.append(
            # a copy of the model has the hook, too: it must not drive this engine
            model.register_forward_pre_hook(lambda m, _: self.ensure_step() if m is model and m.training else None)
        )
        if optimizer is not None:
            if self.collective.size > 1:
                self.watch = GradientWatch(model, optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_optimizer()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.finish_step()))
            self._hooks.append(Following(optimizer, self))

    @property
    def device(self) -> torch.device:
        """Where ranks exchange tensors."""
        return self.layers[0].experts.device

    # --- the step, driven by hooks ---

    @torch._compile._disable_dynamo
    def ensure_step(self) -> None:
        """Begin a step unless one is under way: planned placements come into force and Trans starts."""
        if self.runtime.step is not None:
            self.runtime.step.forget()
            return
        if self.runtime.recording is not None:
            self.runtime.recording.begin()
        with self.stopwatch("exposed_plan"):
            for layer in self.balanced:
                layer.take_plan()
            self._fit_memory()
            for layer in self.balanced:
                layer.digest = layer.placement.digest()
            if self.compared and not self._confirmed:
                digests = [layer.digest for layer in self.balanced]
                compare_placements(digests, self.step, self.collective, self.device)
            self._confirmed = False
        window_us = self._agreed_us() or predicted_window_us(self.contexts, [x.last_rank_load for x in self.balanced])
        forms = [layer.form(self.schedule, window_us) for layer in self.balanced]
        self.runtime.begin([layer.placement for layer in self.balanced], forms)

    def _fit_memory(self) -> None:
        """Drop replicas until every rank is within the budget: planned per layer, they share one pool."""
        budget = self.config.replica_memory_bytes
        if budget is None:
            return
        # the layers with the worst imbalance come first; ties go to the earlier layer
        imbalance = [layer.imbalance() for layer in self.balanced]
        shapes = [layer.context.shape for layer in self.balanced]
        placements = within_budget(
            [layer.placement for layer in self.balanced],
            [s.expert_bytes for s in shapes],
            [s.expert_grad_bytes for s in shapes],
            budget,
            sorted(range(len(imbalance)), key=lambda i: (-imbalance[i], i)),
            span=self._depth + 1 if self.config.refetch else None,
        )
        for layer, placement in zip(self.balanced, placements, strict=True):
            layer.placement = placement

    def _agreed_us(self) -> dict[Window, int]:
        """Microseconds by window as all ranks know them; empty before the first measurement."""
        found = {window: us for layer in self.balanced for window, us in layer.windows.agreed_us().items()}
        return found if any(found.values()) else {}

    def complete_gradients(self) -> None:
        """Bring home what is still away, with a warning. Called before the optimizer reads its gradients."""
        if self.runtime.finish_gradients():
            warnings.warn(
                f"optimizer.step() came before {self.config.accumulation_steps} backward passes had run outside "
                f"engine.no_sync(): the gradients were completed just now, so code that read them earlier (gradient "
                f"clipping) saw them without the replicas' part",
                stacklevel=2,
            )

    def _before_optimizer(self) -> None:
        self.complete_gradients()
        if self.watch is not None:
            self.watch.look(self.step)

    def finish_step(self) -> None:
        """End the step: replicas vanish and the report is written. Called when the optimizer has run, or a `GradScaler`
        has skipped it.
        """
        self.updates += 1  # a rank whose optimizer runs without a forward pass is out of step, too
        step = self.runtime.step
        if step is None:
            return
        self.runtime.end()
        for moe in self.layers:
            moe.expert_watch.look()  # where no optimizer of torch's has
        if self.runtime.recording is not None:
            self.runtime.recording.end()
        update_biases(self.layers, [layer.counts.choices for layer in self.balanced])
        if self.device.type == "cpu":
            seconds = self.runtime.windows.take()
            for layer in self.balanced:
                layer.windows.measured(seconds)
        self.last_step = self._report(step, [layer.end_step() for layer in self.balanced])
        if self.collective.rank == 0:
            # the first plan is in force from the second step on
            _log.log(logging.INFO if self.step < 2 else logging.DEBUG, "%r", self.last_step)
        self.step += 1
        for listener in self.on_step:
            listener(self.last_step)

    def _report(self, step: Step, by_layer: list[StepCounts]) -> StepReport:
        ranks, experts = self.collective.size, max(x.num_experts for x in self.layers)
        counts = np.zeros((len(by_layer), ranks, experts), dtype=np.int64)
        static = np.zeros((len(by_layer), ranks), dtype=np.int64)
        for i, (layer, found) in enumerate(zip(self.balanced, by_layer, strict=True)):
            counts[i, :, : found.load.shape[1]] = found.load
            np.add.at(static[i], layer.homes.home, found.load.sum(axis=0))
        placements = [
            layer.homes if found.withdrawn else layer.placement
            for layer, found in zip(self.balanced, by_layer, strict=True)
        ]
        return StepReport(
            step=self.step,
            counts=counts,
            rank_load=np.stack([found.rank_load for found in by_layer]),
            rank_load_static=static,
            copies=np.stack([p.copies_per_rank() for p in placements]),
            dropped=np.array([found.dropped for found in by_layer], dtype=np.int64),
            seconds=self.stopwatch.take(),
            actions=tuple(step.actions),
            placements=tuple(placements),
            forms=step.forms,
            planned=tuple(layer.plans.kept.reason for layer in self.balanced if layer.plans.kept is not None),
            withdrawn=tuple(i for i, found in enumerate(by_layer) if found.withdrawn),
        )

    # --- asked by the layers ---

    @property
    def checks(self) -> bool:
        """Whether this step is one of those that compare splits over the ranks."""
        return self.step < 2 or self.step % self.experiment.check_every == 0

    def upcoming(self) -> int:
        """Digest of the first layer's next placement, where it is known and final by now."""
        if self.config.replica_memory_bytes is not None:
            return UNKNOWN  # the other layers' placements decide what is dropped for lack of memory
        return self.balanced[0].plans.upcoming(self.balanced[0].digest)

    def confirm(self, upcoming: IntArray) -> None:
        """All ranks have said what they planned for the first layer's next step, [R].

        Where that is the same, no comparison is needed before its Trans, which starts before any counts. The other
        layers' placements are compared with the first layer's counts, which is in time for them.
        """
        same = bool(upcoming[0] != UNKNOWN and (upcoming == upcoming[0]).all())
        self._confirmed = self._can_confirm and same

    def used_gradients(self) -> Tensor | None:
        """A digest of the shared gradients that the last optimizer step used; None where ranks cannot differ."""
        return None if self.watch is None else self.watch.take(self.device)

    def first_counts(self) -> None:
        """The first layer's counts are known: it is planned anew. In the first step, ranks compare their experts."""
        self._confirmed = False
        if not self._experts_compared:  # not sooner: a checkpoint may be loaded after `attach`
            self._experts_compared = True
            check_not_copies(self.layers, self.collective)

    # --- for the user ---

    @property
    def measured_windows(self) -> Windows | None:
        """What `EngineConfig.windows` would say of this run: the non-MoE compute of a block, mean over ranks and last
        steps, median over blocks; to be read between two steps. None before the third, with one rank or
        `planner="static"`, and on devices that compute behind the host's back, whose windows the host cannot time.
        """
        found_us = self._agreed_us()
        if not found_us:
            return None
        inner = range(max(len(self.layers) - 1, 1))  # no block comes after the last one, and the loss is computed there
        fnec_us, bnec_us = (float(np.median([found_us[Window(k, i)] for i in inner])) for k in ("FNEC", "BNEC"))
        return Windows(fnec_s=1e-6 * fnec_us, bnec_s=1e-6 * bnec_us)

    @property
    def contexts(self) -> tuple[PlanContext, ...]:
        """What each layer is planned for, by layer."""
        return tuple(layer.context for layer in self.balanced)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep the replicas' gradients where they are; the next one outside brings all home."""
        self.runtime.sync_gradients, before = False, self.runtime.sync_gradients
        try:
            yield
        finally:
            self.runtime.sync_gradients = before

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over *all* ranks' experts and the (replicated) other parameters; the same on every rank.

        norm_type: as of torch's function, any positive number or infinity.
        """
        return clip_grad_norm_(parameters, max_norm, self.collective, self.device, norm_type)

    @contextmanager
    def recording(self, *, limit: int = 100_000) -> Iterator[Recording]:
        """Record what this rank does in the steps inside: `recording.spans()` is one of them, for `write_trace`.

        Enter and leave it between steps. limit: spans that are kept. On a device that computes behind the host's back
        the spans are the host's.
        """
        before = self.runtime.recording, self.collective.recorder
        recording = Recording(self.collective.rank, limit=limit)
        self.runtime.recording, self.collective.recorder = recording, recording.recorder
        try:
            yield recording
        finally:
            self.runtime.recording, self.collective.recorder = before

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
        for layer in self.balanced:
            layer.move_to(replace(layer.context, topology=topology))

    def state_dict(self) -> dict[str, Any]:
        """What balancing remembers between two steps, as numbers and tensors: the histories, and the next plans.

        A run that loads it on as many ranks uses the placements that this one is going to use, and so goes on bit by
        bit; without it the first step has no replicas, and its sums another order. Not collective, and the same on
        every rank. RuntimeError within a step.
        """
        self._between_steps("state_dict()")
        plans = [layer.plans.latest() for layer in self.balanced]
        return engine_state(self.step, plans, [layer.history for layer in self.balanced])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; collective in effect: call it with the same state on all ranks.

        Raises `SpecError`, nothing changed, for the state of another number of ranks or of other layers; RuntimeError
        within a step.
        """
        self._between_steps("load_state_dict()")
        homes, present = [x.homes for x in self.balanced], [x.history for x in self.balanced]
        step, plans, histories = engine_state_from(state, homes, present)
        for layer, plan in zip(self.balanced, plans, strict=True):
            if plan is not None:
                layer.check(plan.placement)
        self._drop_plans()
        for layer, plan, history in zip(self.balanced, plans, histories, strict=True):
            layer.resume(plan, history)
        self.step = step

    def _between_steps(self, what: str) -> None:
        if self.runtime.running:
            raise RuntimeError(f"{what} belongs between two steps, and one is under way")

    def _drop_plans(self) -> None:
        """Throw away the plans that are under way."""
        for layer in self.balanced:
            layer.plans.drop()
        self._confirmed = False

    def close(self) -> None:
        """Detach: layers go back to plain expert parallelism, hooks and threads end; again is harmless.

        A converted model stays converted, every expert at its home alone; `prophet.revert(model)` undoes that.
        Not collective, so it can follow an error: transfers under way are left to themselves. Gradients that replicas
        still hold are lost; `runtime.finish_gradients()` brings them home first.
        """
        if self._closed:
            return
        self._closed = True
        for balanced in self.balanced:
            balanced.plans.cancel()
        self.thread.close(self.collective.timeout_s)
        self.runtime.end(wait=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for layer, (collective, port) in zip(self.layers, self._originals, strict=True):
            layer.collective, layer._port = collective, port
