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
from prophet.engine.config import AUTO, EngineConfig, Experiment, check_budget, context_of, planner_of, topology_for
from prophet.engine.identical_experts import check_not_copies
from prophet.engine.overflow import Following
from prophet.engine.parallel import clip_grad_norm_, update_biases
from prophet.engine.step_report import StepReport
from prophet.experts.replica import ReplicaPool
from prophet.layer.counts import UNKNOWN, compare_placements
from prophet.layer.gradient_watch import GradientWatch
from prophet.layer.moe import MoE
from prophet.machine.auto import topology_of
from prophet.planner.base import Planner
from prophet.ranks.collective import Collective
from prophet.ranks.waiting import Waiter
from prophet.scheduler.actions import Window
from prophet.scheduler.budget import within_budget
from prophet.scheduler.recording import ObservedCollective, Recording
from prophet.scheduler.runtime import Runtime, Step
from prophet.scheduler.schedules import Schedule, depth_within, schedule_named
from prophet.scheduler.windows import Stopwatch, predicted_window_us
from prophet.spec import IntArray, PlanContext, Split, Topology, Windows

_log = logging.getLogger(__name__)
# Shared parameters whose gradients show whether the user has zeroed them; the smallest cost the least to read
_SEEN = 4


class Engine:
    """Balances the MoE layers of one model on one rank; made by `attach`.

    Args:
        layers: The model's MoE layers, in the order of execution.
        collective: Their expert-parallel group.
        config: How to balance.
        experiment: Settings of benchmarks and tests.

    Attributes:
        balanced: What the engine knows of each layer.
        last_step: The report of the last step; None before the first.
        on_step: Functions that are called with every report.
        updates: How often the optimizer has run, also where no step was under way.
        compared: Whether ranks compare placements.

    Raises:
        ValueError: For a topology of another number of ranks.
        ReplicaMemoryError: Where the budget holds no replica.
    """

    def __init__(self, layers: list[MoE], collective: Collective, config: EngineConfig, experiment: Experiment) -> None:
        # 1. What may refuse: planner, contexts, budget. Nothing of the model has changed if one of them raises.
        self.layers = layers
        # Wrapped, so that `recording` can switch spans on and off between steps
        self.collective = ObservedCollective(collective)
        self.config, self.experiment = config, experiment
        self.planner: Planner = planner_of(config, collective.rank)
        self.compared = collective.size > 1 and self.planner.replicates
        if config.topology == AUTO and self.compared and config.slots_per_rank > 0:
            topology = topology_of(collective, layers[0].experts)
        else:
            topology = topology_for(config, collective.size)
        contexts = [context_of(layer, topology, config) for layer in layers]
        # No experts come before those of the first block, so only non-MoE compute can hide its transfers
        contexts[0] = replace(contexts[0], windows=replace(config.windows, experts=False))
        check_budget(config, self.planner, contexts)
        # 2. State that does not depend on anything
        self.step = self.updates = 0
        self.last_step: StepReport | None = None
        self.on_step: list[Callable[[StepReport], None]] = []
        self.watch: GradientWatch | None = None
        self.stopwatch = Stopwatch()
        self._split_digest = 0
        self._unhashed: Split | None = None
        # 3. The machinery of a step, bottom up: memory, then the schedule over it, then the runtime that follows the
        # schedule. The depth comes before the schedule, since the budget limits it.
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
        # 4. Planning. Layers read the schedule, the thread and the stopwatch of this engine, so they come after those.
        self.thread = Waiter("plans placements")
        self.balanced = [BalancedLayer(self, i, *both) for i, both in enumerate(zip(layers, contexts, strict=True))]
        # Only the first layer's next placement is compared a step ahead: a schedule that sends others' replicas at the
        # start, before any counts, needs a comparison with a message
        early = {a.block for a in self.schedule if a.kind == "TRANS" and a.window == Window("START")}
        self._can_confirm = len(layers) > 1 and early <= {0}
        self._confirmed = self._experts_compared = False
        self._closed = False
        self._hooks: list[Any] = []
        # 5. Last of all the layers are taken over: an error above leaves the model as it was. `close` puts these back.
        self._originals = [(layer.collective, layer.port) for layer in layers]
        for layer, balanced in zip(layers, self.balanced, strict=True):
            layer.collective, layer.port = self.collective, balanced
            layer.expert_watch.every = experiment.check_every

    def __repr__(self) -> str:
        layers, ranks = len(self.layers), self.collective.size
        sizes = f"{layers} layer{'s' * (layers != 1)}, {ranks} rank{'s' * (ranks != 1)}"
        return f"Engine({sizes}, planner {self.planner.name})"

    def _look_ahead(self, contexts: list[PlanContext]) -> int:
        """Return over how many blocks transfers are spread."""
        config = self.config
        depth = self.experiment.look_ahead_blocks if self.experiment.schedule == "look-ahead" else 1
        if config.refetch:
            wanted = [config.slots_per_rank * c.shape.expert_bytes for c in contexts]
            depth = depth_within(wanted, config.replica_memory_bytes, depth)
        return depth

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Hook the model and the optimizer: its forward passes begin steps, and optimizer steps end them.

        Args:
            model: The model; only its own forward passes count, not those of a copy.
            optimizer: Its optimizer, or None where the caller ends steps.
        """
        # Not those that FSDP has cut: their gradients come at another time, and as parts
        shared = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]
        shared = [p for p in shared if not getattr(p, "prophet_expert", False)]
        self.runtime.shared = sorted(shared, key=lambda p: p.numel())[:_SEEN]
        self._hooks.append(
            # A copy of the model has the hook, too: it must not drive this engine
            model.register_forward_pre_hook(lambda m, _: self.ensure_step() if m is model and m.training else None)
        )
        if optimizer is not None:
            if self.collective.size > 1:
                self.watch = GradientWatch(model, optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_optimizer()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.finish_step()))
            self._hooks.append(Following(optimizer, self))

    @property
    def closed(self) -> bool:
        """Whether `close` has ended balancing."""
        return self._closed

    @property
    def device(self) -> torch.device:
        """The device on which ranks exchange tensors."""
        return self.layers[0].experts.device

    # --- the step, driven by hooks ---

    @torch._compile._disable_dynamo
    def ensure_step(self) -> None:
        """Begin a step unless one is under way: planned placements come into force and Trans starts."""
        # Another forward pass of the step under way: gradients that the user has zeroed since must not come home
        if self.runtime.step is not None:
            self.runtime.step.forget()
            return
        if self.runtime.recording is not None:
            self.runtime.recording.begin()
        # The model may have gone to a device since `attach`
        self.stopwatch.on(self.device)
        with self.stopwatch("exposed_plan"):
            for layer in self.balanced:
                layer.take_plan()
            self._fit_memory()
            # Only now: what has no room in memory is not a part of the placement in force
            for layer in self.balanced:
                layer.digest = layer.placement.digest()
            # Before Trans: ranks whose placements differ would send what others do not expect
            if self.compared and not self._confirmed:
                digests = [layer.digest for layer in self.balanced]
                compare_placements(digests, self.step, self.collective)
            self._confirmed = False
        window_us = self._agreed_us() or predicted_window_us(self.contexts, [x.last_rank_load for x in self.balanced])
        forms = [layer.form(self.schedule, window_us) for layer in self.balanced]
        self.runtime.begin([layer.placement for layer in self.balanced], forms)

    def _fit_memory(self) -> None:
        """Drop replicas until every rank is within the budget: planned per layer, they share one pool."""
        budget = self.config.replica_memory_bytes
        if budget is None:
            return
        # The layers with the worst imbalance come first; ties go to the earlier layer
        imbalance = [layer.imbalance() for layer in self.balanced]
        shapes = [layer.context.shape for layer in self.balanced]
        topology = self.balanced[0].context.topology
        placements = within_budget(
            [layer.placement for layer in self.balanced],
            [s.expert_bytes for s in shapes],
            [s.expert_grad_bytes for s in shapes],
            [s.expert_sum_bytes for s in shapes],
            budget,
            sorted(range(len(imbalance)), key=lambda i: (-imbalance[i], i)),
            node=topology.node_ids().tolist() if topology.has_levels else None,
            spreads=self.balanced[0].spreads,
            span=self._depth + 1 if self.config.refetch else None,
        )
        for layer, placement in zip(self.balanced, placements, strict=True):
            layer.placement = placement

    def _agreed_us(self) -> dict[Window, int]:
        """Microseconds by window that all ranks have agreed on; empty before the first measurement."""
        # Never this rank's own measurement: forms are chosen from it, and must be the same on all ranks
        found = {window: us for layer in self.balanced for window, us in layer.windows.agreed_us().items()}
        return found if any(found.values()) else {}

    def complete_gradients(self) -> None:
        """Bring home gradients that are still away, with a warning; called before the optimizer reads its gradients."""
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
        """End the step: replicas vanish and the report is written.

        Called when the optimizer has run, or a `GradScaler` has skipped it.
        """
        # Counted without a step as well: a rank whose optimizer runs without a forward pass is out of step, too
        self.updates += 1
        step = self.runtime.step
        if step is None:
            return
        self.runtime.end()
        # For optimizers that are not torch's, which do not call its hooks
        for moe in self.layers:
            moe.expert_watch.look()
        if self.runtime.recording is not None:
            self.runtime.recording.end()
        update_biases(self.layers, [layer.counts.choices for layer in self.balanced])
        # On a device those of the step before, which are over: none at the end of the first step
        seconds = self.runtime.windows.take()
        for layer in self.balanced if seconds else ():
            layer.windows.measured(seconds)
        self.last_step = self._report(step, [layer.end_step() for layer in self.balanced])
        if self.collective.rank == 0:
            # The first plan is in force from the second step on, so two steps show what balancing does
            _log.log(logging.INFO if self.step < 2 else logging.DEBUG, "%r", self.last_step)
        self.step += 1
        for listener in self.on_step:
            listener(self.last_step)

    def _report(self, step: Step, by_layer: list[StepCounts]) -> StepReport:
        ranks, experts = self.collective.size, max(x.num_experts for x in self.layers)
        counts = np.zeros((len(by_layer), ranks, experts), dtype=np.int64)
        static = np.zeros((len(by_layer), ranks), dtype=np.int64)
        # Layers may have different numbers of experts: the rest of their rows stays zero
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

    def last_split(self, split: Split) -> None:
        """Keep a split that had a choice, for ranks to compare: its digest travels with the next counts."""
        self._unhashed = split

    @property
    def split_digest(self) -> int:
        """Digest of the last split that had a choice; made when it is first asked for, once the step can wait."""
        if self._unhashed is not None:
            self._split_digest, self._unhashed = self._unhashed.digest(), None
        return self._split_digest

    @property
    def checks(self) -> bool:
        """Whether ranks compare their splits in this step."""
        return self.step < 2 or self.step % self.experiment.check_every == 0

    def upcoming(self) -> int:
        """Return the digest of the first layer's next placement; `UNKNOWN` unless it is final by now."""
        # With a budget the other layers' placements decide what is dropped for lack of memory
        if self.config.replica_memory_bytes is not None:
            return UNKNOWN
        return self.balanced[0].plans.upcoming(self.balanced[0].digest)

    def confirm(self, upcoming: IntArray) -> None:
        """Take note of what all ranks have planned for the first layer.

        Where that is the same, no comparison is needed before its Trans, which starts before any counts. The other
        layers' placements are compared with the first layer's counts, which is in time for them.

        Args:
            upcoming: Digests [R] of the first layer's next placement, by rank, or `UNKNOWN`.
        """
        same = bool(upcoming[0] != UNKNOWN and (upcoming == upcoming[0]).all())
        self._confirmed = self._can_confirm and same

    def used_gradients(self) -> Tensor | None:
        """Return a digest of the shared gradients that the last optimizer step used; None if ranks cannot differ."""
        return None if self.watch is None else self.watch.take(self.device)

    def first_counts(self) -> None:
        """React to the first layer's counts: it is planned anew, and in the first step ranks compare their experts."""
        # The plan that was confirmed is replaced by the one that starts now
        self._confirmed = False
        # Not sooner: a checkpoint may be loaded after `attach`
        if not self._experts_compared:
            self._experts_compared = True
            check_not_copies(self.layers, self.collective)

    # --- for the user ---

    @property
    def measured_windows(self) -> Windows | None:
        """The measured value of `EngineConfig.windows`, to be read between two steps.

        It is the non-MoE compute of a block: the mean over ranks and the last steps, the median over blocks. None
        before the third step (on accelerators the fourth), with one rank, and with `planner="static"`.
        """
        found_us = self._agreed_us()
        if not found_us:
            return None
        # No block comes after the last one, and the loss is computed there
        inner = range(max(len(self.layers) - 1, 1))
        fnec_us, bnec_us = (float(np.median([found_us[Window(k, i)] for i in inner])) for k in ("FNEC", "BNEC"))
        return Windows(fnec_s=1e-6 * fnec_us, bnec_s=1e-6 * bnec_us)

    @property
    def contexts(self) -> tuple[PlanContext, ...]:
        """The contexts that placements are planned in, by layer."""
        return tuple(layer.context for layer in self.balanced)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on the replicas in backward passes inside; the next one outside brings all of them home."""
        self.runtime.sync_gradients, before = False, self.runtime.sync_gradients
        try:
            yield
        finally:
            self.runtime.sync_gradients = before

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over *all* ranks' experts and the (replicated) other parameters; collective.

        Args:
            parameters: This rank's parameters, experts and others.
            max_norm: The norm that gradients are scaled down to.
            norm_type: As of torch's function, any positive number or infinity.

        Returns:
            The norm before clipping, in float64, the same on every rank.
        """
        return clip_grad_norm_(parameters, max_norm, self.collective, self.device, norm_type)

    @contextmanager
    def recording(self, *, limit: int = 100_000) -> Iterator[Recording]:
        """Record what this rank does in the steps inside: `recording.spans()` is one of them, for `write_trace`.

        Enter and leave it between steps. On an accelerator the spans are the host's.

        Args:
            limit: How many spans are kept.
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
        are thrown away; the placements in force stay for one more step.

        Args:
            topology: The machine as it is now.

        Raises:
            ValueError: For another number of ranks.
            RuntimeError: Within a step.
        """
        if topology.ranks != self.collective.size:
            raise ValueError(f"expected a topology of {self.collective.size} ranks, got {topology.ranks}")
        self._between_steps("set_topology()")
        self._drop_plans()
        for layer in self.balanced:
            layer.move_to(replace(layer.context, topology=topology))

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's memory between two steps as numbers and tensors: the histories, and the next plans.

        A run that loads it on as many ranks uses the placements that this one is going to use, and so goes on bit by
        bit; without it the first step has no replicas, and its sums another order. It also has the machine that this
        run plans for, if that is known, which a run with `topology="auto"` goes on with, on other hosts too. Not
        collective, and the same on every rank.

        Raises:
            RuntimeError: Within a step.
        """
        self._between_steps("state_dict()")
        plans = [layer.plans.latest() for layer in self.balanced]
        topology: Topology | None = self.contexts[0].topology
        # One that was to be measured and was not, as where nothing is copied, would keep later runs from measuring
        if self.config.topology == AUTO and topology == Topology.uniform(self.collective.size):
            topology = None
        return engine_state(self.step, plans, [layer.history for layer in self.balanced], topology)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; collective in effect: call it with the same state on all ranks.

        Raises:
            SpecError: For the state of another number of ranks or of other layers; nothing is changed then.
            RuntimeError: Within a step.
        """
        self._between_steps("load_state_dict()")
        homes, present = [x.homes for x in self.balanced], [x.history for x in self.balanced]
        step, plans, histories, topology = engine_state_from(state, homes, present)
        # All plans are checked before anything is changed
        for layer, plan in zip(self.balanced, plans, strict=True):
            if plan is not None:
                layer.check(plan.placement)
        if topology is not None and self.config.topology == AUTO:
            self.set_topology(topology)
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
        """Detach: layers go back to plain expert parallelism, hooks and threads end. A second call does nothing.

        A converted model stays converted, every expert at its home alone; `prophet.revert(model)` undoes that.
        Not collective, so it can follow an error: transfers under way are abandoned. Gradients that replicas still hold
        are lost; `runtime.finish_gradients()` brings them home first.
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
            layer.collective, layer.port = collective, port
