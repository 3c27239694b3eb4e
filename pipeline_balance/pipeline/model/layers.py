"""What a pipeline needs to know of a model: units in a row, what passes between them, and how a loss is counted.

Shape legend: L units, M microbatches. `ModuleChain` is the simplest such model, modules called one after the other.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeline_balance.pipeline.model.shapes import KnownShapes, output_of, trains
from pipeline_balance.pipeline.model.vocabulary import Vocabulary, check_plain, made_up_labels, not_plain
from pipeline_balance.schedules.actions import Action, Schedule
from prophet.errors import SpecError
from prophet.ranks.collective import Collective

Activations = tuple[Tensor, ...]
"""What one unit hands to the next; its floating-point tensors may carry gradients."""

Inputs = Tensor | Mapping[str, Tensor]
Batch = Inputs | Sequence[Inputs]
"""A batch to be cut, or its microbatches, whose shapes may differ."""
Labels = Tensor | Sequence[Tensor | None] | None
LossFn = Callable[[Any, Any], Tensor]
CountLabels = Callable[[Tensor | None], float]


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One part of a batch, the same on every rank of a replica.

    Attributes:
        number: Counts microbatches over the replicas and accumulated calls of an update; random numbers follow it.
        inputs: Inputs by name.
        labels: Labels of these rows.
        kept: What a model computes once per microbatch, such as its layers' arguments.
        slice: Counts the parts of a microbatch where they pass the stages one by one; None if it passes whole.
        share: How much of the microbatch a slice is, from 0 to 1.
    """

    number: int
    inputs: Mapping[str, Tensor]
    labels: Tensor | None
    kept: dict[str, Any] = field(default_factory=dict, repr=False)
    slice: int | None = None
    share: float = 1.0

    def shapes(self) -> tuple[Any, ...]:
        """The key on which the activations' shapes depend: names, shapes and types of the inputs and the labels."""
        given = {**self.inputs, "labels": self.labels}
        return tuple((n, None if t is None else (tuple(t.shape), t.dtype)) for n, t in sorted(given.items()))


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingPass:
    """What runs in one training pass.

    Attributes:
        schedule: The actions of every rank in use, by row [P].
        ranks: The rank of every row in `collective` [P].
        stages: The units of every stage [S].
        collective: Over the ranks of this replica.
        parts: What passes the stages one by one.
    """

    schedule: Schedule
    ranks: Sequence[int]
    stages: Sequence[Sequence[int]]
    collective: Collective
    parts: Sequence[Microbatch]


@dataclass(frozen=True, kw_only=True, eq=False)
class NextBatch:
    """A batch that is about to be trained, and by whom.

    Attributes:
        world: Over all ranks, of all replicas.
        collective: Over the ranks of this replica.
        stages: The units of every stage [S].
        ranks: The rank of every stage in `collective` [S].
        parts: Microbatches, or what they were cut into; none where a process has no stages.
    """

    world: Collective
    collective: Collective
    stages: Sequence[Sequence[int]]
    ranks: Sequence[int]
    parts: Sequence[Microbatch]


class Slicing(Protocol):
    """How microbatches are cut into `slices`, who shares these, and in which order they pass the stages."""

    @property
    def slices(self) -> int: ...

    @property
    def stages_per_rank(self) -> int: ...

    @property
    def context_parallel(self) -> int: ...

    def check(self, ranks: Sequence[int]) -> None:
        """Raise `SpecError` unless stages on these ranks [S] can be run."""

    def schedule(self, ranks: Sequence[int], microbatches: int) -> Schedule:
        """Order all slices over the stages.

        Args:
            ranks: [S] rank of every stage; they are 0 to P - 1.
            microbatches: M, each of which is cut into slices.
        """
        ...


class Slicer(Protocol):
    """Options of slices, which name the module that makes the models that run by them.

    Its `chain(slices, layers, loss_fn, **options)` is as `ModuleChain`, its `transformers(slices, model, **options)` as
    `TransformersModel`.
    """

    models: ClassVar[str]


