"""Large tensors in stretches of their elements: what is done here needs no copy of a whole one.

Elements are counted in a tensor's logical order, whatever its strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Float64 of one part of so many takes at most 1/8 of what a gradient in sixteen bits takes
_PARTS = 32
# Elements of a part at least, 1 MiB in float64: many small operators would take longer than the memory is worth
_LEAST_PART = 1 << 17


def stretches(x: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield views that together are the elements from `start` to `stop` of `x`, in order.

    Args:
        x: Any tensor; of one that is not contiguous there are several views.
        start: First element.
        stop: End of the elements.
    """
    if start >= stop:
        return
    if x.is_contiguous():
        yield x.view(-1)[start:stop]
        return
    row = x.numel() // len(x)
    # The rows that are whole
    first, last = -(-start // row), stop // row
    if first > last:
        yield from stretches(x[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from stretches(x[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield x[first:last]
    if last * row < stop:
        yield from stretches(x[last], 0, stop - last * row)


def in_parts(x: Tensor) -> Iterator[Tensor]:
    """Yield views that together are `x`. In float64 a large one takes at most 1/8 of the bytes of `x` in bfloat16."""
    # By its own size alone: ranks that share a tensor have to cut it alike
    each = max(_LEAST_PART, x.numel() // _PARTS)
    for start in range(0, x.numel(), each):
        yield from stretches(x, start, min(start + each, x.numel()))


def sum_of_powers(x: Tensor, power: float) -> Tensor:
    """Sum the powers of the absolute values of `x` in float64, or take the largest; without a float64 copy of it.

    Args:
        x: Any tensor of real numbers, also a sparse one.
        power: A positive number; infinity for the largest value.

    Returns:
        A float64 scalar on the device of `x`; 0 without elements.
    """
    own = x.detach()
    if own.is_sparse:
        own = own.coalesce().values()
    # Copies in any case, since they are written to
    found = [_figure(part.to(torch.float64, copy=True), power) for part in in_parts(own)]
    if not found:
        return x.new_zeros((), dtype=torch.float64)
    figures = torch.stack(found)
    return figures.amax() if power == math.inf else figures.sum()


def _figure(own: Tensor, power: float) -> Tensor:
    if power == math.inf:
        return own.abs_().amax()
    return own.square_().sum() if power == 2 else own.abs_().pow_(power).sum()
