"""Experts in a list that nobody announced: an adapter for what `discover` found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from prophet.convert.base import RUNS_TWICE, Adapter, ExpertsSpec
from prophet.convert.sources.lists import list_spec, pack_modules
from prophet.convert.trials.discover import Listing
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights


class Listed(Adapter):
    """Experts in a `ModuleList`, behind whatever code calls them.

    Attributes:
        listing: What `discover` found.
        holder: Name of the module that holds the list.
        path: Of the list in its block.

    Args:
        listing: What `discover` found.
        rank: This rank in the expert-parallel group.
        ranks: Size of that group.
    """

    family = "own code"

    def __init__(self, listing: Listing, rank: int, ranks: int) -> None:
        self.listing, self._first = listing, rank * (listing.experts // ranks)
        self.holder, _, self.experts_name = listing.name.rpartition(".")
        block = listing.block
        # Of the list in its block, which need not be the module that holds it
        self.path = listing.name.removeprefix(f"{block}." if block else "")

    def matches(self, block: nn.Module) -> bool:
        # Its lists are found by `discover`, not by asking each module
        return False

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts: Any = block.get_submodule(self.experts_name)
        return list_spec(
            experts, total=len(experts), top_k=0, dim=self.listing.dim, router=RUNS_TWICE, first=self._first
        )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        names: Any = spec.names
        return names.unpack(state, f"{expert}.")  # type: ignore[no-any-return]

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return pack_modules(spec, experts, "")

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        """Make the forward of a converted block, which was of class `kind`."""
        path, own = self.path, kind.forward

        @functools.wraps(own)
        def forward(block: nn.Module, *args: Any, **named: Any) -> Any:
            layer: Any = block.get_submodule(path)
            # No longer the `ListedExperts` that the conversion put there
            if not hasattr(layer, "run_block"):
                raise ConversionError(
                    f"{path} of a converted {kind.__name__} is a {type(layer).__name__} now: prophet.revert(model) "
                    f"first, then change the list, then prophet.convert(model)"
                )
            return layer.run_block(block, functools.partial(own, block), args, named)

        return forward
