"""Rows as text: tables in Markdown, as aligned columns and on a terminal, and rows on a line of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Lines = Iterable[Sequence[str]]


def cell(value: Any, digits: int = 3) -> str:
    """A value as it stands in a table: so many digits of a float, nothing for None."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def words(row: Mapping[str, Any], digits: int = 3) -> str:
    """A row on one line: every name with its value."""
    return "  ".join(f"{name} {cell(value, digits)}" for name, value in row.items())


def markdown(head: Sequence[str], lines: Lines) -> str:
    """A table in Markdown."""
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *lines))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def columns(head: Sequence[str], lines: Lines, *, left: int = 1) -> str:
    """A table as aligned text; all but the first `left` columns are aligned at the right."""
    every = [head, *lines]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    marks = ["<" if i < left else ">" for i in range(len(head))]
    texts = ("  ".join(f"{c:{m}{w}}" for c, m, w in zip(line, marks, widths, strict=True)) for line in every)
    return "\n".join(text.rstrip() for text in texts)


def show(left: Sequence[str], right: Sequence[str], lines: Lines, *, width: int = 0, title: str | None = None) -> None:
    """Print a table on the terminal: columns of words at the left, figures at the right; a line may end early.

    width: columns that the table needs, also where the terminal says less or the output goes to a file.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console(width=max(width, Console().width)).print(table)
