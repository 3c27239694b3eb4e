"""Measuring layers and stages while training runs: seconds per layer, waits for neighbours, bytes.

Shape legend: L layers, M microbatches. Times come from clock readings around forward, and from gradient hooks in the
backward passes of every third microbatch: a hook takes longer than a reading. Nothing is run twice. On a device they
are events, which are read one step later, so that nothing waits for them. A layer's time is the mean over microbatches
and steps, without those that took more than twice the median. Of slices it is the sum of a line fitted over them.
Activations are counted on the second microbatch of a measuring period, or on the first that a layer sees at all. What
comes before a stage's first gradient, the loss's own backward on the last stage, counts for the stage's last layer, and
so does the loss.

A full backward interleaves input and weight gradients, so the two are distinguished by what needs computing: a layer
without trainable parameters has no weight part, one without an input gradient has nothing else, any other is split in
half. Where the schedule splits the backward, the weight part is what was measured, shared among the stage's layers by
trainable parameters.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.measure.links import Noted
from pipeline_balance.pipeline.measure.slice_costs import OfSlice, SliceFit
from pipeline_balance.spec import LayerCost
from prophet.ranks.collective import Collective
from prophet.ranks.device.clocks import Mark, is_over, on_host, seconds_between
from prophet.ranks.operation import Operation

_FIGURES = tuple(f.name for f in fields(LayerCost) if f.name != "name")
MAX_SAMPLES = 256
HOOKED_EVERY = 3
"""Of how many microbatches one is timed going backward."""


class _AtWork(NamedTuple):
    """A mark on a device, and how many waits of the step came before it: those after it are no work."""

    mark: Mark
    waits: int


@dataclass(eq=False)
class _Marked:
    """What a step has marked on a device, to be read when the step is over: who is told, from where, to where."""

    stretches: list[tuple[Callable[[float], None], Any, Any]] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)

    def over(self) -> bool:
        """Whether the device has come to the last mark."""
        if not self.stretches:
            return True
        last = self.stretches[-1][2]
        return is_over(last.mark if isinstance(last, _AtWork) else last)

    def read(self) -> None:
        """Tell the seconds of all; waits for the device where it has not come to the last mark."""
        for told, began, ended in self.stretches:
            if isinstance(ended, _AtWork):
                waits = self.waits[began.waits : ended.waits]
                told(seconds_between(began.mark, ended.mark) - sum(seconds_between(*wait) for wait in waits))
            else:
                told(seconds_between(began, ended))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Where this rank's time went during the measured steps, in seconds per step.

    Attributes:
        steps: How many steps were measured.
        step_s: A whole step.
        compute_s: Forward and backward of this rank's stages.
        wait_forward_s: Waiting for an activation from the stage before: a slow link or a slow neighbour shows here.
        wait_backward_s: Waiting for a gradient from the stage after.
        between_s: Median from one action to the next. On a rank that seldom waits, it is what the runtime takes per
            action.
    """

    steps: int
    step_s: float
    compute_s: float
    wait_forward_s: float
    wait_backward_s: float
    between_s: float


