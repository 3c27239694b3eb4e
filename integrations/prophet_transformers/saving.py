"""Checkpoints of converted models, as the original class writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prophet.convert import converted, load_original_state_dict, original_state_dict
from prophet.errors import CheckpointError
from prophet.ranks.collective import Operation
from prophet.ranks.process_group import collective_for, process_rank, processes


def save_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Write `model` in its original layout, so that its class's `from_pretrained` loads it; collective.

    Every process calls it. Process 0 writes, to which the experts are gathered from their homes one block at a time,
    and all return once the files are there. options: for the model's own `save_pretrained`.
    """
    layers = [layer for *_, layer in converted(model)]
    group = layers[0].collective if layers else collective_for(None)
    writer = group.rank == 0 and process_rank() == 0
    state = original_state_dict(model, keep=writer)
    if writer:
        type(model).save_pretrained(model, folder, state_dict=state, **options)
    device = next(model.parameters()).device
    for ranks in (group, *([collective_for(None)] if group.size < processes() else [])):
        ranks.all_gather(torch.zeros(1, device=device), op=Operation("end of save_pretrained"))


def load_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Load what `save_pretrained`, or the original class, wrote; every rank reads all and keeps its own experts.

    options: for the class's `from_pretrained`. Raises `CheckpointError` where parameters of the model are missing.
    """
    dtype = next(model.parameters()).dtype
    whole, said = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    missing = sorted(said["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder} lacks {missing[0]}{more}: expected all parameters of {type(model).__name__}")
    load_original_state_dict(model, whole.state_dict())
