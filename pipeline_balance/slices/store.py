"""Keys and values of the slices that went before, kept in chunks until the backward pass has used them.

Shape legend: B sequences, Hq and Hkv heads, T tokens of a slice, D head dim, N slices of a microbatch. A chunk is the
keys and values of one slice, layer and microbatch. Those of one microbatch lie side by side (`pipeline_balance.slices.
memory`), so that attention reads many of them at once and nothing is copied for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.buffers import BufferPool
from pipeline_balance.slices.kernel import half_of
from pipeline_balance.slices.memory import Room
from pipeline_balance.slices.sharing.context import Context
from prophet.errors import SpecError


class SliceError(SpecError):
    """Slices went through a layer in an order in which attention cannot be computed; the message names them."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One slice of one microbatch.

    Tokens of different documents do not attend to each other.

    Attributes:
        microbatch: Its number.
        slice: Which of the microbatch's slices it is.
        slices: N.
        documents: Integers [B, tokens of the whole sequence]; None: one document.
        starts: The slices' first tokens and the sequence's length [N + 1]; without documents they may be left out.
        asking: Where ranks share the slice's tokens, the documents of its tokens on all of them, this rank's ahead
            [B, c T]. Documents and starts are of this rank's tokens alone then.
    """

    microbatch: int
    slice: int
    slices: int
    documents: Tensor | None = None
    starts: tuple[int, ...] = ()
    asking: Tensor | None = None

    def documents_of(self, number: int) -> Tensor | None:
        """The documents of slice `number`'s tokens, [B, T]."""
        if self.documents is None:
            return None
        return self.documents[:, self.starts[number] : self.starts[number + 1]]


