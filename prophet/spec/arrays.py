"""Array types, and the checks and fingerprints that the values share.

Shape legend: R ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


def check_positive(name: str, value: float) -> None:
    """Raise `SpecError` with the field's `name` unless `value` is above 0."""
    if not value > 0:
        raise SpecError(f"{name} must be positive, got {value!r}")


def frozen(values: Any, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """Return a read-only copy of `values` with `dtype` and `shape`, or raise `SpecError`."""
    source = np.asarray(values)
    if source.shape != shape:
        raise SpecError(f"{name} must have shape {list(shape)}, got {list(source.shape)}")
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(source.dtype, np.integer):
        raise SpecError(f"{name} must hold integers, got {source.dtype}")
    copy = np.array(source, dtype=dtype, order="C", copy=True)
    copy.setflags(write=False)
    return copy


def digest(*arrays: npt.NDArray[Any]) -> int:
    """A 62-bit non-negative fingerprint of the arrays' bytes, equal on every rank that holds equal arrays."""
    h = hashlib.blake2b(digest_size=8)
    for a in arrays:
        h.update(repr((a.shape, a.dtype.str)).encode())
        h.update(np.ascontiguousarray(a).tobytes())
    return int.from_bytes(h.digest(), "little") >> 2


def odd_ones_out(values: npt.ArrayLike) -> list[int]:
    """Ranks whose entry of `values` [R] differs from the most common one (the smallest of several); [] if all agree."""
    array = np.asarray(values)
    found, votes = np.unique(array, return_counts=True)
    return [int(r) for r in np.flatnonzero(array != found[votes.argmax()])] if found.size > 1 else []
