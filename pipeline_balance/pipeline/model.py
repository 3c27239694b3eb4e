"""What a pipeline needs to know of a model: units in a row, what passes between them, and how a loss is counted.

Shape legend: L units, M microbatches. `ModuleChain` is the simplest such model, modules called one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from prophet.errors import SpecError

Boundary = tuple[Tensor, ...]
"""What one unit hands to the next; its floating-point tensors may carry gradients."""

Inputs = Tensor | Mapping[str, Tensor]
LossFn = Callable[[Any, Any], Tensor]
CountLabels = Callable[[Tensor | None], int]


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One part of a batch, the same on every rank of a replica.

    `number` counts microbatches over the replicas and accumulated calls of an update; random numbers follow it. `kept`
    is for what a model computes once per microbatch, such as its layers' arguments.
    """

    number: int
    inputs: Mapping[str, Tensor]
    labels: Tensor | None
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def shapes(self) -> tuple[Any, ...]:
        """What the boundaries' shapes depend on, as a key: names, shapes and types of the inputs and the labels."""
        given = {**self.inputs, "labels": self.labels}
        return tuple((n, None if t is None else (tuple(t.shape), t.dtype)) for n, t in sorted(given.items()))


class PipelineModel(ABC):
    """A model cut into L units in a row. Every rank holds all of them and runs those that the stage map gives it.

    `root` is the unsplit model: names of parameters and buffers are its own. `units` [L] are the modules whose state
    moves. A parameter that several units hold is tied. Buffers outside all units stay on every rank.
    """

    root: nn.Module
    units: tuple[nn.Module, ...]

    @abstractmethod
    def cut(self, inputs: Inputs, labels: Tensor | None, microbatches: int, first: int = 0) -> list[Microbatch]:
        """The batch in `microbatches` parts, numbered from `first`. Raises `SpecError` if it has fewer rows."""

    @abstractmethod
    def run(self, unit: int, boundary: Boundary, microbatch: Microbatch) -> Boundary:
        """Forward of one unit. Unit 0 gets an empty boundary; the loss is computed from the last unit's."""

    @abstractmethod
    def loss(self, boundary: Boundary, microbatch: Microbatch) -> Tensor:
        """The sum of the losses of the labels that count, a scalar with its graph."""

    @abstractmethod
    def counted(self, microbatch: Microbatch) -> int:
        """How many labels count in this microbatch; known on every rank without running anything."""

    @abstractmethod
    def boundaries(self, microbatch: Microbatch) -> list[Boundary]:
        """L + 1 boundaries without memory: before unit 0 (empty), then after every unit.

        Shapes, types and `requires_grad` are those of the data that will flow.
        """


def split_rows(inputs: Mapping[str, Tensor], labels: Tensor | None, parts: int, first: int) -> list[Microbatch]:
    """Cut along the first dimension into `parts` whose rows differ by at most one."""
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


