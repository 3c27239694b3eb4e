"""Memory that is used again and again: buffers by shape, type and device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_Kind = tuple[object, ...]


@dataclass
class BufferPool:
    """Tensors that are used again by shape, type and device.

    Attributes:
        allocated: How many tensors were made.
        n_bytes: Bytes of all tensors that are in use or wait for it.
    """

    allocated: int = 0
    n_bytes: int = 0
    _free: dict[_Kind, list[Tensor]] = field(default_factory=dict)
    _used: set[_Kind] = field(default_factory=set)

    def take(self, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Hand out a tensor with the shape of `like`; its values are undefined.

        Args:
            like: Gives the shape; it may be on `meta`.
            dtype: The tensor's type (None: that of `like`).
            device: Where it lies (None: where `like` does).
        """
        kind = (like.shape, dtype or like.dtype, device or like.device)
        # also where one is free: `trim` keeps what was asked for since its last call
        self._used.add(kind)
        if free := self._free.get(kind):
            return free.pop()
        made = torch.empty(like.shape, dtype=kind[1], device=kind[2])
        self.allocated += 1
        self.n_bytes += made.numel() * made.element_size()
        return made

    def give(self, tensor: Tensor | None) -> None:
        """Take `tensor` back; nobody reads it any more."""
        if tensor is not None:
            self._free.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)

    def trim(self) -> None:
        """Let go of memory of shapes that nobody has asked for since the last call."""
        for kind in self._free.keys() - self._used:
            # shapes follow the batch, so without this a run with many lengths would keep buffers of each
            self.n_bytes -= sum(t.numel() * t.element_size() for t in self._free.pop(kind))
        self._used.clear()
