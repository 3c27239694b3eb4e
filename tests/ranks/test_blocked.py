"""Another thread looks for the call that the main thread waits in, and lets it be where it may be running."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from prophet.ranks.failures.blocked import blocked


class _Frame:
    """A frame of torch.distributed that nobody may follow outwards."""

    f_globals = {"__name__": "torch.distributed.distributed_c10d"}  # noqa: RUF012 - as a frame has it

    def __init__(self, steps: int) -> None:
        self._steps, self._at = steps, 0

    @property
    def f_lasti(self) -> int:
        self._at += self._steps
        return self._at

    @property
    def f_back(self) -> Any:
        raise AssertionError("a frame that may be running was followed")


@pytest.mark.parametrize("steps", [0, 2])
def test_frames_of_a_thread_that_may_be_running_are_not_followed(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 crashed there: once in a training run, and within a minute of looking all the time."""
    ident = threading.main_thread().ident
    if steps:
        found = _Frame(steps)
        monkeypatch.setattr(sys, "_current_frames", lambda: {ident: found})
    else:
        # at the same place, but called anew
        monkeypatch.setattr(sys, "_current_frames", lambda: {ident: _Frame(0)})
    assert blocked() is None


def test_a_thread_that_computes_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _Frame(0)
    found.f_globals = {"__name__": "torch.nn.functional"}
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.main_thread().ident: found})
    assert blocked() is None
