"""Reads what a monitor wrote: the whole run for a report, its end for a view that stays open.

A file may hold several starts of a run; the last one counts. A line that is cut off, as by a crash, is left out.

Shape legend: L layers, R ranks, E experts, T steps.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prophet.errors import MonitorError
from prophet.monitor.sinks import FILE, FORMAT, Row

_TAIL_BYTES = 8 << 20  # what is read of a long file's end
_MOST_STEPS = 4096  # kept for a report: of a longer run every second one, every fourth, ...
_LISTS = ("max_mean", "max_mean_static", "copies", "dropped", "rows", "hottest")


def run_file(run: str | Path) -> Path:
    """The file of a run, given its folder or the file itself; `MonitorError` where there is none."""
    path = Path(run)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise MonitorError(
            f"{run}: no run here: expected a folder with {FILE}, as prophet.monitor(engine, folder) writes it"
        )
    return file


@dataclass(frozen=True, slots=True)
class Steps:
    """The last start of a run: its header and its steps in order. starts: how often it was started."""

    header: Row
    rows: list[Row]
    starts: int = 1


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_step(row: Any, layers: int) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    if not isinstance(row.get("exposed_s"), (int, float)) or not isinstance(row.get("seconds"), dict):
        return False
    return all(isinstance(row.get(name), list) and len(row[name]) == layers for name in _LISTS)


def _is_start(row: Any) -> bool:
    start = row.get("start") if isinstance(row, dict) else None
    return isinstance(start, dict) and all(isinstance(start.get(n), int) for n in ("layers", "ranks"))


def _check_first(file: Path, line: bytes) -> Row:
    first = _parsed(line)
    if not _is_start(first):
        raise MonitorError(f"{file}: not the steps of a run: expected a first line with its start")
    if first.get("format") != FORMAT:
        raise MonitorError(f"{file}: format {first.get('format')!r}, expected {FORMAT}")
    header: Row = first["start"]
    return header


def read_steps(run: str | Path) -> Steps:
    """Every step of the last start, thinned where there are more than 4096; `MonitorError` where there is none."""
    file = run_file(run)
    rows: list[Row] = []
    stride, seen, starts = 1, 0, 0
    header: Row | None = None
    with file.open("rb") as lines:
        for line in lines:
            if header is None:
                header, starts = _check_first(file, line), 1
                continue
            row = _parsed(line)
            if _is_start(row):
                header, starts, rows, stride, seen = row["start"], starts + 1, [], 1, 0
            elif _is_step(row, header["layers"]):
                if seen % stride == 0:
                    rows.append(row)
                seen += 1
                if len(rows) > _MOST_STEPS:
                    rows, stride = rows[::2], 2 * stride
    if header is None or not rows:
        raise MonitorError(f"{file}: no step has been written yet")
    return Steps(header, rows, starts)


@dataclass(slots=True)
class Tail:
    """The end of a run's file, read on as it grows. keep: steps held."""

    file: Path
    keep: int = 240
    header: Row = field(default_factory=dict)
    rows: deque[Row] = field(default_factory=deque)
    starts: int = 0
    skipped_lines: int = 0
    _offset: int = 0
    _rest: bytes = b""

    def poll(self) -> bool:
        """Read what has been added; True where that was something. `MonitorError` where it is no run's file."""
        size = self.file.stat().st_size
        if size < self._offset:  # the run was begun anew
            self.rows.clear()
            self._offset, self._rest, self.starts = 0, b"", 0
        if size == self._offset:
            return False
        with self.file.open("rb") as stream:
            if self._offset == 0:
                first = stream.readline()
                if not first.endswith(b"\n"):
                    return False
                self.header, self.starts = _check_first(self.file, first), 1
                self._offset = len(first)
                if size - self._offset > _TAIL_BYTES:
                    stream.seek(size - _TAIL_BYTES)
                    self._offset = size - _TAIL_BYTES + len(stream.readline())
            stream.seek(self._offset)
            data = stream.read(_TAIL_BYTES)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        row = _parsed(line)
        if _is_start(row):
            self.header, self.starts = row["start"], self.starts + 1
            self.rows.clear()
        elif _is_step(row, self.header["layers"]):
            self.rows.append(row)
            while len(self.rows) > self.keep:
                self.rows.popleft()
        elif line:
            self.skipped_lines += 1
