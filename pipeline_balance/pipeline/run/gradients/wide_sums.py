"""Gradients of parameters in half precision, added up in float32 over the slices of a pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class WideSums:
    """Sums what a backward pass adds to the `parameters` in float32, while it is open.

    Parameters in float32 or better are left alone, and so are those whose gradients travel (`prophet_expert`).
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for p in dict.fromkeys(parameters):
            half = p.is_floating_point() and p.dtype.itemsize < torch.float32.itemsize
            if half and p.requires_grad and not getattr(p, "prophet_expert", False):
                self._handles.append(p.register_post_accumulate_grad_hook(self._take))

    def _take(self, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        assert p.grad is not None
        # a slice's gradient is small beside the sum of many, and half precision would lose it
        wide = p.grad.float()
        p.grad = None
        known = self._sums.get(p)
        self._sums[p] = wide if known is None else known.add_(wide)

    def settle(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the sums where the optimizers read them, once these parameters have all their gradients."""
        for p in parameters:
            found = self._sums.pop(p, None)
            if found is not None:
                # rounded once, after all slices
                p.grad = (found if p.grad is None else found.add_(p.grad)).to(p.dtype)

    def close(self) -> None:
        """Let go of everything."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._sums = [], {}
