"""A thread that waits: for transfers that cannot say by themselves whether they have ended."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Item = tuple[Future[None], Callable[[], None]]


def _serve(items: queue.SimpleQueue[_Item | None]) -> None:
    while (item := items.get()) is not None:
        future, call = item
        try:
            call()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, future, call  # what was waited for is not kept until the next one comes


class Waiter:
    """Calls what it is given on a thread of its own, one after the other; the thread starts with the first call.

    The calls have time limits themselves. The thread ends with `close`, or with this object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._finalizer: Any = None

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """What becomes of `call`."""
        if self._finalizer is None:
            # daemon: what a lost peer still owes must not keep the program from ending
            threading.Thread(target=_serve, args=(self._items,), name=self._name, daemon=True).start()
            self._finalizer = weakref.finalize(self, self._items.put, None)
        future: Future[None] = Future()
        self._items.put((future, call))
        return future

    def close(self) -> None:
        """End the thread once it has called what it was given so far."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
