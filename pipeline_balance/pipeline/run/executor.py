"""Running a schedule's actions on one rank: forward, backward, and the messages between stages.

Shape legend: S stages, M microbatches. Where microbatches are cut into slices, M counts the slices. A stage keeps what
a microbatch's forward left until its backward. Every message has the shapes and types that all ranks have agreed on for
its microbatch; what a stage sends is checked against them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.model.added_loss import AddedLosses, added_losses
from pipeline_balance.pipeline.model.buffers import BufferPool
from pipeline_balance.pipeline.model.halves import SecondHalf, first_half
from pipeline_balance.pipeline.model.layers import (
    Activations,
    Microbatch,
    PipelineModel,
    SplitsVocabulary,
    TrainingPass,
)
from pipeline_balance.pipeline.model.lost_losses import LostLosses, is_loss, lost_loss
from pipeline_balance.pipeline.model.vocabulary import unsplit
from pipeline_balance.pipeline.run.failures import Failures
from pipeline_balance.pipeline.run.generators import going_on, seed_generators, unit_seed
from pipeline_balance.pipeline.run.gradients.wide_sums import WideSums
from pipeline_balance.pipeline.run.vocabulary import VocabularyPasses
from pipeline_balance.schedules.actions import SHARED, Action
from pipeline_balance.schedules.transfers import Message, Step, received_ahead
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.operation import Operation

# Messages that a rank has under way at most: it waits for the oldest before it sends another. So what has been sent and
# not yet received takes bounded memory.
SENDS = 4


@dataclass
class Run:
    """One pass of a batch through the stages.

    Attributes:
        microbatches: [M] the parts of the batch.
        shapes: [M] every part's activations, without memory.
        update: Number of the update, which random numbers follow.
        scale: The gradient is that of the sum of losses times this.
        training: Whether there is a backward pass.
        losses: This rank's sums: the model's on the last stage's rank, and what layers add.
    """

    microbatches: Sequence[Microbatch]
    shapes: Sequence[Sequence[Activations]]
    update: int
    scale: float = 1.0
    training: bool = True
    losses: list[Tensor] = field(default_factory=list)


@dataclass
class _Kept:
    """What a forward leaves for its backward.

    Attributes:
        inputs: The stage's inputs.
        outputs: What is differentiated.
        second: The second half of the backward, once the first has run.
    """

    inputs: Activations
    outputs: Activations
    second: SecondHalf | None = None


class Executor:
    """Runs this rank's stages.

    Attributes:
        received: Buffers of the messages that a training pass receives, each until the backward that reads it last.

    Args:
        model: The model.
        stages: The units of each of this rank's stages, by the stage's number.
        total_stages: S, of all ranks.
        training: This rank's steps of the schedule.
        evaluation: This rank's steps of a forward pass of as many microbatches.
        collective: Returns the communicator of the replica's ranks; asked anew, as it changes with the group.
        failures: Returns what makes one rank's failure that of all of them.
        config_seed: By which layers draw random numbers.
        device: Where this rank computes.
        meter: Times layers and waits.
        on_stage_done: Called with a stage's number after its last backward action of a pass.
        training_pass: What all ranks run, of the microbatches of a pass; the model is told.
        reuse: Whether buffers are used again, as of slices. Gradients in half precision are then summed in float32.
        vocabulary: This rank's parts of a split vocabulary (None: it is not split).
    """

    def __init__(
        self,
        model: PipelineModel,
        stages: Mapping[int, Sequence[int]],
        total_stages: int,
        *,
        training: Sequence[Step],
        evaluation: Callable[[int], Sequence[Step]],
        collective: Callable[[], Collective],
        failures: Callable[[], Failures],
        config_seed: int,
        device: torch.device,
        meter: Meter,
        on_stage_done: Callable[[int], None],
        training_pass: Callable[[Sequence[Microbatch]], TrainingPass],
        reuse: bool = False,
        vocabulary: VocabularyPasses | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.model, self.stages, self.total = model, stages, total_stages
        # a device has one queue per communicator, in which a receive would hold up what is sent after it
        ahead = reuse and device.type == "cpu"
        self.training, self.evaluation = received_ahead(training) if ahead else training, evaluation
        self.collective, self.failures, self.seed, self.device = collective, failures, config_seed, device
        self.meter, self.on_stage_done, self._training_pass = meter, on_stage_done, training_pass
        self.reuse, self.received = reuse, BufferPool()
        last = [a.stage for a in training if isinstance(a, Action) and a.kind in "BW"]
        # how many actions of a stage end a microbatch's backward
        self._actions = {s: last.count(s) for s in stages}
        self._lost = LostLosses() if model.watched else None
        self._begin()

    def _begin(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._arrived: dict[tuple[bool, int, int], Activations] = {}
        self._coming: dict[tuple[bool, int, int], tuple[Pending, Activations]] = {}
        # with their bytes
        self._outgoing: deque[tuple[Pending, int]] = deque()
        # receive buffers in use
        self._lent: dict[tuple[bool, int, int], list[Tensor]] = {}
        # bytes that came, until they have been read
        self._received: dict[tuple[bool, int, int], int] = {}
        self._sums: WideSums | None = None
        self._left = dict(self._actions)
        # what the head gets of the last stage, until its sums have been found
        self._hidden: dict[int, Tensor] = {}

    def run(self, run: Run) -> None:
        """Run all steps of the schedule; returns when everything sent has left."""
        self.meter.sent_bytes = self.meter.boundary_bytes = 0
        if self.reuse and run.training:
            self._sums = WideSums(p for s in self.stages for p in self._weights(s))
        if self.vocabulary is not None:
            self.vocabulary.begin()
        try:
            if run.training:
                self.model.begin_pass(self._training_pass(run.microbatches))
            for step in self.training if run.training else self.evaluation(len(run.microbatches)):
                if isinstance(step, Message):
                    self._post(step, run)
                else:
                    with self.failures().action(step):
                        self.run_action(step, run)
            while self._outgoing:
                self._sent()
            if self.vocabulary is not None:
                self.vocabulary.finish()
            if run.training:
                # One pass shows which losses nobody adds, also on the ranks that layers may come from. Watching costs a
                # hook for every output.
                self._lost, self.model.watched = None, False
        finally:
            if self.reuse and run.training:
                # after an error messages may still come into buffers
                self.received = BufferPool() if self._lent else self.received
                self.received.trim()
                self.meter.boundary_bytes = self.received.n_bytes
            if self._sums is not None:
                self._sums.close()
            self._begin()
            self.model.end_pass()

    def rest(self) -> None:
        """Let go of memory that is kept for the next pass."""
        self.received = BufferPool()
        self.model.rest()

    def run_action(self, action: Action, run: Run) -> None:
        """Run one action, once its input has come."""
        if action.kind in SHARED:
            self.meter.run_shared(lambda: self._run_shared(action.kind, action.microbatch, run))
            return
        with self.model.acting(action) if run.training else nullcontext():
            # a help has no part: the model does it at the end of this context
            if action.kind != "H":
                self._run_pass(action, run)

    def _run_shared(self, kind: str, m: int, run: Run) -> None:
        """This rank's part of the vocabulary in microbatch m."""
        assert self.vocabulary is not None
        assert isinstance(self.model, SplitsVocabulary)
        shapes = run.shapes[m]
        ids, labels = self.model.words(run.microbatches[m])
        if kind == "E":
            self.vocabulary.look_up(m, ids)
        elif kind == "G":
            # the embedding is the boundary in front of stage 0
            (grad,) = self._arrived.pop((False, 0, m), (None,))
            self.vocabulary.add_embedding_gradient(m, ids, grad, shapes[0][0])
        elif kind == "S":
            self.vocabulary.add_up(m, self._hidden.pop(m, None), labels, shapes[-1][0])
        else:
            loss = self.vocabulary.loss(m, run.scale, training=run.training)
            run.losses += [loss.double()] if loss is not None else []

    def _run_pass(self, action: Action, run: Run) -> None:
        s, m = action.stage, action.microbatch
        part, slicing = run.microbatches[m], self.model.slicing
        self.meter.working_on = None
        if part.slice is not None and slicing is not None:
            self.meter.working_on = part.slice, slicing.slices, part.share
        if action.kind == "F":
            given = self._take(True, s, m, run) if s else self._first_given(m)
            with self.model.working(run.microbatches[m]):
                self.meter.run_action("F", s, lambda: self._forward(s, m, given, run))
            return
        if action.kind == "W":
            self._weight(s, m)
        else:
            grads = self._take(False, s + 1, m, run) if s + 1 < self.total else ()
            with self.model.working(run.microbatches[m]):
                self._backward(s, m, grads, run, split=action.kind == "I")
        if action.kind in "BW":
            if self._lost is not None:
                self._lost.check((s, m))
            self._give_back((True, s, m), (False, s + 1, m))
            self._left[s] -= 1
            if not self._left[s]:
                if self._sums is not None:
                    self._sums.settle(self._weights(s))
                self.on_stage_done(s)

    def _first_given(self, m: int) -> Activations:
        """What stage 0 gets: nothing but what is in the microbatch, or what ranks have found of the embedding."""
        return () if self.vocabulary is None else (self.vocabulary.embedded(m),)

    # --- forward ----------------------------------------------------------------------------------------------

    def _forward(self, s: int, m: int, given: Activations, run: Run) -> None:
        units, part = self.stages[s], run.microbatches[m]
        out = given
        # once for all units: putting generators back takes longer than seeding them
        with added_losses(self._weight_of(m, run)) as added, going_on(self.device):
            for unit in units:
                seed = unit_seed(self.seed, unit, run.update, part.number, part.slice)
                out = (
                    self._watched(s, m, unit, seed, out, part, added)
                    if run.training
                    else self._unit(unit, seed, out, part)
                )
        if added.values and part.slice is not None:
            raise SpecError(
                f"stage {s} has layers that add a loss of their own (add_loss), a mean over whole microbatches: "
                "slices would change it"
            )
        run.losses += [value.double() * self.model.counted(part) for value in added.values]
        if s == self.total - 1 and self.vocabulary is not None:
            # its gradient comes from all ranks, so autograd ends here
            (self._hidden[m],) = out
        elif s == self.total - 1:
            loss = self.meter.timed(lambda: self.model.loss(out, part))
            run.losses.append(loss.detach().double())
            out = (loss * run.scale,)
        else:
            # a message has no shape: the next rank would read other shapes as garbage
            self._check(s, out, run.shapes[m][units[-1] + 1], part)
            self._arrived[True, s + 1, m] = tuple(t.detach() for t in out)
        if run.training:
            self._kept[s, m] = _Kept(given, out)

    def _watched(
        self, s: int, m: int, unit: int, seed: int, given: Activations, part: Microbatch, added: AddedLosses
    ) -> Activations:
        """What a unit returns in training; the first time losses are looked for that nobody adds."""
        if self._lost is None:
            return self._unit(unit, seed, given, part)
        module, so_far = self.model.units[unit], len(added.values)
        before = self._lost.before(module)
        out = self._unit(unit, seed, given, part)
        self._lost.after((s, m), unit, module, out, before, adds=len(added.values) > so_far)
        return out

    def _unit(self, unit: int, seed: int, given: Activations, part: Microbatch) -> Activations:
        def call() -> Activations:
            seed_generators(seed, self.device)
            return self.model.run(unit, given, part)

        # what seeding takes is part of the layer's time: every microbatch pays it
        return self.meter.run_unit(unit, self.model.units[unit], call, given) if self.model.metered else call()

    def _weight_of(self, m: int, run: Run) -> float:
        """What a mean over a microbatch counts."""
        return self.model.counted(run.microbatches[m]) * run.scale

    def _check(self, s: int, out: Activations, agreed: Activations, part: Microbatch) -> None:
        """What a stage hands on must be what the next one expects."""

        def kinds(tensors: Activations) -> list[str]:
            return [f"{list(t.shape)} of {t.dtype}" for t in tensors]

        if kinds(out) != kinds(agreed):
            raise SpecError(
                f"layer {self.stages[s][-1]} returned {', '.join(kinds(out))} for microbatch {part.number}, "
                f"the ranks had agreed on {', '.join(kinds(agreed))}"
            )

    # --- backward ---------------------------------------------------------------------------------------------

    def _backward(self, s: int, m: int, grads: Activations, run: Run, *, split: bool) -> None:
        kept = self._kept[s, m] if split else self._kept.pop((s, m))
        if s == self.total - 1 and self.vocabulary is not None:
            wanted = [(t, self.vocabulary.hidden_gradient(m, t)) for t in kept.outputs]
        elif s == self.total - 1:
            wanted = [(t, torch.ones_like(t)) for t in kept.outputs]
        else:
            agreed = run.shapes[m][self.stages[s][-1] + 1]
            flowing = [t for t, like in zip(kept.outputs, agreed, strict=True) if like.requires_grad]
            wanted = list(zip(flowing, grads, strict=True))
        pairs = [(t, g) for t, g in wanted if t.requires_grad]
        outputs, grads = tuple(t for t, _ in pairs), tuple(g for _, g in pairs)
        inputs = tuple(t for t in kept.inputs if t.requires_grad)
        # a split backward keeps `kept`, which must not keep the outputs in memory
        kept.outputs = ()
        # layers that recompute their forward may add their losses only now
        with added_losses(self._weight_of(m, run)):
            # without an input gradient to pass on first, splitting the backward has no use
            if outputs and split and inputs:
                self.meter.run_action("I", s, lambda: self._input_gradients(s, kept, outputs, grads, inputs))
            elif outputs:
                self.meter.run_action("B", s, lambda: torch.autograd.backward(outputs, grads))
        for i, t in enumerate(inputs):
            if self._lost is not None and t.grad is None and is_loss(t):
                unit = self.stages[s][0] - 1
                raise lost_loss(f"layer {unit} ({type(self.model.units[unit]).__name__}) returns a loss (output {i})")
        if inputs:
            self._arrived[False, s, m] = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs)
            for t in inputs:
                t.grad = None

    def _input_gradients(
        self, s: int, kept: _Kept, outputs: Activations, grads: Activations, inputs: Activations
    ) -> None:
        found, kept.second = first_half(outputs, grads, inputs, self._weights(s))
        for t, grad in zip(inputs, found, strict=True):
            t.grad = grad

    def _weight(self, s: int, m: int) -> None:
        second = self._kept.pop((s, m)).second
        if second is not None:
            self.meter.run_action("W", s, second.run)

    def _weights(self, s: int) -> list[torch.nn.Parameter]:
        """Parameters of a stage that train."""
        every = (p for unit in self.stages[s] for p in self.model.units[unit].parameters())
        # rows of a vocabulary get theirs from all units at once
        return [p for p in unsplit(dict.fromkeys(every)) if p.requires_grad]

    # --- messages ---------------------------------------------------------------------------------------------

    def _take(self, forward: bool, boundary: int, m: int, run: Run) -> Activations:
        """What has come over `boundary`: activations for the stage above it, gradients for the one below."""
        key = (forward, boundary, m)
        if key in self._coming:
            # from another rank; what stays on this one is in `_arrived` already
            pending, tensors = self._coming.pop(key)
            began = time.perf_counter()
            pending.wait()
            self.meter.noted.took(key, began)
        else:
            tensors = self._arrived.pop(key, ())
        if forward:
            agreed = run.shapes[m][self.stages[boundary][0]]
            tensors = tuple(t.requires_grad_(like.requires_grad) for t, like in zip(tensors, agreed, strict=True))
        return tensors

    def _post(self, message: Message, run: Run) -> None:
        """Begin to send or receive."""
        key = (message.forward, message.boundary, message.microbatch)
        op = Operation(f"{message}")
        if message.what == "send":
            tensors = [t.detach().contiguous() for t in self._arrived.pop(key, ())]
            if tensors:
                # tensors under way stay in memory until they have left
                if len(self._outgoing) == SENDS:
                    self._sent()
                self.meter.noted.sent(key)
                pending = self.collective().exchange([(message.peer, t) for t in tensors], [], op=op)
                self._outgoing.append((pending, sum(t.numel() * t.element_size() for t in tensors)))
                self.meter.sent_bytes = max(self.meter.sent_bytes, sum(n for _, n in self._outgoing))
            return
        agreed = run.shapes[message.microbatch][self._unit_below(message)]
        # gradients come only for what requires grad, and both sides know which that is
        wanted = [t for t in agreed if message.forward or t.requires_grad]
        if self.reuse and run.training:
            self._lent[key] = [self.received.take(t, device=self.device) for t in wanted]
            # the views may want gradients, a buffer does not
            made = [t.detach() for t in self._lent[key]]
        else:
            made = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in wanted]
        self._received[key] = sum(t.numel() * t.element_size() for t in made)
        self.meter.boundary_bytes = max(self.meter.boundary_bytes, sum(self._received.values()))
        if made:
            self.meter.noted.asked(key)
            pending = self.collective().exchange([], [(message.peer, t) for t in made], op=op)
            self._coming[key] = (pending, tuple(made))

    def _sent(self) -> None:
        """Wait until the oldest message has arrived, and let go of it."""
        # Its receive was begun in an earlier turn of the schedule on paper than anything that comes now. So no ranks
        # can wait for each other in a circle.
        self._outgoing[0][0].wait()
        self._outgoing.popleft()

    def _give_back(self, *keys: tuple[bool, int, int]) -> None:
        """What was received for these has been read for the last time."""
        for key in keys:
            self._received.pop(key, None)
            for buffer in self._lent.pop(key, ()):
                self.received.give(buffer)

    def _unit_below(self, message: Message) -> int:
        """Which of the boundaries between units the message is of."""
        # a gradient is of the outputs of the stage below the boundary
        stage = message.boundary if message.forward else message.boundary - 1
        units = self.stages[stage]
        return units[0] if message.forward else units[-1] + 1
