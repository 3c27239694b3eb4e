"""torch's attention for CPUs, with the log-sum-exp that merging needs, and what its calls are given.

Shape legend: B sequences, T tokens of a slice, S tokens of a part of its prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# called directly: the public function returns no log-sum-exp
forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores [B, 1, T, S]: zero, or -inf where a token is not seen [B, T, S]."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


def without_blind(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The log-sum-exp [B, Hq, T], of nothing where a token sees nothing: the kernel says 0 there."""
    return lse if mask is None else lse.masked_fill(torch.isinf(mask).all(dim=-1), float("-inf"))


def half_of(place: tuple[int, int], piece: int) -> tuple[int, int]:
    """Where one of the two pieces of a chunk is, whose tokens are `place`; pieces of chunk c are 2c and 2c + 1."""
    start, stop = place
    middle = start + (stop - start) // 2
    return (middle, stop) if piece % 2 else (start, middle)


@dataclass(frozen=True, slots=True)
class Heads:
    """What one attention of a model is like, whatever the batch.

    Attributes:
        queries: How many query heads.
        keys: How many key heads.
        width: Head dim.
        dtype: Of all of them.
        scale: Of scores.
    """

    queries: int
    keys: int
    width: int
    dtype: torch.dtype
    scale: float

    @property
    def wide(self) -> torch.dtype:
        """In which sums are formed."""
        return torch.promote_types(self.dtype, torch.float32)


# a stack: a trace may cause another one
_tracing: list[list[Heads]] = []


@contextmanager
def tracing() -> Iterator[list[Heads]]:
    """Within this context attentions whose shapes are asked for are noted in what it yields."""
    _tracing.append([])
    try:
        yield _tracing[-1]
    finally:
        _tracing.pop()


def note(query: Tensor, key: Tensor, scale: float) -> None:
    """Somebody asks for the shapes of an attention.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        scale: Of scores.
    """
    for noted in _tracing[-1:]:
        noted.append(Heads(query.shape[1], key.shape[1], query.shape[-1], query.dtype, scale))


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one message, those with the widest numbers first."""
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])


Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor that comes in a message."""


def bytes_of(likes: Sequence[Like]) -> int:
    """What a message takes."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in likes)


def unpacked(message: Tensor, likes: Sequence[Like]) -> list[Tensor]:
    """Reverse of `packed`."""
    parts = message.split([bytes_of([like]) for like in likes])
    return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, likes, strict=True)]
