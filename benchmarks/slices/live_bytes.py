"""Bytes that a rank's layers keep for their backward at any moment: saved tensors, chunks, and chunks' gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.layers import Activations, Microbatch
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.slices.saved.offload import Saved
from pipeline_balance.slices.store import ChunkStore, Unit


class _Kept:
    """A saved tensor; while it lives, its memory counts."""

    def __init__(self, tensor: Tensor, live: dict[int, list[int]]) -> None:
        self.tensor, self.live = tensor, live
        self.key = tensor.untyped_storage().data_ptr()
        live.setdefault(self.key, [0, tensor.untyped_storage().nbytes()])[0] += 1

    def __del__(self) -> None:
        entry = self.live[self.key]
        entry[0] -= 1
        if not entry[0]:
            del self.live[self.key]


def _unpack(kept: Any) -> Tensor:
    found: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return found


def _storages(tensors: Iterable[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor) and not t.is_meta}


class SavedBytes:
    """Counts what autograd keeps of whatever runs in `keeping`; `peak` is the most at any moment somebody looked.

    Every storage counts once and whole, and only while it is kept.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._live: dict[int, list[int]] = {}

    def keeping(self, leaving_out: Iterable[Any]) -> AbstractContextManager[Any]:
        """Within, saved tensors count, apart from those that share memory with one of `leaving_out`."""
        known = _storages(leaving_out)

        def pack(tensor: Tensor) -> Any:
            return tensor if tensor.untyped_storage().data_ptr() in known else _Kept(tensor, self._live)

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def look(self) -> None:
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Bytes at this moment."""
        return sum(entry[1] for entry in self._live.values())


class LiveBytes(SavedBytes):
    """Counts while `model` runs.

    Parameters do not count, nor what all layers of a microbatch are called with, such as rotary angles, nor what comes
    before and after the layers. Memory that is saved and in a chunk counts once. What is on the host does not count.
    `peak_chunks` and `peak_gradients` are
    the most bytes of chunks and of their gradients, at other moments perhaps.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model
        self.peak_chunks = self.peak_gradients = 0
        self.store = model.store if isinstance(model, Sliced) else ChunkStore()
        self._parameters = list(model.root.parameters())
        # a pass whose saved tensors will leave saves them in hooks of its own
        self._offloader = model.offloader if isinstance(model, Sliced) else None
        self._saved, self._leaving_out = WeakSet[Saved](), set[int]()
        self._inside = False
        if self._offloader is not None:
            self._pack = self._offloader.pack
            self._offloader.pack = self.pack  # type: ignore[method-assign]
        self._run, self._pop = model.run, self.store.pop
        model.run = self.run  # type: ignore[method-assign]
        self.store.pop = self.pop  # type: ignore[method-assign]

    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        if not torch.is_grad_enabled() or not 0 < unit <= len(self.model.layers):
            return self._run(unit, activations, microbatch)
        known = [*self._parameters, *self.model.recorded(microbatch).calls[unit - 1].leaves]
        if self._offloader is not None and self._offloader.taking:
            self._leaving_out, self._inside = _storages(known), True
            out = self._run(unit, activations, microbatch)
            self._inside = False
        else:
            with self.keeping(known):
                out = self._run(unit, activations, microbatch)
        self.look()
        return out

    def pack(self, tensor: Tensor) -> Saved:
        """What the offloader saves in place of a tensor."""
        saved = self._pack(tensor)
        if self._inside and tensor.untyped_storage().data_ptr() not in self._leaving_out:
            self._saved.add(saved)
        return saved

    def pop(self, layer: int, unit: Unit) -> None:
        self.look()  # before a backward frees anything
        self._pop(layer, unit)

    def look(self) -> None:
        super().look()
        self.peak_chunks = max(self.peak_chunks, self.store.used_bytes)
        self.peak_gradients = max(self.peak_gradients, self.store.gradient_bytes)

    def end(self) -> None:
        """Count no longer."""
        self.model.run = self._run  # type: ignore[method-assign]
        self.store.pop = self._pop  # type: ignore[method-assign]
        if self._offloader is not None:
            self._offloader.pack = self._pack  # type: ignore[method-assign]

    def now(self) -> int:
        found = {key: entry[1] for key, entry in self._live.items()}
        here = [saved.here for saved in self._saved]
        if self._offloader is not None:
            # outputs of attention that are on their way back to their chunks
            here += [saved.here for some in self._offloader._chunks.values() for _, *two in some for saved in two]
        found |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in here if t is not None}
        for line in self.store._lines.values():
            for chunk in line.chunks:
                for tensor in (chunk.out, chunk.lse):
                    if tensor is not None:
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(found.values()) + self.store.used_bytes + self.store.gradient_bytes
