"""Writing training state to files and reading it, by boxes: in torch's distributed checkpoint format (DCP).

What ranks hold is boxes of the tensors of a space, as everywhere in this package. The files hold such boxes too, and
torch's index says which. So a rank that wants a box reads its common part with every box of the files, whoever wrote
them. Any rank can read any file: no rank needs another one to get its state, and no route is planned.

A new checkpoint takes the place of the one before at a single rename (`prophet.state.checkpoint.folder`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult

from prophet.errors import CheckpointError
from prophet.ranks.process_group import at_work, process_rank, processes
from prophet.state.checkpoint.folder import Folder
from prophet.state.checkpoint.tensor_index import DAMAGED, TensorReader
from prophet.state.layout import Piece, missing
from prophet.state.space import Box, Space
from prophet.state.streams import torch_dtype

_SHOWN_CHARACTERS = 400  # of an error's text

Agree = Callable[[str, Callable[[], Any]], list[Any]]
"""Called on all processes with a name and a function, it returns what the function returns, by process.

Where the function fails on one of them, it raises on all of them, and no process waits for the one that failed.
"""


class Boxes:
    """What this rank has of one tensor, as torch's planners take it: boxes by their offsets.

    `DefaultSavePlanner` and `DefaultLoadPlanner` ask an object that is no tensor for `__create_write_items__` and
    `__create_chunk_list__`, as they do with a DTensor.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.parts: dict[tuple[int, ...], Tensor] = {}

    def size(self) -> torch.Size:
        """Shape of the whole tensor, which torch's planners ask for."""
        return self.shape

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(o), sizes=t.shape) for o, t in self.parts.items()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]


def by_tensor(space: Space, state: Mapping[Piece, Tensor]) -> dict[str, Boxes]:
    """Group a rank's pieces by tensor, as `write` and `Files.read` take them."""
    found: dict[str, Boxes] = {}
    for piece, tensor in state.items():
        spec = space[piece.name]
        boxes = found.setdefault(piece.name, Boxes(spec.shape, torch_dtype(spec)))
        boxes.parts[piece.box.start] = tensor
    return found


class SavePlanner(DefaultSavePlanner):
    """Finds tensors in `Boxes` too; torch's planner then lets each box be written by one of its holders, evenly."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.parts[tuple(index.offset or ())] if isinstance(held, Boxes) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds the tensors to read into in `Boxes` too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own method copies values that it does not know, and the copies would be read into
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        if not isinstance(held, Boxes):
            return super().lookup_tensor(index)
        found: Tensor = held.parts[tuple(index.offset or ())]
        return found


class _Writer(FileSystemWriter):
    """Raises the system's error where a disk is full; torch's writer hides it behind "unexpected pos"."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's archive raises while it is closed after a failed write, and keeps the first error as the context
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from error


def write(
    folder: Path,
    number: int,
    description: Mapping[str, Any],
    entries: Mapping[str, Any],
    agree: Agree,
    *,
    group: Any = None,
    first: bool | None = None,
) -> None:
    """Replace the checkpoint in `folder` by this one; collective over `group`.

    A save that fails leaves the checkpoint before as it was.

    Args:
        folder: The checkpoint's folder; it is made where there is none.
        number: Number of this checkpoint, equal on all processes and unlike that of any checkpoint before.
        description: What `training.json` is to hold, as JSON can; that of the first process is written.
        entries: Tensors and `Boxes` by name; what several ranks have is written by one of them.
        agree: Runs a function on all processes and fails on all where it fails on one.
        group: torch's process group; None: all processes.
        first: Whether this is the first process of the group; None: whether it is the first of all.

    Raises:
        CheckpointError: A process could not write its part.
    """
    target, tensors = Folder(folder), Folder(folder).tensors(number)
    writer = first if first is not None else process_rank() == 0
    failed: list[Exception] = []
    with at_work(f"writing {folder}"):
        agree("start of a checkpoint", lambda: target.begin(number) if writer else None)
        try:
            _call_torch(
                lambda: save_tensors(
                    dict(entries),
                    storage_writer=_Writer(tensors),
                    planner=SavePlanner(),
                    process_group=group,
                    no_dist=processes() == 1,
                ),
                folder,
            )
        except (CheckpointError, RuntimeError, OSError) as error:
            # Kept for the vote at the end, where all processes learn of it: one that raised here would leave the others
            # waiting
            failed.append(error)

        def end() -> None:
            try:
                if failed:
                    # Raised inside of `agree`, so that no other process takes the checkpoint for finished
                    raise failed[0]
                if writer:
                    _commit(target, number, description)
            except BaseException:
                if writer:
                    target.give_up()
                raise

        agree("end of a checkpoint", end)


