"""What a conversion did, as values and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from prophet.convert.base import ExpertsSpec
from prophet.convert.layers.routed import converted
from prophet.convert.trials.discover import LeftAlone
from prophet.spec import Bias
from prophet.terminal import Column, FittedTable


@dataclass(frozen=True, slots=True)
class Replaced:
    """One converted block.

    Attributes:
        name: Of the experts' module in the model.
        family: The adapter's.
        block: Class of the block around it.
        spec: What the adapter found.
        experts: Global indices of those that this rank is home to.
        methods: Those of the block that were replaced.
        dtype: Of the parameters.
        params: Number of expert parameters on this rank now.
        params_before: The same before the conversion.
        flops_per_row: FLOP of an expert's forward on one row.
        expert_bytes: Bytes that a replica receives.
    """

    name: str
    family: str
    block: str
    spec: ExpertsSpec
    experts: range
    methods: tuple[str, ...]
    dtype: str
    params: int
    params_before: int
    flops_per_row: float
    expert_bytes: float


@dataclass(frozen=True, slots=True)
class Trained:
    """How many parameters of one kind this rank has, and how many of them train.

    Attributes:
        kind: "experts", "router", "shared experts" (whatever else is in a block), "dense layers" (what other layers
            have in a block's place) or "the rest", such as attention.
        params: All of this kind.
        trained: Those that require a gradient.
        adapters: Those of `trained` that are PEFT's.
    """

    kind: str
    params: int
    trained: int
    adapters: int

    def __str__(self) -> str:
        if not self.trained:
            return f"{self.kind} none of {self.params:,}"
        how = "" if not self.adapters else " in adapters" if self.adapters == self.trained else " and adapters"
        return f"{self.kind} {self.trained:,} of {self.params:,}{how}"


KINDS = ("experts", "router", "shared experts", "dense layers", "the rest")


def trained(model: nn.Module) -> tuple[Trained, ...]:
    """What trains in a converted model, by the kinds that it has."""
    # Numbers of all parameters, of those that train, and of adapters among these
    found = {kind: [0, 0, 0] for kind in KINDS}
    # The experts' LoRA is in layers of this library; other tuners name theirs in `adapter_layer_names`.
    inside = {"lora_A", "lora_B"}
    for module in model.modules():
        inside.update(getattr(module, "adapter_layer_names", ()))
    for name, p, kind in _kinds(model):
        counts, adapter = found[kind], not inside.isdisjoint(name.split("."))
        counts[0] += p.numel()
        counts[1] += p.numel() * p.requires_grad
        counts[2] += p.numel() * adapter * p.requires_grad
    return tuple(Trained(kind, *counts) for kind, counts in found.items() if counts[0])


def _kinds(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Name, parameter and kind of every parameter."""
    layers = [name for name, *_ in converted(model)]
    blocks = {name[: name.rfind(".") + 1] for name in layers}
    # With numbers as stars, such as model.layers.*.mlp., other layers' dense blocks are found in the same place.
    places = {re.sub(r"\b\d+\b", "*", block) for block in blocks}
    for name, p in model.named_parameters():
        if name.startswith(tuple(f"{layer}." for layer in layers)):
            yield name, p, "experts"
            continue
        block = next(filter(name.startswith, blocks), None)
        if block is not None:
            path = name.removeprefix(block).split(".")
            # A shared expert may have a gate as well, so its name decides before the router's does.
            shared = "shared" in path[0] or not any(_ROUTER.fullmatch(part) for part in path)
            yield name, p, "shared experts" if shared else "router"
        else:
            place = re.sub(r"\b\d+\b", "*", name)
            yield name, p, "dense layers" if place.startswith(tuple(places)) else "the rest"


# What routers, or the layer inside them, are called in the families that are known
_ROUTER = re.compile(r"(.*_)?(gate|gating|router|wg|score)")


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What `convert` replaced, on one rank, and what it left alone; prints as a table where `rich` prints.

    Attributes:
        replaced: A value per block.
        rank: This rank in the expert-parallel group.
        ranks: Size of that group.
        left: Lists that were not taken for experts, and why.
        trained: What trains in the model, by kind.
    """

    replaced: tuple[Replaced, ...]
    rank: int
    ranks: int
    left: tuple[LeftAlone, ...] = ()
    trained: tuple[Trained, ...] = ()

    @property
    def params(self) -> int:
        """Expert parameters on this rank now."""
        return sum(r.params for r in self.replaced)

    @property
    def params_before(self) -> int:
        """Expert parameters on this rank before."""
        return sum(r.params_before for r in self.replaced)

    def rows(self) -> list[tuple[str, ...]]:
        """A row of text per block, in the order of `COLUMNS`."""
        return [
            (
                r.name,
                f"{r.family} ({r.spec.form})",
                f"{r.spec.num_experts}" + (f", top-{r.spec.top_k}" if r.spec.top_k else ""),
                # Both ends included, as people read a range
                f"{r.experts.start}-{r.experts.stop - 1}",
                _sizes(r.spec),
                _bank(r.spec),
                f"{_short(r.flops_per_row)}FLOP a row, {_short(r.expert_bytes)}B a replica",
                r.dtype,
                r.spec.router + (f"; own {', '.join(r.methods)}" if r.methods else ""),
            )
            for r in self.replaced
        ]

    def __rich__(self) -> FittedTable:
        return FittedTable(COLUMNS, self.rows(), self._title(), "\n".join(self.remarks()))

    def __repr__(self) -> str:
        return f"ConversionReport({self._title()})"

    def __str__(self) -> str:
        return "\n".join([self._title(), *(" · ".join(row) for row in self.rows()), *self.remarks()])

    def remarks(self) -> list[str]:
        """Why experts run one by one, why other lists were left alone, and what trains.

        Layers that differ in numbers alone are named once.
        """
        reasons = [(r.name, f"run one by one: {r.spec.why}") for r in self.replaced if r.spec.why]
        reasons += [(one.name, f"was left alone: {one.why}") for one in self.left]
        alike: dict[str, list[str]] = {}
        for name, why in reasons:
            # Layer numbers as stars: 60 layers with one reason give one line
            alike.setdefault(re.sub(r"\b\d+\b", "*", f"{name} {why}"), []).append(f"{name} {why}")
        found = [lines[0] + (f" (and {len(lines) - 1} like it)" if lines[1:] else "") for lines in alike.values()]
        return [
            *found,
            *([f"parameters that train here: {'; '.join(map(str, self.trained))}"] if self.trained else []),
        ]

    def _title(self) -> str:
        return (
            f"{len(self.replaced)} MoE blocks converted, rank {self.rank} of {self.ranks}: "
            f"{self.params:,} of {self.params_before:,} expert parameters stay here"
        )


def _sizes(spec: ExpertsSpec) -> str:
    """Sizes of an expert's input, of its hidden layer where that is known, and of its output if that differs."""
    inside = [spec.hidden] if spec.bank == "feed-forward" else []
    out = [spec.outputs] if spec.outputs != spec.dim else []
    return " x ".join(map(str, [spec.dim, *inside, *out]))


def _bank(spec: ExpertsSpec) -> str:
    """What holds and runs the experts."""
    return spec.bank if spec.bank != "feed-forward" else f"{spec.bank}: {spec.activation}{_BIASES[spec.bias]}"


def _short(x: float) -> str:
    """A number with three digits and its prefix of thousands, before a unit."""
    # FLOP and bytes alike: thousands, not 1024s
    for prefix in ("", "k", "M", "G"):
        if x < 1000:
            return f"{x:.3g} {prefix}"
        x /= 1000
    return f"{x:.3g} T"


_BIASES: dict[Bias, str] = {True: " + bias", False: "", "in": " + bias in", "out": " + bias out"}
# Where the terminal is narrow, the columns with the highest number are left out first.
COLUMNS = (
    Column("experts", align="left"),
    Column("family", 4, "left", wrap=True),
    Column("E, top-k", align="left"),
    Column("home here", 1, "left"),
    Column("dim x hidden", 2, "left"),
    Column("bank", 5, "left", wrap=True),
    Column("cost", 3, "left"),
    Column("dtype", 6, "left"),
    Column("router kept", 7, "left", wrap=True),
)
