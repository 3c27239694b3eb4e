"""The sizes that a recording has of its model: the fields of `ModelSizes` in a routing trace's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prophet.errors import SpecError
from prophet.files import shown
from prophet.machine.sizes import MOST
from prophet.spec import parts_of

# Bounds on values from a file, so that products stay in the range of numbers
_RANGES = {
    **dict.fromkeys(("dim", "hidden", "experts", "top_k", "layers", "moe_layers", "dense_hidden"), (1, MOST)),
    **dict.fromkeys(("heads", "kv_heads", "head_dim", "sequence"), (1, MOST)),
    "vocabulary": (0, MOST),
    "dense_params": (0, 1 << 48),
}
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# A name is shown in tables
_NAME_CHARACTERS = 80


def recorded_sizes(meta: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the fields of `ModelSizes` from a trace's metadata, and check them.

    Args:
        meta: `model` gives the name and `dtype` the element_bytes; the other fields are called as in `ModelSizes`.
        where: What messages begin with.

    Returns:
        The fields that are there and not null.

    Raises:
        SpecError: For a value that does not fit.
    """
    values = {name: value for name, value in meta.items() if value is not None}

    def check(name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise SpecError(f"{where}: meta: {name}: expected {expected}, got {shown(values[name])}")

    found: dict[str, Any] = {}
    for name in _RANGES.keys() & values.keys():
        low, high = _RANGES[name]
        value = values[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        check(name, whole and low <= value <= high, f"a whole number from {low} to {high}")
        found[name] = value
    if "activation" in values:
        try:
            parts_of(values["activation"])
        except SpecError as error:
            raise SpecError(f"{where}: meta: {error}") from None
        found["activation"] = values["activation"]
    if "bias" in values:
        check("bias", isinstance(values["bias"], bool) or values["bias"] in ("in", "out"), "true, false, 'in' or 'out'")
        found["bias"] = values["bias"]
    if "dtype" in values:
        dtype = str(values["dtype"]).removeprefix("torch.")
        check("dtype", dtype in _ELEMENT_BYTES, f"one of {', '.join(_ELEMENT_BYTES)}")
        found["element_bytes"] = _ELEMENT_BYTES[dtype]
    if "model" in values:
        check("model", isinstance(values["model"], str), "a name")
        # Control characters of a file must not reach the terminal
        found["name"] = "".join(c for c in values["model"] if c.isprintable())[:_NAME_CHARACTERS]
    return found
