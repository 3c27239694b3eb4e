"""Numbers, strings, small tensors, and lists and dictionaries of them, as what JSON can hold."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prophet.engine.checkpoint_folder import is_tensors

FORMAT = 2  # of a checkpoint's description
_BY_NUMBER = "entries by number"
_TENSOR = "tensor: dtype, shape, bytes in base 64"
_DTYPES = {f"torch.{name}": name for name in ("bool", "int8", "uint8", "int32", "int64", "float32", "float64")}
_MAX_TENSOR_BYTES = 1 << 24


def plain(value: Any, what: str) -> Any:
    """`value` in a form that JSON can hold; `as_given` is the inverse. ValueError, with `what`, where there is none."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(v, what) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: plain(v, f"{what}[{k!r}]") for k, v in value.items()}
    if isinstance(value, dict) and all(type(k) is int for k in value):  # JSON's keys are strings
        return {_BY_NUMBER: [[k, plain(v, f"{what}[{k}]")] for k, v in sorted(value.items())]}
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{what} is a {type(value).__name__}; expected numbers, strings, small tensors, and lists and dictionaries "
            "of them"
        )
    if str(value.dtype) not in _DTYPES or value.numel() * value.itemsize > _MAX_TENSOR_BYTES:
        raise ValueError(
            f"{what} is a tensor of {value.dtype} {list(value.shape)}; expected at most {_MAX_TENSOR_BYTES} bytes of "
            f"{', '.join(_DTYPES)}"
        )
    data = value.detach().resolve_neg().cpu().numpy().tobytes()
    return {_TENSOR: [str(value.dtype), list(value.shape), base64.b64encode(data).decode()]}


def as_given(found: dict[str, Any]) -> Any:
    """What an object in the text stands for; JSON's reader calls it, inner objects first."""
    if found.keys() == {_BY_NUMBER}:
        return dict(found[_BY_NUMBER])
    if found.keys() == {_TENSOR}:
        dtype, shape, data = found[_TENSOR]
        array = np.frombuffer(base64.b64decode(data, validate=True), dtype=_DTYPES[dtype])
        return torch.from_numpy(array.reshape(shape).copy())
    return found


def misfit(said: Any) -> str | None:
    """The field of a checkpoint's description that is not as `save` writes it; None where all are."""
    if not isinstance(said, dict):
        return "the whole"
    fits = {
        "format": said.get("format") == FORMAT,
        "tensors": is_tensors(said.get("tensors")),
        "optimizer": isinstance(said.get("optimizer", 0), str | None),
        "extra": isinstance(said.get("extra"), dict),
        "groups": isinstance(said.get("groups"), list) and all(map(_is_group, said["groups"])),
        "states": isinstance(said.get("states"), dict),
    }
    for name, right in fits.items():
        if not right:
            return name
    for name, fields in said["states"].items():
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
