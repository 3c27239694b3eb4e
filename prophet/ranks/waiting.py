"""Threads that run calls one after the other: for transfers that cannot report whether they have ended."""

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
# Ctrl-C is seen after so long at most: Python runs its handler only between two instructions of the main thread
TURN_S = 0.1
# At the end of the program, for all threads together
LEAVE_S = 4.0
_Items = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _serve(items: _Items) -> None:
    while (item := items.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        # The thread blocks in `get` now: without this it would keep the tensors of the last call alive
        del item, future, call


class Waiter:
    """A thread that runs the calls it is given, in their order. The calls have time limits themselves.

    The thread ends with `close`, or with this object. At the end of the program it may finish its present call, for
    `LEAVE_S`: a thread that comes back from a library while the interpreter goes down aborts the process.
    """

    def __init__(self, name: str) -> None:
        self._items: _Items = queue.SimpleQueue()
        # daemon: a message that a lost peer never sends must not keep the program from ending
        self.thread = threading.Thread(target=_serve, args=(self._items,), name=name, daemon=True)
        # Before the start: Ctrl-C in the middle of it must not leave a thread that nobody ends
        self._end = weakref.finalize(self, self._items.put, None)
        _waiters.add(self)
        self.thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call`; the future can be cancelled until its turn comes.

        Raises:
            RuntimeError: After `close`.
        """
        if not self._end.alive:
            raise RuntimeError(f"{self.thread.name}: the thread was ended")
        future: Future[T] = Future()
        self._items.put((future, call))
        return future

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread once it has run the calls queued so far; waits for that, at most `wait_s`."""
        self._end()
        if wait_s and self.thread.ident is not None:
            self.thread.join(wait_s)


def joined(done: Future[T], turn: Callable[[], None] = lambda: None, turn_s: float = TURN_S) -> T:
    """Wait for `done` in short turns, so that Ctrl-C is seen in between.

    Args:
        done: The future of a call that another thread runs.
        turn: Called between turns. It may raise; the call then goes on in its thread.
        turn_s: Seconds of a turn.

    Returns:
        The result of the call, or its error, raised.
    """
    while True:
        try:
            return done.result(timeout=turn_s)
        except TimeoutError:
            # The call itself may have raised a TimeoutError, which is its result then
            if done.done():
                return done.result()
        stay()
        turn()


_waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
_leaving = threading.Event()


def stay() -> None:
    """Called by a wait between its turns; RuntimeError at the end of the program, except in its main thread."""
    # `_leave` waits for these threads; the main thread may still wait for something in an exit handler itself
    if _leaving.is_set() and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the program ends")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C while the context lasts: for work that must be completed, and has a time limit.

    Launchers send it again to processes that are ending already.
    """
    # Python lets only the main thread set handlers, and only that one gets KeyboardInterrupt
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        # None: not set from Python, so it cannot be put back
        if before is not None:
            signal.signal(signal.SIGINT, before)


@atexit.register
def _leave() -> None:
    with uninterrupted():
        _leaving.set()
        waiters = list(_waiters)
        # First told to end all together, then waited for one by one within one limit
        for waiter in waiters:
            waiter.close()
        deadline = time.monotonic() + LEAVE_S
        for waiter in waiters:
            waiter.close(max(1e-3, deadline - time.monotonic()))
