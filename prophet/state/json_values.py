"""Numbers, strings, small tensors, and lists, tuples and dictionaries of them, as what JSON can hold; and back.

`from_json` makes such values and nothing else, so a text from outside runs nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prophet.errors import SpecError

MOST_BYTES = 1 << 24
"""The most bytes that one tensor may have."""

_TENSOR = "tensor: dtype, shape, bytes in base 64"
_TUPLE = "tuple"
_ENTRIES = "entries"  # of a dictionary whose keys are no strings, or one of ours
_OURS = (_TENSOR, _TUPLE, _ENTRIES)
_NUMPY = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {f"torch.{name}": name for name in (*_NUMPY, "bfloat16")}
_KEYS = str | int | float | bool | None


def to_json(value: Any, what: str, *, most_bytes: int = MOST_BYTES) -> Any:
    """Put `value` into a form that JSON can hold; `from_json` is the inverse.

    Args:
        value: Numbers, strings, tensors, and lists, tuples and dictionaries of them.
        what: Name of the value in errors.
        most_bytes: The most bytes that one tensor may have.

    Raises:
        SpecError: The value holds something else, or a larger tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(v, what, most_bytes=most_bytes) for v in value]
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(v, what, most_bytes=most_bytes) for v in value]}
    if isinstance(value, Mapping) and all(isinstance(k, _KEYS) for k in value):
        # A dictionary that has one of our markers as a key must not be taken for a marked value when it is read
        if all(isinstance(k, str) for k in value) and value.keys().isdisjoint(_OURS):
            return {k: to_json(v, f"{what}[{k!r}]", most_bytes=most_bytes) for k, v in value.items()}
        # JSON's keys are strings: those of other types go as pairs
        return {_ENTRIES: [[k, to_json(v, f"{what}[{k!r}]", most_bytes=most_bytes)] for k, v in value.items()]}
    if not isinstance(value, Tensor) and hasattr(value, "item") and getattr(value, "shape", None) == ():
        # numpy's numbers, which schedulers and metrics leave in a state
        return to_json(value.item(), what)
    if not isinstance(value, Tensor) or value.is_meta:
        raise SpecError(
            f"{what} is a {type(value).__name__}; expected numbers, strings, small tensors, and lists and dictionaries "
            "of them"
        )
    if str(value.dtype) not in _DTYPES or value.numel() * value.itemsize > most_bytes:
        raise SpecError(
            f"{what} is a tensor of {value.dtype} {list(value.shape)}; expected at most {most_bytes} bytes of "
            f"{', '.join(_DTYPES)}"
        )
    # A conjugate or negative view shares the bytes of its base, with a flag that `view` would lose
    whole = value.detach().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    flat = whole.reshape(-1).view(torch.uint8)
    return {_TENSOR: [str(value.dtype), list(value.shape), base64.b64encode(flat.numpy().tobytes()).decode()]}


def from_json(value: Any) -> Any:
    """Reverse `to_json`.

    Raises:
        SpecError: `value` is nothing that `to_json` returns.
    """
    try:
        return _from_json(value)
    # RecursionError, for a value that is nested too deeply, is a RuntimeError
    except (TypeError, KeyError, ValueError, OverflowError, RuntimeError) as error:
        raise SpecError(f"expected a value as it is saved ({type(error).__name__}: {error!s:.200})") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys().isdisjoint(_OURS):
        return {k: _from_json(v) for k, v in value.items()}
    ((kind, content),) = value.items()
    if kind == _TUPLE:
        return tuple(_from_json(v) for v in content)
    return {k: _from_json(v) for k, v in content} if kind == _ENTRIES else _tensor(*content)


def _tensor(dtype: str, shape: list[int], text: str) -> Tensor:
    data = base64.b64decode(text, validate=True)
    name = _DTYPES[dtype]
    # numpy has no bfloat16: its bytes go through torch
    array = np.frombuffer(data, dtype=np.uint8 if name == "bfloat16" else name)
    # `frombuffer` gives memory that cannot be written to
    made = torch.from_numpy(array.copy())
    if name == "bfloat16":
        made = made.view(torch.bfloat16)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {shape!r:.60}")
    return made.reshape(shape)