@dataclass
class Meter:
    """Collects samples on one rank.

    Of every kind of sample the last `max_samples` are kept, in seconds, by layer where they are of layers.

    Attributes:
        enabled: Whether anything is read; off between measured steps.
        clock: Times waits and steps; see `prophet.ranks.device.clocks.clock_on`.
        work_clock: Times the layers' own work (None: `clock`). The processor time of the thread suits ranks that share
            cores or run under a quota, where the wall clock counts pauses as work.
        max_samples: How many samples of a kind are kept, a third of that going backward; with slices, of each slice.
        forward, backward: Seconds of a microbatch, by layer.
        stage_weight: Seconds of weight gradients, by stage, where the schedule splits the backward.
        activation_bytes: What autograd keeps of a microbatch, by layer.
        input_grad: Whether a layer has to compute an input gradient.
        loss: Seconds of a microbatch's loss.
        between: Seconds from one action to the next.
        counted: Layers whose activations were counted in this measuring period.
        boundary_bytes: What this rank has received of other ranks and not used up, at most at a moment of the last
            step; slices keep as much in buffers. No layer's activations have it.
        sent_bytes: The most that was on its way to others in the last step.
        working_on: Which slice of how many runs, and the share of the microbatch's tokens that it has.
        noted: When messages of the last steps were sent and received, see `measure.links`.
    """

    enabled: bool = True
    clock: Callable[[], Mark] = time.perf_counter
    work_clock: Callable[[], float] | None = None
    max_samples: int = MAX_SAMPLES
    forward: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    stage_weight: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    activation_bytes: dict[int, int] = field(default_factory=dict)
    input_grad: dict[int, bool] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    boundary_bytes: int = 0
    sent_bytes: int = 0
    working_on: tuple[int, int, float] | None = None
    noted: Noted = field(default_factory=Noted)
    # how many microbatches a stage has taken, and whether the last one has hooks
    _passes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _hooked: dict[int, bool] = field(default_factory=dict)
    _hooking: bool = True
    _waited_s: float = 0.0
    _arrived: list[tuple[int, Any]] = field(default_factory=list)
    _acted: bool = False
    # on a device: the step under way, and those that have ended and were not read yet
    _marked: _Marked = field(default_factory=_Marked)
    _ended: list[_Marked] = field(default_factory=list)
    _steps: int = 0
    _step_s: float = 0.0
    _compute_s: float = 0.0
    _wait_s: dict[str, float] = field(default_factory=lambda: {"F": 0.0, "B": 0.0})
    _step_began: Mark = 0.0
    _last_end: Mark = 0.0

    def reset(self) -> None:
        """Forget all samples, for a new measuring period or a new stage map. Bytes stay known until counted anew."""
        for by_layer in (self.forward, self.backward, self.stage_weight):
            by_layer.clear()
        self._passes.clear()
        for samples in (self.loss, self.between):
            samples.clear()
        self.counted.clear()
        self.noted.reset()
        self._ended.clear()
        # waits stay, as marks of this step count them
        self._marked.stretches.clear()
        self._steps, self._step_s, self._compute_s = 0, 0.0, 0.0
        self._wait_s = {"F": 0.0, "B": 0.0}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is measured."""
        enabled, self.enabled = self.enabled, False
        self.noted.stop()
        try:
            yield
        finally:
            self.enabled = enabled

    def begin_step(self) -> None:
        """Begin a new step, which work counts towards from here on."""
        if not self.enabled:
            # samples of before may stay, and say nothing of the next measured steps
            self._passes.clear()
        else:
            # what an unfinished step has marked is nobody's
            self._marked, self._acted = _Marked(), False
            self._step_began = self._last_end = self.clock()

    def end_step(self) -> None:
        """End the step that began last."""
        if self.enabled:
            self._between(self._end_step, self._step_began, self.clock())
            # by now the device has mostly come to the end of the step before this one
            while self._ended and self._ended[0].over():
                self._ended.pop(0).read()
            if self._marked.stretches:
                self._ended.append(self._marked)
            self._marked = _Marked()

    def _end_step(self, seconds: float) -> None:
        self._steps += 1
        self._step_s += seconds

    @property
    def behind(self) -> bool:
        """Whether `read` would wait for a device."""
        return not all(marked.over() for marked in self._unread())

    def read(self) -> None:
        """Take in all that steps which have ended have marked on a device; where none has, what is marked so far."""
        unread = self._unread()
        if unread == [self._marked]:
            self._marked = _Marked(waits=self._marked.waits)
        self._ended = []
        for marked in unread:
            marked.read()

    def _unread(self) -> list[_Marked]:
        return self._ended if self._ended or self._steps else [self._marked]

    def _between(self, told: Callable[[float], None], began: Any, ended: Any) -> None:
        """Tell the seconds from one mark to another: now on the host, later on a device."""
        if on_host(ended):
            told(ended - began)
        # a step that began without being measured has no first mark
        elif not on_host(began):
            self._marked.stretches.append((told, began, ended))

    def run_action(self, kind: str, stage: int, call: Callable[[], Any]) -> Any:
        """Run one action of the schedule; the gap since the one before it is waiting, by what it waited for.

        Args:
            kind: F, B, I or W, as `Action` has it.
            stage: The stage that runs.
            call: The action.

        Returns:
            What `call` returns.
        """
        if not self.enabled:
            return call()
        began, work_began = self.clock(), self.work_s()
        # a weight gradient needs nothing from other ranks, so the gap before it is no wait
        if kind != "W":
            self._between(partial(self._waited_for, "F" if kind == "F" else "B"), self._last_end, began)
        if self._acted:
            self._sample(self.between, self._last_end, began)
        self._acted = True
        if kind == "F":
            self._hooking = self._hooks(stage)
        self._arrived.clear()
        result = call()
        ended, work_ended = self.clock(), self.work_s()
        if kind in ("B", "I"):
            # a layer's backward lasts until the gradient reaches the layer below it, or the action ends
            marks = [*self._arrived, (-1, work_ended)]
            # what comes before the first gradient, the loss's own backward, counts for the stage's last layer
            marks[0] = (marks[0][0], work_began)
            for (layer, start), (_, stop) in pairwise(marks):
                self._sample(self.backward[layer], start, stop, -(-self.max_samples // HOOKED_EVERY))
        elif kind == "W":
            self._sample(self.stage_weight[stage], work_began, work_ended)
        self._between(self._computed, began, ended)
        self._last_end = ended
        return result

    def _hooks(self, stage: int) -> bool:
        """Whether a stage's coming microbatch is to be timed going backward: in all layers and slices or in none."""
        if self.working_on is None or self.working_on[0] == 0:
            self._passes[stage] += 1
            # the second of three, as the first microbatch of a step is slower; it is the only one where steps have one
            self._hooked[stage] = self._passes[stage] == 1 or self._passes[stage] % HOOKED_EVERY == 2
        return self._hooked.get(stage, True)

    def run_shared(self, call: Callable[[], None]) -> None:
        """Run what all ranks share; it counts for no layer, nor as waiting before the next action."""
        if not self.enabled:
            call()
            return
        began = self.clock()
        call()
        ended = self.clock()
        self._between(self._shared, began, ended)
        # what was waited before it stays a wait of the next action
        last: Any = self._last_end
        if on_host(ended) and on_host(last):
            self._last_end = last + (ended - began)

    def _shared(self, seconds: float) -> None:
        self._compute_s += seconds

    def _waited_for(self, kind: str, seconds: float) -> None:
        self._wait_s[kind] += seconds

    def _computed(self, seconds: float) -> None:
        self._compute_s += seconds

    def _sample(self, samples: list[float], began: Any, ended: Any, most: int | None = None) -> None:
        self._between(partial(self._add, samples, self.working_on, most), began, ended)

    def add(self, samples: list[float], value: float) -> None:
        """Note a sample and forget those that are too old."""
        self._add(samples, self.working_on, None, value)

    def _add(
        self, samples: list[float], working_on: tuple[int, int, float] | None, most: int | None, value: float
    ) -> None:
        # a slice's number stays with its sample: later slices take longer, and a line is fitted over them
        number, slices, _ = working_on or (0, 1, 1.0)
        samples.append(value if working_on is None else OfSlice(value, number, slices))
        # all that are too many, as the limit may have been lowered since
        del samples[: max(0, len(samples) - (most or self.max_samples) * slices)]

    def gradient_arrived(self, layer: int) -> None:
        """Note that the backward pass has reached `layer`, whose own work begins."""
        self._arrived.append((layer, self.work_s()))

    def work_s(self) -> Any:
        """A reading of the clock that times layers; it stands still inside `waiting`. A mark on a device."""
        # the processor time of a thread stands still in waits by itself
        if self.work_clock is not None:
            return self.work_clock()
        now = self.clock()
        return now - self._waited_s if on_host(now) else _AtWork(now, len(self._marked.waits))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a layer waits for other ranks, which is none of its work."""
        if not self.enabled:
            yield
            return
        began = self.clock()
        try:
            yield
        finally:
            ended = self.clock()
            if on_host(ended):
                self._waited_s += ended - began
            else:
                self._marked.waits.append((began, ended))

    def run_unit(
        self, index: int, module: nn.Module, call: Callable[[], tuple[Tensor, ...]], given: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the forward of a layer and measure it.

        Args:
            index: The layer's number.
            module: The layer, whose parameters are no activations.
            call: Its forward.
            given: What it is given.

        Returns:
            What `call` returns.
        """
        if not self.enabled:
            return call()
        # on the second microbatch: the first one is slower than the others, and belongs to the mean
        known = index in self.activation_bytes
        count = index not in self.counted and (not known or bool(self.forward[index]))
        saved = _SavedBytes(module) if count else None
        began = self.work_s()
        with saved.counting() if saved else nullcontext():
            out = call()
        self.input_grad[index] = any(t.requires_grad for t in given)
        if saved:
            share = self.working_on[2] if self.working_on is not None else 1.0
            # a slice's bytes stand for those of the whole microbatch
            self.activation_bytes[index] = round(saved.total / share)
            self.counted.add(index)
        else:
            # the counted microbatch is slower and gives no sample
            self._sample(self.forward[index], began, self.work_s())
        first = next((t for t in out if t.requires_grad), None) if self._hooking else None
        if first is not None and torch.is_grad_enabled():
            # the gradient of an output is ready when the layer above it is done
            first.register_hook(lambda _: self.gradient_arrived(index))
        return out

    def timed(self, call: Callable[[], Tensor]) -> Tensor:
        """Run `call`, the loss of a microbatch, and note its seconds."""
        if not self.enabled:
            return call()
        began = self.work_s()
        result = call()
        self._sample(self.loss, began, self.work_s())
        return result

    def times(self) -> RankTimes:
        """Return where the time went, per step, over the steps since the last reset."""
        self.read()
        n = max(self._steps, 1)
        return RankTimes(
            steps=self._steps,
            step_s=self._step_s / n,
            compute_s=self._compute_s / n,
            wait_forward_s=self._wait_s["F"] / n,
            wait_backward_s=self._wait_s["B"] / n,
            between_s=_median(self.between),
        )


