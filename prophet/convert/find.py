"""Which blocks of a model are about to be converted: those that an adapter knows, and lists that `discover` finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert import huggingface
from prophet.convert.base import Adapter, ExpertsSpec, child
from prophet.convert.checks import describe_block
from prophet.convert.deepspeed import DeepSpeedMoE
from prophet.convert.discover import LeftAlone, discover
from prophet.convert.listed import Listed
from prophet.convert.lora import for_lora
from prophet.convert.routed import block_of
from prophet.convert.tutel import TutelMoE
from prophet.convert.verify import TOKENS
from prophet.layer.moe import MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One block that can be converted.

    name: of the block. where: of the module that holds its experts. around: how many modules up from the one that holds
    that module is the block whose methods are replaced.
    """

    name: str
    where: str
    around: int
    adapter: Adapter
    spec: ExpertsSpec

    def experts(self, model: nn.Module) -> nn.Module:
        """The module that holds the experts."""
        return model.get_submodule(self.where)

    def holder(self, model: nn.Module) -> nn.Module:
        """The module that holds that one."""
        return block_of(model, self.where)

    @property
    def block_name(self) -> str:
        """Of the module whose methods are replaced."""
        path = self.where.split(".")[:-1]
        return ".".join(path[: len(path) - self.around])

    def block(self, model: nn.Module) -> nn.Module:
        """The module whose methods are replaced."""
        return block_of(model, self.where, self.around)

    def run(self, model: nn.Module, x: Tensor) -> Any:
        """What the block, or a module around it, answers to `x` of `input_shape`."""
        if isinstance(self.adapter, Listed):
            return model.get_submodule(self.adapter.listing.tried)(x)
        return self.adapter.call(self.block(model), x)

    @property
    def input_shape(self) -> tuple[int, ...]:
        if isinstance(self.adapter, Listed):
            return self.adapter.listing.shapes[-1]
        return (1, TOKENS, self.spec.dim)


def standard_adapters() -> tuple[Adapter, ...]:
    """The adapters that `convert` knows: Hugging Face's families, DeepSpeed, Tutel."""
    return (*huggingface.adapters(), DeepSpeedMoE(), TutelMoE())


def find(model: nn.Module, adapters: Sequence[Adapter]) -> list[tuple[str, nn.Module, Adapter]]:
    """Name, block and adapter of every block that an adapter knows; nothing inside a block is looked at."""
    found: list[tuple[str, nn.Module, Adapter]] = []
    for name, module in model.named_modules():
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
    """The blocks to convert, on one of `ranks` ranks, and the lists that are left alone; nothing is changed.

    experts: as for `discover`. describe: raises `ConversionError` for a block that will not do; without it, one that
    cannot be converted.
    """
    found = []
    known = find(model, adapters)
    for name, block, known_as in known:
        adapter = for_lora(known_as, block)
        spec = describe(name, adapter, block, ranks)
        child(block, adapter.experts_name)
        where = f"{name}.{adapter.experts_name}" if name else adapter.experts_name
        found.append(Found(name=name, where=where, around=0, adapter=adapter, spec=spec))
    taken = [name for name, *_ in known] + [n for n, m in model.named_modules() if isinstance(m, MoE)]
    listings, left = discover(model, taken, experts)
    for listing in listings:
        listed = Listed(listing, rank, ranks)
        spec = describe(listing.name, listed, model.get_submodule(listed.holder), ranks)
        around = listed.path.count(".")
        found.append(Found(name=listing.name, where=listing.name, around=around, adapter=listed, spec=spec))
    return found, left


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are that are anywhere."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def nothing_found(model: nn.Module, left: Sequence[LeftAlone]) -> str:
    """The message for a model without a block that is known."""
    families = ", ".join(a.family for a in standard_adapters())
    if any(isinstance(m, MoE) for m in model.modules()):
        return "the model's MoE layers are prophet.MoE already: there is nothing to convert"
    first = sorted(left, key=lambda one: "expert" not in one.name.lower())  # what was meant, if anything was
    lists = "".join(f"; {one.name} was left alone: {one.why}" for one in first)
    if lists:
        return f"no MoE block found that is one of {families}, or a list of experts{lists}"
    suspects = _suspects(model)
    hint = f"; {', '.join(suspects)} may be one: write an Adapter for it (docs/convert.md)" if suspects else ""
    return f"no MoE block found that is one of {families}{hint}"


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
        blocks = {n for n in names if ("moe" in n.lower() or "expert" in n.lower()) and not _NO_BLOCK.search(n)}
    return sorted(blocks)


# what families name after the model, or put around a block
_NO_BLOCK = re.compile(r"Norm|Attention|Rotary|Router|Layer$|Model$|For[A-Z]", re.ASCII)
