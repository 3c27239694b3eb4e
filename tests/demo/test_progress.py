"""The demo's progress: what the ranks write, what is made of it, and lines where there is no terminal."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from prophet.demo.progress import STARTING, Status, StatusWriter, describe, read_status, shown_progress


def result(step: int) -> Any:
    return SimpleNamespace(loss=3.25, seed=2, step=step, run="on", report=SimpleNamespace(max_mean=1.5))


def test_the_last_whole_line_is_read(tmp_path: Path) -> None:
    assert read_status(tmp_path, 0) == Status()
    writer = StatusWriter(tmp_path, 0)
    assert read_status(tmp_path, 0).doing == STARTING
    writer.begin("training")
    for step in range(200):  # more than is read from the end
        writer.step(result(step))
    found = read_status(tmp_path, 0)
    assert (found.stage, found.doing, found.steps) == (1, "training", 200)
    assert found.shown == "seed 2, balancing on, step 200: loss 3.250, busiest rank 1.50 × mean"
    with (tmp_path / "status-0.jsonl").open("a") as file:
        file.write('{"stage": 7, "do')
    assert read_status(tmp_path, 0) == found


def test_ranks_behind_are_named() -> None:
    ahead, same = Status(2, "training"), Status(2, "training", 5)
    assert describe([same, ahead]) == "training"
    behind = [ahead, Status(1, "reading the text"), ahead, Status()]
    assert describe(behind) == f"training; waiting for rank 1 (reading the text), rank 3 ({STARTING})"


@pytest.mark.parametrize("width", [80, 60, 45])
def test_a_terminal_shows_all_of_it(tmp_path: Path, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with shown_progress(tmp_path, ranks=1, steps=240, console=console):
        writer = StatusWriter(tmp_path, 0)
        for step in range(200):
            writer.step(result(step))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "…" not in text
    words = " ".join(text.split()[-40:])
    assert "200/240" in words
    for part in ("seed 2", "step", "200:", "loss", "3.250", "busiest", "1.50 ×"):
        assert part in words


def test_a_log_gets_a_line_for_everything_that_begins(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    writers = [StatusWriter(tmp_path, rank) for rank in range(2)]

    def until(words: str) -> None:
        deadline = time.monotonic() + 30
        while words not in console.file.getvalue():
            assert time.monotonic() < deadline, console.file.getvalue()
            time.sleep(0.01)

    with shown_progress(tmp_path, ranks=2, steps=4, console=console):
        until(STARTING)
        writers[0].begin("reading")
        until(f"0/4 steps  reading; waiting for rank 1 ({STARTING})\n")
        writers[1].begin("reading")
        until("0/4 steps  reading\n")
        for writer in writers:
            writer.begin("training")
        writers[0].step(result(0))
    assert "1/4 steps  seed 2, balancing on, step 1: loss" in console.file.getvalue()
