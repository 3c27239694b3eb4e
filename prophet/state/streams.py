"""What ranks send to each other in a transition: streams, the chunks that they are cut into, and the round of each.

Shape legend: W waves. A stream is all that one rank sends to another and that has been sent equally often before. It
goes wave by wave; a safe transition has one wave. All of this is found from the route and the window, so both ends of a
stream cut it alike, and put each chunk into the same round, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

import numpy as np
import torch
from torch import Tensor

from prophet.errors import BudgetError, LayoutError
from prophet.spec import BoolArray, IntArray
from prophet.state.layout import Layout, Piece
from prophet.state.route import Route
from prophet.state.space import TensorSpec
from prophet.state.table import distinct, flat_ranges, numbered, positions_of, starts, volumes, within

# Measured on four hosts, gloo, links of 200 Mbit/s, 8 MiB through the busiest port: seconds over that port's, medians
# of three. All move two layers to the next rank: 32 KiB take 1.19 with one round under way and 1.09 to 1.11 with
# more, 128 KiB to 2 MiB take 1.07 to 1.09 at any depth. One rank's state goes to three: 32 KiB take 1.10 to 1.12, 128
# KiB 1.11 to 1.14, 2 MiB 1.14 to 1.16.
# a message takes its time whatever it carries, where links are fast more than the bytes do
CHUNK_BYTES = 2 << 20
# above this, memory is better spent on rounds than on their size
SMALL_CHUNK_BYTES = 128 << 10
# Rounds in flight at once
DEPTH = 4
# A stream that is forwarded has at least so many chunks: the first of them is sent on while the others come
FORWARDED_CHUNKS = 16


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The tensor's element type in torch.

    Raises:
        TypeError: torch has none of this name.
    """
    dtype = getattr(torch, spec.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{spec.dtype} is no element type of torch")
    return dtype


Place = tuple[Piece, list[int], list[int]]
"""A box as it lies in a piece: where it begins there, and its shape."""


def views(places: Sequence[Place], state: Mapping[Piece, Tensor]) -> list[Tensor]:
    """The elements of every box, in the tensors of the state."""
    found = []
    for piece, low, shape in places:
        tensor = state[piece]
        steps = tensor.stride()
        # One call for each box instead of a slice per dimension: a chunk may hold thousands of small boxes
        found.append(tensor.as_strided(shape, steps, tensor.storage_offset() + sum(map(mul, low, steps))))
    return found


def placed(layout: Layout, rank: int, tensor: IntArray, low: IntArray, high: IntArray) -> list[Place]:
    """Find where boxes lie in the pieces of a rank.

    Args:
        layout: The layout of the pieces.
        rank: The rank.
        tensor: Tensor of every box, [M].
        low: Where every box begins, [M, D].
        high: Where it ends, [M, D].

    Raises:
        LayoutError: A box does not lie within one piece.
    """
    table, tensors, pieces = layout.table, layout.space.tensors, layout.listed(rank)
    box, at = table.meeting(rank, tensor, low, high)
    entry = table.on(rank)[at]
    if (
        # Each box meets one entry; two would mean that a box is cut over pieces, and none that it is elsewhere
        not np.array_equal(box, np.arange(len(tensor)))
        or (low < table.low[entry]).any()
        or (high > table.high[entry]).any()
    ):
        raise LayoutError(f"rank {rank} has no piece with all of a box that it sends or receives")
    # As lists, since reading single numbers out of numpy's arrays is slow
    columns = at.tolist(), (low - table.low[entry]).tolist(), (high - low).tolist(), tensor.tolist()
    found = []
    for k, begin, shape, t in zip(*columns, strict=True):
        dims = len(tensors[t].shape)
        found.append((pieces[k], begin[:dims], shape[:dims]))
    return found


Kept = Mapping[Piece, Sequence[tuple[Place, Place]]]
"""By new piece, what of it stays on its rank: where it lies in an old piece, and in the new one."""


def kept(route: Route, rank: int) -> Kept:
    """Find the boxes that stay on `rank` in another piece than before."""
    old, new = route.before.table, route.after.table
    entry = new.on(rank)
    box, at = old.meeting(rank, new.tensor[entry], new.low[entry], new.high[entry])
    b, a = entry[box], old.on(rank)[at]
    # A piece with the same box in both layouts is handed over as it is, without a copy
    other = ((old.low[a] != new.low[b]) | (old.high[a] != new.high[b])).any(1)
    a, b = a[other], b[other]
    common = new.tensor[b], np.maximum(old.low[a], new.low[b]), np.minimum(old.high[a], new.high[b])
    found: dict[Piece, list[tuple[Place, Place]]] = {}
    for pair in zip(placed(route.before, rank, *common), placed(route.after, rank, *common), strict=True):
        found.setdefault(pair[1][0], []).append(pair)
    return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message carries: boxes, the widest elements first, so that none needs padding.

    Attributes:
        n_bytes: Bytes of the message.
        sent_on: Whether it is read from the new state, as another rank has sent it here before.
        places: Every box, in a piece of the new state where the chunk comes or is sent on, and of the old one
            elsewhere.
        runs: Stretches of elements of one type: the first byte, the one behind the last, the type, and how many
            elements each box in turn has.
    """

    n_bytes: int
    sent_on: bool
    places: list[Place]
    runs: list[tuple[int, int, torch.dtype, list[int]]]

    def packed(self, memory: Tensor) -> list[Tensor]:
        """The elements of every box within the memory that carries the chunk."""
        parts = [p for first, last, t, sizes in self.runs for p in memory[first:last].view(t).split_with_sizes(sizes)]
        return [part.view(shape) for part, (_, _, shape) in zip(parts, self.places, strict=True)]


@dataclass(frozen=True)
class Measures:
    """What a window is chosen by, over all ranks.

    Attributes:
        number: The most streams that one rank sends and receives.
        widest: Bytes of the widest element that travels.
        longest: Bytes of every wave's longest stream, [W].
        hops: How often a byte is sent at most before it is where it belongs.
    """

    number: int
    widest: int
    longest: tuple[int, ...]
    hops: int = 0

    @classmethod
    def of(cls, route: Route, waves: IntArray | None) -> Measures:
        """Measure a route.

        Args:
            route: The route.
            waves: Wave of every tensor, [tensors]; None: there is one wave.
        """
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
    """What all ranks agree on. Wave w goes in rounds starts[w] .. starts[w + 1] - 1; what is forwarded may come later.

    Attributes:
        chunk_bytes: Bytes of a chunk.
        slot_bytes: Bytes of a chunk's place in the buffer.
        starts: First round of every wave, and the one behind the last wave, [W + 1].
        depth: Rounds in flight at once.
    """

    chunk_bytes: int
    slot_bytes: int
    starts: tuple[int, ...]
    depth: int


# Bytes that a slot's start is a multiple of; no element is wider, so any type may begin there
_ALIGNED = 16


def window_of(budget: int, chunk: int, depth: int, of: Measures) -> Window:
    """Choose the largest chunks of which a few rounds fit the streams of every rank, then the most rounds that fit.

    A smaller budget or chunk never makes a larger slot.

    Args:
        budget: Bytes that a rank has for buffers.
        chunk: The most bytes that a message may carry.
        depth: The most rounds in flight at once.
        of: The route's measures.

    Raises:
        BudgetError: One element for each stream does not fit.
    """
    if min(budget, chunk, depth) < 1:
        raise BudgetError(f"budget, chunk and depth must be at least one, got {budget}, {chunk} and {depth}")
    longest = max(of.longest)
    if not longest:
        return Window(chunk, 0, (0,) * (len(of.longest) + 1), 1)
    wish, fair = chunk, budget // of.number
    # Rounds in flight hide the latency of messages, so a small budget goes into rounds before it goes into their size
    chunk = min(chunk, max(fair // DEPTH, SMALL_CHUNK_BYTES))
    if of.hops > 1:
        chunk = min(chunk, max(longest // FORWARDED_CHUNKS, SMALL_CHUNK_BYTES))
    slot = min(_aligned(chunk), _aligned(longest), fair)
    slot = slot // _ALIGNED * _ALIGNED or slot // of.widest * of.widest
    # A chunk holds whole elements of the widest type. Wider elements come first, so all chunks but a last are full
    chunk = min(chunk, slot) // of.widest * of.widest
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


@dataclass(frozen=True, eq=False)
class Streams:
    """The streams that one rank sends and receives, and those by which others get what they send on to it.

    Shape legend: S streams, B boxes, by stream, tensor and place.

    Attributes:
        route: The route.
        rank: This rank.
        ends: Hop, source and destination of every stream, ascending, [S, 3].
        stream: Stream of every box, [B].
        row: Row of the route that the box is of, [B].
        tensor: Tensor of the box, [B].
    """

    route: Route
    rank: int
    ends: IntArray
    stream: IntArray
    row: IntArray
    tensor: IntArray

    @classmethod
    def of(cls, route: Route, rank: int) -> Streams:
        """The streams that concern `rank`."""
        rows, feed = route.rows, route.feed
        chosen = (route.source == rank) | (rows.destination == rank)
        if (feed[chosen] >= 0).any():
            # When a forwarded chunk may go depends on when it has come. So the streams that feed this rank's are cut
            # too, and those that feed these, though others send and receive them.
            number, first = numbered(route.hop, route.source, rows.destination)
            wanted, more = np.zeros(len(first), dtype=bool), number[chosen]
            while len(more):
                wanted[more] = True
                chosen = wanted[number]
                more = number[feed[chosen & (feed >= 0)]]
                more = more[~wanted[more]]
        row = np.flatnonzero(chosen)
        many = (rows.last - rows.first)[row]
        tensor = route.atoms.members[positions_of(rows.first[row], many)]
        row = np.repeat(row, many)
        ends = np.stack([route.hop[row], route.source[row], rows.destination[row]], axis=1)
        order = np.lexsort([*rows.low[row].T[::-1], tensor, *ends.T[::-1]])
        stream, first = numbered(*ends[order].T)
        return cls(route, rank, ends[order][first], stream, row[order], tensor[order])

    @property
    def leaving(self) -> BoolArray:
        """Whether this rank sends the stream, [S]."""
        found: BoolArray = self.ends[:, 1] == self.rank
        return found

    @property
    def coming(self) -> BoolArray:
        """Whether this rank receives the stream, [S]."""
        found: BoolArray = self.ends[:, 2] == self.rank
        return found

    @cached_property
    def number(self) -> int:
        """Number of streams that this rank sends and receives."""
        return int(self.leaving.sum() + self.coming.sum())

    @cached_property
    def out_bytes(self) -> dict[int, int]:
        """Bytes that this rank sends, by the rank that they go to."""
        sent = np.flatnonzero(self.route.source == self.rank)
        found = np.bincount(self.route.rows.destination[sent], self.route.rows.n_bytes[sent])
        return {peer: int(found[peer]) for peer in np.flatnonzero(found).tolist()}

    @cached_property
    def in_bytes(self) -> int:
        """Bytes that this rank receives."""
        return int(self.route.rows.n_bytes[self.route.rows.destination == self.rank].sum())


Chunks = Mapping[int, list[tuple[int, Chunk]]]
"""By round: peers, each with a chunk."""


class Timetable:
    """The chunks that streams are cut into, and the round of each.

    Shape legend: B boxes and C chunks, by stream, wave and type of elements. Bytes count from the first box on. In a
    wave all chunks of a stream are full but the last. They are spread evenly over the wave's rounds.

    What is sent on goes once the round that brings it has ended: `depth` rounds later, since a rank ends that one
    before it begins this one. So every rank gets to its next round, whatever the others do.

    Args:
        streams: The streams of a rank.
        window: What ranks have agreed on.
        waves: Wave of every tensor, [tensors]; None: there is one wave.
    """

    def __init__(self, streams: Streams, window: Window, waves: IntArray | None) -> None:
        self.streams, self.window = streams, window
        space, rows = streams.route.space, streams.route.rows
        names, self.kinds = space.types
        self.types: list[torch.dtype] = [getattr(torch, name) for name in names]
        wave = np.zeros(len(streams.row), np.int64) if waves is None else waves[streams.tensor]
        order = np.lexsort([self.kinds[streams.tensor], wave, streams.stream])
        self.row, self.tensor, stream, wave = (x[order] for x in (streams.row, streams.tensor, streams.stream, wave))
        self.item_bytes = space.item_bytes[self.tensor]
        self.begin = starts(volumes(rows.low, rows.high)[self.row] * self.item_bytes)  # [B + 1]
        _, first = numbered(stream, wave)
        begin = self.begin[np.append(first, len(stream))]
        many = -(-np.diff(begin) // window.chunk_bytes)
        self.chunk_begin = np.append(  # [C + 1]
            np.repeat(begin[:-1], many) + within(many) * window.chunk_bytes, begin[-1]
        )
        self.stream = np.repeat(stream[first], many)
        start = np.array(window.starts)
        rounds = start[wave[first] + 1] - start[wave[first]]
        # A shorter stream's chunks are spread over the rounds of the longest one, so that all streams end together
        self.round = np.repeat(start[wave[first]], many) + within(many) * np.repeat(rounds, many) // np.repeat(
            many, many
        )
        # Parts of boxes, each within one chunk; those of chunk c are part[c] .. part[c + 1] - 1
        self.cut = distinct(np.concatenate([self.begin, self.chunk_begin]))
        self.box = np.searchsorted(self.begin, self.cut[:-1], side="right") - 1
        self.part = np.searchsorted(self.cut, self.chunk_begin)
        # Hop by hop: a chunk's round must be settled before that of one that waits for it
        for hop in range(1, int(streams.ends[:, 0].max(initial=0)) + 1):
            self._delay(np.flatnonzero(streams.ends[self.stream, 0] == hop))

    def _parts(self, chunks: IntArray) -> tuple[IntArray, IntArray]:
        """The parts of these chunks, and how many each has."""
        many = np.diff(self.part)[chunks]
        return positions_of(self.part[chunks], many), many

    def _delay(self, chunks: IntArray) -> None:
        """Let chunks that are sent on go `depth` rounds after the last of what they hold has come, one in a round."""
        part, many = self._parts(chunks)
        box, feed = self.box[part], self.streams.route.feed
        tensors = len(self.streams.route.space.tensors)
        key = self.row * tensors + self.tensor
        order = np.argsort(key)
        fed = order[np.searchsorted(key[order], feed[self.row[box]] * tensors + self.tensor[box])]
        # The last byte of each part, as it lies in the stream that brings it
        last = self.begin[fed] + self.cut[part + 1] - 1 - self.begin[box]
        there = self.round[np.searchsorted(self.chunk_begin, last, side="right") - 1]
        earliest = np.maximum.reduceat(there, starts(many)[:-1]) + self.window.depth
        ahead = np.maximum(self.round[chunks], earliest) - np.arange(len(chunks))
        # The running maximum leaves one chunk of a stream to a round. Each stream gets a range apart from the others',
        # so that none delays another
        apart = self.stream[chunks] * (int(ahead.max()) - int(ahead.min()) + 1)
        self.round[chunks] = np.maximum.accumulate(ahead + apart) - apart + np.arange(len(chunks))

    def rounds(self) -> tuple[Chunks, Chunks]:
        """Chunks that this rank sends, and those that it receives, by round."""
        streams, route = self.streams, self.streams.route
        going: dict[int, list[tuple[int, Chunk]]] = {}
        coming: dict[int, list[tuple[int, Chunk]]] = {}
        # What is sent for the first time lies in the old state, what is sent on lies where it came in, in the new one
        first = streams.ends[:, 0] == 0
        for which, peers, layout, sent_on, found in (
            (streams.leaving & first, 2, route.before, False, going),
            (streams.leaving & ~first, 2, route.after, True, going),
            (streams.coming, 1, route.after, False, coming),
        ):
            chunks = np.flatnonzero(which[self.stream])
            numbers, peer = self.round[chunks].tolist(), streams.ends[self.stream[chunks], peers].tolist()
            for number, rank, chunk in zip(numbers, peer, self._made(chunks, layout, sent_on), strict=True):
                found.setdefault(number, []).append((rank, chunk))
        return going, coming

    def _made(self, chunks: IntArray, layout: Layout, sent_on: bool) -> list[Chunk]:
        """These chunks; what they hold lies in this rank's pieces of `layout`."""
        if not len(chunks):
            return []
        space, rows, rank = self.streams.route.space, self.streams.route.rows, self.streams.rank
        part, many = self._parts(chunks)
        box = self.box[part]
        first, last = ((self.cut[part + k] - self.begin[box]) // self.item_bytes[box] for k in (0, 1))
        row = self.row[box]
        of, low, high = flat_ranges((rows.high - rows.low)[row], first, last)
        # Sender and receiver cut the same range into the same boxes, so the same order on both ends is all that a
        # message needs
        order = np.lexsort([*low.T[::-1], of])
        of, low, shape = of[order], low[order] + rows.low[row[of[order]]], (high - low)[order]
        tensor, size = self.tensor[box[of]], np.prod(shape, axis=1)
        chunk = np.repeat(np.arange(len(chunks)), many)[of]
        places = placed(layout, rank, tensor, low, low + shape)
        made = [Chunk(n, sent_on, [], []) for n in np.diff(self.chunk_begin)[chunks].tolist()]
        kind = self.kinds[tensor]
        _, first = numbered(chunk, kind)
        stop, sizes = np.append(first[1:], len(chunk)), size.tolist()
        byte = starts(size * space.item_bytes[tensor])
        ends = np.stack([byte[first], byte[stop]]) - byte[np.searchsorted(chunk, chunk[first])]
        runs = np.stack([chunk[first], kind[first], first, stop, *ends], axis=1).tolist()
        for number, of_type, i, j, begins, stops in runs:
            made[number].places.extend(places[i:j])
            made[number].runs.append((begins, stops, self.types[of_type], sizes[i:j]))
        return made
