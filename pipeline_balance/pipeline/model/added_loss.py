"""A layer's own loss, added to the model's: so a layer in the middle of a model can have one.

A pipeline's loss is a mean over labels, computed per microbatch. A layer's own loss is a mean over its microbatch, so
it counts with the microbatch's share of the labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class AddedLosses:
    """What layers have added while this was in force.

    Attributes:
        weight: By how much their gradients count.
        values: The losses themselves, detached.
    """

    weight: float
    values: list[Tensor] = field(default_factory=list)


_in_force: list[AddedLosses] = []


@contextmanager
def added_losses(weight: float) -> Iterator[AddedLosses]:
    """Inside, `add_loss` counts `weight` times."""
    found = AddedLosses(weight)
    _in_force.append(found)
    try:
        yield found
    finally:
        _in_force.pop()


class _AddLoss(torch.autograd.Function):
    """Hands x on; in backward, the loss gets the weight as its gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight  # type: ignore[attr-defined]
        # x itself goes on unchanged: the function is there for its backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        # the loss is no part of the output, so nothing comes back to it: its gradient is how much it counts
        return grad, torch.full((), ctx.weight, dtype=grad.dtype, device=grad.device), None  # type: ignore[attr-defined]


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x, with the scalar `loss`, a mean over the microbatch, added to what training minimises.

    Outside a pipeline it counts once, like a loss on which `backward` is called.
    """
    if _in_force:
        # detached: the value is only reported, its gradient flows through `_AddLoss`
        _in_force[-1].values.append(loss.detach())
    weight = _in_force[-1].weight if _in_force else 1.0
    result: Tensor = _AddLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return result
