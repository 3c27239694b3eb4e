"""A disk that fails at its n-th operation: full from then on, or with the process killed in the middle of it."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CHANGES = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir")
_FREES = ("replace", "rename", "unlink", "rmdir")  # need no room


class Disk:
    """Lists what a process writes, removes and renames. fails_at: None, or the number of the operation that fails."""

    def __init__(self, fails_at: int | None = None, *, kills: bool = False) -> None:
        self.fails_at, self.kills = fails_at, kills
        self.done: list[str] = []

    def meets(self, operation: str, half: Callable[[], object] | None = None) -> None:
        """One operation; `half` does a part of it."""
        number = len(self.done)
        self.done.append(operation)
        if self.fails_at is None or number < self.fails_at:
            return
        if self.kills:
            if half is not None:
                half()
            os._exit(9)
        if operation not in _FREES:
            if half is not None:
                half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def inserted(self) -> Iterator[Disk]:
        """Stand between this process and its disk."""
        kept = {name: getattr(os, name) for name in _CHANGES}
        opened = io.open

        def change(name: str) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.meets(name)
                return kept[name](*args, **options)

            return call

        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return opened(file, mode, *args, **options)
            self.meets("open")
            return _File(opened(file, mode, *args, **options), self)

        try:
            for name in _CHANGES:
                setattr(os, name, change(name))
            io.open = builtins.open = open_file
            yield self
        finally:
            for name, function in kept.items():
                setattr(os, name, function)
            io.open = builtins.open = opened


class _File:
    """A file opened for writing."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()

        self._disk.meets("write", half)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
