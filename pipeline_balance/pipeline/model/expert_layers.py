"""Which modules of a model are expert-parallel layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from prophet.ranks.collective import Collective


def collective_of(module: nn.Module) -> Collective | None:
    """What an expert-parallel layer exchanges its tokens over; None for any other module."""
    found = getattr(module, "collective", None)
    return found if isinstance(found, Collective) else None


def expert_layers(units: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield the layers that share experts with other ranks, or their tokens, with their unit and their name in it."""
    for number, unit in enumerate(units):
        for name, module in unit.named_modules():
            found = collective_of(module)
            # a group of one shares no experts; with `alike`, its tokens are still divided among ranks
            if found is not None and (found.size > 1 or getattr(module, "alike", None) is not None):
                yield number, name, module
