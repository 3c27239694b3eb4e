"""The description of a checkpoint of model and optimizer: which fields it has, and what they stand for."""

from __future__ import annotations

from typing import Any

import torch

from prophet.state.json_values import from_json

FORMAT = 3


def description_from_json(description: dict[str, Any]) -> dict[str, Any]:
    """A description that fits, with its values as they were given to `save`. ValueError for one that cannot be."""
    groups = [{**group, "settings": from_json(group["settings"])} for group in description["groups"]]
    states = {
        name: {
            field: {k: from_json(v) if k == "value" else v for k, v in kept.items()} for field, kept in fields.items()
        }
        for name, fields in description["states"].items()
    }
    return {**description, "groups": groups, "states": states, "extra": from_json(description["extra"])}


def misfit(description: Any) -> str | None:
    """The field of a checkpoint's description that is not as `save` writes it; None where all are."""
    if not isinstance(description, dict):
        return "the whole"
    fits = {
        "format": description.get("format") == FORMAT,
        "optimizer": isinstance(description.get("optimizer", 0), str | None),
        "extra": isinstance(description.get("extra"), dict),
        "groups": isinstance(description.get("groups"), list) and all(map(_is_group, description["groups"])),
        "states": isinstance(description.get("states"), dict),
    }
    for name, right in fits.items():
        if not right:
            return name
    for name, fields in description["states"].items():
        if not isinstance(fields, dict):
            return f"states.{name!s:.100}"
        for field, kept in fields.items():
            if not _is_kept(kept):
                return f"states.{name!s:.100}.{field!s:.100}: value, dtype, shape"
    return None


def _is_group(group: Any) -> bool:
    """Whether it is a group of an optimizer: parameters by name, and their settings."""
    if not isinstance(group, dict) or not isinstance(group.get("settings"), dict):
        return False
    names = group.get("parameters")
    return isinstance(names, list) and all(isinstance(n, str) for n in names)


def _is_kept(kept: Any) -> bool:
    """Whether it describes one entry of an optimizer's state."""
    if not isinstance(kept, dict) or "dtype" not in kept:
        return isinstance(kept, dict) and "value" in kept
    if not isinstance(kept["dtype"], str) or not isinstance(getattr(torch, kept["dtype"], None), torch.dtype):
        return False
    if "value" in kept:
        return isinstance(kept["value"], bool | float) or (type(kept["value"]) is int and abs(kept["value"]) < 1 << 63)
    shape = kept.get("shape")
    return isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
