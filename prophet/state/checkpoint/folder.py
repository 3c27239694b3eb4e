"""A folder that holds one whole checkpoint at every moment, also while the next one is written into it.

    folder/training.json         the description; says which tensors belong to it
    folder/.metadata             torch's index of the same tensors, for torch's own functions
    folder/tensors-<number>/     tensors, and torch's index of them

A new checkpoint's tensors go to a new folder beside the old ones. Replacing `training.json`, by a rename, is what makes
them the checkpoint. What an interrupted save has left there the next one removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from prophet.errors import CheckpointError
from prophet.files import read_bytes

DESCRIPTION = "training.json"
MAX_DESCRIPTION_BYTES = 1 << 28
TENSOR_INDEX = ".metadata"  # torch's
FILES = "files"
"""The field of a description that says which tensors belong to it."""

_DESCRIPTION_PART = f"{DESCRIPTION}.part"
_FROM_OUTSIDE = "from_outside"
_TENSORS = "tensors-{:012x}"


def read_description(folder: Path) -> Any:
    """Read `training.json`.

    Raises:
        CheckpointError: It is missing, too long or no JSON.
    """
    path = folder / DESCRIPTION
    needed = "a finished checkpoint's description, as no checkpoint was finished here"
    text = read_bytes(path, most_bytes=MAX_DESCRIPTION_BYTES, expected=needed, error=CheckpointError)
    try:
        return json.loads(text)
    # RecursionError: a text of many nested brackets
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a description ({type(error).__name__}: {error!s:.200})") from error


def tensors_of(folder: Path, description: Any) -> Path:
    """Return the folder of tensors that a description names.

    Raises:
        CheckpointError: It names none, or a name that `Folder` does not give.
    """
    name = description.get(FILES) if isinstance(description, dict) else None
    # A name from outside must not lead out of the folder: `_tidy` removes folders by their names
    if not isinstance(name, str) or not _is_tensors(name):
        raise CheckpointError(f"{folder / DESCRIPTION}: {FILES}: expected the name of a folder of tensors")
    return folder / name


class Folder:
    """One process's view of the folder; process 0 alone calls what changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, number: int) -> None:
        """Make room for the tensors of a new checkpoint."""
        self.path.mkdir(parents=True, exist_ok=True)
        # A description that cannot be read says nothing of what may be removed, so nothing is
        with suppress(CheckpointError):
            self._tidy()
        self.tensors(number).mkdir()

    def tensors(self, number: int) -> Path:
        """The folder for the tensors of a new checkpoint."""
        return self.path / _TENSORS.format(number)

    def index_from_outside(self, number: int) -> Path:
        """Make and return a folder for torch's index with the files' paths as they are from outside."""
        made = self.tensors(number) / _FROM_OUTSIDE
        made.mkdir(exist_ok=True)
        return made

    def commit(self, number: int, description: dict[str, Any]) -> None:
        """Make the new tensors the checkpoint, and remove those from before."""
        part, tensors = self.path / _DESCRIPTION_PART, self.tensors(number)
        with part.open("wb") as f:
            f.write(json.dumps({**description, FILES: tensors.name}, sort_keys=True).encode())
            f.flush()
            # Without this, a system may bring the rename to the disk before the text: a power cut would leave an empty
            # file
            os.fsync(f.fileno())
        # The one moment in which the old checkpoint ends and the new one begins
        os.replace(part, self.path / DESCRIPTION)
        self._show_to_torch(tensors)
        _sync(self.path)
        # The new checkpoint is in force; what could not be removed the next save removes
        with suppress(OSError):
            self._tidy()

    def give_up(self) -> None:
        """Remove what was written of a checkpoint that could not be finished, as far as that is possible."""
        with suppress(OSError, CheckpointError):
            self._tidy()

    def _tidy(self) -> None:
        """Remove everything that a save has written and that is not the checkpoint."""
        there = (self.path / DESCRIPTION).exists()
        current = tensors_of(self.path, read_description(self.path)) if there else None
        (self.path / _DESCRIPTION_PART).unlink(missing_ok=True)
        # A save that ended right after its rename has left torch's index behind
        if current is not None:
            self._show_to_torch(current)
        for left in self.path.glob("tensors-*"):
            if left != current and _is_tensors(left.name):
                shutil.rmtree(left)

    def _show_to_torch(self, tensors: Path) -> None:
        """Replace torch's index, unless that has been done: a save may end between the two."""
        index = tensors / _FROM_OUTSIDE / TENSOR_INDEX
        if index.exists():
            os.replace(index, self.path / TENSOR_INDEX)
            index.parent.rmdir()


def _is_tensors(name: str) -> bool:
    """Whether `name` is one that a folder of tensors can have."""
    return re.fullmatch("tensors-[0-9a-f]{12}", name) is not None


def _sync(folder: Path) -> None:
    """Bring a rename to the disk before anything that depends on it; not every system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
