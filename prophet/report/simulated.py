"""The HTML page of `prophet simulate`: what a step consists of, by planner and number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from prophet.report.charts import draw_parts
from prophet.report.page import (
    AFTER,
    BEFORE,
    FAINT,
    FOURTH,
    INK,
    THIRD,
    Table,
    page,
    remarks,
    section,
    table_html,
    tiles,
    write_page,
)

_COLOURS = {
    "experts": AFTER,
    "all-to-all": THIRD,
    "transfers": BEFORE,
    "dense": FOURTH,
    "average": INK,
    "host": BEFORE,
    "bubble": FAINT,
}


def _parts(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """Draw a bar for every planner."""
    every = [
        (part, colour, np.array([1e3 * row["parts_s"][part] for row in rows])) for part, colour in _COLOURS.items()
    ]
    return draw_parts(
        [row["planner"] for row in rows],
        # A part that no planner has would only lengthen the legend. Parts are stacked even where ranks do not wait in
        # all of them, so a bar may be longer than the step
        [part for part in every if part[2].any()],
        [f"{1e3 * row['step_s']:.4g}" for row in rows],
        xlabel="simulated ms of a step",
        label=f"{ranks} ranks: where the time goes",
    )


def render_simulated(answer: dict[str, Any], sentences: Sequence[str]) -> str:
    """The page as one string of HTML, from what `prophet simulate --json` prints.

    Args:
        answer: The answer.
        sentences: The lines beside the command's table.

    Raises:
        ReportError: matplotlib is missing.
    """
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for row in answer["rows"]:
        # Rows come in the order of their numbers of ranks, and `dict` keeps it
        by_ranks.setdefault(row["ranks"], []).append(row)
    # The last row is even routing, which is no planner
    figures = [
        (f"{max(row['gain'] for row in rows[:-1]):.2f}x", f"a step on {ranks} ranks, over no balancing")
        for ranks, rows in by_ranks.items()
    ]
    sections = "".join(
        section(
            f"{ranks} ranks",
            "Parts of a step, in every layer of the busiest rank. Ranks do not wait for each other in all of them, so "
            "that the figure behind a bar, the step, may be smaller than the bar.",
            _parts(rows, ranks),
        )
        for ranks, rows in by_ranks.items()
    )
    numbers = Table(
        title="All planners",
        caption="Milliseconds are of one step; the error bar is that of steps both simulated and measured.",
        columns=("planner", "ranks", "step ms", "error bar", "gain", "of even routing", "most of it", "max/mean"),
        rows=[
            (
                row["planner"],
                str(row["ranks"]),
                f"{1e3 * row['step_s']:.4g}",
                f"{1e3 * row['low_s']:.4g} to {1e3 * row['high_s']:.4g}",
                f"{row['gain']:.2f}",
                f"{row['fraction_of_even_routing']:.3f}",
                row["limited_by"],
                f"{row['max_mean']:.3f}",
            )
            for row in answer["rows"]
        ],
    )
    return page(
        "How long would a step take?",
        f"{answer['model']} on {answer['machine']}, simulated.",
        f'{tiles(figures)}<div class="columns">{sections}</div>{table_html(numbers)}{remarks(sentences)}',
    )


def write_simulated(path: str | os.PathLike[str], answer: dict[str, Any], sentences: Sequence[str]) -> None:
    """Write the page of a simulation into a file.

    Args:
        path: The file; its folder is made.
        answer: What `prophet simulate --json` prints.
        sentences: The lines beside the command's table.

    Raises:
        ReportError: matplotlib is missing.
    """
    write_page(path, render_simulated(answer, sentences))
