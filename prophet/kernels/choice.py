"""Which implementation of an op runs: the choice is made from the arguments alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

Impl = Literal["auto", "naive", "torch", "triton"]
"""naive: the definition. torch: library calls on slices, any device. triton: the fused kernels. auto: by device."""

P = ParamSpec("P")
Result = TypeVar("Result")

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def triton_available() -> bool:
    """Whether Triton can be imported; it is an optional dependency."""
    return find_spec("triton") is not None


def choose(impl: Impl, x: Tensor, *, indices: bool = False) -> Literal["naive", "torch", "triton"]:
    """Return the implementation to run for an input.

    Args:
        impl: What was asked for; "auto" decides by the device of `x` and its dtype.
        x: The input, of one of `TRITON_DTYPES` for Triton.
        indices: Whether `x` holds indices, which Triton serves in any dtype.

    Raises:
        ValueError: There is no such name, or it cannot serve the dtype.
        ImportError: Triton was asked for and is missing.
    """
    # float64 has no fused kernels: references and gradient checks run on library products
    served = indices or x.dtype in TRITON_DTYPES
    # never an error: what Triton does not serve runs on library products
    if impl == "auto":
        return "triton" if x.is_cuda and served and triton_available() else "torch"
    if impl not in ("naive", "torch", "triton"):
        raise ValueError(f"impl must be 'auto', 'naive', 'torch' or 'triton', got {impl!r}")
    if impl == "triton":
        if not triton_available():
            raise ImportError("impl='triton' was asked for, but the package triton is not installed")
        if not served:
            raise ValueError(f"impl='triton' works in float32, float16 and bfloat16, got {x.dtype}")
    return impl


def on_its_device(launch: Callable[Concatenate[Tensor, P], Result]) -> Callable[Concatenate[Tensor, P], Result]:
    """Run a function on the device of its first argument: Triton launches on the current one, whatever it is given."""

    @wraps(launch)
    def guarded(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        # does nothing for a tensor of the CPU, where Triton's interpreter runs
        with torch.cuda.device_of(x):
            return launch(x, *args, **kwargs)

    return guarded
