"""Checkpoints of converted models, as the original class writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prophet.comm import Operation
from prophet.convert import converted, load_original_state_dict, original_state_dict

import torch


def save_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Write `model` in its original layout, so that its class's `from_pretrained` loads it; collective.

    Every rank calls it; rank 0 of the expert-parallel group writes, which gathers the experts from their homes one
    block at a time, and all return once the files are there. options: for the model's own `save_pretrained`. With
    several expert-parallel groups the first writes.
    """
    layers = [layer for *_, layer in converted(model)]
    writer = not layers or (layers[0].collective.rank == 0 and _first_group())
    state = original_state_dict(model, keep=writer)
    if writer:
        type(model).save_pretrained(model, folder, state_dict=state, **options)
    if layers:
        done = torch.zeros(1, device=layers[0].experts.w_in.device)
        layers[0].collective.all_gather(done, op=Operation("end of save_pretrained"))


def load_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Load what `save_pretrained`, or the original class, wrote; every rank reads all and keeps its own experts.

    options: for the class's `from_pretrained`.
    """
    whole = _original_class(model).from_pretrained(folder, dtype=next(model.parameters()).dtype, **options)
    load_original_state_dict(model, whole.state_dict())


def _original_class(model: Any) -> Any:
    return type(model)


def _first_group() -> bool:
    """Whether this process belongs to the expert-parallel group that has process 0 in it, where it is a rank 0."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
