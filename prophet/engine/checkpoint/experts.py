"""Optimizer states of experts as entries of a checkpoint: one per expert, its step and other numbers included.

Experts that are modules need not all have been visited, nor have taken the same steps; those that are stacked have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prophet.engine.checkpoint.optimizer_by_expert import Share, empty_state, fill_numbers, is_number, split_state
from prophet.errors import CheckpointError

# In the name of an entry whose value was no tensor
_NUMBER = "number"
# Numbers are saved as tensors of these types, which lose nothing of a Python number
_ZEROS: dict[torch.dtype, Any] = {torch.bool: False, torch.int64: 0, torch.float64: 0.0}


def entries_of(states: Mapping[str, Mapping[str, Any]], p: Tensor) -> dict[str, Tensor]:
    """Return the experts' state of the parameter `p`, as `split_state` cuts it, as entries of a checkpoint.

    Raises:
        ValueError: For a value that is neither a tensor nor a number.
    """
    entries: dict[str, Tensor] = {}
    for key, state in states.items():
        for field, value in state.items():
            # The experts of a stacked parameter share one number in a tensor; each entry needs memory that no other has
            if isinstance(value, Tensor):
                entries[f"optimizer.{key}.{field}"] = value.detach().clone() if is_number(value, p) else value
            elif isinstance(value, bool | int | float):
                entries[f"optimizer.{key}.{_NUMBER}.{field}"] = torch.tensor(value, dtype=_dtype_of(value))
            else:
                raise ValueError(f"{field} of {key} is a {type(value).__name__}; expected a tensor or a number")
    return entries


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer keeps its step on the device; torch's do so only with one of these two settings."""
    return bool(group.get("capturable") or group.get("fused"))


class ExpertStates:
    """Reads the experts' states from a checkpoint.

    The caller reads `numbers` first, then calls `settle`, which refuses numbers that do not fit, then reads `entries`.

    Args:
        folder: The checkpoint, for errors.
        index: Its index of tensors.

    Attributes:
        numbers: Tensors to read numbers into, by the names of their entries.
        entries: Tensors to read all else into, by the names of their entries.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self._folder = folder
        self._there = _by_key(index)
        self._expected: list[tuple[str, Tensor, list[Share], dict[str, dict[str, Any]], dict[str, Any]]] = []
        self.numbers: dict[str, Any] = {}
        self.entries: dict[str, Any] = {}

    def expect(self, name: str, p: Tensor, shares: list[Share], group: Mapping[str, Any]) -> dict[str, Any]:
        """Make the state of a parameter to read into.

        Args:
            name: The parameter's name.
            p: The parameter.
            shares: Its shares.
            group: The optimizer's group that holds it.

        Returns:
            State whose tensors are still to be read; empty where no expert has any.

        Raises:
            CheckpointError: Where the experts' saved states do not fit.
        """
        saved = {s.key: dict(self._there.get(s.key, {})) for s in shares}
        try:
            state = empty_state(name, p, shares, saved, on_device=counts_on_device(group))
            cut = split_state(name, p, shares, state)
        # torch raises several kinds for shapes that a wrong file names
        except (ValueError, RuntimeError, TypeError, MemoryError) as error:
            raise CheckpointError(f"{self._folder}: {error!s:.300}") from error
        for key, parts in cut.items():
            for field, part in parts.items():
                # Not straight into `state`: stacked experts share one number, and theirs are to be compared first
                if is_number(part, p):
                    number = saved[key][field]
                    saved[key][field] = torch.zeros((), dtype=_dtype_of(number))
                    where = f"{key}.{field}" if isinstance(number, Tensor) else f"{key}.{_NUMBER}.{field}"
                    self.numbers[f"optimizer.{where}"] = saved[key][field]
                else:
                    self.entries[f"optimizer.{key}.{field}"] = part
        if state:
            self._expected.append((name, p, shares, saved, state))
        return state

    def settle(self) -> None:
        """Copy the numbers that were read into the states.

        Raises:
            CheckpointError: Where those of stacked experts differ.
        """
        for name, p, shares, saved, state in self._expected:
            read = {
                key: {f: v if isinstance(state[f], Tensor) else v.item() for f, v in parts.items()}
                for key, parts in saved.items()
            }
            try:
                fill_numbers(name, p, shares, read, state)
            except ValueError as error:
                raise CheckpointError(f"{self._folder}: {error}") from error


def _by_key(index: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read from an index the saved optimizer state by key and field: tensors without storage, numbers as zeros."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in index.items():
        size, properties = getattr(entry, "size", None), getattr(entry, "properties", None)
        if not name.startswith("optimizer.") or size is None:
            continue
        key, _, field = name.removeprefix("optimizer.").rpartition(".")
        # On the meta device: shape and type without memory, whatever sizes the index claims
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
