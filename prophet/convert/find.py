"""Which blocks of a model are about to be converted: those that an adapter knows, and lists that `discover` finds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, child
from prophet.convert.checks import describe_block
from prophet.convert.layers.routed import block_of
from prophet.convert.sources import own_interface, transformers_4
from prophet.convert.sources.deepspeed import DeepSpeedMoE
from prophet.convert.sources.listed import Listed
from prophet.convert.sources.lora import for_lora
from prophet.convert.sources.transformers_5 import Interface
from prophet.convert.sources.tutel import TutelMoE
from prophet.convert.trials.discover import LeftAlone, discover
from prophet.convert.trials.verify import TOKENS
from prophet.errors import ConversionError
from prophet.layer.moe import MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One block that can be converted.

    Attributes:
        name: Of the block.
        where: Name of the module that holds its experts.
        around: How many modules up from the one that holds that module is the block whose methods are replaced.
        adapter: The one that knows it.
        spec: What the adapter says of its experts.
    """

    name: str
    where: str
    around: int
    adapter: Adapter
    spec: ExpertsSpec

    def known(self, model: nn.Module) -> nn.Module:
        """The module that its adapter reads: a block, or what holds the experts."""
        return model.get_submodule(self.name)

    def experts(self, model: nn.Module) -> nn.Module:
        """The module that holds the experts."""
        return model.get_submodule(self.where)

    def holder(self, model: nn.Module) -> nn.Module:
        """The module that holds the experts' module as an attribute."""
        return block_of(model, self.where)

    @property
    def block_name(self) -> str:
        """Name of the module whose methods are replaced."""
        path = self.where.split(".")[:-1]
        return ".".join(path[: len(path) - self.around])

    def block(self, model: nn.Module) -> nn.Module:
        """The module whose methods are replaced."""
        return block_of(model, self.where, self.around)

    def run(self, model: nn.Module, x: Tensor) -> Any:
        """What the block, or a module around it, answers to `x` of `input_shape`."""
        # A list has no forward; it was found by running a module around it, which is run again.
        if isinstance(self.adapter, Listed):
            return model.get_submodule(self.adapter.listing.tried)(x)
        return self.adapter.call(self.known(model), x)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the inputs that `run` takes."""
        if isinstance(self.adapter, Listed):
            return self.adapter.listing.shapes[-1]
        return (1, TOKENS, self.spec.dim)


def standard_adapters() -> tuple[Adapter, ...]:
    """The adapters that `convert` knows: of Hugging Face's interface, its other families, DeepSpeed, Tutel."""
    return (Interface(), *own_interface.adapters(), *transformers_4.adapters(), DeepSpeedMoE(), TutelMoE())


def find(model: nn.Module, adapters: Sequence[Adapter]) -> list[tuple[str, nn.Module, Adapter]]:
    """Name, block and adapter of every block that an adapter knows; nothing inside a block is looked at."""
    found: list[tuple[str, nn.Module, Adapter]] = []
    for name, module in model.named_modules():
        # The outermost match wins: a block's own parts may look like blocks.
        if any(above == "" or name.startswith(above + ".") for above, *_ in found):
            continue
        adapter = next((a for a in adapters if a.matches(module)), None)
        if adapter is not None:
            found.append((name, module, adapter))
    return found


