"""The output of commands: tables whose figures are whole at any width, and a line of progress."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text

FILE_WIDTH = 110
"""Width in columns of output to a file or a pipe."""

# A column of text that may be wrapped keeps at least so many columns, or it would be a stack of syllables
_LEAST_TEXT = 16

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        head: Its lines, parted by newlines.
        rank: Columns of rank 0 always stay; the highest rank is left out first.
        align: Where its cells stand.
        wrap: Whether its text may take several lines; figures are never cut.
    """

    head: str
    rank: int = 0
    align: Literal["left", "right"] = "right"
    wrap: bool = False

    @property
    def name(self) -> str:
        """The head on one line."""
        return " ".join(self.head.split())


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table that `rich` prints as wide as there is room, and never cuts a cell.

    Where it is narrow, the columns of highest rank are left out, and named below. Where those of rank 0 alone are too
    wide, every figure has a line.

    Attributes:
        columns: Its columns, from left to right.
        rows: Cells as strings, which are shown as they are, or as rich's `Text`.
        title: A line above the table.
        caption: A line below it.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]
    title: str = ""
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.title:
            yield Text(self.title, style="italic")
        kept = self._that_fit(console, options)
        if kept is None:
            yield from self._line_by_line()
        else:
            yield self._of(kept)
        if self.caption:
            yield Text(self.caption, style="dim")
        if kept is not None and len(kept) < len(self.columns):
            missing = ", ".join(column.name for i, column in enumerate(self.columns) if i not in kept)
            yield Text(f"Left out at {options.max_width} columns: {missing}.", style="dim")

    def _that_fit(self, console: Console, options: ConsoleOptions) -> list[int] | None:
        """Choose the columns that are shown, in order; None where not even those of rank 0 have room."""
        from rich.measure import Measurement

        # Measured as if there were no limit, or rich would report what it had already squeezed
        anywhere = options.update(width=1 << 16)
        kept = list(range(len(self.columns)))
        while Measurement.get(console, anywhere, self._of(kept)).minimum > options.max_width:
            # Of equal ranks the rightmost
            goes = max(kept, key=lambda i: (self.columns[i].rank, i))
            if self.columns[goes].rank == 0:
                return None
            kept.remove(goes)
        return kept

    def _of(self, kept: Sequence[int]) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        rows = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        for i in kept:
            column, head = self.columns[i], Text(self.columns[i].head)
            widest = max(line.cell_len for cell in (head, *(row[i] for row in rows)) for line in cell.split())
            # Without a least width rich cuts the widest column first, figures included
            table.add_column(
                head,
                justify=column.align,
                no_wrap=not column.wrap,
                overflow="fold",
                min_width=min(widest, _LEAST_TEXT) if column.wrap else widest,
            )
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        return table

    def _line_by_line(self) -> Iterator[Text]:
        from rich.text import Text

        for number, row in enumerate(self.rows):
            if number:
                yield Text()
            for column, cell in zip(self.columns, row, strict=True):
                yield Text.assemble(f"{column.name}: " if column.name else "", cell, overflow="fold")


def console(*, stderr: bool = False) -> Console:
    """Make a console as wide as the terminal, or `FILE_WIDTH` columns; text is shown as it is, without markup."""
    from rich.console import Console

    found = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    # rich takes 80 columns for a pipe, which would leave out columns of reports
    if not found.is_terminal:
        found.width = max(found.width, FILE_WIDTH)
    return found


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], to: Console | None = None) -> None:
    """Print a table as wide as there is room: a narrow terminal has fewer columns, and no figure is cut.

    Args:
        columns: Its columns.
        rows: Its cells, as they are shown.
        to: Where to print; None for the terminal.
    """
    (console() if to is None else to).print(FittedTable(columns, rows))


@contextmanager
def progress(what: str, items: Iterable[_T], total: int) -> Iterator[Iterator[_T]]:
    """Yield `items`, with a line on stderr that shows how far they are; nothing is shown without a terminal.

    Args:
        what: The text of the line.
        items: What to go through.
        total: How many there are.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with _shown(BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn(compact=True)) as bar:
        yield iter(items) if bar is None else iter(bar.track(items, total=total, description=what))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a line on stderr with the text `what` and the seconds so far; nothing without a terminal."""
    from rich.progress import TimeElapsedColumn

    with _shown(TimeElapsedColumn()) as bar:
        if bar is not None:
            bar.add_task(what, total=None)
        yield


@contextmanager
def _shown(*columns: ProgressColumn) -> Iterator[Progress | None]:
    """Show a line of text and `columns`, which is gone when the block ends; None where stderr is no terminal."""
    # A log file would get a line for every refresh
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress, TextColumn
    from rich.table import Column as Cell

    description = TextColumn("{task.description}", markup=False, table_column=Cell(ratio=1, overflow="fold"))
    with Progress(*columns, description, console=console(stderr=True), transient=True, expand=True) as bar:
        yield bar
