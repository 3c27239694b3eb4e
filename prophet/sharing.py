"""Where modules and tensors stand in a model. One of them may stand in several places: layers may share a block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """One place of a module, parameter or buffer: `holder` has it as `attribute`, and the model calls it `name`."""

    name: str
    holder: nn.Module
    attribute: str


def places_of(root: nn.Module) -> dict[int, list[Place]]:
    """All places of all modules, parameters and buffers inside `root` by their ids, in its order."""
    found: dict[int, list[Place]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for held in (module._modules, module._parameters, module._buffers):
            for attribute, one in held.items():
                if one is not None:
                    found.setdefault(id(one), []).append(Place(f"{dot}{attribute}", module, attribute))
    return found


def held_by_several(places: list[Place]) -> list[Place]:
    """One of the `places` for every module that holds the same thing: those inside a shared module are one place."""
    return list({(id(p.holder), p.attribute): p for p in reversed(places)}.values())[::-1]
