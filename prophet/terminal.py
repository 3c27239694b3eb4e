"""What commands show: tables whose figures are whole at any width, and a line of progress while they work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 110
"""Columns of what goes to a file or a pipe."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. head: its lines, parted by newlines. rank: 0 always stays; the highest goes first."""

    head: str
    rank: int = 0
    align: Literal["left", "right"] = "right"


def console(*, stderr: bool = False) -> Console:
    """Where people read: as wide as their terminal, or `FILE_WIDTH` columns."""
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=max(found.width, FILE_WIDTH))


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], to: Console | None = None) -> None:
    """Print a table. A narrow terminal leaves out the columns of highest rank, and says which; no cell is ever cut."""
    from rich import box
    from rich.table import Table

    to = console() if to is None else to
    kept = _that_fit(columns, rows, to.width)
    if kept is None:
        for row in rows:  # narrower than what has to be shown: a line for every figure
            for column, cell in zip(columns, row, strict=True):
                to.print(f"{_in_a_line(column)}: {cell}", highlight=False)
            to.print()
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i in kept:
        table.add_column(columns[i].head, justify=columns[i].align, no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    to.print(table)
    missing = [_in_a_line(c) for i, c in enumerate(columns) if i not in kept]
    if missing:
        to.print(f"Left out at {to.width} columns: {', '.join(missing)}.", highlight=False)


def _in_a_line(column: Column) -> str:
    return " ".join(column.head.split())


def _that_fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The columns that are shown at `width`, in order; None where not even those of rank 0 have room."""
    from rich.cells import cell_len

    needs = [
        max(map(cell_len, [*column.head.split("\n"), *(row[i] for row in rows)])) for i, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while sum(needs[i] + 1 for i in kept) > width:
        goes = max(kept, key=lambda i: (columns[i].rank, i))
        if columns[goes].rank == 0:
            return None
        kept.remove(goes)
    return kept


@contextmanager
def progress(what: str, items: Iterable[_T], total: int) -> Iterator[Iterator[_T]]:
    """`items`, with a line on stderr that says how far they are; nothing is shown where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield iter(items)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*shown, console=console(stderr=True), transient=True) as bar:
        yield bar.track(items, total=total, description=what)
