"""What ranks send to each other in a transition: streams, the chunks that they are cut into, and the round of each.

Shape legend: W waves. A stream is all that one rank sends to another and that has been sent equally often before. It
goes wave by wave; a safe transition has one wave. All of this is found from the route and the window, so both ends of a
stream cut it alike, and put each chunk into the same round, without a word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prophet.errors import BudgetError
from prophet.spec import IntArray
from prophet.state.route import Route, Transfer
from prophet.state.space import Box, Space, TensorSpec, flat_boxes

# Measured on four hosts, gloo, links of 200 Mbit/s, 8 MiB through the busiest port: seconds over that port's, medians
# of three. All move two layers to the next rank: 32 KiB take 1.19 with one round under way and 1.09 to 1.11 with
# more, 128 KiB to 2 MiB take 1.07 to 1.09 at any depth. One rank's state goes to three: 32 KiB take 1.10 to 1.12, 128
# KiB 1.11 to 1.14, 2 MiB 1.14 to 1.16.
CHUNK_BYTES = 2 << 20  # a message takes its time whatever it carries, where links are fast more than the bytes do
SMALL_CHUNK_BYTES = 128 << 10  # above this, memory is better spent on rounds than on their size
DEPTH = 4  # rounds under way
FORWARDED_CHUNKS = 16  # of the longest stream, at least: the first of them is sent on while the others come

StreamKey = tuple[int, int]
"""The peer, and how often it has been sent before."""


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The tensor's element type in torch; TypeError where it has none."""
    dtype = getattr(torch, spec.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{spec.dtype} is no element type of torch")
    return dtype


class Part(NamedTuple):
    """Elements first .. last-1 of a transfer's box, in that order."""

    transfer: Transfer
    spec: TensorSpec
    first: int
    last: int

    def boxes(self) -> list[Box]:
        """The boxes that hold these elements."""
        box = self.transfer.box
        if self.last - self.first == box.elements:
            return [box]
        return [b.shift(box.start) for b in flat_boxes(box.shape, self.first, self.last)]


@dataclass(frozen=True)
class Chunk:
    """What one message carries. Its `parts` are all there before anything else is asked for."""

    wave: int
    parts: list[Part]

    @cached_property
    def n_bytes(self) -> int:
        return sum((p.last - p.first) * p.spec.item_bytes for p in self.parts)

    @cached_property
    def cuts(self) -> list[tuple[str, Box, int, int, torch.dtype]]:
        """Boxes with the bytes first .. last-1 of the message that carry them, and their element type."""
        found: list[tuple[str, Box, int, int, torch.dtype]] = []
        offset = 0
        for part in self.parts:
            for box in part.boxes():
                stop = offset + box.elements * part.spec.item_bytes
                found.append((part.transfer.name, box, offset, stop, torch_dtype(part.spec)))
                offset = stop
        return found

    def views(self, memory: Tensor) -> Iterable[tuple[str, Box, Tensor]]:
        """Boxes, and their elements within the memory that carries the chunk."""
        for name, box, first, last, dtype in self.cuts:
            yield name, box, memory[first:last].view(dtype).view(box.shape)


@dataclass(frozen=True)
class Measures:
    """Of all ranks: most streams of one, bytes of the widest element that travels, of every wave's longest stream [W].

    hops: how often a byte is sent at most before it is where it belongs.
    """

    number: int
    widest: int
    longest: tuple[int, ...]
    hops: int = 0

    @classmethod
    def of(cls, route: Route, waves: IntArray | None) -> Measures:
        """`waves` [tensors] is the wave of every tensor; None: there is one."""
        keys, n_bytes = route.streams(waves)
        many = 1 if waves is None else int(waves.max(initial=0)) + 1
        longest = np.zeros(many, np.int64)
        np.maximum.at(longest, keys[:, 3], n_bytes)
        ends = np.unique(keys[:, :3], axis=0)
        number = np.bincount(ends[:, 0], minlength=route.ranks) + np.bincount(ends[:, 1], minlength=route.ranks)
        hops = int(keys[:, 2].max(initial=-1)) + 1
        return cls(int(number.max()), route.widest_item_bytes(), tuple(longest.tolist()), hops)


@dataclass(frozen=True)
class Window:
    """What all ranks agree on: bytes of a chunk and of its place in the buffer, rounds of every wave, those under way.

    Wave w goes in rounds starts[w] .. starts[w + 1] - 1; what is forwarded may come later.
    """

    chunk_bytes: int
    slot_bytes: int
    starts: tuple[int, ...]
    depth: int


_ALIGNED = 16  # bytes; no element is wider


def window_of(budget: int, chunk: int, depth: int, of: Measures) -> Window:
    """The largest chunks of which a few rounds fit the streams of every rank, then the most rounds that fit.

    A smaller budget or chunk never makes a larger slot. Raises `BudgetError` where one element for each stream does not
    fit.
    """
    if min(budget, chunk, depth) < 1:
        raise BudgetError(f"budget, chunk and depth must be at least one, got {budget}, {chunk} and {depth}")
    longest = max(of.longest)
    if not longest:
        return Window(chunk, 0, (0,) * (len(of.longest) + 1), 1)
    wish, fair = chunk, budget // of.number
    chunk = min(chunk, max(fair // DEPTH, SMALL_CHUNK_BYTES))
    if of.hops > 1:
        chunk = min(chunk, max(longest // FORWARDED_CHUNKS, SMALL_CHUNK_BYTES))
    slot = min(_aligned(chunk), _aligned(longest), fair)
    slot = slot // _ALIGNED * _ALIGNED or slot // of.widest * of.widest
    chunk = min(chunk, slot) // of.widest * of.widest  # wider elements come first, so all chunks but a last are full
    if not chunk:
        raise BudgetError(
            f"a budget of {budget} bytes in chunks of {wish} cannot hold one element of {of.widest} bytes for each "
            f"of {of.number} streams to and from peers"
        )
    starts = [0]
    for n_bytes in of.longest:
        starts.append(starts[-1] - (-n_bytes // chunk))
    return Window(chunk, slot, tuple(starts), max(min(depth, starts[-1], budget // (of.number * slot)), 1))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Streams:
    """What one rank sends and receives, by peer and how often it was sent before."""

    sends: Mapping[StreamKey, list[Transfer]]
    receives: Mapping[StreamKey, list[Transfer]]
    out_bytes: Mapping[int, int]
    in_bytes: int

    @classmethod
    def of(cls, route: Route, rank: int) -> Streams:
        sends, receives = sends_of(route, rank), receives_of(route, rank)
        sizes: dict[int, int] = defaultdict(int)
        for (peer, _), stream in sends.items():
            sizes[peer] += sum(map(route.n_bytes, stream))
        return cls(sends, receives, dict(sizes), sum(route.n_bytes(t) for row in receives.values() for t in row))

    @property
    def number(self) -> int:
        return len(self.sends) + len(self.receives)


def sends_of(route: Route, rank: int) -> dict[StreamKey, list[Transfer]]:
    """The streams that leave `rank`."""
    return _gathered((t.destination, t.hop, t) for t in route.sends(rank))


def receives_of(route: Route, rank: int) -> dict[StreamKey, list[Transfer]]:
    """The streams that come to `rank`."""
    return _gathered((t.source, t.hop, t) for t in route.receives(rank))


def _gathered(transfers: Iterable[tuple[int, int, Transfer]]) -> dict[StreamKey, list[Transfer]]:
    found: dict[StreamKey, list[Transfer]] = {}
    for peer, hop, transfer in transfers:
        found.setdefault((peer, hop), []).append(transfer)
    return dict(sorted(found.items()))  # what two ranks send each other in one round goes by hop


def chunks_of(space: Space, stream: Sequence[Transfer], chunk_bytes: int, waves: IntArray | None = None) -> list[Chunk]:
    """The stream cut into chunks of at most `chunk_bytes`, wave by wave, its widest elements first: none needs padding.

    Alike at both ends.
    """

    def place(t: Transfer) -> tuple[int, int]:
        number = space.number[t.name]
        return 0 if waves is None else int(waves[number]), -space.tensors[number].item_bytes

    chunks: list[Chunk] = []
    left = 0
    for t in sorted(stream, key=place):
        spec, wave = space[t.name], place(t)[0]
        first, total = 0, t.box.elements
        while first < total:
            if left < spec.item_bytes or chunks[-1].wave != wave:
                chunks.append(Chunk(wave, []))
                left = chunk_bytes
            last = min(total, first + left // spec.item_bytes)
            chunks[-1].parts.append(Part(t, spec, first, last))
            left -= (last - first) * spec.item_bytes
            first = last
    return chunks


class Timetable:
    """The round of every chunk: those of a stream spread evenly over their wave's rounds.

    What is sent on goes once the round that brings it has ended: `depth` rounds later, since a rank ends that one
    before it begins this one. So every rank gets to its next round, whatever the others do.
    """

    def __init__(self, route: Route, window: Window, waves: IntArray | None) -> None:
        self.route, self.window, self.waves = route, window, waves
        self._arrivals: dict[tuple[int, int], dict[tuple[str, Box], tuple[list[int], list[int]]]] = {}
        self._received: dict[int, dict[StreamKey, list[Transfer]]] = {}

    def rounds(self, source: int, hop: int, stream: Sequence[Transfer]) -> list[tuple[int, Chunk]]:
        """The chunks of a stream that leaves `source`, each with its round; they ascend."""
        chunks = chunks_of(self.route.space, stream, self.window.chunk_bytes, self.waves)
        many: dict[int, int] = defaultdict(int)
        for chunk in chunks:
            many[chunk.wave] += 1
        found: list[tuple[int, Chunk]] = []
        seen: dict[int, int] = defaultdict(int)
        before = -1
        for chunk in chunks:
            start, stop = self.window.starts[chunk.wave], self.window.starts[chunk.wave + 1]
            number = start + seen[chunk.wave] * (stop - start) // many[chunk.wave]
            seen[chunk.wave] += 1
            if hop:
                number = max(number, before + 1, self._there(source, hop - 1, chunk) + self.window.depth)
            before = number
            found.append((number, chunk))
        return found

    def _there(self, rank: int, hop: int, chunk: Chunk) -> int:
        """The round that brings `rank` the last of what the chunk holds."""
        arrivals = self._arriving(rank, hop)
        last = 0
        for part in chunk.parts:
            ends, rounds = arrivals[part.transfer.name, part.transfer.box]
            last = max(last, rounds[bisect_left(ends, part.last)])
        return last

    def _arriving(self, rank: int, hop: int) -> dict[tuple[str, Box], tuple[list[int], list[int]]]:
        """When what comes to `rank` after `hop` others is there: up to which element, in which round."""
        if (rank, hop) not in self._arrivals:
            if rank not in self._received:
                self._received[rank] = receives_of(self.route, rank)
            found: dict[tuple[str, Box], tuple[list[int], list[int]]] = {}
            for (source, times), stream in self._received[rank].items():
                for number, chunk in self.rounds(source, hop, stream) if times == hop else ():
                    for part in chunk.parts:
                        ends, rounds = found.setdefault((part.transfer.name, part.transfer.box), ([], []))
                        ends.append(part.last)
                        rounds.append(number)
            self._arrivals[rank, hop] = found
        return self._arrivals[rank, hop]
