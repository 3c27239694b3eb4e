"""Array types, and the base of values that consist of arrays: checks, comparison, fingerprints.

Shape legend: R ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


def check_positive(value: object, *fields: str) -> None:
    """Raise `SpecError` unless these fields of `value` are above 0."""
    # `not >` and not `<=`: NaN is refused as well
    for name in fields:
        if not getattr(value, name) > 0:
            raise SpecError(f"{type(value).__name__}.{name} must be positive, got {getattr(value, name)!r}")


def check_not_negative(value: object, *fields: str) -> None:
    """Raise `SpecError` unless these fields of `value` are 0 or above."""
    for name in fields:
        if not getattr(value, name) >= 0:
            raise SpecError(f"{type(value).__name__}.{name} must not be negative, got {getattr(value, name)!r}")


def frozen(values: Any, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """Return a read-only copy of `values`.

    Args:
        values: An array, or anything that numpy can make one of.
        dtype: The type of the copy.
        shape: The shape that it must have.
        name: Its name in errors.

    Raises:
        SpecError: For another shape, or for other values than integers where `dtype` is integer.
    """
    source = np.asarray(values)
    if source.shape != shape:
        raise SpecError(f"{name} must have shape {list(shape)}, got {list(source.shape)}")
    # numpy would cut fractions off without a word
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(source.dtype, np.integer):
        raise SpecError(f"{name} must hold integers, got {source.dtype}")
    copy = np.array(source, dtype=dtype, order="C", copy=True)
    copy.setflags(write=False)
    return copy


def digest(*arrays: npt.NDArray[Any]) -> int:
    """Return a 62-bit non-negative fingerprint of the arrays' bytes, equal on every rank that holds equal arrays."""
    # 62 bits: it travels as a signed 64-bit integer, and negative numbers are free to mean something else
    h = hashlib.blake2b(digest_size=8)
    for a in arrays:
        # Zeros of two shapes have the same bytes
        h.update(repr((a.shape, a.dtype.str)).encode())
        h.update(np.ascontiguousarray(a).tobytes())
    return int.from_bytes(h.digest(), "little") >> 2


def odd_ones_out(values: npt.ArrayLike) -> list[int]:
    """List ranks whose entry of `values` [R] differs from the most common one (of several the smallest)."""
    array = np.asarray(values)
    # The case of every step and layer. Bytes take a fifth of a comparison's time; of floats they may mislead.
    if array.dtype.kind in "iub" and array.tobytes() == array[:1].tobytes() * len(array):
        return []
    found, votes = np.unique(array, return_counts=True)
    return [int(r) for r in np.flatnonzero(array != found[votes.argmax()])] if found.size > 1 else []


class OfArrays:
    """A base of frozen dataclasses whose fields are all arrays; equal where their arrays are, and without a hash."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def trusted(cls, *arrays: npt.NDArray[Any]) -> Self:
        """Wrap arrays that a tested kernel made, without copying or checking them; they become read-only."""
        value = object.__new__(cls)
        # A dataclass with slots has its fields in `__slots__`, in their order
        for name, array in zip(cls.__slots__, arrays, strict=True):
            array.setflags(write=False)
            object.__setattr__(value, name, array)
        return value

    def _arrays(self) -> list[npt.NDArray[Any]]:
        return [getattr(self, name) for name in self.__slots__]

    def digest(self) -> int:
        """Return an integer that stands for the value in comparisons over ranks."""
        return digest(*self._arrays())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return all(map(np.array_equal, self._arrays(), other._arrays()))
