"""What the conversion knows about a Mixture-of-Experts block that somebody else wrote, and how it is told.

An `Adapter` reads one kind of block. The block itself stays, with its router, shared experts, jitter and losses. Only
the module that holds the experts is replaced, and methods of the block that loop over them.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import Activation, Bias


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How one matrix or bias of a gated expert holds the rows of its gate and of `up`.

    up_first: those of `up` come first. interleaved: they take turns, row by row.
    """

    up_first: bool = False
    interleaved: bool = False

    def gate_first(self, rows: Tensor) -> Tensor:
        """All rows of the gate, then all of `up`: the library's order. rows: [2H, ...]."""
        gate, up = (rows[0::2], rows[1::2]) if self.interleaved else rows.chunk(2)
        return torch.cat((up, gate) if self.up_first else (gate, up))

    def back(self, rows: Tensor) -> Tensor:
        """The inverse."""
        gate, up = rows.chunk(2)
        parts = (up, gate) if self.up_first else (gate, up)
        return torch.stack(parts, dim=1).flatten(0, 1) if self.interleaved else torch.cat(parts)


RUNS_TWICE = "its own, runs twice"  # what reports call the router of a block that was found by trying


@dataclass(frozen=True, slots=True)
class FfnNames:
    """Where a feed-forward module keeps its parameters, as names relative to it.

    w_in: one name, or two for a gated module, the gate's first. Biases are None where the module has none. rows: where
    one matrix holds gate and `up`, in which order.
    """

    w_in: tuple[str, ...]
    w_out: str
    b_in: tuple[str, ...] | None = None
    b_out: str | None = None
    rows: RowOrder = RowOrder()

    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.w_in, *(self.b_in or ()), self.w_out, *(() if self.b_out is None else (self.b_out,)))

    def by_parameter(self) -> dict[str, tuple[str, ...]] | None:
        """The names by the bank's parameter that holds them, None where the bank's rows are in another order."""
        if self.rows != RowOrder():
            return None
        found = {"w_in": self.w_in, "w_out": (self.w_out,)}
        if self.b_in is not None:
            found["bias_in"] = self.b_in
        if self.b_out is not None:
            found["bias_out"] = (self.b_out,)
        return found

    def unpack(self, state: Mapping[str, Tensor], prefix: str) -> ExpertWeights:
        """The parameters under `prefix`, in the library's layout."""

        def joined(names: tuple[str, ...]) -> Tensor:
            parts = [state[prefix + name] for name in names]
            if len(parts) > 1:
                return torch.cat(parts)
            return parts[0] if self.rows == RowOrder() else self.rows.gate_first(parts[0])

        return ExpertWeights(
            joined(self.w_in),
            state[prefix + self.w_out],
            None if self.b_in is None else joined(self.b_in),
            None if self.b_out is None else state[prefix + self.b_out],
        )

    def pack(self, weights: ExpertWeights, prefix: str) -> dict[str, Tensor]:
        """The inverse of `unpack`."""

        def separate(rows: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
            if len(names) == 1 and self.rows != RowOrder():
                return (self.rows.back(rows),)
            return rows.chunk(len(names))

        parts = [*separate(weights.w_in, self.w_in)]
        if self.b_in is not None and weights.b_in is not None:
            parts += separate(weights.b_in, self.b_in)
        parts.append(weights.w_out)
        if self.b_out is not None and weights.b_out is not None:
            parts.append(weights.b_out)
        return {prefix + name: part for name, part in zip(self.all(), parts, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """The experts of one block.

    num_experts: E. held: how many of them the module has here: all, or this rank's share of them where the model was
    built expert-parallel. form: "stacked" (one parameter for all experts) or "modules" (one module per expert).
    bias: both, none, or only that "in" or "out". dim_out: elements of an expert's output; None: `dim`. router: how the
    router is called in reports. names: of an expert's parameters, for the form "modules" where the experts are
    feed-forward networks. bank: what holds and runs them, "feed-forward" or "modules", and why: why not the former;
    hidden, activation and bias have no meaning then. places: where one module computes all held experts and is cut, in
    how many of its places each copy has its expert (`prophet.convert.cut`); 0 where there is a module per expert.
    """

    num_experts: int
    held: int
    top_k: int
    dim: int
    hidden: int = 0
    activation: Activation = "gelu"
    bias: Bias = False
    form: str
    router: str
    names: FfnNames | None = None
    dim_out: int | None = None
    bank: str = "feed-forward"
    why: str = ""
    places: int = 0

    @property
    def outputs(self) -> int:
        """Elements of an expert's output."""
        return self.dim if self.dim_out is None else self.dim_out

    def signature(self) -> str:
        """What must be equal on all ranks, as text."""
        what = self.bank
        if what == "feed-forward":
            what = f"hidden {self.hidden}, {self.activation}, bias {self.bias}, output {self.outputs}, {self.form}"
        return f"{self.num_experts} experts, top-{self.top_k}, dim {self.dim}, {what}"


class Adapter(ABC):
    """Reads one kind of block. `family` names it; `experts_name` is the block's attribute that holds the experts.

    list_prefix: what the names of the experts' parameters begin with there, before their numbers, where the experts may
    stay the modules that they are; None where they may not.
    """

    family: str
    experts_name: str = "experts"
    list_prefix: str | None = None
    takes_lora = False  # whether it describes experts that PEFT has put LoRA on

    @abstractmethod
    def matches(self, block: nn.Module) -> bool:
        """Whether this is such a block. Must be cheap, and must not import the framework that defines it."""

    @abstractmethod
    def describe(self, block: nn.Module) -> ExpertsSpec:
        """The block's experts. Raises `ConversionError` for whatever would not be kept, naming the field."""

    @abstractmethod
    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        """Expert number `expert` of those held, from the parameters of the experts' module by name.

        Pure movement of numbers: views, slices, concatenations, permutations.
        """

    @abstractmethod
    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        """The inverse: the parameters of the experts' module, from all experts that it holds, in order."""

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        """Methods that replace the block's own, by name, because those call the experts one by one.

        They are called with the block as first argument, and reach the new experts as
        `block.experts(tokens, ids, weights)` (or whatever `experts_name` is): tokens [N, D], ids and weights [N, K].
        """
        return {}

    def call(self, block: nn.Module, x: Tensor) -> Any:
        """Run the block on `x` [1, N, D], to compare it before and after."""
        return block(x)


def class_named(module: nn.Module, names: Sequence[str], package: str) -> bool:
    """Whether `module` is of a class of one of these names, defined in `package`; a subclass will do."""
    return any(
        c.__name__ in names and (c.__module__ == package or c.__module__.startswith(package + "."))
        for c in type(module).__mro__
    )


def child(block: nn.Module, name: str) -> nn.Module:
    """A module's child, or `ConversionError`."""
    found = getattr(block, name, None)
    if not isinstance(found, nn.Module):
        raise ConversionError(f"{type(block).__name__}.{name}: expected a module, got {type(found).__name__}")
    return found


def integer(module: nn.Module, name: str) -> int:
    """A module's positive integer attribute, or `ConversionError`."""
    value = getattr(module, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConversionError(f"{type(module).__name__}.{name}: expected a positive integer, got {value!r}")
    return value


def check_shapes(experts: nn.Module, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ConversionError` unless the experts' module has exactly these parameters, of these shapes."""
    found = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    who = type(experts).__name__
    if set(found) != set(wanted):
        raise ConversionError(f"{who}: expected the parameters {sorted(wanted)}, got {sorted(found)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConversionError(f"{who}.{name}: expected shape {list(shape)}, got {list(found[name])}")