def find_all(
    model: nn.Module,
    adapters: Sequence[Adapter],
    experts: Sequence[str] | None,
    rank: int,
    ranks: int,
    describe: Callable[[str, Adapter, nn.Module, int], ExpertsSpec] = describe_block,
) -> tuple[list[Found], list[LeftAlone]]:
    """The blocks to convert on one rank, and the experts that are left alone; nothing is changed.

    Args:
        model: Before its conversion.
        adapters: Asked in this order.
        experts: Patterns of names of the experts to take, and no others; None takes what is found.
        rank: This rank in the expert-parallel group.
        ranks: Size of that group.
        describe: Describes a block; raises `ConversionError` for one that will not do. The default checks that it can
            be converted.

    Raises:
        ConversionError: For a block that `describe` refuses, and where only some of the model's blocks can be read.
    """
    found, apart = [], []
    known = find(model, adapters)
    unmet = set(experts or ())
    for name, block, known_as in known:
        adapter = for_lora(known_as.at(block), block)
        # An adapter that reads the experts' module itself has no name to add.
        where = ".".join(filter(None, (name, adapter.experts_name)))
        if not where:
            raise ConversionError(f"{type(model).__name__} holds nothing but experts: convert the model that calls it")
        fitting = {pattern for pattern in experts or () if fnmatchcase(where, pattern)}
        unmet -= fitting
        if experts is not None and not fitting:
            apart.append(LeftAlone(name=where, why="experts= does not name it"))
            continue
        spec = describe(name, adapter, block, ranks)
        child(block, adapter.experts_name)
        found.append(Found(name=name, where=where, around=0, adapter=adapter, spec=spec))
    taken = [name for name, *_ in known] + [n for n, m in model.named_modules() if isinstance(m, MoE)]
    unread = list(_unread(model, taken))
    # Half a model converted would train: the rest stays unbalanced, and nobody would notice.
    if experts is None and found and unread:
        raise ConversionError(
            f"{unread[0].name}: {unread[0].why}, and a model is converted whole. To convert the others alone, write "
            f"prophet.convert(model, experts={[f.where for f in found]})"
        )
    # Only the patterns that no adapter's block has met: `discover` refuses one that fits no list.
    listings, left = discover(model, taken, experts if experts is None else [p for p in experts if p in unmet])
    left = [*apart, *unread, *left]
    for listing in listings:
        listed = Listed(listing, rank, ranks)
        spec = describe(listing.name, listed, model.get_submodule(listed.holder), ranks)
        around = listed.path.count(".")
        found.append(Found(name=listing.name, where=listing.name, around=around, adapter=listed, spec=spec))
    return found, left


def _unread(model: nn.Module, taken: Sequence[str]) -> Iterator[LeftAlone]:
    """Modules of stacked experts that a router chooses from, and that no adapter reads."""
    for name, m in model.named_modules():
        # By name and signature, so plain modules with three-dimensional weights are not taken for experts.
        if any(name == t or name.startswith(f"{t}.") for t in taken) or "expert" not in type(m).__name__.lower():
            continue
        stacked = {n: list(p.shape) for n, p in m.named_parameters(recurse=False) if p.ndim > 2 and len(p) > 1}
        chosen = [a for a in inspect.signature(m.forward).parameters if _CHOICES.search(a)]
        if stacked and chosen:
            parts = ", ".join(f"{n} {shape}" for n, shape in stacked.items())
            yield LeftAlone(
                name=name,
                why=f"{type(m).__name__} stacks experts ({parts}) in a way that no adapter reads: write one "
                f"(docs/convert.md) and prophet.convert(model, adapters=[...])",
            )


# Arguments that say which experts a token goes to
_CHOICES = re.compile(r"ind(ex|ices)|ids\b|selected")


def nothing_found(model: nn.Module, left: Sequence[LeftAlone]) -> str:
    """The message for a model in which no block is known: what was left alone and why, or what may be a block."""
    if any(isinstance(m, MoE) for m in model.modules()):
        return "the model's MoE layers are prophet.MoE already: there is nothing to convert"
    # Lists that are named after experts come first: those the user most likely wants to know about.
    first = sorted(left, key=lambda one: "expert" not in one.name.lower())
    lists = "".join(f"; {one.name} was left alone: {one.why}" for one in first)
    if lists:
        return f"{_NOTHING}{lists}"
    suspects = _suspects(model)
    hint = f"; {', '.join(suspects)} may be one: write an Adapter for it (docs/convert.md)" if suspects else ""
    return f"{_NOTHING}{hint}"


_NOTHING = (
    "no MoE block found: neither experts of transformers, nor a layer of DeepSpeed or Tutel, nor a list of experts"
)


def _suspects(model: nn.Module) -> list[str]:
    """Classes of the modules that hold experts; where none does, of those that are named after them."""
    blocks = {
        type(m).__name__
        for m in model.modules()
        for part, inner in m.named_children()
        if "expert" in part.lower() or "experts" in type(inner).__name__.lower()
    }
    if not blocks:
        names = {type(m).__name__ for m in model.modules() if any(True for _ in m.children())}
        # No module holds anything called expert, so class names are the last hint.
        blocks = {n for n in names if ("moe" in n.lower() or "expert" in n.lower()) and not _NO_BLOCK.search(n)}
    return sorted(blocks)


# what families name after the model, or put around a block
_NO_BLOCK = re.compile(r"Norm|Attention|Rotary|Router|Layer$|Model$|For[A-Z]", re.ASCII)
