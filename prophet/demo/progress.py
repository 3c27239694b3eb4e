"""What the demo is doing, shown throughout: each rank writes it down, and the process that started them shows it.

On a terminal it is one live line with a bar, elsewhere (a log, CI) a line now and then.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from prophet.demo.train import StepResult
from prophet.terminal import console as new_console

STARTING = "starting and importing PyTorch"
_LOOK_S = 0.25
# More than two lines of a rank's file have, so a read of the end holds a whole line
_LONGEST_BYTES = 4096
# Where the output is no terminal, there is a line in so many seconds at least
_LINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Status:
    """What one rank is doing.

    Attributes:
        stage: How many things it has begun so far.
        doing: What it does now.
        steps: Training steps that it has done, in all.
        shown: Figures of its last step, for as long as it trains.
    """

    stage: int = 0
    doing: str = STARTING
    steps: int = 0
    shown: str = ""


class StatusWriter:
    """A rank's side: writes what it does into a file of `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _file_of(folder, rank).open("a", buffering=1, encoding="utf-8")
        self._now = Status()

    def begin(self, doing: str) -> None:
        """Write that this rank now does something else."""
        self._write(Status(self._now.stage + 1, doing, self._now.steps))

    def step(self, result: StepResult) -> None:
        """Write that one more training step is done."""
        where = f"seed {result.seed}, balancing {result.run}, step {result.step + 1}"
        text = f"{where}: loss {result.loss:.3f}, busiest rank {result.report.max_mean:.2f} × mean"
        self._write(Status(self._now.stage, self._now.doing, self._now.steps + 1, text))

    def _write(self, status: Status) -> None:
        self._now = status
        print(json.dumps(asdict(status)), file=self._file)


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"status-{rank}.jsonl"


def read_status(folder: Path, rank: int) -> Status:
    """The last whole line that a rank has written; `STARTING` before its first one."""
    try:
        with _file_of(folder, rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return Status()
    # Behind the last line break stands nothing, or a line that is being written
    return Status(**json.loads(lines[-2])) if len(lines) > 1 else Status()


def describe(statuses: Sequence[Status]) -> str:
    """Say what all ranks do, and which of them the others wait for."""
    furthest = max(statuses, key=lambda s: s.stage)
    # All ranks do the same things in the same order, so a lower stage is a rank that is late
    behind = [(rank, s) for rank, s in enumerate(statuses) if s.stage < furthest.stage]
    if not behind:
        return furthest.doing
    waits = ", ".join(f"rank {rank} ({s.doing})" for rank, s in behind)
    return f"{furthest.doing}; waiting for {waits}"


@contextmanager
def shown_progress(folder: Path, *, ranks: int, steps: int, console: Console | None = None) -> Iterator[None]:
    """Show what ranks write into a folder until the block ends.

    Args:
        folder: Folder of the ranks' files.
        ranks: Number of ranks.
        steps: Steps that rank 0 will do, in all.
        console: Where it is shown; None: standard error.
    """
    console = new_console(stderr=True) if console is None else console
    columns = (
        TimeElapsedColumn(),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, overflow="fold")),
    )
    ended = threading.Event()
    with Progress(*columns, console=console, refresh_per_second=4, expand=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(STARTING, total=steps)
        lines = _Lines(console)

        def look() -> None:
            statuses = [read_status(folder, rank) for rank in range(ranks)]
            doing, first = describe(statuses), statuses[0]
            together = len({status.stage for status in statuses}) == 1
            # A step's figures are worth less than the name of a rank that all others wait for
            text = first.shown if first.shown and together else doing
            bar.update(task, completed=first.steps, description=text)
            if not console.is_terminal:
                lines.show(doing, f"{first.steps}/{steps} steps  {text}")

        look()
        watcher = threading.Thread(target=_repeat, args=(look, ended), name="demo-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            # The last steps may have come after the last look
            watcher.join()
            look()


def _repeat(look: Callable[[], None], ended: threading.Event) -> None:
    while not ended.wait(_LOOK_S):
        look()


class _Lines:
    """A line when something else begins, and after some time without one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last, self._began, self._at = "", time.monotonic(), 0.0

    def show(self, doing: str, text: str) -> None:
        now = time.monotonic() - self._began
        if doing == self._last and now < self._at + _LINE_S:
            return
        self._last, self._at = doing, now
        self._console.print(f"{now:4.0f} s  {text}", highlight=False, soft_wrap=True)