class PipelineModel(ABC):
    """A model cut into L units in a row. Every rank holds all of them and runs those that the stage map gives it.

    A parameter that several units hold is tied. Buffers outside all units stay on every rank.

    Attributes:
        root: The unsplit model: names of parameters and buffers are its own.
        units: [L] the modules whose state moves.
        slicing: How microbatches are cut into slices; None where they pass the stages whole.
        vocabulary: The embedding and the head, of which every rank has some rows; None where they are whole. Then unit
            0 is given what the embedding finds, and the last unit returns what the head would get.
        asks: Whether the batch that was cut last is to be cut otherwise, which `ChoosesCuts.choose` finds out.
        metered: Whether times and memory of its units are measured.
        leads: Whether this process reports the loss, of those that compute the same one.
        watched: Whether the coming training pass is watched for losses that layers compute and nobody adds. A
            transformers model adds its losses by its own forward.
    """

    root: nn.Module
    units: tuple[nn.Module, ...]
    slicing: Slicing | None = None
    vocabulary: Vocabulary | None = None
    asks: bool = False
    metered: bool = True
    leads: bool = True
    watched: bool = False

    def measures(self, parameter: nn.Parameter, replica: int) -> bool:
        """Whether this process measures what it has of a parameter's gradient; replicas have copies."""
        return replica == 0

    def look(self) -> None:  # noqa: B027 - most models have nothing to look for
        """Take in what was changed about the model since the last step, so that `units` hold all its parameters."""

    @abstractmethod
    def cut(self, inputs: Inputs, labels: Tensor | None, microbatches: int, first: int = 0) -> list[Microbatch]:
        """Cut the batch into parts.

        Args:
            inputs: A tensor, or tensors by name.
            labels: Labels with as many rows, or None.
            microbatches: How many parts to make.
            first: Number of the first part.

        Raises:
            SpecError: The batch has fewer rows than `microbatches`.
        """

    def sliced(self, microbatch: Microbatch) -> list[Microbatch]:
        """Return what passes the stages one by one: the microbatch, or its slices in order."""
        return [microbatch]

    @contextmanager
    def working(self, microbatch: Microbatch) -> Iterator[None]:
        """The context in which a stage's forward and its backward run."""
        yield

    def begin_batch(self, world: Collective, stages: object) -> None:  # noqa: B027 - most models cut all alike
        """A batch is about to be cut for training, by these ranks and stages, which can be compared."""

    def begin_pass(self, given: TrainingPass) -> None:  # noqa: B027 - most models need no more than their microbatches
        """A training pass begins on this rank, which runs a stage."""

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """The context in which an action of a training pass runs; a rank that only helps others does so in it."""
        yield

    def settle_gradients(self, shards: Sequence[Collective]) -> None:  # noqa: B027 - most models leave them to replicas
        """An update's gradients are there: make them those of one process; collective over `shards`.

        These are the communicators that modules use by themselves.
        """

    def end_pass(self) -> None:  # noqa: B027 - most models keep nothing
        """A pass of a batch has ended or failed: let go of what it has left behind."""

    def rest(self) -> None:  # noqa: B027 - most models keep nothing
        """No pass is under way: let go of memory that is kept for the next one."""

    @abstractmethod
    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        """Forward of one unit.

        Args:
            unit: Its number, 0 to L - 1.
            activations: What the unit before it returned; unit 0 gets none.
            microbatch: The microbatch, or the slice, that they are of.

        Returns:
            What the next unit gets; the loss is computed from the last unit's.
        """

    @abstractmethod
    def loss(self, activations: Activations, microbatch: Microbatch) -> Tensor:
        """The sum of the losses of the labels that count, a scalar with its graph."""

    @abstractmethod
    def counted(self, microbatch: Microbatch) -> float:
        """How many labels count in this microbatch, or their weight; known on every rank without running anything."""

    @abstractmethod
    def activations(self, microbatch: Microbatch) -> list[Activations]:
        """Describe what will flow, without memory [L + 1]: before unit 0 (nothing), then after every unit.

        Shapes and types are those of the data that will flow. A tensor requires grad where a gradient may come back.
        """


