"""Keys and values of the slices that went before, kept in chunks until the backward pass has used them.

Shape legend: B sequences, Hq and Hkv heads, T tokens of a slice, D head dim, N slices of a microbatch. A chunk is the
keys and values of one slice, layer and microbatch. Chunks are never joined: attention reads them one by one. Their
memory goes back to a pool, so that a training step with the shapes of the last one allocates none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline_balance.pipeline.buffers import BufferPool
from prophet.errors import SpecError


class SliceError(SpecError):
    """Slices went through a layer in an order in which attention cannot be computed; the message names them."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One slice of one microbatch, the n-th of `slices`. `documents` [B, tokens of the whole sequence] are integers.

    Tokens of different documents do not attend to each other. `starts` [N + 1] are the slices' first tokens and the
    sequence's length; without documents they may be left out.
    """

    microbatch: int
    slice: int
    slices: int
    documents: Tensor | None = None
    starts: tuple[int, ...] = ()

    def documents_of(self, number: int) -> Tensor | None:
        """The documents of slice `number`'s tokens, [B, T]."""
        if self.documents is None:
            return None
        return self.documents[:, self.starts[number] : self.starts[number + 1]]


@dataclass(slots=True)
class Chunk:
    """Keys and values [B, Hkv, T, D] of one slice, and what its own attention gave: out [B, Hq, T, D], lse [B, Hq, T].

    `key_grad` and `value_grad` appear with the first later slice's backward. `pending` says that a backward will come.
    `version` is torch's count of changes in place of `out`.
    """

    key: Tensor
    value: Tensor
    pending: bool
    out: Tensor | None = None
    lse: Tensor | None = None
    version: int = 0
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None


class ChunkStore:
    """The chunks of one rank, by layer and microbatch."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self._chunks: dict[tuple[int, int], dict[int, Chunk]] = {}

    def __len__(self) -> int:
        """Chunks that are alive."""
        return sum(len(of_layer) for of_layer in self._chunks.values())

    def chunks(self, layer: int, microbatch: int) -> dict[int, Chunk]:
        """The chunks of one layer and microbatch by slice."""
        return self._chunks.get((layer, microbatch), {})

    def append(self, layer: int, unit: Unit, key: Tensor, value: Tensor, *, pending: bool) -> Chunk:
        """Keep a slice's keys and values. Raises `SliceError` unless all slices before it are there, and only they.

        Where its own are there already, two attentions have the same `layer`.
        """
        known = self._chunks.setdefault((layer, unit.microbatch), {})
        if unit.slice in known:
            raise SliceError(
                f"two attentions of one pass call themselves layer {layer}: give each a `layer` of its own"
            )
        if sorted(known) != list(range(unit.slice)):
            raise SliceError(
                f"layer {layer}, microbatch {unit.microbatch}: slice {unit.slice} goes forward with chunks of slices "
                f"{sorted(known)}, expected those of all slices before it"
            )
        chunk = Chunk(self.pool.take(key), self.pool.take(value), pending)
        chunk.key.copy_(key.detach())
        chunk.value.copy_(value.detach())
        known[unit.slice] = chunk
        return chunk

    def gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The sums of a chunk's gradients so far, in float32 or better; zero at first."""
        if chunk.key_grad is None or chunk.value_grad is None:
            wide = torch.promote_types(chunk.key.dtype, torch.float32)
            chunk.key_grad = self.pool.take(chunk.key, wide).zero_()
            chunk.value_grad = self.pool.take(chunk.value, wide).zero_()
        return chunk.key_grad, chunk.value_grad

    def check_last(self, layer: int, unit: Unit) -> None:
        """Raise `SliceError` unless `unit`'s slice is the last that is alive, which its backward asks for."""
        last = max(self.chunks(layer, unit.microbatch), default=-1)
        if last != unit.slice:
            alive = f"slice {last} comes first" if last > unit.slice else "its chunk is gone"
            raise SliceError(
                f"layer {layer}, microbatch {unit.microbatch}: backward of slice {unit.slice}, but {alive}"
            )

    def pop(self, layer: int, unit: Unit) -> None:
        """Free a slice's chunk after its backward, and those before it if no backward will come for any of them."""
        known = self._chunks[layer, unit.microbatch]
        self._free(known.pop(unit.slice))
        self._tidy(layer, unit.microbatch)

    def passed(self, layer: int, unit: Unit) -> None:
        """Free a microbatch's chunks after its last slice's forward, if no backward will come for any of them."""
        if unit.slice == unit.slices - 1:
            self._tidy(layer, unit.microbatch)

    def clear(self) -> None:
        """Free all chunks, after an error or at the end of a step; buffers of shapes that it has not had are let go."""
        for of_layer in self._chunks.values():
            for chunk in of_layer.values():
                self._free(chunk)
        self._chunks.clear()
        self.pool.trim()

    def _tidy(self, layer: int, microbatch: int) -> None:
        known = self._chunks[layer, microbatch]
        if any(chunk.pending for chunk in known.values()):
            return
        for chunk in known.values():
            self._free(chunk)
        del self._chunks[layer, microbatch]

    def _free(self, chunk: Chunk) -> None:
        for tensor in (chunk.key, chunk.value, chunk.key_grad, chunk.value_grad):
            self.pool.give(tensor)


_active: list[tuple[ChunkStore, Unit]] = []


@contextmanager
def active(store: ChunkStore, unit: Unit) -> Iterator[None]:
    """Within this, attention is of `unit` and its chunks are in `store`: in a unit's forward and in its backward.

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
