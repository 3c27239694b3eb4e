"""Optimizer states of experts as entries of a checkpoint: each expert's by itself, its step and other numbers included.

Experts that are modules need not all have been visited, nor have taken the same steps; those that are stacked have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prophet.engine.checkpoint.expert_state import Share, empty_state, fill_numbers, is_number, split_state
from prophet.errors import CheckpointError

_NUMBER = "number"  # in the name of an entry whose value was no tensor
_ZEROS: dict[torch.dtype, Any] = {torch.bool: False, torch.int64: 0, torch.float64: 0.0}


def entries_of(states: Mapping[str, Mapping[str, Any]], p: Tensor) -> dict[str, Tensor]:
    """What `split_state` gives for the parameter `p`, as entries.

    Raises ValueError for what is neither a tensor nor a number.
    """
    entries: dict[str, Tensor] = {}
    for key, state in states.items():
        for field, value in state.items():
            if isinstance(value, Tensor):
                entries[f"optimizer.{key}.{field}"] = value.detach().clone() if is_number(value, p) else value
            elif isinstance(value, bool | int | float):
                entries[f"optimizer.{key}.{_NUMBER}.{field}"] = torch.tensor(value, dtype=_dtype_of(value))
            else:
                raise ValueError(f"{field} of {key} is a {type(value).__name__}; expected a tensor or a number")
    return entries


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Torch's optimizers keep their step on the host unless they count on the device."""
    return bool(group.get("capturable") or group.get("fused"))


class ExpertStates:
    """The states that a checkpoint with this index has, to be read.

    numbers, entries: tensors to read into, the numbers first: `settle` says whether they can be.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self._folder = folder
        self._there = _by_key(index)
        self._expected: list[tuple[str, Tensor, list[Share], dict[str, dict[str, Any]], dict[str, Any]]] = []
        self.numbers: dict[str, Any] = {}
        self.entries: dict[str, Any] = {}

    def expect(self, name: str, p: Tensor, shares: list[Share], group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the parameter `name`, whose tensors are to be read; empty where no expert has any.

        group: that of the optimizer which holds it. Raises `CheckpointError` where the experts' do not fit.
        """
        said = {s.key: dict(self._there.get(s.key, {})) for s in shares}
        try:
            state = empty_state(name, p, shares, said, on_device=counts_on_device(group))
            cut = split_state(name, p, shares, state)
        except (ValueError, RuntimeError, TypeError, MemoryError) as error:
            raise CheckpointError(f"{self._folder}: {error!s:.300}") from error
        for key, parts in cut.items():
            for field, part in parts.items():
                if is_number(part, p):
                    number = said[key][field]
                    said[key][field] = torch.zeros((), dtype=_dtype_of(number))
                    where = f"{key}.{field}" if isinstance(number, Tensor) else f"{key}.{_NUMBER}.{field}"
                    self.numbers[f"optimizer.{where}"] = said[key][field]
                else:
                    self.entries[f"optimizer.{key}.{field}"] = part
        if state:
            self._expected.append((name, p, shares, said, state))
        return state

    def settle(self) -> None:
        """Put the numbers that were read where they belong; `CheckpointError` where those of stacked experts differ."""
        for name, p, shares, said, state in self._expected:
            read = {
                key: {f: v if isinstance(state[f], Tensor) else v.item() for f, v in parts.items()}
                for key, parts in said.items()
            }
            try:
                fill_numbers(name, p, shares, read, state)
            except ValueError as error:
                raise CheckpointError(f"{self._folder}: {error}") from error


def _by_key(index: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What there is of every parameter's optimizer state, by key and field: tensors without storage.

    Numbers that are no tensors stand for themselves, as zeros.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, entry in index.items():
        size, properties = getattr(entry, "size", None), getattr(entry, "properties", None)
        if not name.startswith("optimizer.") or size is None:
            continue
        key, _, field = name.removeprefix("optimizer.").rpartition(".")
        like = torch.empty(tuple(size), dtype=getattr(properties, "dtype", None), device="meta")
        if key.endswith(f".{_NUMBER}"):
            found.setdefault(key.removesuffix(f".{_NUMBER}"), {})[field] = _ZEROS.get(like.dtype, 0.0)
        else:
            found.setdefault(key, {})[field] = like
    return found


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, Tensor):
        return number.dtype
    return next(dtype for dtype, zero in _ZEROS.items() if type(zero) is type(number))
