"""What a device brings to the host: read within a time limit, with Ctrl-C seen and news of other ranks in between."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prophet.ranks import works
from prophet.ranks.works import on_host_in_turns


class _Device:
    """A stream whose events are over once `queries` have been made."""

    def __init__(self, queries: float) -> None:
        self.left = queries

    def record_event(self) -> Any:
        def query() -> bool:
            self.left -= 1
            return self.left < 0

        return SimpleNamespace(query=query)


def _read(monkeypatch: pytest.MonkeyPatch, queries: float, turn: Any, limit_s: float = 30.0) -> torch.Tensor:
    monkeypatch.setattr(works, "current_stream", lambda device: _Device(queries))
    return on_host_in_turns(torch.arange(6.0, device="cpu").view(2, 3), turn, 0.02, limit_s)


def test_a_value_comes_to_the_host_once_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    found = _read(monkeypatch, 0, lambda: turns.append(1))
    assert torch.equal(found, torch.arange(6.0).view(2, 3))
    assert not turns


def test_it_comes_to_the_host_whatever_device_new_tensors_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        found = _read(monkeypatch, 0, lambda: None)
    assert found.device.type == "cpu"


def test_a_wait_that_lasts_asks_for_news_and_takes_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []

    def turn() -> None:
        turns.append(time.monotonic())
        if len(turns) == 3:
            raise ValueError("rank 1 has failed")

    began = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has failed"):
        _read(monkeypatch, float("inf"), turn)
    assert turns[0] - began >= 0.02
    assert len(turns) == 3


def test_a_device_that_never_comes_to_it_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"timed out: the device has not come to it within 0.2 s"):
        _read(monkeypatch, float("inf"), lambda: None, limit_s=0.2)


def test_other_threads_run_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()
    threading.Timer(0.05, ran.set).start()

    def turn() -> None:
        if ran.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _read(monkeypatch, float("inf"), turn)
