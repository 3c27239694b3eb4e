"""Bytes that a rank's layers keep for backward at any moment: saved tensors, chunks, and chunks' gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.model import Boundary, Microbatch
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.store import Chunk

Key = tuple[int, int]


class _Kept:
    """A saved tensor; while it lives, its bytes count."""

    def __init__(self, tensor: Tensor, live: dict[Key, list[int]]) -> None:
        self.tensor, self.live = tensor, live
        self.key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        entry = live.setdefault(self.key, [0, 0])
        entry[0] += 1
        entry[1] = max(entry[1], tensor.numel() * tensor.element_size())

    def __del__(self) -> None:
        entry = self.live[self.key]
        entry[0] -= 1
        if not entry[0]:
            del self.live[self.key]


def _unpack(kept: Any) -> Tensor:
    found: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return found


class LiveBytes:
    """Counts while `model` runs: `unit`, bytes of the first slice on this rank, and `peak`, the most at any moment.

    Parameters do not count, and what comes before and after the layers does not.
    """

    def __init__(self, model: SlicedTransformers) -> None:
        self.model, self.unit, self.peak, self._first = model, 0, 0, True
        self._live: dict[Key, list[int]] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in model.root.parameters() if not p.is_meta}
        self._run, self._gradients = model.run, model.store.gradients
        model.run = self.run  # type: ignore[method-assign]
        model.store.gradients = self.of_chunk  # type: ignore[method-assign]

    def run(self, unit: int, boundary: Boundary, microbatch: Microbatch) -> Boundary:
        if not 0 < unit <= len(self.model.layers):
            return self._run(unit, boundary, microbatch)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            out = self._run(unit, boundary, microbatch)
        self.peak = max(self.peak, self.now())
        self._first = self._first and microbatch.slice == 0
        if self._first:
            self.unit = self.now()  # grows with the stage's layers
        return out

    def _pack(self, tensor: Tensor) -> Any:
        known = tensor.untyped_storage().data_ptr() in self._parameters
        return tensor if known else _Kept(tensor, self._live)

    def of_chunk(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        found = self._gradients(chunk)
        self.peak = max(self.peak, self.now())
        return found

    def chunks(self) -> list[Chunk]:
        return [chunk for of_layer in self.model.store._chunks.values() for chunk in of_layer.values()]

    def now(self) -> int:
        """Bytes at this moment; a tensor that is saved and in a chunk counts once."""
        found = {key: entry[1] for key, entry in self._live.items()}
        for chunk in self.chunks():
            for tensor in (chunk.key, chunk.value, chunk.out, chunk.lse, chunk.key_grad, chunk.value_grad):
                if tensor is not None:
                    key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
                    found[key] = max(found.get(key, 0), tensor.numel() * tensor.element_size())
        return sum(found.values())
