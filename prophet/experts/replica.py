"""An expert on a rank that is not its home, for one step; and the memory in which such replicas live.

Shape legend: P parameters of one expert, G those of them that train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prophet.errors import ReplicaMemoryError


@dataclass(slots=True)
class Replica:
    """One expert's parameters on a rank that is not its home, for one step.

    params [P] and grads [G] are flat. `leaves` are views of `params` by the parameters' names, in their order; the
    gradients of those that train accumulate into `grads`.
    """

    expert: int
    params: Tensor
    grads: Tensor
    leaves: dict[str, Tensor]

    @classmethod
    def build(cls, expert: int, like: Mapping[str, Tensor], params: Tensor, grads: Tensor) -> Replica:
        """A replica of `expert` whose leaves have the shapes of `like` and train where those do."""
        shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in like.items()}
        return cls(expert, params, grads, leaves_in(params, grads, shapes))

    def vanish(self) -> None:
        """The step is over, and `params` and `grads` are about to be others'."""

    def collect_grads(self) -> None:
        """Make sure `grads` holds what autograd accumulated, also where it replaced `.grad` by a new tensor."""
        base = 0
        for leaf in self.leaves.values():
            if not leaf.requires_grad:
                continue
            n = leaf.numel()
            view = self.grads[base : base + n]
            if view.dtype != leaf.dtype:  # of several dtypes the sums run in the widest
                if leaf.grad is not None:
                    view.add_(leaf.grad.reshape(-1))
                    leaf.grad = None
            elif leaf.grad is not None and leaf.grad.data_ptr() != view.data_ptr():
                view.copy_(leaf.grad.reshape(-1))
                leaf.grad = view.view(leaf.shape)
            base += n


def leaves_in(
    params: Tensor, grads: Tensor, shapes: Mapping[str, tuple[Sequence[int], torch.dtype, bool]]
) -> dict[str, Tensor]:
    """Views of flat `params` [P] by name, one behind the other; their gradients accumulate into `grads` [G].

    shapes: of each, its shape, its dtype, and whether it trains. A gradient of another dtype than `grads` is kept
    apart.
    """
    leaves: dict[str, Tensor] = {}
    base = grad_base = 0
    for name, (shape, dtype, requires_grad) in shapes.items():
        n = math.prod(shape)
        size = n * dtype.itemsize // params.dtype.itemsize
        leaf = nn.Parameter(params[base : base + size].view(dtype).view(shape), requires_grad)
        base += size
        if requires_grad:
            if dtype == grads.dtype:
                leaf.grad = grads[grad_base : grad_base + n].view(shape)
            grad_base += n
        leaves[name] = leaf
    return leaves


class ReplicaPool:
    """Memory for replicas, shared by all layers of a model and bounded in bytes.

    Buffers are kept for reuse; `in_use_bytes` counts those lent out, `held_bytes` all that were ever allocated.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.in_use_bytes = 0
        self.held_bytes = 0
        self._free: dict[_Kind, list[tuple[Tensor, Tensor, bool]]] = {}

    def take(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        grad_numel: int | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Lend a flat buffer of `numel` parameters, and a zeroed one of as many gradients, or of `grad_numel`.

        Gradients have the parameters' dtype, or `grad_dtype`.
        """
        kind = (numel, dtype, numel if grad_numel is None else grad_numel, grad_dtype or dtype, device)
        free = self._free.setdefault(kind, [])
        size = _pair_bytes(kind)
        self._check_budget(size)
        if free:
            params, grads, zeroed = free.pop()
            if not zeroed:
                grads.zero_()
        else:
            self._make_room(size)
            params = torch.empty(numel, dtype=dtype, device=device)
            grads = torch.zeros(kind[2], dtype=kind[3], device=device)
            self.held_bytes += size
        self.in_use_bytes += size
        return params, grads

    def release(self, params: Tensor) -> None:
        """Free a lent parameter buffer's memory; the tensor and its views stay, empty until `restore`."""
        params.untyped_storage().resize_(0)
        self.in_use_bytes -= params.nbytes
        self.held_bytes -= params.nbytes

    def restore(self, params: Tensor) -> None:
        """Give a released parameter buffer its memory back; what is in it is undefined."""
        self._check_budget(params.nbytes)
        self._make_room(params.nbytes)
        params.untyped_storage().resize_(params.nbytes)
        self.in_use_bytes += params.nbytes
        self.held_bytes += params.nbytes

    def give(self, params: Tensor, grads: Tensor, *, zeroed: bool = False) -> None:
        """Take buffers back; `zeroed` says that every gradient is zero, and saves doing so when they are lent again."""
        if params.numel() and not params.untyped_storage().size():
            # the parameters are gone already, and half a pair is of no use
            self.in_use_bytes -= grads.nbytes
            self.held_bytes -= grads.nbytes
            return
        kind = (params.numel(), params.dtype, grads.numel(), grads.dtype, params.device)
        self._free[kind].append((params, grads, zeroed))
        self.in_use_bytes -= _pair_bytes(kind)

    def _check_budget(self, size: int) -> None:
        if self.budget_bytes is not None and self.in_use_bytes + size > self.budget_bytes:
            raise ReplicaMemoryError(
                f"a replica needs {size} bytes, but {self.in_use_bytes} of the budget's {self.budget_bytes} are in use"
            )

    def _make_room(self, size: int) -> None:
        """Drop free buffers of other sizes where keeping them would exceed the budget."""
        if self.budget_bytes is None:
            return
        for kind, buffers in self._free.items():
            while buffers and self.held_bytes + size > self.budget_bytes:
                buffers.pop()
                self.held_bytes -= _pair_bytes(kind)


_Kind = tuple[int, torch.dtype, int, torch.dtype, torch.device]  # of parameters, and of gradients: how many, and what


def _pair_bytes(kind: _Kind) -> int:
    return kind[0] * kind[1].itemsize + kind[2] * kind[3].itemsize
