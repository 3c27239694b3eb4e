"""Which implementation of an op runs: the choice is made from the arguments alone."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from torch import Tensor

Impl = Literal["auto", "naive", "torch", "triton"]
"""naive: the definition. torch: library calls on slices, any device. triton: the fused kernels. auto: by device."""


def triton_available() -> bool:
    """Whether Triton can be imported; it is an optional dependency."""
    return find_spec("triton") is not None


def choose(impl: Impl, x: Tensor) -> Literal["naive", "torch", "triton"]:
    """The implementation to run for an input `x`. Raises ValueError, or ImportError for a missing Triton."""
    if impl == "auto":
        return "triton" if x.is_cuda and triton_available() else "torch"
    if impl not in ("naive", "torch", "triton"):
        raise ValueError(f"impl must be 'auto', 'naive', 'torch' or 'triton', got {impl!r}")
    if impl == "triton" and not triton_available():
        raise ImportError("impl='triton' was asked for, but the package triton is not installed")
    return impl
