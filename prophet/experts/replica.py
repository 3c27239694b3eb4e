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

    Attributes:
        expert: Its number among all.
        params: Flat parameters [P].
        grads: Flat gradients [G] of those that train, which accumulate here.
        leaves: Views of `params` by the parameters' names, in their order.
    """

    expert: int
    params: Tensor
    grads: Tensor
    leaves: dict[str, Tensor]

    @classmethod
    def build(cls, expert: int, like: Mapping[str, Tensor], params: Tensor, grads: Tensor) -> Replica:
        """Make a replica whose leaves have the shapes of `like` and train where those do.

        Args:
            expert: Its number among all.
            like: One expert's parameters by name, in the order of the flat vector.
            params: Flat parameters [P].
            grads: Flat gradients [G].
        """
        shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in like.items()}
        return cls(expert, params, grads, leaves_in(params, grads, shapes))

    def vanish(self) -> None:
        """Let go of `params` and `grads`, which are about to be others': the step is over."""

    def collect_grads(self) -> None:
        """Make sure that `grads` holds what autograd accumulated, also where it replaced `.grad` by a new tensor."""
        base = 0
        for leaf in self.leaves.values():
            if not leaf.requires_grad:
                continue
            n = leaf.numel()
            view = self.grads[base : base + n]
            # `grads` of several dtypes is in the widest, and autograd takes a `.grad` of the leaf's only: summed here
            if view.dtype != leaf.dtype:
                if leaf.grad is not None:
                    view.add_(leaf.grad.reshape(-1))
                    leaf.grad = None
            # autograd, or a hook of the user's, may have put another tensor in place of the view
            elif leaf.grad is not None and leaf.grad.data_ptr() != view.data_ptr():
                view.copy_(leaf.grad.reshape(-1))
                leaf.grad = view.view(leaf.shape)
            base += n


def leaves_in(
    params: Tensor, grads: Tensor, shapes: Mapping[str, tuple[Sequence[int], torch.dtype, bool]]
) -> dict[str, Tensor]:
    """Return views of flat parameters by name, one behind the other, as leaves of autograd.

    A gradient of another dtype than `grads` is kept apart, until `Replica.collect_grads`.

    Args:
        params: Flat parameters [P].
        grads: Flat gradients [G], into which the leaves' gradients accumulate.
        shapes: By name, in order: shape, dtype, and whether the parameter trains.
    """
    leaves: dict[str, Tensor] = {}
    base = grad_base = 0
    for name, (shape, dtype, requires_grad) in shapes.items():
        n = math.prod(shape)
        # `params` is in bytes where the parameters have several dtypes
        size = n * dtype.itemsize // params.dtype.itemsize
        leaf = nn.Parameter(params[base : base + size].view(dtype).view(shape), requires_grad)
        base += size
        if requires_grad:
            if dtype == grads.dtype:
                # autograd adds in place to a gradient that is there: what Agg sends is summed without a copy
                leaf.grad = grads[grad_base : grad_base + n].view(shape)
            grad_base += n
        leaves[name] = leaf
    return leaves


class ReplicaPool:
    """Memory for replicas, shared by all layers of a model and bounded in bytes.

    Buffers are kept for reuse.

    Args:
        budget_bytes: Most bytes in use at a time; None for no limit.

    Attributes:
        in_use_bytes: Bytes lent out.
        held_bytes: Bytes of all buffers, lent out or kept.
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
        """Lend a flat buffer of parameters, with undefined values, and a zeroed one of gradients.

        Args:
            numel: Elements of parameters.
            dtype: Of the parameters.
            device: Of both.
            grad_numel: Elements of gradients; None for as many.
            grad_dtype: Of the gradients; None for the parameters'.

        Raises:
            ReplicaMemoryError: The budget does not allow it.
        """
        kind = (numel, dtype, numel if grad_numel is None else grad_numel, grad_dtype or dtype, device)
        free = self._free.setdefault(kind, [])
        size = _pair_bytes(kind)
        # before a kept buffer is lent as well: the budget bounds what is in use
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
        # through the storage: leaves and saved tensors of the graph are views of it, and stay valid objects
        params.untyped_storage().resize_(0)
        self.in_use_bytes -= params.nbytes
        self.held_bytes -= params.nbytes

    def restore(self, params: Tensor) -> None:
        """Give a released parameter buffer its memory back; its values are undefined."""
        self._check_budget(params.nbytes)
        self._make_room(params.nbytes)
        params.untyped_storage().resize_(params.nbytes)
        self.in_use_bytes += params.nbytes
        self.held_bytes += params.nbytes

    def give(self, params: Tensor, grads: Tensor, *, zeroed: bool = False) -> None:
        """Take buffers back.

        Args:
            params: What `take` has lent, or `release` has emptied.
            grads: What `take` has lent with it.
            zeroed: Whether every gradient is zero, which saves zeroing when they are lent again.
        """
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
            # only as many as needed: another layer may lend this size again in the same step
            while buffers and self.held_bytes + size > self.budget_bytes:
                buffers.pop()
                self.held_bytes -= _pair_bytes(kind)


# of parameters, and of gradients: how many, and of which dtype; then the device
_Kind = tuple[int, torch.dtype, int, torch.dtype, torch.device]


def _pair_bytes(kind: _Kind) -> int:
    return kind[0] * kind[1].itemsize + kind[2] * kind[3].itemsize
