"""Checkpoints of converted models, as the original class writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prophet.convert import converted, load_original_state_dict, original_state_dict
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

    options: for the class's `from_pretrained`.
    """
    whole = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype, **options)
    load_original_state_dict(model, whole.state_dict())
