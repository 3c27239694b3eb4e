"""What older releases of torch, which the library still supports, cannot do; `docs/status.md` lists it for users."""

from __future__ import annotations

import inspect
from importlib import metadata

import numpy as np
import pytest
import torch
import torch.distributed as dist


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


TORCH = _release(torch.__version__)
# Tests of layouts whose groups list ranks in another than ascending order
needs_orders = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts a group's members, so such layouts are refused",
)
after_2_11 = pytest.mark.skipif(TORCH < (2, 12), reason="fails on torch 2.11 with context parallelism, cause unknown")
needs_interpreter = pytest.mark.skipif(
    _release(metadata.version("triton")) < (3, 7) and _release(np.__version__) >= (2, 4),
    reason="Triton 3.6 interprets no kernels with numpy 2.4: arrays of one element are no numbers there",
)
