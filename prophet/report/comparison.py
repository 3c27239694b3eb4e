"""The HTML page of `prophet plan`, which compares planners on a trace.

It shows load before and after, where the time goes, and which experts were copied when.

Shape legend: I judged iterations, L layers, R ranks, E experts.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prophet.errors import ReportError
from prophet.report.charts import draw_load_by_rank, draw_parts
from prophet.report.page import (
    AFTER,
    BEFORE,
    FOURTH,
    THIRD,
    Table,
    draw_figure,
    few,
    page,
    remarks,
    section,
    table_html,
    tiles,
    write_page,
)
from prophet.report.run import max_mean
from prophet.traces.replay import Replay

_SHOWN_LAYERS = 6
_STATIC = "no balancing"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Comparison:
    """One trace on the page.

    Attributes:
        name: Name of the trace.
        subtitle: Sizes and machine, in one line.
        iterations: Numbers of the judged iterations in the trace, [I].
        results: What each planner made of it, plain expert parallelism first.
        step_s: Predicted seconds of a step with each planner.
        remarks: Gain, cost and advice, a sentence or two each.

    Raises:
        ReportError: There are fewer than two results, or lengths do not match.
    """

    name: str
    subtitle: str
    iterations: Sequence[int]
    results: Sequence[Replay]
    step_s: Sequence[float]
    remarks: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len(self.results) < 2:
            raise ReportError("a page on planning needs at least one planner besides plain expert parallelism")
        if any(len(r.copies) != len(self.iterations) for r in self.results):
            raise ReportError(f"expected {len(self.iterations)} iterations in every result")
        if len(self.step_s) != len(self.results):
            raise ReportError(f"expected the seconds of a step with each of {len(self.results)} planners")

    @property
    def best(self) -> Replay:
        """The planner with the shortest predicted step, other than plain expert parallelism; the first of several."""
        return self.results[self._best]

    @property
    def _best(self) -> int:
        return min(range(1, len(self.results)), key=self.step_s.__getitem__)

    def step_gain(self, i: int | None = None) -> float:
        """How many times as fast a step is with planner `i`, or with the best."""
        after_s = self.step_s[self._best if i is None else i]
        return self.step_s[0] / after_s if after_s > 0 else 1.0

    def worst_layers(self) -> list[int]:
        """Up to six layers, those with the most unequal load before, in the model's order."""
        # As many as a phone can show one below the other without scrolling for long
        ratio = max_mean(self.results[0].rank_load)
        return sorted(np.argsort(-ratio, kind="stable")[:_SHOWN_LAYERS].tolist())


def _load(report: Comparison, label: str) -> str:
    layers = report.worst_layers()
    loads = []
    for name, result in ((_STATIC, report.results[0]), (report.best.planner, report.best)):
        load = result.rank_load[layers]
        # A layer without tokens has bars of no length
        loads.append((name, load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)))
    return draw_load_by_rank(loads, layers, label=f"{label}: load by rank, before and after")


_PARTS = (
    ("all-to-all", "a2a_s", THIRD),
    ("experts", "expert_s", AFTER),
    ("exposed Trans", "exposed_trans_s", BEFORE),
    ("exposed Agg", "exposed_agg_s", FOURTH),
)


def _time(report: Comparison, label: str) -> str:
    parts = [
        (name, colour, np.array([1e3 * getattr(r, attribute) for r in report.results]))
        for name, attribute, colour in _PARTS
    ]
    return draw_parts(
        [_STATIC, *(r.planner for r in report.results[1:])],
        parts,
        [f"{total:.3g}" for total in np.sum([lengths for *_, lengths in parts], axis=0)],
        xlabel="predicted ms of one layer in one step, forward and backward",
        label=f"{label}: where the time goes",
    )


def _copies(report: Comparison, label: str) -> str:
    copies, layers = report.best.copies, report.worst_layers()
    iterations, experts = len(report.iterations), copies.shape[2]
    # One scale for all layers, so that their colours can be compared
    most = max(1, int(copies.max()))

    def draw(figure: Any) -> None:
        from matplotlib.colors import PowerNorm

        grid = np.atleast_1d(figure.subplots(len(layers), 1, sharex=True))
        image: Any = None
        for axes, layer in zip(grid, layers, strict=True):
            image = axes.imshow(
                copies[:, layer].T,
                aspect="auto",
                cmap="cividis",
                # a single copy has to be seen
                norm=PowerNorm(0.5, vmin=0, vmax=most),
                interpolation="nearest",
                extent=(-0.5, iterations - 0.5, experts - 0.5, -0.5),
            )
            axes.grid(visible=False)
            axes.set_ylabel(f"layer {layer}\nexpert", fontsize=8)
            axes.set_yticks(few(experts, 4))
        # Iterations are spread over the trace, so the axis has places and the ticks name the trace's numbers
        ticks = few(iterations, 6)
        grid[-1].set_xticks(ticks, [str(report.iterations[i]) for i in ticks])
        grid[-1].set_xlabel("iteration of the trace (those judged)")
        bar = figure.colorbar(image, ax=list(grid), location="top", fraction=0.04, aspect=40)
        bar.set_ticks(few(most + 1, 8))
        bar.set_label("ranks with a copy of the expert, besides its home")
        bar.outline.set_visible(False)

    height_in = 0.9 + 0.85 * len(layers)
    return draw_figure(draw, height_in=height_in, label=f"{label}: copies of every expert by iteration")


