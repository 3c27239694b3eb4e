"""Which blocks of a model are about to be converted: those that an adapter knows, and lists that `discover` finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, child
from prophet.convert.checks import describe_block
from prophet.convert.discover import LeftAlone, discover
from prophet.convert.listed import Listed
from prophet.convert.lora import for_lora
from prophet.convert.routed import block_of
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
    model: nn.Module, adapters: Sequence[Adapter], experts: Sequence[str] | None, rank: int, ranks: int
) -> tuple[list[Found], list[LeftAlone]]:
    """The blocks to convert, on one of `ranks` ranks, and the lists that are left alone; nothing is changed.

    experts: as for `discover`. Raises `ConversionError` for a block that cannot be converted.
    """
    found = []
    known = find(model, adapters)
    for name, block, known_as in known:
        adapter = for_lora(known_as, block)
        spec = describe_block(name, adapter, block, ranks)
        child(block, adapter.experts_name)
        where = f"{name}.{adapter.experts_name}" if name else adapter.experts_name
        found.append(Found(name=name, where=where, around=0, adapter=adapter, spec=spec))
    taken = [name for name, *_ in known] + [n for n, m in model.named_modules() if isinstance(m, MoE)]
    listings, left = discover(model, taken, experts)
    for listing in listings:
        listed = Listed(listing, rank, ranks)
        spec = describe_block(listing.name, listed, model.get_submodule(listed.holder), ranks)
        around = listed.path.count(".")
        found.append(Found(name=listing.name, where=listing.name, around=around, adapter=listed, spec=spec))
    return found, left


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are that are anywhere."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
