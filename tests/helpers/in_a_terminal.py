"""Tables on so many columns, and commands in a real pseudo-terminal, whose width they find out for themselves.

`shown(cases, folder)` runs commands; this module is also the program that runs in the terminal.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from prophet.cli import main
from prophet.terminal import FittedTable

_CASE = "=== case "
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours, and where the cursor is


@dataclass(frozen=True)
class Noted:
    """A table as it was given: names of its columns, which of them hold words, and the cells."""

    names: list[str]
    wrap: list[bool]
    rows: list[list[str]]


def noted(table: FittedTable) -> Noted:
    """What a table has to show."""
    rows = [[str(cell) for cell in row] for row in table.rows]
    return Noted([c.name for c in table.columns], [c.wrap for c in table.columns], rows)


def printed(what: Any, width: int) -> str:
    """What rich prints on so many columns."""
    to = Console(file=io.StringIO(), width=width)
    to.print(what)
    return to.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def check_whole(text: str, width: int, table: Noted) -> list[str]:
    """Assert that no cell is cut and every column is there or named as missing; return those that are missing."""
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width, text
    words = " ".join(text.split())
    said = re.search(rf"Left out at {width} columns: (.*?)\.(?: |$)", words)
    missing = said[1].split(", ") if said else []
    assert set(missing) <= set(table.names)
    kept = [i for i, name in enumerate(table.names) if name not in missing]
    figures, texts = ([i for i in kept if table.wrap[i] == wraps] for wraps in (False, True))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for row in table.rows:
        parts = [" ".join(row[i].split()) for i in figures]
        in_one_line = any(all(part in line for part in parts) for line in lines)
        line_by_line = not missing and all(part in words for part in parts)
        assert in_one_line or line_by_line, (row, text)
        assert all(set(row[i].split()) <= set(words.split()) for i in texts), (row, text)
    return missing


@dataclass(frozen=True)
class Shown:
    """What a command printed, and the tables that it was given to show."""

    text: str
    tables: list[Noted]


def shown(cases: list[tuple[int, list[str]]], folder: Path) -> list[Shown]:
    """The output of every (width, arguments of `prophet`); all run in one process, in one terminal."""
    (folder / "cases.json").write_text(json.dumps(cases))
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "tests.helpers.in_a_terminal", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    child = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    read = bytearray()
    try:
        while block := os.read(ours, 1 << 16):
            read += block
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    text = _CODES.sub("", read.decode("utf-8")).replace("\r\n", "\n")
    assert child.wait(timeout=60) == 0, text
    texts = text.split(_CASE)[1:]
    tables = [[Noted(**t) for t in json.loads((folder / f"{i}.json").read_text())] for i in range(len(cases))]
    return [Shown(text.partition("\n")[2], found) for text, found in zip(texts, tables, strict=True)]


def _run(folder: Path) -> None:
    """In the terminal: every case at its width."""
    found: list[dict[str, Any]] = []
    render = FittedTable.__rich_console__

    def noting(table: FittedTable, *where: Any) -> Any:
        found.append(asdict(noted(table)))
        return render(table, *where)

    FittedTable.__rich_console__ = noting  # type: ignore[method-assign]
    for i, (width, arguments) in enumerate(json.loads((folder / "cases.json").read_text())):
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        print(f"{_CASE}{i}", flush=True)
        if arguments[0] == "calibrate":  # what it prints, of an answer that was measured before
            from prophet.commands.calibrate import _print

            _print(json.loads(Path(arguments[1]).read_text()))
        elif arguments[0] == "doctor":  # what it prints; looking itself starts ranks
            from prophet.commands.doctor import _show
            from prophet.doctor.check import Check

            asked = json.loads(Path(arguments[1]).read_text())
            _show([Check(**check) for check in asked["checks"]], [asked["versions"]], as_json=False)
        elif arguments[0] == "gpu-check":  # the same
            from prophet.commands.gpu_check import show
            from prophet.doctor.check import Check
            from prophet.gpu_check.verdict import Verdict

            asked = json.loads(Path(arguments[1]).read_text())
            verdicts = [Verdict(name=one["name"], checks=[Check(**c) for c in one["lines"]]) for one in asked["checks"]]
            show(verdicts, asked["device"])
        else:
            assert main(arguments) == 0, arguments
        sys.stdout.flush()
        (folder / f"{i}.json").write_text(json.dumps(found))
        found.clear()


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
