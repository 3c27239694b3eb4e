"""Bytes of training state that a process has, counted storage by storage while a job switches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.model.ownership import local
from pipeline_balance.pipeline.move.transaction import Switched
from prophet.state.transition import empty


def state_of(job: Job) -> Iterator[Tensor]:
    """What this process has of parameters, buffers, moments and registered tensors."""
    yield from (buffer.tensor for buffer in job.pipeline.owned.buffers.values())
    for tensor in job.model.parameters():
        yield local(tensor.detach())
        yield from (local(handle.tensor) for handle in vars(tensor).get("_registered", {}).values())
    for entries in job.optimizer.state.values():
        yield from (local(t) for t in entries.values() if isinstance(t, Tensor))


def storages(tensors: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of these tensors, each once."""
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if not t.is_meta}


def n_bytes(found: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in found.values())


def metered(job: Job, layout: Parallelism | None = None, **options: Any) -> tuple[Switched, int, float]:
    """A switch, the most bytes of state and buffers during it, and that less the buffers over the larger state.

    Bytes are those of storages: of all that is state at the beginning, and of all that is asked for later. They are
    counted whenever memory has been asked for.
    """
    there, new, most = storages(state_of(job)), [], [0]
    before = n_bytes(there)

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        new.append(empty(shape, dtype, device))
        most[0] = max(most[0], n_bytes(there) + n_bytes(storages(new)))
        return new[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.pipeline.mover, "allocate", allocate)
        report = job.switch(layout, **options)
    buffers = sum(t.nbytes for t in new if t.dtype == torch.uint8)  # no state of these tests is
    larger = max(before, n_bytes(storages(state_of(job))))
    return report, most[0], (most[0] - buffers) / larger if larger else 1.0
