"""Charts that several pages show: the load of every rank before and after, and bars of what a time consists of.

Shape legend: L layers, R ranks, B bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prophet.report.page import AFTER, BEFORE, INK, draw_figure, few
from prophet.spec import FloatArray


def draw_load_by_rank(loads: Sequence[tuple[str, FloatArray]], layers: Sequence[int], *, label: str) -> str:
    """Draw how busy every rank is, a panel for each layer, as themed SVG.

    Args:
        loads: Before and after: a name, and what ranks compute over their mean, [L, R].
        layers: The layers' numbers, L.
        label: As `draw_figure` takes it.
    """
    rows = -(-len(layers) // 2)

    def draw(figure: Any) -> None:
        # Matplotlib returns a single axes, a row or a grid, by how many there are
        grid = np.atleast_1d(figure.subplots(rows, min(2, len(layers)), sharex=True, sharey=True)).ravel()
        # An odd number of layers leaves a place in the grid empty
        for axes in grid[len(layers) :]:
            axes.set_axis_off()
        for i, (axes, layer) in enumerate(zip(grid, layers, strict=False)):
            for offset, (name, load), colour in zip((-0.2, 0.2), loads, (BEFORE, AFTER), strict=True):
                axes.bar(np.arange(load.shape[1]) + offset, load[i], 0.38, color=colour, label=name)
                axes.set_xticks(few(load.shape[1]))
            # All ranks finish together where every bar ends at this line
            axes.axhline(1.0, color=INK, linewidth=0.6, linestyle=(0, (3, 3)))
            axes.set_title(f"layer {layer}", fontsize=8.5)
            axes.grid(visible=False, axis="x")
        figure.supxlabel("rank", fontsize=8.5)
        figure.supylabel("load / mean", fontsize=8.5)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)

    return draw_figure(draw, height_in=0.9 + 1.15 * rows, label=label)


def draw_parts(
    names: Sequence[str],
    parts: Sequence[tuple[str, str, FloatArray]],
    totals: Sequence[str],
    *,
    xlabel: str,
    label: str,
) -> str:
    """Draw a bar for each name, stacked from its parts, with its total behind it; as themed SVG.

    Args:
        names: Names of the bars, the first one on top.
        parts: Name, colour and lengths [B] of every part.
        totals: What stands behind each bar.
        xlabel: What lengths are of.
        label: As `draw_figure` takes it.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        left = np.zeros(len(names))
        for name, colour, lengths in parts:
            axes.barh(np.arange(len(names)), lengths, 0.62, left=left, color=colour, label=name)
            left += lengths
        # The eye compares lengths, and needs a number for the sum
        for i, total in enumerate(totals):
            axes.text(left[i] + 0.01 * float(left.max()), i, total, va="center", fontsize=8)
        axes.set_yticks(np.arange(len(names)), names)
        # As in the table: the first on top
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        # Room for the number behind the longest bar; a trace without tokens has bars of no length
        axes.set_xlim(0, 1.15 * max(float(left.max()), 1e-12))
        axes.set_xlabel(xlabel)
        figure.legend(loc="outside upper center", ncols=3)

    return draw_figure(draw, height_in=1.5 + 0.26 * len(names), label=label)
