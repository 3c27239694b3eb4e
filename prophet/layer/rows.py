"""Rows that several ranks are given alike: each takes a part of them, and all get all answers.

Between the two functions the ranks are as data-parallel ranks are: each one's gradients are those of its part times
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
    """This rank's part of so many rows: all of ceil(N / R), the last ones shorter or empty."""
    size = -(-rows // ranks.size)
    return slice(min(ranks.rank * size, rows), min((ranks.rank + 1) * size, rows))


def take(x: Tensor, ranks: Collective, name: str) -> Tensor:
    """This rank's part [P, D] of `x` [N, D], which all have; collective in the backward pass. `name`: in messages."""
    out: Tensor = _Take.apply(x, ranks, name)  # type: ignore[no-untyped-call]
    return out


def gather(part: Tensor, rows: int, ranks: Collective, name: str) -> Tensor:
    """All parts together [N, D], on every rank; collective. `name`: in messages."""
    out: Tensor = _Gather.apply(part, rows, ranks, name)  # type: ignore[no-untyped-call]
    return out


def _together(part: Tensor, rows: int, ranks: Collective, name: str) -> Tensor:
    size = -(-rows // ranks.size)
    padded = part if len(part) == size else torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])
    return ranks.all_gather(padded, op=Operation(name)).flatten(0, 1)[:rows]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Collective, name: str) -> Tensor:
        ctx.given = (len(x), ranks, name)
        return x[part_of(len(x), ranks)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ranks, name = ctx.given
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
        return grads[0][part_of(rows, ranks)] * ranks.size, None, None, None
