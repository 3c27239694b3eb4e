"""Threads that call one thing after the other: for transfers that cannot say by themselves whether they have ended."""

from __future__ import annotations

import atexit
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
TURN_S = 0.1
LEAVE_S = 4.0  # at the end of the program, for all threads together
_Items = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _serve(items: _Items) -> None:
    while (item := items.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        del item, future, call  # what was called is not kept until the next one comes


class Waiter:
    """A thread that calls what it is given, in that order. The calls have time limits themselves.

    The thread ends with `close`, or with this object. At the end of the program it may finish what it is at, for
    `LEAVE_S`: a thread that comes back from a library while the interpreter goes down aborts the process.
    """

    def __init__(self, name: str) -> None:
        self._items: _Items = queue.SimpleQueue()
        # daemon: what a lost peer still owes must not keep the program from ending
        self.thread = threading.Thread(target=_serve, args=(self._items,), name=name, daemon=True)
        # before the start: Ctrl-C in the middle of it must not leave a thread that nobody ends
        self._end = weakref.finalize(self, self._items.put, None)
        _waiters.add(self)
        self.thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What becomes of `call`, which can be cancelled until its turn comes; RuntimeError after `close`."""
        if not self._end.alive:
            raise RuntimeError(f"{self.thread.name}: the thread was ended")
        future: Future[T] = Future()
        self._items.put((future, call))
        return future

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread once it has called what it was given so far; waits for that, at most `wait_s`."""
        self._end()
        if wait_s and self.thread.ident is not None:
            self.thread.join(wait_s)


def joined(done: Future[T], turn: Callable[[], None] = lambda: None) -> T:
    """What becomes of `done`, waited for in short turns: Ctrl-C is seen in between, and `turn` called, which may raise.

    What was waited for goes on then, in its thread.
    """
    while True:
        try:
            return done.result(timeout=TURN_S)
        except TimeoutError:
            if done.done():
                return done.result()
        stay()
        turn()


_waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
_leaving = threading.Event()


def stay() -> None:
    """What a wait calls between its turns. RuntimeError at the end of the program, except in its main thread."""
    if _leaving.is_set() and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the program ends")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, the main thread does not hear Ctrl-C: for what must be done to its end, and has a time limit.

    Launchers send it again to processes that are ending already.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:  # None: not set from Python, so it cannot be put back
            signal.signal(signal.SIGINT, before)


@atexit.register
def _leave() -> None:
    with uninterrupted():
        _leaving.set()
        waiters = list(_waiters)
        for waiter in waiters:
            waiter.close()
        deadline = time.monotonic() + LEAVE_S
        for waiter in waiters:
            waiter.close(max(1e-3, deadline - time.monotonic()))
