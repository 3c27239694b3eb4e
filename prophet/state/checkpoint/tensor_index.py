"""torch's distributed checkpoint format, read without running anything that stands in its files.

torch keeps its index of the tensors as a pickle, which may call any function when it is read. The reader here knows the
classes that torch writes, and refuses every other name. The tensors themselves torch reads with `weights_only`.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from prophet.errors import CheckpointError
from prophet.files import read_bytes

TENSOR_INDEX = ".metadata"
MAX_INDEX_BYTES = 1 << 28
DAMAGED = pickle.UnpicklingError
"""What torch raises for a stored tensor that it cannot read."""

_OF_METADATA = {
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
}
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
# What torch's index is made of: no sets, no bytes, no objects by reference. A pickle that needs another operation was
# not written by torch.
_OPERATIONS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE BINUNICODE8
    EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
"""
# Items of a tuple: a tensor has no more dimensions
_MOST_ITEMS = 64
# The most that a size or a place in a file may be
_LARGEST = 1 << 62


# The unpickler in C makes room in memory for any place of the memo that a file names, however large
_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):  # type: ignore[misc]
    """Builds torch's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"an index has no {module}.{name}; it was not run")
        return super().find_class(module, name)

    def _build(self) -> None:
        # BUILD sets any attribute of any object, of a class or function too
        if not dataclasses.is_dataclass(self.stack[-2]) or isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("an index gives fields to its own objects alone")
        self.load_build()

    def _put_tuple(self, made: Any) -> None:
        made(self)
        # Hashing or comparing a tuple that is nested thousands deep can crash Python itself
        found = self.stack[-1]
        inner = [x for x in found if isinstance(x, tuple)] if len(found) <= _MOST_ITEMS else None
        if inner is None or any(isinstance(x, tuple) for t in inner for x in t):
            raise pickle.UnpicklingError("an index has no such tuple")


_EVERY = _InPython.dispatch
# Operations that are not in the table end in a KeyError, which `_read_index` reports
_Unpickler.dispatch = {ord(getattr(pickle, name)): _EVERY[ord(getattr(pickle, name))] for name in _OPERATIONS.split()}
_Unpickler.dispatch[ord(pickle.BUILD)] = _Unpickler._build
for _name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
    _code = ord(getattr(pickle, _name))
    _Unpickler.dispatch[_code] = lambda self, made=_EVERY[_code]: self._put_tuple(made)


class TensorReader(FileSystemReader):
    """Reads the tensors of a folder, and its index without running anything that stands there.

    Raises:
        CheckpointError: The index is none; the error names the file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read once; there is one for all ranks."""
        if self._index is None:
            self._index = _read_index(self._folder)
            # torch's own method, which this one replaces, sets it too
            self._index.storage_meta = self._index.storage_meta or StorageMeta()
            self._index.storage_meta.load_id = self.load_id
        return self._index


def _read_index(folder: Path) -> Metadata:
    """The index in `folder`, checked.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    file, what = folder / TENSOR_INDEX, "torch's index of the tensors"
    data = read_bytes(file, most_bytes=MAX_INDEX_BYTES, expected=what, error=CheckpointError)
    expected = f"{file}: expected {what}"
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        problem = _problem(found)
    except Exception as error:
        # A damaged pickle may raise anything
        raise CheckpointError(f"{expected}: {type(error).__name__}: {error!s:.200}") from error
    if problem:
        raise CheckpointError(f"{expected}: {problem}")
    index: Metadata = found
    return index


def _problem(index: Any) -> str | None:
    """What is wrong with an index, in a few words; None where nothing is."""
    if not isinstance(index, Metadata):
        return f"it holds a {type(index).__name__}"
    # Unpickling does not call `__init__`: fields may be missing or of any type
    held: dict[str, Any] = vars(index)
    entries, parts = held.get("state_dict_metadata"), held.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(parts, dict):
        return "state_dict_metadata, storage_data: expected dictionaries"
    if not isinstance(held.get("planner_data"), dict | None):
        return "planner_data: expected a dictionary"
    if not isinstance(held.get("storage_meta"), StorageMeta | None):
        return "storage_meta: expected a StorageMeta"
    for name, entry in entries.items():
        if not isinstance(name, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            return f"state_dict_metadata[{name!r:.60}]: expected a tensor's size, type and chunks"
    for place, part in parts.items():
        if not _has(place, MetadataIndex, "fqn") or not isinstance(place.fqn, str) or not _is_part(part):
            return (
                f"storage_data[{getattr(place, 'fqn', place)!r:.60}]: expected a file of the folder, a place and a size"
            )
    return None


def _has(value: Any, kind: type, *names: str) -> bool:
    """Whether it is a `kind` that has these fields: unpickling gives an object those that the file has."""
    return isinstance(value, kind) and all(hasattr(value, name) for name in names)


def _is_tensor(entry: Any) -> bool:
    if not _has(entry, TensorStorageMetadata, "size", "chunks", "properties") or not isinstance(entry.chunks, list):
        return False
    known = _has(entry.properties, TensorProperties, "dtype") and isinstance(entry.properties.dtype, torch.dtype)
    chunks = all(
        _has(c, ChunkStorageMetadata, "offsets", "sizes") and _is_size(c.offsets) and _is_size(c.sizes)
        for c in entry.chunks
    )
    return known and chunks and _is_size(entry.size)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(0 <= n <= _LARGEST for n in value)


def _is_part(part: Any) -> bool:
    if not _has(part, _StorageInfo, "relative_path", "offset", "length") or not isinstance(part.relative_path, str):
        return False
    # A path from outside must stay in the folder of the tensors
    inside = part.relative_path == Path(part.relative_path).name and part.relative_path not in ("", "..")
    whole = all(type(n) is int and 0 <= n <= _LARGEST for n in (part.offset, part.length))
    # Descriptors name transforms that torch would run over the bytes it reads
    return inside and whole and not getattr(part, "transform_descriptors", None)
