"""The sizes that a recording says of its model: the fields of `ModelSizes` in a routing trace's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prophet.errors import SpecError
from prophet.files import shown
from prophet.machine.sizes import MOST
from prophet.spec import parts_of

_RANGES = {
    **dict.fromkeys(("dim", "hidden", "experts", "top_k", "layers", "moe_layers", "dense_hidden"), (1, MOST)),
    **dict.fromkeys(("heads", "kv_heads", "head_dim", "sequence"), (1, MOST)),
    "vocabulary": (0, MOST),
    "dense_params": (0, 1 << 48),
}
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NAME_CHARACTERS = 80


def recorded_sizes(meta: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `ModelSizes` that `meta` says, checked; what is absent or null is left out.

    meta: `model` gives the name and `dtype` the element_bytes; the other fields are called as in `ModelSizes`.
    Raises `SpecError`, which begins with `where`.
    """
    said = {name: value for name, value in meta.items() if value is not None}

    def check(name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise SpecError(f"{where}: meta: {name}: expected {expected}, got {shown(said[name])}")

    found: dict[str, Any] = {}
    for name in _RANGES.keys() & said.keys():
        low, high = _RANGES[name]
        value = said[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        check(name, whole and low <= value <= high, f"a whole number from {low} to {high}")
        found[name] = value
    if "activation" in said:
        try:
            parts_of(said["activation"])
        except SpecError as error:
            raise SpecError(f"{where}: meta: {error}") from None
        found["activation"] = said["activation"]
    if "bias" in said:
        check("bias", isinstance(said["bias"], bool) or said["bias"] in ("in", "out"), "true, false, 'in' or 'out'")
        found["bias"] = said["bias"]
    if "dtype" in said:
        dtype = str(said["dtype"]).removeprefix("torch.")
        check("dtype", dtype in _ELEMENT_BYTES, f"one of {', '.join(_ELEMENT_BYTES)}")
        found["element_bytes"] = _ELEMENT_BYTES[dtype]
    if "model" in said:
        check("model", isinstance(said["model"], str), "a name")
        found["name"] = "".join(c for c in said["model"] if c.isprintable())[:_NAME_CHARACTERS]
    return found