class _SavedBytes:
    """Bytes that autograd keeps for the backward pass, parameters excluded, every storage once."""

    def __init__(self, module: nn.Module) -> None:
        self.total = 0
        self._seen = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def counting(self) -> AbstractContextManager[Any]:
        def pack(tensor: Tensor) -> Tensor:
            # views share memory, which is kept once
            storage = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
            if storage not in self._seen:
                self._seen.add(storage)
                self.total += tensor.numel() * tensor.element_size()
            # an output that is saved itself would hold its node: where backward never comes, as of a norm that a model
            # logs, the pass's whole graph would stay for ever
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def local_costs(
    layers: Mapping[int, nn.Module],
    stages: Mapping[int, Sequence[int]],
    meter: Meter,
    state: Mapping[int, Mapping[str, Any]],
    staying: Collection[int] = (),
) -> dict[int, LayerCost]:
    """Work out the costs of this rank's layers from what was measured.

    Args:
        layers: The layers by number.
        stages: The layers of each of this rank's stages, by the stage's number as `meter` has it.
        meter: What was measured.
        state: What optimizers keep per parameter, by its id.
        staying: Ids of parameters that stay on their ranks wherever the layer runs, and count for none.

    Returns:
        Seconds and bytes of a microbatch, by layer.
    """
    meter.read()
    weights = _weight_seconds(layers, stages, meter)
    found: dict[int, LayerCost] = {}
    # only the rank of the model's last layer has seen a loss
    last = max(layers, default=-1)
    for index, layer in layers.items():
        here = [p for p in layer.parameters() if id(p) not in staying]
        trainable = [p for p in here if p.requires_grad]
        backward = _typical(meter.backward.get(index, ()))
        if index in weights:
            input_s, weight_s = backward, weights[index]
        elif not trainable:
            input_s, weight_s = backward, 0.0
        elif not meter.input_grad.get(index, True):
            input_s, weight_s = 0.0, backward
        else:
            # two matrix products of equal size
            input_s = weight_s = backward / 2
        found[index] = LayerCost(
            forward_s=_typical(meter.forward.get(index, ())) + (_typical(meter.loss) if index == last else 0.0),
            backward_input_s=input_s,
            backward_weight_s=weight_s,
            activation_bytes=meter.activation_bytes.get(index, 0),
            parameter_bytes=sum(_n_bytes(p) for p in here),
            gradient_bytes=sum(_n_bytes(p) for p in trainable),
            optimizer_bytes=sum(
                _n_bytes(v) for p in trainable for v in state.get(id(p), {}).values() if isinstance(v, Tensor)
            ),
        )
    return found


