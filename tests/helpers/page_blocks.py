"""Blocks of code and tables of the pages, as tests/docs/ reads, runs and compares them.

python -m tests.helpers.page_blocks PAGE ...    # runs the pages' commands and writes their outputs anew

Marks are on the fence or on the line before it; CONTRIBUTING says which to use when.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.house import ROOT

PART = "part of a program"
"""Title of a fence whose lines are no whole program: they must parse, and are not run."""

NOT_RUN = "not run: "
"""Comment before a block of commands that stay unrun, with the reason."""

FIGURES_VARY = "figures vary"
"""Comment before a block of commands whose output is compared without its figures."""

MEASURED = "Measured on this machine"
"""Begins a line of output whose figures are never compared."""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""What a launcher tells its only process."""

MEETS_NOBODY = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}
"""Where a rank meets others that has none: at a port that the system gives it."""

COMMAND_S = 240.0
"""Longest that one command or program of a page may take."""

_FENCE = re.compile(r"^(\s*)```(\w*)(?: title=\"([^\"]*)\")?\s*$")
_COMMENT = re.compile(r"^\s*<!-- (.*) -->\s*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block. page: path from the repository. line: of its fence. mark: the comment before it, or ""."""

    page: str
    line: int
    language: str
    title: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def whole(self) -> bool:
        """Whether it is Python that runs as it stands."""
        return self.language == "python" and self.title != PART and not self.title.startswith("examples/")

    @property
    def runs(self) -> bool:
        """Whether it is commands that are run."""
        return self.language == "console" and not self.mark.startswith(NOT_RUN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with the paragraphs before and after it. rows: cells under the head, without the first column."""

    page: str
    line: int
    rows: tuple[tuple[str, ...], ...]
    near: str


def read_pages() -> list[Path]:
    """README and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(name: str, text: str) -> list[Block]:
    """The fenced blocks of a page; ValueError for a fence that is written in another way, or that does not end."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        if "```" not in lines[at]:
            at += 1
            continue
        fence = _FENCE.match(lines[at])
        if fence is None:
            raise ValueError(f'{name}:{at + 1}: expected a fence such as ```python title="...", got {lines[at]!r}')
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), None)
        if end is None:
            raise ValueError(f"{name}:{at + 1}: this fence does not end")
        comment = _COMMENT.match(lines[at - 1]) if at else None
        inside = [line.removeprefix(fence[1]) for line in lines[at + 1 : end]]
        found.append(
            Block(
                page=name,
                line=at + 1,
                language=fence[2],
                title=fence[3] or "",
                mark=comment[1] if comment else "",
                text="\n".join(inside) + "\n",
            )
        )
        at = end + 1
    return found


def commands_of(text: str) -> list[tuple[str, str]]:
    """(command, output that is shown below it) of a block of commands; "" where none is shown."""
    found: list[tuple[str, str]] = []
    goes_on = False
    for line in text.splitlines():
        if goes_on or line.startswith("$ "):
            before = found.pop()[0] + "\n" if goes_on else ""
            found.append((before + line.removeprefix("$ "), ""))
            goes_on = line.endswith("\\")
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + line.rstrip() + "\n")
        else:
            raise ValueError(f"a block of commands begins with '$ ', got {line!r}")
    return found


def run(command: list[str], folder: Path, **settings: str) -> str:
    """What a command prints in `folder`, as to a file: wide, without colours and GPUs. AssertionError where it fails.

    settings: more of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",  # transformers imports DeepSpeed where it is installed, which else says what it found
        **MEETS_NOBODY,
        **settings,
    }
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=COMMAND_S)
        except BaseException:
            process.terminate()  # torchrun ends its processes then; if it were killed they would go on
            raise
    if process.returncode:
        raise AssertionError(f"{command[-1]}\n{printed[-2000:]}{errors[-6000:]}")
    return printed


def difference(printed: str, shown: str, *, figures: bool = True) -> str:
    """ "" where a command printed what its page shows, else both. figures: False leaves numbers out of it."""
    left, right = (_comparable(text, figures) for text in (printed, shown))
    return "" if left == right else f"printed:\n{left}\nthe page shows:\n{right}"


def _comparable(text: str, figures: bool) -> str:
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join(line if figures and not line.startswith(MEASURED) else _masked(line) for line in lines)