def _numbers(report: Comparison) -> Table:
    static = report.results[0]
    return Table(
        title="All planners",
        caption="Balance (busiest rank over the mean) and copies are exact for this trace; milliseconds and gains are "
        "predictions, for one layer in one step and for the whole step.",
        columns=(
            "planner",
            "max/mean median",
            "p95",
            "copies per rank",
            "layer ms",
            "layer gain",
            "step ms",
            "step gain",
        ),
        rows=[
            (
                r.planner if r is not static else _STATIC,
                f"{r.max_mean_median:.3f}",
                f"{r.max_mean_p95:.3f}",
                f"{r.copies_per_rank:.2f}",
                f"{1e3 * r.layer_s:.3g}",
                f"{static.layer_s / r.layer_s if r.layer_s > 0 else 1.0:.2f}×",
                f"{1e3 * report.step_s[i]:.3g}",
                f"{report.step_gain(i):.2f}×",
            )
            for i, r in enumerate(report.results)
        ],
    )


def _one(report: Comparison, label: str) -> str:
    static, best = report.results[0], report.best
    shown = len(report.worst_layers())
    # Readers must know that they do not see all layers
    which = "" if shown == static.rank_load.shape[0] else f" The {shown} layers with the most unequal load are shown."
    figures = (
        (f"{static.max_mean_median:.2f} → {best.max_mean_median:.2f}", "busiest rank over the mean (median)"),
        (
            f"{1e3 * static.layer_s:.3g} → {1e3 * best.layer_s:.3g} ms",
            "one layer in one step, predicted, without and with balancing",
        ),
        (f"{report.step_gain():.2f}×", f"predicted gain of {best.planner}, of the whole step"),
        (f"{best.copies_per_rank:.2f}", "copies of a layer's experts on a rank (mean)"),
    )
    sections = (
        section(
            "Load by rank, before and after",
            "Tokens each rank computes over the mean of the ranks, averaged over the judged steps. All ranks wait for "
            f"the tallest bar; at 1.0 (dashed) they finish together.{which}",
            _load(report, label),
        )
        + section(
            "Where the time goes",
            "Predicted time of one MoE layer: moving tokens (all-to-all), computing them (experts), and the part of "
            "sending copies out (Trans) and bringing their gradients home (Agg) that nothing hides.",
            _time(report, label),
        )
        + section(
            "Which experts were copied, and when",
            f"One row per expert; brighter means that {best.planner} puts copies on more ranks. Rows that stay bright "
            f"are experts that stay busy.{which}",
            _copies(report, label),
        )
    )
    return (
        f'<h2>{html.escape(report.name)}</h2><p class="soft">{html.escape(report.subtitle)}</p>'
        f"{tiles(figures)}{''.join(f'<p>{html.escape(r)}</p>' for r in report.remarks)}"
        f'<div class="columns">{sections}</div>{table_html(_numbers(report))}'
    )


def render_comparison(reports: Sequence[Comparison]) -> str:
    """The page as one string of HTML, a part for every trace.

    Raises:
        ReportError: There is no trace, or matplotlib is missing.
    """
    if not reports:
        raise ReportError("expected at least one trace")
    parts = "\n".join(_one(report, f"Trace {i + 1}") for i, report in enumerate(reports))
    return page(
        "What would balancing gain?",
        "A replay of recorded routing: copies of busy experts are placed from the iteration before, and each step's "
        "tokens are divided among the copies by their exact counts.",
        parts
        + remarks(
            (
                "The balance and the copies are exact for the recorded routing. Times are predictions of the "
                "performance model for the machine named above, not measurements; the command prophet calibrate "
                "measures yours.",
                "The rest of the model takes as long as before, so the whole step gains less than the layer does. Its "
                "time follows from the model's sizes.",
                "Routing is taken as recorded: balancing changes where tokens are computed, never which expert "
                "computes them.",
            )
        ),
    )


def write_comparison(path: str | os.PathLike[str], reports: Sequence[Comparison]) -> None:
    """Render `reports` into the file `path`."""
    write_page(path, render_comparison(reports))
