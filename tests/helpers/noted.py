"""Which functions were called, and in which thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def noted(*places: tuple[Any, str]) -> Iterator[set[tuple[str, bool]]]:
    """Inside, which of these were called, and whether by the main thread."""
    found: set[tuple[str, bool]] = set()

    def noting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            found.add((inner.__qualname__, threading.current_thread() is threading.main_thread()))
            return inner(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, noting(getattr(owner, name)))
        yield found
