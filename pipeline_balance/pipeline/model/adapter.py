"""Any transformers model as a pipeline, by its own forward: no code per family.

The model's forward runs on every stage, once per microbatch, with recording functions in place of its layers. They note
the arguments that each layer gets: rotary angles, masks, positions. Unit 0 is everything before the first layer, units
1 to n are the layers, and unit n + 1 is everything after the last, the model's own loss included. What lives on other
ranks is a stand-in that says when it is read, so nothing is computed from weights that are not there.

Shape legend: L units (n + 2), n layers, B rows of a microbatch, T tokens of a row.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeline_balance.pipeline.model import shapes
from pipeline_balance.pipeline.model.layers import Activations, Inputs, Microbatch, SplitsVocabulary, zero_of
from pipeline_balance.pipeline.model.router_losses import RouterLoss, find_router_loss
from pipeline_balance.pipeline.model.skeleton import Readable, Skeleton, StandIn, Stop, standing
from pipeline_balance.pipeline.model.vocabulary import IGNORED, Vocabulary, check_plain, made_up_labels
from prophet.errors import SpecError
from prophet.trials import RandomState

# transformers leaves these out of its losses
IGNORED_LABEL = IGNORED
# losses whose label t belongs to the output at t - 1
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
_PER_TOKEN = ("ForMaskedLM", "ForTokenClassification")
_DEFAULT_EXAMPLE = torch.tensor([[7, 6, 0, 0, 1], [1, 2, 3, 0, 0]])


@dataclass(frozen=True, eq=False)
class _Call:
    """One layer's arguments in one microbatch.

    Attributes:
        leaves: Arguments in the order of `structure`; None where an activation goes in.
        structure: How positional and keyword arguments are nested.
        takes: [tensors that the layer before hands over] the leaf that each one fills.
    """

    leaves: list[Any]
    structure: TreeSpec
    takes: tuple[int, ...]

    def with_activations(self, activations: Activations) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.takes, activations, strict=True):
            leaves[place] = tensor
        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, self.structure)
        return found


@dataclass(eq=False)
class Recorded:
    """What the model's own forward does with its layers in one microbatch.

    Attributes:
        first_inputs: What layer 0 gets from the front, on `meta`.
        calls: [n] arguments of every layer.
        outputs: [n] leaves of every layer's output, on `meta`, and their structure.
        stands: [n - 1] stand-ins for a layer's output, in its structure.
        gives: [n] the leaves of a layer's output that go on to the next one.
    """

    first_inputs: tuple[Tensor, ...] = ()
    calls: list[_Call] = field(default_factory=list)
    outputs: list[tuple[list[Any], TreeSpec]] = field(default_factory=list)
    stands: list[Any] = field(default_factory=list)
    gives: list[tuple[int, ...]] = field(default_factory=list)


class TransformersModel(SplitsVocabulary):
    """A transformers model, or one built like them, cut between its layers; the model itself is not changed.

    Inputs are named as the model's forward names them, and given alike on every rank, as are the labels. The loss of a
    microbatch is the model's own, times the labels that count in it.

    Args:
        model: The whole model; what other ranks run may be on `meta`.
        layers: Dotted name of its list of layers. Needed only where there are several lists of modules.
        example: Inputs for one forward of what comes before the layers, by name; made with the model. By default token
            ids.
        device: Where ranks compute; the CPU by default.
        split_vocabulary: Whether every rank has some rows of the embedding and of the head. The model's loss must be
            the plain cross entropy.

    Raises:
        SpecError: The layers cannot be found, or the model does something that a pipeline would get wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | None = None,
        example: Mapping[str, Tensor] | None = None,
        device: torch.device | None = None,
        split_vocabulary: bool = False,
    ) -> None:
        self.root = model
        self.device = device if device is not None else torch.device("cpu")
        self.layers = _find_layers(model, layers)
        self.skeleton = Skeleton(model, self.layers, self.device)
        self.example = example
        self._accepts = inspect.signature(type(model).forward).parameters
        self._known: shapes.KnownShapes[None] = shapes.KnownShapes()
        self._outputs: dict[Any, tuple[list[Any], TreeSpec]] = {}
        self._latest: tuple[Microbatch, Any, Recorded] | None = None
        self._as_known: tuple[Any, ...] = ()
        self._numbers: dict[Any, int] = {}  # of kinds of layers
        self._kinds: list[int] = []  # [n]
        self._front: frozenset[str] = frozenset()  # parameters by what reads them: before the layers, or after
        self._behind: frozenset[str] = frozenset()
        self.router_loss: RouterLoss | None = None
        # within it layers have no hooks but the user's
        self._apart: Callable[[], AbstractContextManager[None]] = nullcontext
        self._ends = (_Held(), _Held())
        self.units = (self._ends[0], *self.layers, self._ends[1])
        self.skeleton.to_device()
        if split_vocabulary:
            asked = [getattr(model, f"get_{name}_embeddings", lambda: None)() for name in ("input", "output")]
            self.vocabulary = Vocabulary(*asked)
        self.look()
        if self.vocabulary is not None:
            self._check_plain(self.vocabulary)

    # --- the batch ---------------------------------------------------------------------------------------------

    def cut(self, inputs: Inputs, labels: Tensor | None, microbatches: int, first: int = 0) -> list[Microbatch]:
        """Cut along the rows; an input of one row goes to every microbatch.

        Args:
            inputs: The main input, or inputs by name: B rows each, or one row for all microbatches.
            labels: Labels with B rows.
            microbatches: How many parts to make, whose rows differ by at most one.
            first: Number of the first part.

        Raises:
            SpecError: Rows do not agree or are fewer than `microbatches`, or an input requires grad.
        """
        if labels is None:
            raise SpecError("a transformers model computes its loss from labels: give them on every rank")
        if self.vocabulary is not None:
            self.vocabulary.check_autocast(self.device)
        named, rows = self._named(inputs), labels.shape[0]
        if self.vocabulary is not None:
            self._check_words(named)
            self.vocabulary.check_behind(self.root)
        # microbatches are detached between stages, so a gradient of an input would never reach the caller
        grad = [name for name, t in named.items() if t.requires_grad]
        if grad:
            raise SpecError(f"{grad[0]} requires grad, which would be lost: inputs must not")
        odd = {n: list(t.shape) for n, t in named.items() if t.dim() == 0 or t.shape[0] not in (1, rows)}
        if odd:
            raise SpecError(f"labels have {rows} rows, so have all inputs, or one for all microbatches; got {odd}")
        if rows < microbatches:
            raise SpecError(f"a batch of {rows} rows cannot be cut into {microbatches} microbatches")
        cut = {n: t.tensor_split(microbatches) if t.shape[0] == rows else (t,) * microbatches for n, t in named.items()}
        return [
            Microbatch(first + i, {n: t[i] for n, t in cut.items()}, its)
            for i, its in enumerate(labels.tensor_split(microbatches))
        ]

    def _named(self, inputs: Inputs) -> dict[str, Tensor]:
        name = getattr(self.root, "main_input_name", "input_ids")
        named = {name: inputs} if isinstance(inputs, Tensor) else dict(inputs)
        # the main input comes first: its rows are those of the batch
        return {name: named.pop(name), **named} if name in named else named

    def counted(self, microbatch: Microbatch) -> int:
        labels = microbatch.labels
        kind = getattr(self.root, "loss_type", None) or "ForCausalLM"
        if labels is None or kind not in (*_SHIFTED, *_PER_TOKEN):
            return int(next(iter(microbatch.inputs.values())).shape[0])
        # the model shifts labels left before its loss, so the first label of a row belongs to no output
        return int(((labels[..., 1:] if kind in _SHIFTED else labels) != IGNORED_LABEL).sum())

    # --- running units -----------------------------------------------------------------------------------------

    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        if unit == 0:
            found = self._run_front(microbatch, activations)
        elif unit == len(self.units) - 1:
            found = self._run_behind(activations, microbatch)
        else:
            found = self._run_layer(unit - 1, activations, microbatch)
        if torch.is_grad_enabled() and (any(t.requires_grad for t in activations) or shapes.trains(self.units[unit])):
            # `activations` says that these require grad, whether or not a gradient will come of it
            return tuple(_requiring_grad(t) for t in found)
        return found

    def loss(self, activations: Activations, microbatch: Microbatch) -> Tensor:
        return activations[0] * self.counted(microbatch)

    def words(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        labels = microbatch.labels
        assert labels is not None, "cut has asked for labels"
        kind = getattr(self.root, "loss_type", None) or "ForCausalLM"
        ids = next(iter(microbatch.inputs.values()))
        return ids, shifted(labels) if kind in _SHIFTED else labels

    def _run_front(self, microbatch: Microbatch, embedded: Activations = ()) -> Activations:
        takes = self.recorded(microbatch).calls[0].takes
        found: list[Tensor] = []

        def first(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # the arguments of layer 0 are all that this stage needs of the forward
            leaves = tree_flatten((args, kwargs))[0]
            found.extend(leaves[place] for place in takes)
            raise Stop

        places: dict[int, nn.Module] = {}
        if self.vocabulary is not None:
            module = self.vocabulary.embedding
            words = self.words(microbatch)[0]

            def look_up(ids: Tensor) -> Tensor:
                # ranks have looked up those of the batch
                if not torch.equal(ids, words):
                    raise SpecError("split_vocabulary: the model looks up other words than its inputs have")
                return embedded[0]

            places[id(module)] = standing(module, look_up)
        self.skeleton.forward(
            self.kwargs_of(microbatch),
            first,
            held=self._front,
            readable=Readable(allowed=False),
            hooks=lambda: True,
            places=places,
        )
        return tuple(found)

    def _run_layer(self, layer: int, activations: Activations, microbatch: Microbatch) -> Activations:
        recorded = self.recorded(microbatch)
        sums, flowing = self._without_sums(layer, activations)
        args, kwargs = recorded.calls[layer].with_activations(flowing)
        logits: list[Tensor] = []
        with ExitStack() as stack:
            if self.router_loss is not None:
                stack.enter_context(self.router_loss.recording(layer, logits))
            leaves, structure = tree_flatten(self._call_layer(layer, args, kwargs))
        agreed = recorded.outputs[layer][1]
        if structure != agreed:
            raise SpecError(f"layer {layer} returned {structure}, where {agreed} was agreed on")
        out = tuple(leaves[place] for place in recorded.gives[layer])
        if self.router_loss is not None:
            sums = self.router_loss.add(sums, logits, microbatch.inputs.get("attention_mask"))
        return out if sums is None else (*out, sums)

    def _call_layer(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.layers[layer](*args, **kwargs)

    def _run_behind(self, activations: Activations, microbatch: Microbatch) -> Activations:
        recorded, last = self.recorded(microbatch), len(self.layers) - 1
        sums, flowing = self._without_sums(last + 1, activations)
        readable = Readable(allowed=True)
        random = RandomState(self.device)

        def stand(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if layer < last:
                return recorded.stands[layer]
            leaves, structure = recorded.outputs[layer]
            # What follows computes on real activations, so weights of other ranks may not be read from here on. The
            # front ran on stand-ins only, and its random draws would shift those of what follows.
            readable.allowed = False
            random.put_back()
            own = list(leaves)
            for place, tensor in zip(recorded.gives[last], flowing, strict=True):
                own[place] = tensor
            return tree_unflatten(own, structure)

        places: dict[int, nn.Module] = {}
        hidden: list[Tensor] = []
        if self.vocabulary is not None:
            places[id(self.vocabulary.head)] = standing(self.vocabulary.head, _ending_in(hidden))
        counts = self.counted(microbatch) > 0 and self.vocabulary is None
        asked = self.kwargs_of(microbatch, labels=microbatch.labels if counts else None)
        with ExitStack() as stack:
            if sums is not None and self.router_loss is not None:
                stack.enter_context(self.router_loss.given(sums, microbatch.inputs.get("attention_mask")))
            out = self.skeleton.forward(
                asked, stand, held=self._behind, readable=readable, hooks=lambda: not readable.allowed, places=places
            )
        if self.vocabulary is not None:
            return tuple(hidden)
        loss = out[0] if isinstance(out, tuple) else out["loss" if counts else "logits"]
        if counts:
            # sums over labels and microbatches need more than the bits of a half precision
            return (loss.float() if loss.dtype.itemsize < torch.float32.itemsize else loss,)
        # no label counts: transformers' mean over no labels is not a number
        return (zero_of((loss, *activations)),)

    def kwargs_of(self, microbatch: Microbatch, labels: Tensor | None = None) -> dict[str, Any]:
        """The arguments of the model's own forward."""
        asked: dict[str, Any] = dict(microbatch.inputs)
        if labels is not None:
            asked["labels"] = labels
        if "use_cache" in self._accepts or any(p.kind is p.VAR_KEYWORD for p in self._accepts.values()):
            # a cache is one object that all layers write to, in the recording run too
            asked["use_cache"] = False
        return asked

    def _without_sums(self, layer: int, activations: Activations) -> tuple[Tensor | None, Activations]:
        """The routers' sums that come with the activations in front of `layer`, and what is the layer's own."""
        if self.router_loss is None or layer <= self.router_loss.first():
            return None, activations
        return activations[-1], activations[:-1]

    # --- what layers are called with ---------------------------------------------------------------------------

    def recorded(self, microbatch: Microbatch) -> Recorded:
        """The arguments of all layers in one microbatch."""
        # only the latest microbatch's are kept: masks are large, and quickly made
        if self._latest is None or self._latest[0] is not microbatch or self._latest[1] != self._mode():
            found = self._record(self.kwargs_of(microbatch), Readable(allowed=True))
            self._latest = (microbatch, self._mode(), found)
        return self._latest[2]

    def _mode(self) -> tuple[Any, ...]:
        """What types and shapes depend on besides the inputs."""
        kind = self.device.type
        return self.root.training, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _record(self, asked: Mapping[str, Any], readable: Readable, fill: float = 0.0) -> Recorded:
        recorded, last = Recorded(), len(self.layers) - 1
        before: list[Any] = []  # leaves of what stood for the output of the layer before

        def note(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal before
            if layer != len(recorded.calls):
                raise SpecError(f"the model runs layer {layer} where layer {len(recorded.calls)} was expected")
            leaves, structure = tree_flatten((args, kwargs))
            if layer:
                # the model's forward hands stand-ins on as they are, so identity links arguments to outputs
                takes, gives = self._linked(layer, leaves, before)
                recorded.gives.append(gives)
            else:
                takes = _from_parameters(leaves)
                recorded.first_inputs = tuple(shapes.on_meta(leaves[i]) for i in takes)
            plain = [None if i in takes else leaf for i, leaf in enumerate(leaves)]
            recorded.calls.append(_Call(plain, structure, takes))
            output = self._output_of(layer, leaves, structure)
            recorded.outputs.append(output)
            if layer == last:
                recorded.gives.append(tuple(i for i, leaf in enumerate(output[0]) if isinstance(leaf, Tensor)))
                raise Stop
            before = self._stand_ins(layer, output[0])
            recorded.stands.append(tree_unflatten(before, output[1]))
            return recorded.stands[layer]

        random = RandomState(self.device)
        # also in evaluation: `requires_grad` of the arguments shows which of them come from parameters
        with torch.enable_grad():
            out = self.skeleton.forward(asked, note, held=frozenset(), readable=readable, fill=fill)
        random.put_back()
        if out is not None or len(recorded.calls) != last + 1:
            raise SpecError(f"the model ran {len(recorded.calls)} of its {last + 1} layers")
        return recorded

    def _linked(self, layer: int, leaves: list[Any], before: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which arguments of a layer are what the one before returned, and which of its leaves those are."""
        place_of = {id(t): i for i, t in enumerate(before) if isinstance(t, Tensor)}
        takes = tuple(i for i, leaf in enumerate(leaves) if id(leaf) in place_of)
        for i, leaf in enumerate(leaves):
            if i not in takes and isinstance(leaf, Tensor) and leaf.requires_grad:
                raise SpecError(
                    f"layer {layer} takes a tensor of shape {list(leaf.shape)} that comes from parameters in front of "
                    "the layers, or from a layer before the last one: its gradient would be lost on the way. "
                    "Let it travel as part of what layers return"
                )
        return takes, tuple(place_of[id(leaves[i])] for i in takes)

    def _output_of(self, layer: int, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
        """What a layer returns, without memory; remembered by the kind of layer and what it is called with."""
        # models have many layers of few kinds: each kind is run on fake tensors once
        key = (
            self._kinds[layer],
            tuple(shapes.shape_of(leaf) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves),
            self.layers[layer].training,
            self._mode(),
        )
        if key not in self._outputs:
            args, kwargs = tree_unflatten(leaves, structure)
            with self._apart():
                self._outputs[key] = shapes.output_of(self.layers[layer], args, kwargs, self.device)
        return self._outputs[key]

    def _stand_ins(self, layer: int, leaves: list[Any]) -> list[Any]:
        """What stands for a layer's output: nobody but the next layer may read it."""
        never = Readable(allowed=False)
        name = f"the output of layer {layer}"
        return [StandIn.like(t, self.device, name, never) if isinstance(t, Tensor) else t for t in leaves]

    # --- activations -------------------------------------------------------------------------------------------

    def activations(self, microbatch: Microbatch) -> list[Activations]:
        requires_grad = tuple(shapes.trains(unit) for unit in self.units)
        # what the front hands over are the arguments that come from parameters which train
        key = (microbatch.shapes(), requires_grad, self._mode())
        wanting = self.wanting_gradients(requires_grad)
        return self._known.flows(key, wanting, lambda: (self._traced(microbatch), None))[0]

    def _traced(self, microbatch: Microbatch) -> list[Activations]:
        recorded, ids = self.recorded(microbatch), next(iter(microbatch.inputs.values()))
        embedded = () if self.vocabulary is None else (self.vocabulary.embedded_like(ids),)
        found: list[Activations] = [embedded, recorded.first_inputs]
        for layer, ((leaves, _), gives) in enumerate(zip(recorded.outputs, recorded.gives, strict=True)):
            carried = tuple(leaves[place] for place in gives)
            if self.router_loss is not None and layer >= self.router_loss.first():
                carried += (torch.empty(self.router_loss.numbers, dtype=torch.float32, device="meta"),)
            found.append(carried)
        # with a split vocabulary, what the head gets: a norm changes no shape
        found.append((torch.empty((), device="meta"),) if self.vocabulary is None else found[-1][:1])
        return found

    def _check_plain(self, vocabulary: Vocabulary) -> None:
        """Raise `SpecError` unless the model's loss is the plain cross entropy of its head's logits."""
        name = type(self.root).__name__
        if self.router_loss is not None:
            raise SpecError(f"split_vocabulary needs the plain cross entropy, and {name} adds its routers' loss to it")
        asked = self._named(self._example())
        self._check_words(asked)
        recorded, last = self._record(asked, Readable(allowed=True)), len(self.layers) - 1
        words = next(iter(asked.values()))
        weight, config = vocabulary.head.weight, getattr(self.root, "config", None)
        apart = [getattr(config, f"{n}_token_id", None) for n in ("pad", "eos", "bos")]
        first = [word for word in apart if isinstance(word, int)]
        kept = recorded.outputs[last][0][recorded.gives[last][0]]

        def stand(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if layer < last:
                return recorded.stands[layer]
            leaves, structure = recorded.outputs[layer]
            zeros = [torch.zeros_like(t, device=self.device) if isinstance(t, Tensor) else t for t in leaves]
            return tree_unflatten(zeros, structure)

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            readable, calls = Readable(allowed=True), list[str]()

            def look_up(ids: Tensor) -> Tensor:
                calls.append("embedding")
                if not torch.equal(ids, words):
                    raise SpecError(f"split_vocabulary: {name} looks up other words than its inputs have")
                found = vocabulary.embedded_like(ids)
                return torch.zeros(found.shape, dtype=found.dtype, device=self.device)

            def head(hidden: Tensor) -> Tensor:
                calls.append("head")
                if hidden.shape != kept.shape:
                    raise SpecError(
                        f"split_vocabulary: the head of {name} gets {list(hidden.shape)}, where the last layer returns "
                        f"{list(kept.shape)}: what stands between may only be a norm"
                    )
                split = {n for n, p in self.skeleton.slots().items() if any(p is q for q in vocabulary.parameters)}
                if readable.read & split:
                    raise SpecError(f"split_vocabulary: {name} reads {min(readable.read & split)} besides")
                readable.read.clear()
                return logits

            places = {
                id(module): standing(module, call)
                for module, call in ((vocabulary.embedding, look_up), (vocabulary.head, head))
            }
            given = self.kwargs_of(Microbatch(0, asked, None), labels=labels)
            out = self.skeleton.forward(given, stand, held=frozenset(), readable=readable, places=places)
            if calls != ["embedding", "head"]:
                raise SpecError(f"split_vocabulary: {name} calls its {', its '.join(calls)}")
            if readable.read:
                raise SpecError(f"split_vocabulary: {name} reads {min(readable.read)} behind its head")
            found: Tensor = out[0] if isinstance(out, tuple) else out["loss"]
            return found.detach()

        def wanted(labels: Tensor) -> Tensor:
            return self.words(Microbatch(0, {"ids": words}, labels))[1]

        random = RandomState(self.device)
        logits = torch.empty((*words.shape[:2], vocabulary.words), dtype=weight.dtype, device="meta")
        labels = made_up_labels(words.shape[:2], vocabulary.words, self.device, first)
        try:
            check_plain(loss_of, logits, labels, name, wanted)
        finally:
            random.put_back()

    def _check_words(self, named: Mapping[str, Any]) -> None:
        """Raise `SpecError` unless the first input is words."""
        name, ids = next(iter(named.items()))
        if name != getattr(self.root, "main_input_name", "input_ids") or ids.is_floating_point():
            raise SpecError(f"split_vocabulary needs words as the main input, got {name} of {ids.dtype}")

    # --- construction ------------------------------------------------------------------------------------------

    def over(
        self,
        of: Callable[[nn.Module], nn.Module],
        units: tuple[nn.Module, ...],
        apart: Callable[[], AbstractContextManager[None]],
    ) -> Self:
        """This model over other modules, which have the same whole shapes.

        Args:
            of: What stands for a module of this one.
            units: What stands for the units [L].
            apart: Within this context the other modules have no hooks but the user's.
        """
        # no __init__: it would look into modules that may have no memory yet
        made = copy.copy(self)
        layers: Any = of(self.layers)
        made.root, made.layers, made.units = of(self.root), layers, units
        made.skeleton = Skeleton(made.root, layers, self.device)
        made._latest, made._known, made._outputs, made._apart = None, shapes.KnownShapes(), {}, apart
        if self.router_loss is not None:
            # of the gates in these modules
            made.router_loss = find_router_loss(made.root, layers)
        return made

    def look(self) -> None:
        """Look at the model again where it may have changed: wrapped modules, a router loss, checkpointing.

        Raises:
            SpecError: The model does something that a pipeline would get wrong in silence.
        """
        _refuse_reentrant_checkpointing(self.root)
        self._kinds = [self._numbers.setdefault(_kind_of(layer), len(self._numbers)) for layer in self.layers]
        self.skeleton.check()
        slots = self.skeleton.slots()
        wanted = getattr(getattr(self.root, "config", None), "output_router_logits", False)
        now = (*((name, id(p)) for name, p in slots.items()), wanted, *self._kinds)
        if now == self._as_known:
            return
        self._known.clear()
        self._latest = None
        self.router_loss = find_router_loss(self.root, self.layers)
        self._front = self._find_front(slots)
        self._behind = frozenset(slots) - self._front
        for unit, is_front in zip(self._ends, (True, False), strict=True):
            unit.hold({n: p for n, p in slots.items() if (n in self._front) is is_front})
        self._as_known = now

    def _find_front(self, slots: Mapping[str, Tensor]) -> frozenset[str]:
        """Which parameters the model reads before its first layer; its layers' arguments may not depend on them."""
        asked, readable = self._example(), Readable(allowed=True)
        example = [name for name, value in asked.items() if isinstance(value, Tensor)]
        try:
            # two runs with other numbers for all weights: an argument that differs between them depends on weights
            found = [self._record(asked, readable, fill) for fill in (0.0, 1.0)]
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(
                f"{type(self.root).__name__} cannot run on example inputs {sorted(example)} ({str(error)[:200]}): "
                "give example={name: tensor} as its forward takes them"
            ) from error
        for layer, (one, other) in enumerate(zip(found[0].calls, found[1].calls, strict=True)):
            for a, b in zip(one.leaves, other.leaves, strict=True):
                if isinstance(a, Tensor) and not torch.equal(a, b):
                    raise SpecError(
                        f"layer {layer} takes a tensor of shape {list(a.shape)} that depends on parameters in front of "
                        "the layers, which other ranks do not have. Let it travel as part of what layers return"
                    )
        return frozenset(readable.read & slots.keys())

    def _example(self) -> dict[str, Any]:
        """Arguments for one forward of what comes before the layers."""
        example = self.example
        if example is None:
            dummy = getattr(self.root, "dummy_inputs", None)
            example = dummy if isinstance(dummy, Mapping) else {"input_ids": _DEFAULT_EXAMPLE}
        return self.kwargs_of(Microbatch(0, {n: t.to(self.device) for n, t in example.items()}, None))


class _Held(nn.Module):
    """The parameters of a unit that is no module: they stay in the model's modules, and are listed here."""

    def hold(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters.clear()
        for name, parameter in parameters.items():
            # torch refuses dots in the names of parameters
            self.register_parameter(name.replace(".", "/"), parameter)


def _refuse_reentrant_checkpointing(model: nn.Module) -> None:
    for name, module in model.named_modules():
        how = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and how.get("use_reentrant", True) is not False:
            raise SpecError(
                f"{name or 'the model'} checkpoints with use_reentrant=True, which drops gradients of what travels "
                "beside the hidden states: call model.gradient_checkpointing_enable("
                'gradient_checkpointing_kwargs={"use_reentrant": False})'
            )


def _find_layers(model: nn.Module, named: str | None) -> nn.ModuleList | nn.Sequential:
    """The list of layers: the one named, else the only list of modules that is in no other."""
    if named is not None:
        found = dict(model.named_modules()).get(named)
        if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
            kind = "nothing" if found is None else f"a {type(found).__name__}"
            raise SpecError(f"layers={named!r} must name a ModuleList or Sequential with layers, it names {kind}")
        return found
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists if other != n)]
    if len(outermost) != 1:
        has = (
            f"has {len(outermost)} lists of modules: {', '.join(outermost)}" if outermost else "has no list of modules"
        )
        raise SpecError(f"{type(model).__name__} {has}; name the one with the layers: layers='model.layers'")
    return lists[outermost[0]]


def _from_parameters(leaves: list[Any]) -> tuple[int, ...]:
    """Which of layer 0's arguments the front computes from parameters, else the first that could be hidden states."""
    floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return tuple(i for i in floating if leaves[i].requires_grad) or tuple(floating[:1])


def shifted(labels: Tensor) -> Tensor:
    """Labels at the outputs that they belong to, where label t belongs to the output at t - 1."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)


def _ending_in(found: list[Tensor]) -> Callable[[Tensor], Any]:
    """A forward that keeps what it is given in `found`, and ends the model's."""

    def call(given: Tensor) -> Any:
        found.append(given)
        raise Stop

    return call


def _constant(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf)


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What layers have in common that return the same shapes for the same arguments: modules and parameters."""
    modules = tuple((name, type(m)) for name, m in layer.named_modules())
    return modules, tuple((name, shapes.shape_of(p)) for name, p in layer.named_parameters())


def _requiring_grad(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad or not tensor.is_floating_point() else tensor.detach().requires_grad_()
