"""Memory of a layer's keys and values, in which the tokens of a microbatch lie side by side.

Shape legend: B sequences, H heads, T tokens, D head dim. Slices come one behind another and go in reverse, while those
of the next microbatch come. A slice is put next to the others of its microbatch, before them or behind: where nothing
hides a token, their order does not matter to attention. So what one microbatch gives up the next one takes, and slices
of equal length need no more than the most tokens that are there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


class Room:
    """Keys [B, H, tokens, D] and values of one layer, as long as needed: a head's tokens lie side by side.

    A place is the tokens `start` to `stop`, and nobody else's until it is given back. `grown` counts how often the
    memory had to be made longer.
    """

    def __init__(self) -> None:
        self.grown = 0
        self._tensors: tuple[Tensor, ...] = ()
        # Places, in ascending order
        self._taken: list[tuple[int, int]] = []
        # Tokens needed since the last `trim`
        self._most = 0

    @property
    def n_bytes(self) -> int:
        """What the tensors take."""
        return sum(t.nbytes for t in self._tensors)

    @property
    def used_bytes(self) -> int:
        """What the places take."""
        return sum(b - a for a, b in self._taken) * sum(t[:, :, :1].nbytes for t in self._tensors)

    def take(self, near: tuple[int, int] | None, *given: Tensor) -> tuple[int, int]:
        """A place with copies of a slice's keys and values.

        It adjoins `near`, if there is room. If not, it is in any gap that is long enough, or else at the end.

        Args:
            near: From the first to the last token of its microbatch's places; None: it is the first.
            *given: Keys and values, each [B, H, T, D].
        """
        tokens = given[0].shape[2]
        start = self._find(near, tokens)
        place = start, start + tokens
        self._taken = sorted([*self._taken, place])
        self._most = max(self._most, self._taken[-1][1])
        self._lengthen(given)
        for mine, tensor in zip(self.tokens(*place), given, strict=True):
            # the layer may reuse its tensors; the copy outlives them
            mine.copy_(tensor.detach())
        return place

    def tokens(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Keys and values there, [B, H, stop - start, D]. The next `take` may make them stale."""
        return tuple(t[:, :, start:stop] for t in self._tensors)

    def give(self, place: tuple[int, int]) -> None:
        """Give a place back."""
        self._taken.remove(place)

    def fits(self, *given: Tensor) -> bool:
        """Whether such keys and values can be kept here: as many sequences, heads and so on as those that are there."""
        return not self._tensors or all(
            (t.shape[0], t.shape[1], t.shape[3], t.dtype, t.device)
            == (g.shape[0], g.shape[1], g.shape[3], g.dtype, g.device)
            for t, g in zip(self._tensors, given, strict=True)
        )

    def trim(self) -> None:
        """Nothing is kept here now: let go of what has not been needed since the last call."""
        self._taken.clear()
        if self._tensors and self._most < self._tensors[0].shape[2]:
            self._tensors = tuple(_like(t, self._most) for t in self._tensors) if self._most else ()
        self._most = 0

    def _find(self, near: tuple[int, int] | None, tokens: int) -> int:
        """Where a place of so many tokens begins."""
        gaps = [(a, b) for a, b in self._gaps() if b - a >= tokens]
        if near is not None:
            for a, b in gaps:
                # behind the microbatch's places, or in front of them: then they can be read as one
                if a == near[1]:
                    return a
                if b == near[0]:
                    return b - tokens
        # the first gap keeps the memory short
        return gaps[0][0] if gaps else self._taken[-1][1] if self._taken else 0

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Between places, before the first and behind the last one."""
        length = self._tensors[0].shape[2] if self._tensors else 0
        for (_, a), (b, _) in pairwise([(0, 0), *self._taken, (length, length)]):
            if a < b:
                yield a, b

    def _lengthen(self, given: tuple[Tensor, ...]) -> None:
        before = self._tensors or tuple(g.new_empty((*g.shape[:2], 0, g.shape[3])) for g in given)
        if self._most > (length := before[0].shape[2]):
            self._tensors = tuple(_like(t, self._most) for t in before)
            for new, old in zip(self._tensors, before, strict=True):
                new[:, :, :length] = old
            self.grown += 1


def _like(tensor: Tensor, tokens: int) -> Tensor:
    return torch.empty((*tensor.shape[:2], tokens, tensor.shape[3]), dtype=tensor.dtype, device=tensor.device)
