"""Who compiles the planner where several processes need it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prophet.planner import compiled
from prophet.planner.compiled import _Turn
from tests.helpers.launch import ended_within

pytestmark = pytest.mark.skipif(compiled.fcntl is None, reason="files cannot be locked here")


ROOT = Path(__file__).parents[2]
KERNEL = """
from prophet.planner.compiled import INT, _turn, compiled, entry

@compiled
def twice(x):
    return 2 * x

@entry(INT)
def kernel(x):
    return twice(x) + 1

print(kernel(3), sum(kernel.stats.cache_misses.values()), _turn._held)
"""


def test_of_several_processes_one_compiles(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "kernel.py")]
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ended = ended_within(120, started)
    assert sorted(out.strip() for out, _ in ended) == ["7 0 None", "7 0 None", "7 1 None"]
    assert sum("compiling the planner" in err for _, err in ended) == 1


def test_the_second_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _Turn(), _Turn(limit_s=60)
    assert first.take(tmp_path / "new")
    tried, taken = threading.Event(), threading.Event()
    monkeypatch.setattr(compiled.time, "sleep", lambda _: tried.set())

    def other() -> None:
        second.take(tmp_path / "new")
        taken.set()

    threading.Thread(target=other, daemon=True).start()
    assert tried.wait(30)
    assert not taken.is_set()
    first.give_back()
    assert taken.wait(30)
    second.give_back()


def test_a_child_that_was_forked_meanwhile_holds_nobody_up(tmp_path: Path) -> None:
    turn = _Turn()
    assert turn.take(tmp_path)
    assert turn._held is not None
    child = subprocess.Popen(["sleep", "60"], pass_fds=[turn._held.fileno()])
    try:
        turn.give_back()
        with (tmp_path / "prophet-compiling.lock").open("wb") as file:
            compiled.fcntl.flock(file, compiled.fcntl.LOCK_EX | compiled.fcntl.LOCK_NB)  # raises where it is held
    finally:
        child.kill()
        child.wait()


def test_a_turn_is_taken_once(tmp_path: Path) -> None:
    turn = _Turn(limit_s=0.2)
    assert turn.take(tmp_path)
    assert not turn.take(tmp_path)  # a kernel within the kernel
    turn.give_back()
    turn.give_back()


def test_after_its_limit_a_process_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _Turn(), _Turn(limit_s=10.0)
    first.take(tmp_path)
    now, sleeps = [0.0], []
    monkeypatch.setattr(compiled.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(compiled.time, "sleep", lambda _: (sleeps.append(1), now.__setitem__(0, now[0] + 4.0)))
    for _ in range(3):  # kernels, one after the other: the limit is for all of them
        assert second.take(tmp_path)
        second.give_back()
    assert len(sleeps) == 3
    assert capsys.readouterr().err.count("another process compiles the planner") == 1
    first.give_back()


def test_without_a_folder_to_write_to_there_are_no_turns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not _Turn().take(tmp_path / "file")
