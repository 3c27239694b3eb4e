"""Checkpoints of converted models, as the original class writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prophet.convert import load_original_state_dict
from prophet.convert.saving import save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]


def load_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Load what `save_pretrained`, or the original class, wrote; every rank reads all and keeps its own experts.

    options: for the class's `from_pretrained`.
    """
    whole = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype, **options)
    load_original_state_dict(model, whole.state_dict())
