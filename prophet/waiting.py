"""Threads that call one thing after the other: for transfers that cannot say by themselves whether they have ended."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Items = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _serve(items: _Items) -> None:
    while (item := items.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        del item, future, call  # what was called is not kept until the next one comes


class Waiter:
    """A thread that calls what it is given, in that order. The calls have time limits themselves.

    The thread ends with `close`, or with this object.
    """

    def __init__(self, name: str) -> None:
        self._items: _Items = queue.SimpleQueue()
        # daemon: what a lost peer still owes must not keep the program from ending
        threading.Thread(target=_serve, args=(self._items,), name=name, daemon=True).start()
        self._end = weakref.finalize(self, self._items.put, None)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What becomes of `call`."""
        future: Future[T] = Future()
        self._items.put((future, call))
        return future

    def close(self) -> None:
        """End the thread once it has called what it was given so far."""
        self._end()
