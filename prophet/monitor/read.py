"""Reads what a monitor wrote: the whole run for a report, its end for a view that stays open.

A file may hold several starts of a run; the last one counts. A line that is no step is left out, counted and reported.
So is a line that a crash has cut off, once another one follows.

Shape legend: L layers, R ranks, E experts, T steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from prophet.errors import MonitorError
from prophet.monitor.lines import MAX_LINE_BYTES, is_start, parsed, start_of, step_of
from prophet.monitor.sinks import FILE, Row

# Bytes that are read of a long file's end
_TAIL_BYTES = 8 << 20
# Steps that are kept for a report: of a longer run every second one, every fourth, ...
_MOST_STEPS = 4096
# Bytes of the lines that are kept; in memory their numbers take up to nine times as much
_MOST_KEPT_BYTES = 16 << 20


def run_file(run: str | Path) -> Path:
    """The file of a run, given its folder or the file itself.

    Raises:
        MonitorError: There is none.
    """
    path = Path(run)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise MonitorError(
            f"{run}: no run here: expected a folder with {FILE}, as prophet.monitor(engine, folder) writes it"
        )
    return file


@dataclass(slots=True)
class LeftOut:
    """Counts the lines of a start that were left out.

    Attributes:
        count: How many.
        why: Why the first of them was.
    """

    count: int = 0
    why: str = ""

    def add(self, error: MonitorError) -> None:
        """Count a line."""
        self.why = self.why if self.count else str(error)
        self.count += 1

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 line is no step of this run and was left out ({self.why})"
        return f"{self.count} lines are no steps of this run and were left out (the first: {self.why})"


def no_steps(file: Path, left_out: LeftOut) -> str:
    """The message for a run without a step."""
    return f"{file}: no step has been written yet" + (f": {left_out}" if left_out.count else "")


@dataclass(frozen=True, slots=True)
class Steps:
    """The last start of a run.

    Attributes:
        header: Its header.
        rows: Its steps in order.
        starts: How often the run was started.
        left_out: The lines that are no steps.
    """

    header: Row
    rows: list[Row]
    starts: int = 1
    left_out: LeftOut = field(default_factory=LeftOut)


def _check_first(file: Path, line: bytes) -> Row:
    try:
        first = parsed(line)
    except MonitorError as error:
        raise MonitorError(f"{file}: line 1: expected a first line with the run's start: {error}") from None
    if not is_start(first):
        raise MonitorError(f"{file}: line 1: not the steps of a run: expected a first line with its start")
    try:
        return start_of(first)
    except MonitorError as error:
        raise MonitorError(f"{file}: line 1: expected a first line with the run's start: {error}") from None


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Every line; of one that is too long, as much as shows that."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES + 1)
        yield line if rest is line else line + b"\n"


def read_steps(run: str | Path) -> Steps:
    """Read every step of the last start, thinned where there are more than 4096 or more than 16 MiB.

    Raises:
        MonitorError: There is no run, or no step.
    """
    file = run_file(run)
    rows: list[Row] = []
    stride, seen, starts, kept_bytes = 1, 0, 0, 0
    left_out = LeftOut()
    header: Row | None = None
    with file.open("rb") as stream:
        for line in _lines(stream):
            if header is None:
                header, starts = _check_first(file, line), 1
                continue
            try:
                row = parsed(line)
                if is_start(row):
                    header, starts, left_out = start_of(row), starts + 1, LeftOut()
                    # A resumed run appends to the file; only its last start is shown
                    rows, stride, seen, kept_bytes = [], 1, 0, 0
                    continue
                row = step_of(row, header)
            except MonitorError as error:
                # A line without its end is still being written
                if line.endswith(b"\n") and line.strip():
                    left_out.add(error)
                continue
            if seen % stride == 0:
                rows.append(row)
                kept_bytes += len(line)
            seen += 1
            while len(rows) > _MOST_STEPS or (kept_bytes > _MOST_KEPT_BYTES and len(rows) > 1):
                # Every second step goes, and from then on every second one is kept: steps stay evenly spread
                rows, stride, kept_bytes = rows[::2], 2 * stride, kept_bytes // 2
    if header is None or not rows:
        raise MonitorError(no_steps(file, left_out))
    return Steps(header, rows, starts, left_out)


@dataclass(slots=True)
class Tail:
    """The end of a run's file, read on as it grows.

    Attributes:
        file: The file.
        keep: Steps that are held.
        header: Header of the last start.
        rows: The last steps of it.
        starts: How often the run was started.
        left_out: Lines that are no steps.
    """

    file: Path
    keep: int = 240
    header: Row = field(default_factory=dict)
    rows: deque[Row] = field(default_factory=deque)
    starts: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    _sizes: deque[int] = field(default_factory=deque)
    _offset: int = 0
    _rest: bytes = b""

    def poll(self) -> bool:
        """Read what has been added, and return whether there was something.

        Raises:
            MonitorError: It is no run's file.
        """
        size = self.file.stat().st_size
        # A shorter file is another one: the run was begun anew
        if size < self._offset:
            self._begin()
            self._offset, self._rest, self.starts = 0, b"", 0
        if size == self._offset:
            return False
        with self.file.open("rb") as stream:
            if self._offset == 0:
                first = stream.readline(MAX_LINE_BYTES + 1)
                if not first.endswith(b"\n") and len(first) <= MAX_LINE_BYTES:
                    return False
                self.header, self.starts = _check_first(self.file, first), 1
                self._offset = len(first)
                # Hours of a run are skipped. The line in which the tail begins is cut, so it is skipped too
                if size - self._offset > _TAIL_BYTES:
                    stream.seek(size - _TAIL_BYTES)
                    self._offset = size - _TAIL_BYTES + len(stream.readline(_TAIL_BYTES))
            stream.seek(self._offset)
            data = stream.read(_TAIL_BYTES)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        # More of a line would only show again that it is too long
        self._rest = self._rest[: MAX_LINE_BYTES + 1]
        for line in lines:
            self._take(line)
        return True

    def as_json(self) -> Row:
        """The run's start and its last step, as its file has them."""
        return {
            "file": str(self.file),
            "starts": self.starts,
            "start": self.header,
            "last_step": self.rows[-1],
            "lines_left_out": self.left_out.count,
        }

    def _begin(self) -> None:
        self.rows.clear()
        self._sizes.clear()
        self.left_out = LeftOut()

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row = parsed(line)
            if is_start(row):
                self.header, self.starts = start_of(row), self.starts + 1
                self._begin()
                return
            self.rows.append(step_of(row, self.header))
        except MonitorError as error:
            self.left_out.add(error)
            return
        self._sizes.append(len(line))
        while len(self.rows) > self.keep or (sum(self._sizes) > _MOST_KEPT_BYTES and len(self.rows) > 1):
            self.rows.popleft()
            self._sizes.popleft()