class SplitsVocabulary(PipelineModel):
    """A model whose embedding and head may be shared by all ranks, see `vocabulary`."""

    def wanting_gradients(self, trained: Iterable[bool]) -> tuple[bool, ...]:
        """Whether a gradient is wanted [L + 1]: in front of unit 0, then by every unit, of which `trained` says it."""
        grad = torch.is_grad_enabled()
        # a split embedding comes before unit 0
        words = self.vocabulary is not None and trains(self.vocabulary.embedding)
        return (grad and words, *(grad and one for one in trained))

    @abstractmethod
    def words(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """What a split vocabulary's embedding looks up [...], and the labels of what its head gets, of the same shape.

        Labels that do not count are `vocabulary.IGNORED`.
        """


class SharesTokens(ABC):
    """A model of which several replicas may share the tokens of every slice, see `slicing`."""

    @abstractmethod
    def share_tokens(self, group: Collective) -> None:
        """Take the ranks that share the tokens of every slice."""


class ChoosesCuts(ABC):
    """A model that finds out how to cut its batches, where it `asks`."""

    @abstractmethod
    def choose(self, given: NextBatch) -> None:
        """Choose how batches like this one are cut; collective over all ranks, the same on all."""


def split_rows(inputs: Mapping[str, Tensor], labels: Tensor | None, parts: int, first: int) -> list[Microbatch]:
    """Cut along the first dimension into parts whose rows differ by at most one.

    Args:
        inputs: Inputs by name, all with equally many rows.
        labels: Labels with as many rows, or None.
        parts: How many parts to make.
        first: Number of the first part.

    Raises:
        SpecError: Rows do not agree, or are fewer than `parts`.
    """
    given = {**inputs, **({"labels": labels} if labels is not None else {})}
    rows = {name: t.shape[0] if t.dim() else 0 for name, t in given.items()}
    if len(set(rows.values())) != 1:
        raise SpecError(f"inputs and labels must have equally many rows, got {rows}")
    if min(rows.values()) < parts:
        raise SpecError(f"a batch of {min(rows.values())} rows cannot be cut into {parts} microbatches")
    pieces = {name: t.tensor_split(parts) for name, t in given.items()}
    return [
        Microbatch(
            number=first + i,
            inputs={name: pieces[name][i] for name in inputs},
            labels=pieces["labels"][i] if labels is not None else None,
        )
        for i in range(parts)
    ]


class ModuleChain(SplitsVocabulary):
    """Modules in a row, each called with what the one before it returned: a tensor, or tuples and dictionaries of them.

    The first is called with the inputs, by name where they have names. A tuple becomes arguments, a dictionary keyword
    arguments.

    Args:
        layers: The modules in order, or one module whose children they are.
        loss_fn: `loss_fn(output, labels)`, a mean over `counted(labels)` labels.
        counted: From labels to how many of them count. By default, cross entropy counts labels other than its
            `ignore_index`, by the weights of their classes if it has some; any other loss counts the rows.
        device: Where ranks compute; the CPU by default.
        split_vocabulary: Whether every rank has some rows of the first layer, a plain `nn.Embedding`, and of the last
            one, a plain `nn.Linear`. The loss must be the plain cross entropy.

    Raises:
        SpecError: A loss of torch's is no mean, or there are labels of -100, no `counted`, and another loss than cross
            entropy.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        loss_fn: LossFn,
        *,
        counted: CountLabels | None = None,
        device: torch.device | None = None,
        split_vocabulary: bool = False,
    ) -> None:
        # `children` would leave out a module that comes twice
        given = layers._modules.values() if isinstance(layers, nn.Module) else layers
        listed = [layer for layer in given if layer is not None]
        if not listed or not all(isinstance(layer, nn.Module) for layer in listed):
            raise SpecError(f"a pipeline needs one or more layers that are modules, got {layers!r:.200}")
        self.root = layers if isinstance(layers, nn.Module) else nn.ModuleList(listed)
        self.units = tuple(listed)
        self.loss_fn = loss_fn
        self._counted = counted if counted is not None else labels_of(loss_fn)
        self.watched = True
        self.device = device if device is not None else torch.device("cpu")
        self.structures: tuple[TreeSpec, ...] = ()
        self._known: KnownShapes[tuple[TreeSpec, ...]] = KnownShapes()
        if split_vocabulary:
            self.vocabulary = Vocabulary(self.units[0], self.units[-1])
            options = _options_of(loss_fn)[1]
            # no trial has all words as labels
            if options.get("weight") is not None or options.get("label_smoothing"):
                raise SpecError(f"{not_plain(_name_of(loss_fn))}: it has weights or smoothing")
        # how many dimensions labels have with which the loss has turned out to be plain
        self._plain: set[int] = set()

    def cut(self, inputs: Inputs, labels: Tensor | None, microbatches: int, first: int = 0) -> list[Microbatch]:
        named = {"input": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        if self.vocabulary is not None:
            self._check_words(named, labels)
        return split_rows(named, labels, microbatches, first)

    def _check_words(self, named: Mapping[str, Tensor], labels: Tensor | None) -> None:
        """Raise `SpecError` where a split vocabulary would compute something else than the layers and the loss."""
        ids = next(iter(named.values()))
        if len(named) != 1 or labels is None or ids.shape != labels.shape:
            got = {
                **{n: list(t.shape) for n, t in named.items()},
                "labels": None if labels is None else [*labels.shape],
            }
            raise SpecError(f"split_vocabulary needs words as the one input, and a label for each of them, got {got}")
        assert self.vocabulary is not None
        self.vocabulary.check_autocast(self.device)
        if labels.dim() not in self._plain:
            head, dims = self.vocabulary.head, labels.dim()
            # no dimension but the vocabulary's is that long, so that a loss cannot take another one for it
            shape = (2,) * (dims - 1) + (3,)
            tried = made_up_labels(shape, self.vocabulary.words, self.device)
            logits = torch.empty((*shape, self.vocabulary.words), dtype=head.weight.dtype, device="meta")
            check_plain(self.loss_fn, logits, tried, _name_of(self.loss_fn))
            self._plain.add(dims)

    def words(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        labels = microbatch.labels
        assert labels is not None, "cut has asked for labels"
        return next(iter(microbatch.inputs.values())), labels

    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        if self._is_split(unit):
            return activations
        args, kwargs = self.arguments_of(unit, activations, microbatch)
        return tuple(tree_flatten(self.units[unit](*args, **kwargs))[0])

    def _is_split(self, unit: int) -> bool:
        """Whether all ranks run a unit, by their rows of it."""
        return self.vocabulary is not None and unit in (0, len(self.units) - 1)

    def arguments_of(
        self, unit: int, activations: Activations, microbatch: Microbatch
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a unit is called with, by place and by name.

        Args:
            unit: Its number.
            activations: What the unit before it returned; not read for the first one.
            microbatch: The inputs of the first one.
        """
        if unit:
            given = tree_unflatten(list(activations), self.structures[unit - 1])
        else:
            given = dict(microbatch.inputs)
            # a single tensor was given the name "input" by `cut`
            given = given["input"] if set(given) == {"input"} else given
        if isinstance(given, Mapping):
            return (), dict(given)
        return tuple(given) if isinstance(given, tuple | list) else (given,), {}

    def loss(self, activations: Activations, microbatch: Microbatch) -> Tensor:
        count = self.counted(microbatch)
        if not count:
            return zero_of(activations)
        loss = self.loss_fn(tree_unflatten(list(activations), self.structures[-1]), microbatch.labels)
        if loss.numel() != 1:
            raise SpecError(f"the loss must be a mean, one number, got a tensor of shape {list(loss.shape)}")
        # without this check the run would go on, and train nothing
        if any(t.requires_grad for t in activations) and not loss.requires_grad:
            raise SpecError("the loss has no gradient: loss_fn must compute it from the output, without detaching")
        # a sum over labels: sums of microbatches add up, means do not
        return loss.reshape(()) * count

    def counted(self, microbatch: Microbatch) -> float:
        if microbatch.labels is None:
            return int(next(iter(microbatch.inputs.values())).shape[0])
        return float(self._counted(microbatch.labels))

    def look(self) -> None:
        """Take in layers that were replaced in `root`."""
        now = tuple(layer for layer in self.root._modules.values() if layer is not None)
        if len(now) != len(self.units):
            raise SpecError(f"the model has {len(now)} layers now, the pipeline has {len(self.units)}")
        if self.vocabulary is not None and (now[0], now[-1]) != (self.vocabulary.embedding, self.vocabulary.head):
            raise SpecError("the first or the last layer was replaced, and their rows are split over the ranks")
        # a wrapped layer, as adapters make it, takes the place of the bare one
        self.units = now

    def activations(self, microbatch: Microbatch) -> list[Activations]:
        # shapes stay what they are where layers are frozen or not
        key, wanting = (microbatch.shapes(), self._mode()), self.wanting_gradients(map(trains, self.units))
        found, self.structures = self._known.flows(key, wanting, lambda: self._trace(microbatch))
        return found

    def _mode(self) -> tuple[Any, ...]:
        """What shapes depend on besides the inputs: modules, which of them are in training mode, and types."""
        # identity, as a replaced module may return other shapes
        parts = tuple(id(part) for module in self.units for part in module.modules())
        training = tuple(module.training for module in self.units)
        types = tuple(t.dtype for unit in self.units for t in (*unit.parameters(), *unit.buffers()))
        kind = self.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return parts, training, types, cast

    def _trace(self, microbatch: Microbatch) -> tuple[list[Activations], tuple[TreeSpec, ...]]:
        """All units' outputs without data, and how they are nested."""
        found: list[Activations] = [()]
        structures: list[TreeSpec] = []
        if self.vocabulary is not None:
            # as if the embedding came before unit 0
            found = [(self.vocabulary.embedded_like(self.words(microbatch)[0]),)]
        for unit in range(len(self.units)):
            # `arguments_of` of this unit nests the output of the one before it
            self.structures = tuple(structures)
            if self._is_split(unit):
                found.append(found[-1])
                structures.append(structures[-1] if structures else tree_flatten(found[0][0])[1])
                continue
            args, kwargs = self.arguments_of(unit, found[-1], microbatch)
            given = found[-1] if unit else tuple(microbatch.inputs.values())
            try:
                leaves, structure = self._output_of(unit, args, kwargs)
            except Exception as error:
                shapes = ", ".join(f"{list(t.shape)} of {t.dtype}" for t in given)
                raise SpecError(f"layer {unit} cannot run on {shapes}: {str(error).splitlines()[0]}") from error
            if not leaves or not all(isinstance(t, Tensor) for t in leaves):
                kinds = sorted({type(t).__name__ for t in leaves})
                raise SpecError(f"layer {unit} returns {kinds}, expected tensors: one, or tuples or dictionaries")
            found.append(tuple(leaves))
            structures.append(structure)
        return found, tuple(structures)

    def _output_of(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
        """What a unit returns for these arguments, without data."""
        return output_of(self.units[unit], args, kwargs, self.device)


def zero_of(activations: Activations) -> Tensor:
    """Return zero with a gradient of zero for all activations.

    Multiplying by 0 would not do: infinite activations times 0 are not 0.
    """
    # sums of empty slices keep the graph without reading any value
    return torch.stack([t.flatten()[:0].sum(dtype=torch.float32) for t in activations if t.is_floating_point()]).sum()


def labels_of(loss_fn: LossFn, *, tokens: bool = False) -> CountLabels:
    """Return the function that counts what a mean is taken over, by the kind of loss.

    Cross entropy leaves labels out, other losses are taken to count rows.

    Args:
        loss_fn: The loss: a module or function of torch, a `functools.partial` of one, or a user's.
        tokens: Whether other losses count all elements of the labels: parts of a sequence may differ in length.

    Raises:
        SpecError: The loss reduces to something other than a mean.
    """
    function, options = _options_of(loss_fn)
    if options.get("reduction", "mean") not in ("mean", "batchmean"):
        raise SpecError(f"the loss must be a mean, got {loss_fn} with reduction={options['reduction']!r}")
    entropies = (nn.functional.cross_entropy, nn.functional.nll_loss)
    entropy = function in entropies or isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss)
    ignored, weight = options.get("ignore_index", -100), options.get("weight") if entropy else None

    def count(labels: Tensor | None) -> float:
        if labels is None:
            return 1
        if not entropy and not labels.is_floating_point() and bool((labels == -100).any()):
            # the loss may leave them out or not, and a wrong count would scale all gradients
            raise SpecError("labels of -100 do not count in most losses: pass counted=, from labels to their number")
        # labels in floating point are class probabilities, of which `ignore_index` leaves none out
        if not entropy or labels.is_floating_point():
            return labels.numel() if tokens else int(labels.shape[0])
        counts = labels != ignored
        if weight is None:
            return int(counts.sum())
        # with class weights, torch divides by the sum of the labels' weights
        return float(weight.detach().to(labels.device, torch.float64)[labels[counts]].sum())

    return count


def _name_of(loss_fn: LossFn) -> str:
    """What errors call a loss."""
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)


def _options_of(loss_fn: LossFn) -> tuple[LossFn, Mapping[str, Any]]:
    """The function or module of torch that a loss is, with its options by name."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.func, loss_fn.keywords
    if isinstance(loss_fn, nn.modules.loss._Loss):
        # class weights are a buffer of the loss module
        return loss_fn, vars(loss_fn) | loss_fn._buffers
    return loss_fn, {}
