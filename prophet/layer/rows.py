"""Rows that several ranks are given alike: each takes a part of them, and all get all answers.

Between the two functions the ranks are as data-parallel ranks are. Each one's gradients are those of its part times
their number, so that the mean over the ranks is the gradient of all rows. In front and behind, gradients are whole.

Shape legend: N rows, R ranks, P rows of a part, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation


def part_of(rows: int, ranks: Collective) -> slice:
    """Return this rank's part of so many rows: all of ceil(N / R), the last ones shorter or empty."""
    # rounded up, so that only the last parts are short and one length serves the all-gather
    size = -(-rows // ranks.size)
    return slice(min(ranks.rank * size, rows), min((ranks.rank + 1) * size, rows))


def take(x: Tensor, ranks: Collective, name: str) -> Tensor:
    """Return this rank's part of rows that all ranks have; collective in the backward pass.

    Args:
        x: Rows [N, D], equal on all ranks.
        ranks: The ranks that share them.
        name: Name of the exchange, for messages.

    Returns:
        A part [P, D], a copy.
    """
    out: Tensor = _Take.apply(x, ranks, name)  # type: ignore[no-untyped-call]
    return out


def gather(part: Tensor, rows: int, ranks: Collective, name: str) -> Tensor:
    """Return the parts of all ranks together; collective.

    Args:
        part: This rank's part [P, D].
        rows: N, of all parts together.
        ranks: The ranks that share the rows.
        name: Name of the exchange, for messages.

    Returns:
        Rows [N, D], equal on all ranks.
    """
    out: Tensor = _Gather.apply(part, rows, ranks, name)  # type: ignore[no-untyped-call]
    return out


def _together(part: Tensor, rows: int, ranks: Collective, name: str) -> Tensor:
    size = -(-rows // ranks.size)
    # an all-gather takes one length: short parts are padded, and the padding is cut off at the end
    padded = part if len(part) == size else torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])
    return ranks.all_gather(padded, op=Operation(name)).flatten(0, 1)[:rows]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Collective, name: str) -> Tensor:
        ctx.given = (len(x), ranks, name)
        # a copy, so that the whole of `x` does not stay in memory through a view
        return x[part_of(len(x), ranks)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ranks, name = ctx.given
        # in between gradients count R times (see above); in front of it they are whole again
        return _together(grads[0], rows, ranks, f"{name} backward") / ranks.size, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: int, ranks: Collective, name: str) -> Tensor:
        ctx.given = (rows, ranks)
        return _together(part, rows, ranks, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ranks = ctx.given
        # every rank has the whole gradient; R times its part, so that the mean over ranks is right
        return grads[0][part_of(rows, ranks)] * ranks.size, None, None, None