def slice_fit(meter: Meter) -> SliceFit:
    """Fit the seconds of a slice, forward and backward in all layers of this rank, without the loss."""
    meter.read()
    found = SliceFit(0.0, 0.0, 1)
    for by_layer in (meter.forward, meter.backward):
        for samples in by_layer.values():
            found += SliceFit.of([x for x in samples if isinstance(x, OfSlice)])
    return found


def _weight_seconds(
    layers: Mapping[int, nn.Module], stages: Mapping[int, Sequence[int]], meter: Meter
) -> dict[int, float]:
    """Measured weight-gradient seconds where the schedule splits the backward, shared by trainable parameters."""
    shared: dict[int, float] = {}
    for stage, members in stages.items():
        samples = meter.stage_weight.get(stage, ())
        if not samples:
            continue
        sizes = {i: sum(p.numel() for p in layers[i].parameters() if p.requires_grad) for i in members}
        total = sum(sizes.values())
        for i in members:
            shared[i] = _typical(samples) * sizes[i] / total if total else 0.0
    return shared


def _typical(samples: Sequence[float]) -> float:
    """Seconds of a microbatch: the mean, without samples above twice the median, or what a fit over slices says."""
    of_slices = [x for x in samples if isinstance(x, OfSlice)]
    if of_slices:
        return SliceFit.of(of_slices).microbatch_s
    # A mean, as a pipeline's step is a sum over microbatches; but one disturbed microbatch must not move layers.
    limit = 2 * _median(samples)
    kept = [x for x in samples if x <= limit]
    return statistics.fmean(kept) if kept else 0.0


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else 0.0


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def gather_costs(
    local: Mapping[int, LayerCost],
    layers: int,
    collective: Collective,
    *,
    rows: Sequence[Sequence[int]] | None = None,
) -> list[LayerCost]:
    """Gather the costs of all L layers on every rank; one all-gather of [L, 8] figures.

    Args:
        local: Costs of the layers that this rank runs, by number.
        layers: L.
        collective: Over all ranks.
        rows: The ranks of every replica (None: one of all); a figure is that of the slowest replica.

    Returns:
        [L] costs, equal on all ranks.
    """
    # float64 holds whole bytes up to 2^53 exactly
    table = torch.zeros((layers, len(_FIGURES)), dtype=torch.float64)
    for i, cost in local.items():
        table[i] = torch.tensor([float(getattr(cost, name)) for name in _FIGURES], dtype=torch.float64)
    gathered = collective.all_gather(table, op=Operation("gathering layer costs"))
    # in a replica a layer is on one rank, all others contribute zeros
    replicas = rows if rows is not None else [range(collective.size)]
    figures = torch.stack([gathered[list(row)].sum(dim=0) for row in replicas]).amax(dim=0)
    costs = []
    for i, row in enumerate(figures.tolist()):
        found = {name: int(x) if name.endswith("_bytes") else x for name, x in zip(_FIGURES, row, strict=True)}
        costs.append(LayerCost(**found, name=f"layer {i}"))
    return costs
