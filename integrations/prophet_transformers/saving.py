"""Checkpoints of converted models, as the original class writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prophet.convert import load_original_state_dict
from prophet.convert.saving import save_pretrained
from prophet.errors import CheckpointError

__all__ = ["load_pretrained", "save_pretrained"]


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
