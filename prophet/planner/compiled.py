"""The one place that imports numba: how the planner's hot loops are compiled.

Kernels are cached on disk, so that only the first run on a machine compiles them, and they release the
interpreter lock, so that planning on a background thread does not hold up the one that launches device
work. Entry kernels, those called from Python, have fixed signatures: they are compiled when their module
is imported and never again, whatever arrays they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Arguments are declared read-only: numba takes writable arrays for them, too.
INTS = types.Array(types.int64, 1, "C", readonly=True)
INTS_2D = types.Array(types.int64, 2, "C", readonly=True)
FLOATS = types.Array(types.float64, 1, "C", readonly=True)
BOOLS_2D = types.Array(types.boolean, 2, "C", readonly=True)
OUT_INTS_3D = types.Array(types.int64, 3, "C")
INT, FLOAT, BOOL = types.int64, types.float64, types.boolean


def compiled(function: _Function) -> _Function:
    """Compile `function` with numba when a kernel first calls it."""
    return cast(_Function, numba.njit(cache=True, nogil=True)(function))


def entry(*arguments: Any) -> Callable[[_Function], _Function]:
    """Compile a function for `arguments` (the types above) at once, and for no others."""

    def decorate(function: _Function) -> _Function:
        return cast(_Function, numba.njit([tuple(arguments)], cache=True, nogil=True)(function))

    return decorate
