"""Threads that wait for others do not outlive the program."""

from __future__ import annotations

import subprocess
import sys

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
