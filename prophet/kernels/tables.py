"""Small tables of integers that the host has made, on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy int64 tables of the host to a device, all in one copy, for which the host does not wait.

    Args:
        tables: Of any shapes.
        device: Where they are wanted; the tables themselves are returned where that is the CPU.
    """
    if device.type == "cpu":
        return list(tables)
    # only from pinned memory does `non_blocking` copy without waiting
    numbers = sum(t.numel() for t in tables)
    host = torch.empty(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    torch.cat([t.reshape(-1) for t in tables], out=host)
    parts = host.to(device, non_blocking=True).split([t.numel() for t in tables])
    return [part.view(t.shape) for part, t in zip(parts, tables, strict=True)]
