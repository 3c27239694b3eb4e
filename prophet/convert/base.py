"""What the conversion knows about a Mixture-of-Experts block that somebody else wrote.

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

from prophet.convert.seen import Seen, tokens_in
from prophet.errors import ConversionError
from prophet.experts.plain import FfnNames
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import Activation, Bias

# What reports call the router of a block that was found by trying: its forward runs twice per step.
RUNS_TWICE = "its own, runs twice"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """The experts of one block.

    Attributes:
        num_experts: E.
        held: How many of them the module has here: all, or this rank's share where the model was built expert-parallel.
        top_k: K; 0 where the block's own code says it with every call.
        dim: D, elements of an expert's input.
        hidden: H. It has no meaning where `bank` is "modules", nor have `activation` and `bias`.
        activation: Between an expert's two layers.
        bias: Both, none, or only that "in" or "out".
        form: "stacked" (one parameter for all experts) or "modules" (one module per expert).
        router: How the router is called in reports.
        names: Of an expert's parameters, for the form "modules" where the experts are feed-forward networks.
        dim_out: Elements of an expert's output; None: `dim`.
        bank: How they are run: as "feed-forward" networks on the grouped kernels, or as "modules" one by one.
        why: Why the bank is not "feed-forward", in words for the report.
        idle_called: Whether a block of the form "modules" also calls experts that no token chose. Their gradients are
            zero then and not None.
        places: Where one module computes all held experts and is cut, in how many of its places each copy has its
            expert (`prophet.convert.layers.cut`); 0 where there is a module per expert.
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
    idle_called: bool = False
    places: int = 0

    @property
    def outputs(self) -> int:
        """Elements of an expert's output."""
        return self.dim if self.dim_out is None else self.dim_out

    def signature(self) -> str:
        """What must be equal on all ranks, as text."""
        # The sizes inside modules are unknown; `checks.fingerprint` compares their parameters.
        what = self.bank
        if what == "feed-forward":
            what = f"hidden {self.hidden}, {self.activation}, bias {self.bias}, output {self.outputs}, {self.form}"
        return f"{self.num_experts} experts, top-{self.top_k}, dim {self.dim}, {what}"


class Adapter(ABC):
    """Reads one kind of block.

    Attributes:
        family: Names the kind in reports and messages.
        experts_name: The block's attribute that holds the experts. "" where what is read is not a block, but the module
            that holds the experts, whoever calls that.
        list_prefix: What the names of the experts' parameters begin with, before their numbers, where there is a module
            per expert: "list." for a ModuleList inside, "expert_" for a ModuleDict with such keys.
        takes_lora: Whether it describes experts that PEFT has put LoRA on.
        drops_none: Whether the id E, one beyond the last expert, means that a token has no expert there.
    """

    family: str
    experts_name: str = "experts"
    list_prefix: str = ""
    takes_lora = False
    drops_none = False

    @abstractmethod
    def matches(self, block: nn.Module) -> bool:
        """Whether this is such a block. Must be cheap, and must not import the framework that defines it."""

    def at(self, block: nn.Module) -> Adapter:
        """The adapter of this one block, where blocks differ in more than their `ExpertsSpec` says."""
        return self

    @abstractmethod
    def describe(self, block: nn.Module) -> ExpertsSpec:
        """The block's experts. Raises `ConversionError` for whatever would not be kept, naming the field."""

    @abstractmethod
    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        """Read one expert's weights.

        Pure movement of numbers: views, slices, concatenations, permutations. An optimizer's states move by the same
        code.

        Args:
            spec: What `describe` returned.
            state: Parameters of the experts' module by name.
            expert: Its number among those held.
        """

    @abstractmethod
    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        """The inverse: the parameters of the experts' module, from all experts that it holds, in order."""

    def rest(self, spec: ExpertsSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of parameters, by name, that stand behind those of all experts; `pack` leaves them out."""
        return {}

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        """The methods that replace the block's own because those call the experts one by one.

        They are called with the block as first argument. They reach the new experts as `block.experts(tokens, ids,
        weights)` (or whatever `experts_name` is): tokens [N, D], ids and weights [N, K].

        Returns:
            Functions by the name of the method that they replace.
        """
        return {}

    def call(self, block: nn.Module, x: Tensor) -> Any:
        """Run the block on `x` [1, N, D], to compare it before and after."""
        return block(x)

    def watch(self, block: nn.Module, experts: nn.Module, seen: Seen) -> None:
        """Hang hooks on the block that report to `seen` what its router chose, for `prophet.record`.

        Unless overridden, experts in a list are counted by the rows that each is called with. Of others the first
        integers among their arguments are all tokens' choices, [N, K].

        Args:
            block: As `matches` knows it.
            experts: The module that holds its experts.
            seen: Collects the choices and keeps the hooks.
        """
        # A list has no call to hook: its block calls the experts one by one.
        if isinstance(experts, nn.ModuleList):
            watch_rows(block, experts, seen)
        else:
            seen.before(experts, lambda _, values: _watch_ids(values, seen))


def _watch_ids(values: Sequence[Any], seen: Seen) -> None:
    # Tokens and weights are floating-point and masks are boolean, so the first integers are the ids.
    ids = next((x for x in values if isinstance(x, Tensor) and is_integer(x)), None)
    if ids is not None and ids.ndim:
        seen.ids(ids, ids.shape[:-1].numel())


def is_integer(x: Tensor) -> bool:
    """Whether a tensor holds integers."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def watch_rows(block: nn.Module, experts: nn.ModuleList, seen: Seen) -> None:
    """Count the rows that each expert of a list is called with, and the tokens that its block is called with.

    Args:
        block: Calls the experts.
        experts: Modules in a list.
        seen: Collects the counts.
    """
    seen.before(block, lambda _, values: seen.given(tokens_in(values)))
    for e, expert in enumerate(experts):
        # e=e: a lambda would see the last number of the loop
        seen.before(expert, lambda _, values, e=e: seen.rows(e, tokens_in(values)))  # type: ignore[misc]


def class_named(module: nn.Module, names: Sequence[str], package: str) -> bool:
    """Whether `module` is of a class of one of these names; a subclass will do.

    The framework that defines the class is not imported.

    Args:
        module: Of any class.
        names: Of classes.
        package: Where the class is defined, or a package around that.
    """
    return any(
        c.__name__ in names and (c.__module__ == package or c.__module__.startswith(package + "."))
        for c in type(module).__mro__
    )


def is_wrapper(module: object) -> bool:
    """Whether PEFT has put LoRA on one of the module's parameters."""
    # By name, as PEFT may not be installed.
    kind = type(module)
    return kind.__name__ == "ParamWrapper" and kind.__module__.split(".")[0] == "peft"


def bare(module: Any) -> Any:
    """A module as it is without PEFT's wrappers."""
    # One wrapper for each parameter with LoRA, one in another
    while is_wrapper(module):
        module = module.base_layer
    return module


def child(block: nn.Module, name: str) -> nn.Module:
    """A module's child, the module itself where `name` is empty, or `ConversionError`."""
    found = getattr(block, name, None) if name else block
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
    # One too many is refused as well: a parameter that the adapter does not know would be lost.
    found = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    who = type(experts).__name__
    if set(found) != set(wanted):
        raise ConversionError(f"{who}: expected the parameters {sorted(wanted)}, got {sorted(found)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConversionError(f"{who}.{name}: expected shape {list(shape)}, got {list(found[name])}")