class ModuleChain(PipelineModel):
    """Modules in a row, each called with what the one before it returned: a tensor, a tuple or list, or a dictionary.

    The first is called with the inputs, by name where they have names. A tuple becomes arguments, a dictionary keyword
    arguments. `loss_fn(output, labels)` is a mean over `counted(labels)` labels. Without `counted`, cross entropy
    counts labels other than its `ignore_index`, any other loss the rows.

    A layer that branches on values has no shapes without data. It is taken to keep shape and type, and its stage checks
    that before it sends.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        loss_fn: LossFn,
        *,
        counted: CountLabels | None = None,
        device: torch.device | None = None,
    ) -> None:
        listed = list(layers.children()) if isinstance(layers, nn.Module) else list(layers)
        if not listed or not all(isinstance(layer, nn.Module) for layer in listed):
            raise SpecError(f"a pipeline needs one or more layers that are modules, got {layers!r:.200}")
        self.root = layers if isinstance(layers, nn.Module) else nn.ModuleList(listed)
        self.units = tuple(listed)
        self.loss_fn = loss_fn
        self._counted = counted if counted is not None else _labels_of(loss_fn)
        self.device = device if device is not None else torch.device("cpu")
        self._keys: list[tuple[str, ...] | None] = [None] * len(listed)
        self._known: dict[Any, list[Boundary]] = {}

    def cut(self, inputs: Inputs, labels: Tensor | None, microbatches: int, first: int = 0) -> list[Microbatch]:
        named = {"input": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        return split_rows(named, labels, microbatches, first)

    def run(self, unit: int, boundary: Boundary, microbatch: Microbatch) -> Boundary:
        module = self.units[unit]
        if unit:
            keys = self._keys[unit - 1]
            out = module(*boundary) if keys is None else module(**dict(zip(keys, boundary, strict=True)))
        elif set(microbatch.inputs) == {"input"}:
            out = module(microbatch.inputs["input"])
        else:
            out = module(**microbatch.inputs)
        self._keys[unit] = tuple(out) if isinstance(out, dict) else None
        found = tuple(out.values()) if isinstance(out, dict) else (out,) if isinstance(out, Tensor) else tuple(out)
        if not found or not all(isinstance(t, Tensor) for t in found):
            kinds = sorted({type(t).__name__ for t in found})
            raise SpecError(f"layer {unit} returns {kinds}, expected tensors: one, a tuple, or a dictionary of them")
        return found

    def loss(self, boundary: Boundary, microbatch: Microbatch) -> Tensor:
        count = self.counted(microbatch)
        if not count:
            return torch.stack([t.sum() for t in boundary if t.is_floating_point()]).sum() * 0.0
        keys = self._keys[-1]
        out = boundary[0] if len(boundary) == 1 else boundary
        return self.loss_fn(out if keys is None else dict(zip(keys, boundary, strict=True)), microbatch.labels) * count

    def counted(self, microbatch: Microbatch) -> int:
        if microbatch.labels is None:
            return int(next(iter(microbatch.inputs.values())).shape[0])
        return int(self._counted(microbatch.labels))

    def boundaries(self, microbatch: Microbatch) -> list[Boundary]:
        key = (microbatch.shapes(), self._mode())
        if key not in self._known:
            self._known[key] = self._trace(microbatch)
        return self._known[key]

    def _mode(self) -> tuple[Any, ...]:
        """What the boundaries depend on beside the inputs: who trains, and in which precision."""
        trains = tuple((m.training, any(p.requires_grad for p in m.parameters())) for m in self.units)
        kind = self.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return trains, cast, torch.is_grad_enabled()

    def _trace(self, microbatch: Microbatch) -> list[Boundary]:
        """A forward of all units on fake tensors; the units' own state is not touched."""
        found: list[Boundary] = [()]
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = {n: fake(t, mode, self.device) for n, t in microbatch.inputs.items()}
            part = Microbatch(microbatch.number, given, None)
            for unit, module in enumerate(self.units):
                state = {
                    n: fake(t, mode, self.device)
                    for n, t in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
                }
                before = tuple(t.detach().requires_grad_(t.requires_grad) for t in found[-1])
                out = self._run_fake(unit, before, part, state)
                found.append(tuple(t.detach().requires_grad_(t.requires_grad) for t in out))
        return [tuple(t.detach().to("meta").requires_grad_(t.requires_grad) for t in b) for b in _plain(found)]

    def _run_fake(self, unit: int, before: Boundary, part: Microbatch, state: dict[str, Tensor]) -> Boundary:
        module = self.units[unit]
        try:
            with torch.nn.utils.stateless._reparametrize_module(module, state):
                return self.run(unit, before, part)
        except SpecError:
            raise
        except Exception as error:
            given = before if unit else tuple(part.inputs.values())
            if not _needs_data(error):
                shapes = ", ".join(f"{list(t.shape)} of {t.dtype}" for t in given)
                raise SpecError(f"layer {unit} cannot run on {shapes}: {str(error).splitlines()[0]}") from error
            grad = any(t.requires_grad for t in given) or any(p.requires_grad for p in module.parameters())
            return tuple(t.detach().requires_grad_(grad and t.is_floating_point()) for t in given)


def _needs_data(error: Exception) -> bool:
    """Whether a forward without data failed for want of data, and not because shapes do not fit."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    said = str(error).lower()
    return isinstance(error, kinds) or any(word in said for word in ("numpy()", "tolist", "data pointer", "fake"))


def fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """`tensor` without memory, on `device`, whether it lives here or on `meta`; a Parameter's gradient flag is kept."""
    with mode:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return shape.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _plain(boundaries: list[Boundary]) -> list[Boundary]:
    """Fake tensors as ordinary ones on `meta`."""

    def meta(t: Tensor) -> Tensor:
        made = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if isinstance(t, FakeTensor) else t
        )
        return made.requires_grad_(t.requires_grad)

    return [tuple(meta(t) for t in b) for b in boundaries]


def _labels_of(loss_fn: LossFn) -> CountLabels:
    """How many labels a mean is taken over: cross entropy leaves some out, other losses are taken to count rows."""
    ignored = -100 if loss_fn is nn.functional.cross_entropy else None
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        ignored = loss_fn.ignore_index
        if loss_fn.reduction != "mean":
            raise SpecError(f"the loss must be a mean, got {loss_fn} with reduction={loss_fn.reduction!r}")

    def count(labels: Tensor | None) -> int:
        if labels is None:
            return 1
        if ignored is None or labels.is_floating_point():
            return int(labels.shape[0])
        return int((labels != ignored).sum())

    return count