def _commit(target: Folder, number: int, description: Mapping[str, Any]) -> None:
    """Write torch's index a second time, with paths as they are from outside of the tensors' folder; then switch."""
    tensors = target.tensors(number)
    # Read back what was written: a checkpoint with a gap must not take the place of a whole one
    files = Files(tensors)
    files.check(files.index)
    index = TensorReader(tensors).read_metadata()
    places = [
        WriteResult(key, at.length, dataclasses.replace(at, relative_path=f"{tensors.name}/{at.relative_path}"))
        for key, at in index.storage_data.items()
    ]
    FileSystemWriter(target.index_from_outside(number)).finish(index, [places])
    target.commit(number, dict(description))


class Files:
    """The tensors of a checkpoint: an index of boxes, and the files that hold them.

    Attributes:
        tensors: Folder of the files.
        index: torch's entry of every tensor, by name.

    Raises:
        CheckpointError: The index cannot be read, or a file is missing or shorter than the index says.
    """

    def __init__(self, tensors: Path) -> None:
        self.tensors = tensors
        self._reader = TensorReader(tensors)
        metadata = self._reader.read_metadata()
        self.index: Mapping[str, Any] = metadata.state_dict_metadata
        self._parts = metadata.storage_data
        # A copy that broke off is found by sizes now, before any rank has begun to read
        needed: dict[str, int] = {}
        for part in self._parts.values():
            needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
        for name, size in sorted(needed.items()):
            try:
                found = (tensors / name).stat().st_size
            except OSError as error:
                raise CheckpointError(f"{tensors / name}: cannot be read ({error.strerror})") from error
            if found < size:
                where = tensors / name
                raise CheckpointError(f"{where}: expected at least {size} bytes, got {found}: the copy is incomplete")

    def check(self, names: Iterable[str]) -> None:
        """Raise `CheckpointError` unless the files hold all elements of these tensors."""
        for name in names:
            entry = self.index.get(name)
            if entry is None or not hasattr(entry, "chunks"):
                raise CheckpointError(f"{self.tensors}: holds no tensor {name}")
            shape = tuple(entry.size)
            boxes = []
            for chunk in entry.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                inside = len(offsets) == len(sizes) == len(shape)
                # The index has two tables, boxes of a tensor and places in files; from outside they may contradict each
                # other
                if not inside or MetadataIndex(name, torch.Size(offsets)) not in self._parts:
                    raise CheckpointError(f"{self.tensors}: the index names a part of {name} that no file holds")
                boxes.append(Box(offsets, tuple(o + n for o, n in zip(offsets, sizes, strict=True))))
            left = missing([Box.whole(shape)], boxes)
            if left:
                raise CheckpointError(f"{self.tensors}: no file holds {name}{left[0]}")

    def check_space(self, space: Space) -> None:
        """Raise `CheckpointError` unless the files hold the tensors of `space`, all of them and whole."""
        for spec in space.tensors:
            entry = self.index.get(spec.name)
            size, kind = getattr(entry, "size", None), getattr(getattr(entry, "properties", None), "dtype", None)
            if size is None or tuple(size) != spec.shape or kind != torch_dtype(spec):
                got = "none" if size is None else f"one of {kind} {list(size)}"
                wanted = f"{spec.name} of {torch_dtype(spec)} {list(spec.shape)}, as the description says"
                raise CheckpointError(f"{self.tensors}: expected {wanted}, the files have {got}")
        self.check(t.name for t in space.tensors)

    def read(self, entries: Mapping[str, Any], folder: Path, *, group: Any = None) -> None:
        """Fill tensors and `Boxes` with what the files hold; collective over `group`.

        Args:
            entries: Tensors and `Boxes` by name, to be filled.
            folder: The checkpoint's folder, for errors.
            group: torch's process group; None: all processes.

        Raises:
            CheckpointError: On all processes, where one of them could not read.
        """
        _call_torch(
            lambda: load_tensors(
                dict(entries),
                storage_reader=self._reader,
                planner=LoadPlanner(),
                process_group=group,
                no_dist=processes() == 1,
            ),
            folder,
        )


def _call_torch(call: Callable[[], object], folder: Path) -> None:
    """Call a function of torch's checkpoints; what it raises on all processes becomes a `CheckpointError`."""
    try:
        call()
    except CheckpointException as error:
        # A `KeyboardInterrupt` or `SystemExit` of any process goes through as it is: somebody wants to end the program
        if not all(isinstance(caught, Exception) for caught, _ in error.failures.values()):
            raise
        found = [f"rank {rank}: {_message(caught)}" for rank, (caught, _) in sorted(error.failures.items())]
        raise CheckpointError(f"{folder}: {'; '.join(found)}") from error


def _message(error: BaseException) -> str:
    """Kind and text of an error, cut to a length that a log can take."""
    # torch's text for a damaged tensor advises to read the file without `weights_only`, which would run it
    text = "a stored tensor is damaged" if isinstance(error, DAMAGED) else str(error)
    return f"{type(error).__name__}: {text}"[:_SHOWN_CHARACTERS]
