"""The places of modules and tensors in a model. One of them may have several: layers may share a block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """One place of a module, parameter or buffer.

    Attributes:
        name: Its full name in the model.
        holder: The module that has it.
        attribute: Its name in that module.
    """

    name: str
    holder: nn.Module
    attribute: str


def places_of(root: nn.Module) -> dict[int, list[Place]]:
    """Find all places of all modules, parameters and buffers inside `root`, by their ids, in its order."""
    found: dict[int, list[Place]] = {}
    # Duplicates included: a module that two layers share is reached over both
    for path, module in root.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for held in (module._modules, module._parameters, module._buffers):
            for attribute, one in held.items():
                if one is not None:
                    found.setdefault(id(one), []).append(Place(f"{dot}{attribute}", module, attribute))
    return found


def held_by_several(places: list[Place]) -> list[Place]:
    """Keep one of the `places` per module that holds the thing: inside a shared module it has one place only."""
    # Reversed twice, so that the first place of each holder stays, and their order too
    return list({(id(p.holder), p.attribute): p for p in reversed(places)}.values())[::-1]
