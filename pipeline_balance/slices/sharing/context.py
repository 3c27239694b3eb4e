"""Slices whose tokens are shared over ranks: queries and outputs travel, keys and values stay (SlimPipe, Section 5).

A slice is cut into 2c equal parts, and rank i of a group of c has parts i and 2c - 1 - i. So each rank has as much of
the slice's own triangle as any other, and an equal share of all chunks before it. A rank keeps the keys and values of
its own tokens. It computes the attention of all ranks' queries to these, and gets back what others find for its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pipeline_balance.slices import kernel
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

Ranges = tuple[tuple[int, int], ...]
"""First tokens, and those behind the last ones, of parts of a sequence, in order."""


class Context:
    """The ranks that share every slice's tokens.

    Tensors of all ranks' tokens have this rank's ahead, then those of `others`, along the third dimension.

    Attributes:
        rank: This rank's number in the group.
        size: c.
        others: All other ranks, beginning with the next one.

    Args:
        collective: Over them; nothing else may use its channel "tokens".
    """

    def __init__(self, collective: Collective) -> None:
        self._collective, self.rank, self.size = collective, collective.rank, collective.size
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]

    def gather(self, tensors: Sequence[Tensor], layer: int) -> list[Tensor]:
        """Tensors of this rank's tokens, those with the widest numbers first, as tensors of all ranks' tokens.

        Args:
            tensors: [B, Hq, T, ...]; shapes and types are the same on all ranks.
            layer: For errors.
        """
        every = [tensors, *self._swapped([kernel.packed(tensors)] * len(self.others), tensors, layer)]
        return [torch.cat(some, dim=2) for some in zip(*every, strict=True)]

    def give(self, tensors: Sequence[Tensor], layer: int) -> Iterator[list[Tensor]]:
        """What every other rank has found for this one's tokens, once it has what was found here for its own.

        Args:
            tensors: Of all ranks' tokens, those with the widest numbers first.
            layer: For errors.
        """
        mine, *theirs = zip(*(t.chunk(self.size, dim=2) for t in tensors), strict=True)
        return self._swapped([kernel.packed(its) for its in theirs], mine, layer)

    def _swapped(self, messages: Sequence[Tensor], like: Sequence[Tensor], layer: int) -> Iterator[list[Tensor]]:
        """Send a message to each of `others`; what has come from each, once it has.

        Args:
            messages: For the others.
            like: Tensors of the shapes and types that a message has, here and there.
            layer: For errors.
        """
        likes: list[kernel.Like] = [(tuple(t.shape), t.dtype) for t in like]
        come = [torch.empty_like(message) for message in messages]
        op, exchange = Operation("shared slices", layer), self._collective.exchange
        under_way = [
            exchange([(rank, message)], [(rank, buffer)], op=op, channel="tokens")
            for rank, message, buffer in zip(self.others, messages, come, strict=True)
        ]

        def arrived() -> Iterator[list[Tensor]]:
            for pending, buffer in zip(under_way, come, strict=True):
                pending.wait()
                yield kernel.unpacked(buffer, likes)

        return arrived()

    def rectangles(self, tokens: int) -> Iterator[tuple[slice, slice]]:
        """Which of all ranks' tokens see which tokens of the same slice on this rank, apart from its own triangle.

        Args:
            tokens: T, those of the slice on each rank.
        """
        half = tokens // 2
        for number, rank in enumerate(self.others, start=1):
            start, stop = number * tokens, (number + 1) * tokens
            # parts are in the order i < k < 2c - 1 - k < 2c - 1 - i, where i < k
            if rank < self.rank:
                yield slice(start + half, stop), slice(0, tokens)
            else:
                yield slice(start, stop), slice(0, half)


def ranges_of(start: int, stop: int, rank: int, ranks: int) -> Ranges:
    """The tokens that a rank has of a slice.

    Args:
        start: The slice's first token.
        stop: The token behind its last one.
        rank: The number of the rank in its group.
        ranks: c.
    """
    part = (stop - start) // (2 * ranks)
    return tuple((start + part * i, start + part * (i + 1)) for i in (rank, 2 * ranks - 1 - rank))


def check_lengths(starts: Sequence[int], ranks: int) -> None:
    """Raise `SpecError` unless the tokens of all slices can be shared.

    Args:
        starts: First tokens of the slices, and T, [N + 1].
        ranks: c.
    """
    lengths = sorted({b - a for a, b in pairwise(starts)})
    if any(length % (2 * ranks) for length in lengths):
        raise SpecError(
            f"context_parallel={ranks} cuts every slice into {2 * ranks} parts of equal length, and slices have "
            f"{', '.join(map(str, lengths))} tokens here: pad or cut sequences to a multiple of "
            f"{2 * ranks * (len(starts) - 1)} tokens"
        )


def taken(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The tokens of some ranges of a tensor, along a dimension; a view if there is one range.

    Args:
        tensor: Of a sequence or a slice.
        dim: That of its tokens.
        ranges: Which ones.
    """
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