def _masked(line: str) -> str:
    """The line with # for every number, and with single spaces, as columns are as wide as their figures."""
    without = re.sub(r"[-+~]?\d[\d.,]*(?:e[-+]?\d+)?", "#", line)
    return re.sub(r"([ ─])\1*", r"\1", without).strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A command of a page, the output that the page shows, and what it printed."""

    block: Block
    command: str
    shown: str
    printed: str


def play(blocks: list[Block], folder: Path) -> list[Played]:
    """Run a page's programs and commands in one folder, in order. AssertionError where one fails.

    A program with a title is a file for the commands below it; if there are none of it, it runs, too. Programs run as
    a launcher's only process.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    commands = "".join(block.text for block in blocks if block.runs)
    played = []
    for block in blocks:
        if block.whole:
            program = folder / (block.title or "program.py")
            program.write_text(block.text, encoding="utf-8")
            if not (block.title and block.title in commands):
                run([sys.executable, str(program)], folder, **ALONE)
        for command, shown in commands_of(block.text) if block.runs else []:
            printed = run(["bash", "-c", command], folder)
            played.append(Played(block=block, command=command, shown=shown, printed=printed))
    return played


def wrong_outputs(played: list[Played]) -> list[str]:
    """Commands that printed something else than their page shows, with both. Nothing shown is no claim."""
    found = []
    for p in played:
        differs = difference(p.printed, p.shown, figures=p.block.mark != FIGURES_VARY) if p.shown else ""
        found += [f"{p.block.where}: {p.command}\n{differs}"] if differs else []
    return found


def written_anew(text: str, played: list[Played]) -> str:
    """The page with what its commands printed, wherever it shows an output."""
    for block in dict.fromkeys(p.block for p in played):
        lines = []
        for p in played:
            if p.block is block:
                lines += [f"$ {p.command}", *(line.rstrip() for line in p.printed.strip("\n").splitlines() if p.shown)]
        text = text.replace(f"```console\n{block.text}```", "```console\n" + "\n".join(lines) + "\n```", 1)
    return text


def tables_of(name: str, text: str) -> Iterator[Table]:
    """The tables of a page outside of code, each with what stands around it."""
    parts = re.split(r"\n\s*\n", re.sub(r"^ *```.*?^ *```", lambda m: _blank(m[0]), text, flags=re.M | re.S))
    line = 1
    for i, part in enumerate(parts):
        lines = part.strip("\n").splitlines()
        if len(lines) > 2 and all(row.startswith("|") for row in lines):
            rows = tuple(tuple(c.strip() for c in row.strip("|").split("|")[1:]) for row in lines[2:])
            near = "\n".join(parts[max(i - 1, 0) : i + 2])
            yield Table(page=name, line=line, rows=rows, near=near)
        line += part.count("\n") + 2


def _blank(code: str) -> str:
    return "\n".join("code" for _ in code.splitlines())


_NUMBER_FIRST = re.compile(r"[-+~]?\d")
_MEASURED = re.compile(r"\d(?:\.\d|e-?\d|\d{3}| ?(?:%|×|(?:times|x|[mnµ]?s|[KMG]i?B)\b))")


def shows_figures(table: Table) -> bool:
    """Whether half of the cells after the first column begin with a number, and have decimals, a unit or 4 digits."""
    cells = [cell for row in table.rows for cell in row]
    figures = [cell for cell in cells if _NUMBER_FIRST.match(cell) and _MEASURED.search(cell)]
    return bool(cells) and 2 * len(figures) >= len(cells)


def says_where_from(near: str) -> bool:
    """Whether what stands around a table has a date and a commit, a page of results, or the test that holds it."""
    dated = re.search(r"\b20\d\d-\d\d-\d\d\b", near) and re.search(r"\b(?=[a-f]*\d)[0-9a-f]{7}\b", near)
    tests = re.findall(r"tests/[\w/]+\.py", near)
    return bool(dated) or "benchmarks/results/" in near or any((ROOT / test).is_file() for test in tests)


def main(names: list[str]) -> None:
    """Write the outputs on these pages anew."""
    for page in [Path(name).resolve() for name in names]:
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(written_anew(text, play(blocks_of(named(page), text), Path(folder))), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
