"""A folder that holds one whole checkpoint at every moment, also while the next one is written into it.

    folder/training.json         the description; says which tensors belong to it
    folder/.metadata             torch's index of the same tensors, for torch's own functions
    folder/tensors-<number>/     tensors, and torch's index of them

A new checkpoint's tensors go to a new folder beside the old ones. Replacing `training.json`, by a rename, is what makes
them the checkpoint. What an interrupted save has left there the next one removes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prophet.errors import CheckpointError

DESCRIPTION = "training.json"
TENSOR_INDEX = ".metadata"  # torch's
_DESCRIPTION_PART = f"{DESCRIPTION}.part"
_FROM_OUTSIDE = "from_outside"
_TENSORS = "tensors-{:012x}"


class Folder:
    """One process's view of the folder; process 0 alone calls what changes it.

    current: says which tensors the description in the folder belongs to, or None where there is no checkpoint.
    """

    def __init__(self, path: Path, current: Callable[[], str | None]) -> None:
        self.path = path
        self._current = current

    def begin(self, number: int) -> None:
        """Make room for the tensors of a new checkpoint."""
        self.path.mkdir(parents=True, exist_ok=True)
        with suppress(CheckpointError):  # a description that cannot be read says nothing of what may be removed
            self._tidy()
        self.tensors(number).mkdir()

    def tensors(self, number: int) -> Path:
        """Where the tensors of a new checkpoint go."""
        return self.path / _TENSORS.format(number)

    def index_from_outside(self, number: int) -> Path:
        """A folder for torch's index with the tensors' names as they are from outside."""
        made = self.tensors(number) / _FROM_OUTSIDE
        made.mkdir(exist_ok=True)
        return made

    def commit(self, number: int, description: bytes) -> None:
        """Make the new tensors the checkpoint, and remove those that were."""
        part = self.path / _DESCRIPTION_PART
        with part.open("wb") as f:
            f.write(description)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, self.path / DESCRIPTION)
        self._show_to_torch(self.tensors(number))
        _sync(self.path)
        with suppress(OSError):  # the checkpoint is there; the next save tries again
            self._tidy()

    def give_up(self) -> None:
        """Remove what was written of a checkpoint that could not be finished, as far as that is possible."""
        with suppress(OSError, CheckpointError):
            self._tidy()

    def _tidy(self) -> None:
        """Remove everything that a save has written and that is not the checkpoint."""
        current = self._current()
        (self.path / _DESCRIPTION_PART).unlink(missing_ok=True)
        if current is not None:
            self._show_to_torch(self.path / current)
        for left in self.path.glob("tensors-*"):
            if left.name != current and is_tensors(left.name):
                shutil.rmtree(left)

    def _show_to_torch(self, tensors: Path) -> None:
        """Replace torch's index, unless that has been done: a save may end between the two."""
        index = tensors / _FROM_OUTSIDE / TENSOR_INDEX
        if index.exists():
            os.replace(index, self.path / TENSOR_INDEX)
            index.parent.rmdir()


def is_tensors(name: object) -> bool:
    """Whether `name` is one that a folder of tensors can have."""
    return isinstance(name, str) and re.fullmatch("tensors-[0-9a-f]{12}", name) is not None


def _sync(folder: Path) -> None:
    """Bring a rename to the disk before anything that depends on it; not every system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
