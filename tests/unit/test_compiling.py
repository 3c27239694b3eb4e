"""Who compiles the planner where several processes need it at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from prophet.planner import compiled
from prophet.planner.compiled import _Turn

pytestmark = pytest.mark.skipif(compiled.fcntl is None, reason="files cannot be locked here")


def test_the_first_does_not_wait_and_the_second_does(tmp_path: Path) -> None:
    first, second = _Turn(), _Turn(limit_s=60)
    assert not first.take(tmp_path / "new")
    waited: list[bool] = []
    other = threading.Thread(target=lambda: waited.append(second.take(tmp_path / "new")), daemon=True)
    other.start()
    time.sleep(0.3)
    assert waited == []
    first.give_back()
    other.join(30)
    assert waited == [True]
    second.give_back()
    assert not first.take(tmp_path / "new")
    first.give_back()


def test_a_turn_is_taken_once(tmp_path: Path) -> None:
    turn = _Turn(limit_s=0.2)
    assert not turn.take(tmp_path)
    assert not turn.take(tmp_path)  # a kernel within the kernel
    turn.give_back()
    turn.give_back()


def test_after_its_limit_a_process_goes_on_by_itself(tmp_path: Path) -> None:
    first, second = _Turn(), _Turn(limit_s=0.2)
    first.take(tmp_path)
    assert second.take(tmp_path)
    second.give_back()
    first.give_back()


def test_without_a_folder_to_write_to_there_are_no_turns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not _Turn().take(tmp_path / "file")
