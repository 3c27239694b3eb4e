"""The description of a checkpoint of model and optimizer: its fields, and the check that they are well formed."""

from __future__ import annotations

from typing import Any

import torch

from prophet.state.json_values import from_json

# Grows when older releases could not read what `save` writes
FORMAT = 3


def description_from_json(description: dict[str, Any]) -> dict[str, Any]:
    """Return a description that has passed `misfit`, with its values as they were given to `save`.

    Raises:
        ValueError: For a value that JSON cannot stand for.
    """
    groups = [{**group, "settings": from_json(group["settings"])} for group in description["groups"]]
    states = {
        name: {
            field: {k: from_json(v) if k == "value" else v for k, v in kept.items()} for field, kept in fields.items()
        }
        for name, fields in description["states"].items()
    }
    return {**description, "groups": groups, "states": states, "extra": from_json(description["extra"])}


def misfit(description: Any) -> str | None:
    """Find the field of a checkpoint's description that is not as `save` writes it; None where all are."""
    # The file may come from anywhere: no field is used before its type was checked, and names are cut in messages
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
    """Whether `group` is a group of an optimizer: parameters by name, and their settings."""
    if not isinstance(group, dict) or not isinstance(group.get("settings"), dict):
        return False
    names = group.get("parameters")
    return isinstance(names, list) and all(isinstance(n, str) for n in names)


def _is_kept(kept: Any) -> bool:
    """Whether `kept` describes one entry of an optimizer's state."""
    # Without a dtype it is a plain value that was no tensor
    if not isinstance(kept, dict) or "dtype" not in kept:
        return isinstance(kept, dict) and "value" in kept
    if not isinstance(kept["dtype"], str) or not isinstance(getattr(torch, kept["dtype"], None), torch.dtype):
        return False
    if "value" in kept:
        # `type` and not `isinstance` for integers; torch takes none of more than 64 bits
        return isinstance(kept["value"], bool | float) or (type(kept["value"]) is int and abs(kept["value"]) < 1 << 63)
    shape = kept.get("shape")
    # A limit, so that a wrong file does not make torch ask for more memory than there is anywhere
    return isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
