"""Threads that wait for others do not outlive the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest

from prophet.ranks.waiting import Waiter, uninterrupted

PROGRAM = """
from concurrent.futures import Future
from prophet.ranks import waiting

waiter = waiting.Waiter("waits for nobody")
never = Future()
done = waiter.submit(lambda: waiting.joined(never))
waiting._leave()
print(waiter.thread.is_alive(), type(done.exception()).__name__)
"""


def test_a_wait_in_a_thread_ends_with_the_program() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["False", "RuntimeError"]


def test_what_has_not_begun_can_be_cancelled() -> None:
    waiter, go = Waiter("one after the other"), threading.Event()
    first, second, third = waiter.submit(go.wait), waiter.submit(lambda: 2), waiter.submit(lambda: 3)
    assert second.cancel()
    go.set()
    assert third.result(timeout=10) == 3
    assert first.result()
    assert not first.cancel()
    waiter.close(10)
    assert not waiter.thread.is_alive()


def test_what_was_called_is_not_kept_until_the_next_call() -> None:
    waiter, kept = Waiter("keeps nothing"), threading.Event()
    gone = weakref.ref(kept)
    waiter.submit(partial(kept.is_set)).result(timeout=10)
    del kept
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None
    waiter.close(10)


def test_ctrl_c_while_a_thread_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        began.append(self)
        start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        Waiter("is struck at its start")
    caught.value.__traceback__ = None  # has the object
    del caught
    began[0].join(10)
    assert not began[0].is_alive()


def test_a_second_ctrl_c_is_not_heard() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGINT) is before