@dataclass(slots=True, eq=False)
class Chunk:
    """Keys and values of one slice, and what its own attention gave.

    Attributes:
        place: Where its tokens are in the layer's room.
        pending: A backward will come.
        start: Its first token in the sequence.
        gone: Its keys and values are freed already.
        out: [B, Hq, T, D].
        lse: The log-sum-exp [B, Hq, T].
        version: torch's count of changes in place of `out`.
    """

    place: tuple[int, int]
    pending: bool
    start: int = 0
    gone: bool = False
    out: Tensor | None = None
    lse: Tensor | None = None
    version: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.place[1] - self.place[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Sums of the gradients of keys and values, of tokens of the room that lie side by side."""

    start: int
    stop: int
    tensors: tuple[Tensor, ...]


class Line:
    """The chunks of one layer and microbatch by slice, and the sums of their gradients.

    Args:
        room: Has the keys and values.
        pool: Gives memory for sums.
        window: How many tokens a token sees; None: all before it. With a window every chunk's sums are apart, so that
            they are there only while some slice's window meets it.
    """

    def __init__(self, room: Room, pool: BufferPool, window: int | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.room, self._pool, self.window = room, pool, window
        self._sums: list[_Sums] = []

    def append(self, key: Tensor, value: Tensor, pending: bool) -> Chunk:
        """Keep a slice's keys and values, as the chunk that is returned.

        Args:
            key: [B, Hkv, T, D].
            value: [B, Hkv, T, D].
            pending: A backward will come.
        """
        places = [chunk.place for chunk in self.chunks if not chunk.gone]
        near = (min(a for a, _ in places), max(b for _, b in places)) if places else None
        self.chunks.append(Chunk(self.room.take(near, key, value), pending, self._tokens))
        return self.chunks[-1]

    @property
    def _tokens(self) -> int:
        """How many tokens have come."""
        return self.chunks[-1].start + self.chunks[-1].tokens if self.chunks else 0

    def gradients(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Sums of the gradients of the room's keys and values from `start` to `stop`, in float32 or better.

        They are zero at first. All chunks but the last one get them at once. With a window each one gets them when it
        needs them, and the tokens must be of one chunk.
        """
        sums = self._sums_of(start, stop)
        if sums is None:
            if self.window is None:
                # no slice comes after the last one, so nobody adds to its gradients
                places = [chunk.place for chunk in self.chunks[:-1] if chunk.pending]
                first, end = min(a for a, _ in places), max(b for _, b in places)
            else:
                first, end = next(c.place for c in self.chunks if c.place[0] <= start and stop <= c.place[1])
            like = self.room.tokens(first, end)
            wide = torch.promote_types(like[0].dtype, torch.float32)
            # many slices add to them: half precision would lose small parts
            sums = _Sums(first, end, tuple(self._pool.take(t.transpose(1, 2), wide).zero_() for t in like))
            self._sums.append(sums)
        return tuple(t[:, start - sums.start : stop - sums.start].transpose(1, 2) for t in sums.tensors)

    def _sums_of(self, start: int, stop: int) -> _Sums | None:
        return next((sums for sums in self._sums if sums.start <= start and stop <= sums.stop), None)

    def add_there(self, place: tuple[int, int], found: Sequence[Tensor]) -> None:
        """Add to the gradients of the tokens of a place, for which a backward will come.

        Args:
            place: In the room.
            found: Gradients of their keys and values [B, Hkv, S, D].
        """
        places = [place]
        if self.window is not None:
            parts = [(max(place[0], c.place[0]), min(place[1], c.place[1])) for c in self.chunks]
            places = [(a, b) for a, b in parts if a < b]
        for start, stop in places:
            for total, part in zip(self.gradients(start, stop), found, strict=True):
                total.add_(part[:, :, start - place[0] : stop - place[0]])

    def place_of(self, piece: int) -> tuple[int, int]:
        """Where a piece is in the room: half of a chunk."""
        return half_of(self.chunks[piece // 2].place, piece)

    def add(self, pieces: Sequence[int], found: Sequence[Tensor]) -> None:
        """Add what other ranks have found to the gradients of pieces, where a backward will come for them.

        Args:
            pieces: Their numbers.
            found: Gradients of their keys and values, one piece behind another [B, Hkv, S, D].
        """
        at = 0
        for piece in pieces:
            start, stop = self.place_of(piece)
            if self.chunks[piece // 2].pending:
                self.add_there((start, stop), [part[:, :, at : at + stop - start] for part in found])
            at += stop - start

    def summed(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """The chunk's gradients by later slices, if there are any."""
        return self.gradients(*chunk.place) if self._sums_of(*chunk.place) is not None else ()

    @property
    def gradient_bytes(self) -> int:
        """What the sums take."""
        return sum(t.nbytes for sums in self._sums for t in sums.tensors)

    def pop(self) -> None:
        """Free the last chunk."""
        chunk = self.chunks.pop()
        self._free(chunk)
        sums = self._sums_of(*chunk.place) if self.window is not None else None
        if sums is not None:
            self._let_go(sums)

    def leave(self) -> None:
        """Free chunks that are behind the window of all slices to come, if no backward will come for any chunk."""
        if self.window is None or any(chunk.pending for chunk in self.chunks):
            return
        for chunk in self.chunks:
            # the next token sees itself and `window - 1` tokens before it
            if chunk.start + chunk.tokens <= self._tokens - self.window + 1:
                self._free(chunk)

    def free(self) -> None:
        """Free all chunks."""
        while self.chunks:
            self.pop()
        while self._sums:
            self._let_go(self._sums[-1])

    def _free(self, chunk: Chunk) -> None:
        if not chunk.gone:
            self.room.give(chunk.place)
        chunk.gone = True

    def _let_go(self, sums: _Sums) -> None:
        for tensor in sums.tensors:
            self._pool.give(tensor)
        self._sums.remove(sums)


class ChunkStore:
    """The chunks of one rank, by layer and microbatch."""

    def __init__(self) -> None:
        # Of sums of gradients; memory goes from one microbatch's sums to the next ones'
        self.pool = BufferPool()
        # several where batches have other shapes: training and evaluation, for instance
        self.rooms: dict[int, list[Room]] = defaultdict(list)
        self._lines: dict[tuple[int, int], Line] = {}
        # what exchanges attention with other ranks during a training pass
        self.exchange: object = None
        # new chunks, where somebody asks for those of a pass
        self.appended: list[Chunk] | None = None
        # what slices read of chunks that lie at such places, see `attention`
        self.plans: dict[object, list[Any]] = {}
        # the ranks that share every slice's tokens; None: this one has all of them
        self.context: Context | None = None

    def __len__(self) -> int:
        """Chunks that are alive."""
        return sum(not chunk.gone for line in self._lines.values() for chunk in line.chunks)

    def outputs(self) -> list[Tensor]:
        """What the attentions of all chunks gave, as far as it is kept."""
        chunks = [chunk for line in self._lines.values() for chunk in line.chunks]
        return [t for chunk in chunks for t in (chunk.out, chunk.lse) if t is not None]

    @property
    def ranks(self) -> int:
        """How many ranks share every slice's tokens."""
        return self.context.size if self.context is not None else 1

    @property
    def n_bytes(self) -> int:
        """Memory of keys, values and their gradients, in use or kept for the next step."""
        return self.pool.n_bytes + sum(room.n_bytes for rooms in self.rooms.values() for room in rooms)

    @property
    def used_bytes(self) -> int:
        """What the keys and values of all chunks take."""
        return sum(room.used_bytes for rooms in self.rooms.values() for room in rooms)

    @property
    def gradient_bytes(self) -> int:
        """What the sums of their gradients take."""
        return sum(line.gradient_bytes for line in self._lines.values())

    def line(self, layer: int, microbatch: int) -> Line:
        """The chunks of one layer and microbatch, of which there are some."""
        return self._lines[layer, microbatch]

    def chunks(self, layer: int, microbatch: int) -> list[Chunk]:
        """The chunks of one layer and microbatch by slice; an empty list if there are none."""
        line = self._lines.get((layer, microbatch))
        return line.chunks if line is not None else []

    def append(
        self, layer: int, unit: Unit, key: Tensor, value: Tensor, *, pending: bool, window: int | None = None
    ) -> Chunk:
        """Keep a slice's keys and values.

        Args:
            layer: Of the attention.
            unit: The slice.
            key: [B, Hkv, T, D].
            value: [B, Hkv, T, D].
            pending: A backward will come.
            window: How many tokens a token sees; None: all before it.

        Raises:
            SliceError: Unless all slices before it are there, and only they. Where its own are there already, two
                attentions have the same `layer`.
        """
        known = len(self.chunks(layer, unit.microbatch))
        if unit.slice < known:
            raise SliceError(
                f"two attentions of one pass call themselves layer {layer}: give each a `layer` of its own"
            )
        if unit.slice > known:
            raise SliceError(
                f"layer {layer}, microbatch {unit.microbatch}: slice {unit.slice} goes forward with chunks of slices "
                f"{list(range(known))}, expected those of all slices before it"
            )
        if not known:
            self._lines[layer, unit.microbatch] = Line(self._room(layer, key, value), self.pool, window)
        chunk = self.line(layer, unit.microbatch).append(key, value, pending)
        if self.appended is not None:
            self.appended.append(chunk)
        return chunk

    def _room(self, layer: int, *given: Tensor) -> Room:
        # memory is used again by batches of the same shape
        for room in self.rooms[layer]:
            if room.fits(*given):
                return room
        self.rooms[layer].append(Room())
        return self.rooms[layer][-1]

    def check_last(self, layer: int, unit: Unit) -> None:
        """Raise `SliceError` unless `unit`'s slice is the last that is alive, which its backward asks for."""
        last = len(self.chunks(layer, unit.microbatch)) - 1
        if last != unit.slice:
            alive = f"slice {last} comes first" if last > unit.slice else "its chunk is gone"
            raise SliceError(
                f"layer {layer}, microbatch {unit.microbatch}: backward of slice {unit.slice}, but {alive}"
            )

    def pop(self, layer: int, unit: Unit) -> None:
        """Free a slice's chunk after its backward, and those before it if no backward will come for any of them."""
        self.line(layer, unit.microbatch).pop()
        self._tidy(layer, unit.microbatch)

    def passed(self, layer: int, unit: Unit) -> None:
        """Free what no later slice's forward reads, if no backward will come for any of a microbatch's chunks."""
        if unit.slice == unit.slices - 1:
            self._tidy(layer, unit.microbatch)
        else:
            self.line(layer, unit.microbatch).leave()

    def clear(self) -> None:
        """Free all chunks, after an error or at the end of a step; memory that it has not needed is let go."""
        for line in self._lines.values():
            line.free()
        self._lines.clear()
        self.plans.clear()
        self.pool.trim()
        for layer, rooms in list(self.rooms.items()):
            for room in rooms:
                room.trim()
            # shapes that are not used any more
            self.rooms[layer] = [room for room in rooms if room.n_bytes]

    def _tidy(self, layer: int, microbatch: int) -> None:
        line = self.line(layer, microbatch)
        # slices without a backward are needed until the last one that attends to them is done
        if not any(chunk.pending for chunk in line.chunks):
            line.free()
            del self._lines[layer, microbatch]


_active: list[tuple[ChunkStore, Unit]] = []


@contextmanager
def active(store: ChunkStore, unit: Unit) -> Iterator[None]:
    """Within this context, attention is of `unit` and its chunks are in `store`: in a unit's forward and its backward.

    It holds for the process, not for the thread: layers that are computed again in the backward pass of a GPU run on
    another thread than the one that asked for it.
    """
    _active.append((store, unit))
    try:
        yield
    finally:
        _active.pop()


def current() -> tuple[ChunkStore, Unit]:
    """The store and the unit that are active. Raises `SliceError` outside of a pipeline's step."""
    if not _active:
        raise SliceError("attention over slices was called outside of a pipeline's step; train with its step()")
    return _active[-1]
