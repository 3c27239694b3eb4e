"""The implementations of the kernels that a layer's tests run over: definitions, library calls, and Triton.

Triton runs in its interpreter (TRITON_INTERPRET=1 in the environment), or on a GPU where there is one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from prophet.kernels.choice import Impl, triton_available

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_NO_TRITON = (
    "Triton is not installed" if not triton_available() else "no GPU, and TRITON_INTERPRET=1 is not set for Triton"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One implementation: what it computes in, where, and how far it may be from the oracle.

    atol: float64 leaves rounding only; float32 sums of some tens of terms of order one, in another order, differ by a
    hundred roundings.
    """

    impl: Impl
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    atol: float = 1e-10


LIBRARY, DEFINITION = Path(impl="torch"), Path(impl="naive")
TRITON = Path(impl="triton", dtype=torch.float32, device="cpu" if INTERPRETED else "cuda", atol=1e-5)


def _triton(usable: bool, reason: str) -> Any:
    return pytest.param(TRITON, id="triton", marks=pytest.mark.skipif(not usable, reason=reason))


# one rank, on whatever device a path needs
PATHS = [
    pytest.param(LIBRARY, id="torch"),
    pytest.param(DEFINITION, id="naive"),
    _triton(triton_available() and (INTERPRETED or torch.cuda.is_available()), _NO_TRITON),
]
# ranks that are threads, on CPU
PATHS_ON_THREADS = [
    *PATHS[:2],
    _triton(triton_available() and INTERPRETED, f"{_NO_TRITON}; ranks that are threads run in the interpreter"),
]


@contextmanager
def one_kernel_at_a_time() -> Iterator[None]:
    """Triton's interpreter keeps the running program in variables of its module; ranks that are threads take turns."""
    if not (INTERPRETED and triton_available()):
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    turn, run = threading.RLock(), GridExecutor.__call__

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turn:
            return run(self, *args, **kwargs)

    GridExecutor.__call__ = alone
    try:
        yield
    finally:
        GridExecutor.__call__ = run
