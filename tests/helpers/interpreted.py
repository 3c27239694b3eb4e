"""Makes Triton's interpreter quick: `pytest -p tests.helpers.interpreted`, with TRITON_INTERPRET=1.

It patches all of Triton's language anew whenever a kernel or a function in a kernel is called, `tl.zeros` among them,
and asks a dozen of its own operators whether a sum or product of whole numbers has overflowed: both take longer than
all else. Here each function's language is patched once, and stays so; and numpy says whether a result has overflowed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_EXACTLY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


class _Stays:
    """What a kernel's end would undo."""

    def restore(self) -> None:
        pass


def _once(patch: Callable[[Any], object]) -> Callable[[Any], _Stays]:
    @cache
    def patched(function: Any) -> _Stays:
        patch(function)
        return _Stays()

    return patched


def _fits(_: Any, left: Any, right: Any, operator: Any) -> None:
    """Fails where a result is too large for its type, as Triton's own check does."""
    kind = left.type.scalar
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACTLY[operator.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
    if exact.size and not kind.get_int_min_value() <= exact.min() <= exact.max() <= kind.get_int_max_value():
        raise AssertionError(f"int{kind.int_bitwidth} overflow detected for operation {operator.__name__}")


interpreter._patch_lang = _once(interpreter._patch_lang)
TritonSemantic.binary_op_sanitize_overflow_impl = _fits
