"""The HTML report of a run: one file, no network, readable on a phone, in the reader's light or dark.

Shape legend: T steps, L layers, R ranks, E experts.

`Report` holds the numbers and texts, `render_report` turns them into a page.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prophet.engine.history import similarity
from prophet.errors import ReportError
from prophet.report.charts import draw_load_by_rank
from prophet.report.gain import Pairs, draw_gain
from prophet.report.page import (
    AFTER,
    BEFORE,
    FAINT,
    FOURTH,
    INK,
    THIRD,
    Table,
    draw_figure,
    few,
    links,
    page,
    remarks,
    section,
    table_html,
    tiles,
    write_page,
)
from prophet.report.picture import chosen_spans, height_in, middle_blocks, paint_step
from prophet.scheduler.timeline import Span
from prophet.spec import FloatArray

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Run:
    """One training run.

    Without losses of both runs the page has no section of them; those of `after` alone are drawn under its balance.

    Attributes:
        name: Name of the run.
        loss: Loss in nats per byte, NaN where it is not known, [T].
        rank_load: Tokens that every rank computed, [T, L, R].

    Raises:
        ReportError: Shapes do not match.
    """

    name: str
    loss: FloatArray
    rank_load: Ints

    def __post_init__(self) -> None:
        steps = len(self.loss)
        if self.rank_load.ndim != 3 or len(self.rank_load) != steps or steps < 1:
            raise ReportError(
                f"run {self.name!r}: expected loss [T], rank_load [T, L, R] for one T >= 1, got "
                f"{list(self.loss.shape)}, {list(self.rank_load.shape)}"
            )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Report:
    """All that the page shows.

    Attributes:
        title: Title of the page.
        lead: The sentences below it.
        before: The run without balancing.
        after: The run with balancing, on the same tokens.
        counts: Tokens by rank and expert, [T, L, R, E].
        others: Both runs again from other seeds, which the balance and the losses show too.
        pairs: Step times of both runs; None: time shows nothing.
        figures: A figure and what it is of, for the head of the page.
        spans: What all ranks did in one step of `after`.
        tables: Tables.
        timelines: A file's name for readers, and its path from the page.
        remarks: Sentences on what the page shows and what it cannot.

    Raises:
        ReportError: Runs have different layers, ranks or steps, or there are no counts.
    """

    title: str
    lead: str
    before: Run
    after: Run
    counts: Ints
    others: Sequence[tuple[Run, Run]] = ()
    pairs: Pairs | None = None
    figures: Sequence[tuple[str, str]] = ()
    spans: Sequence[Span] = ()
    tables: Sequence[Table] = ()
    timelines: Sequence[tuple[str, str]] = ()
    remarks: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        runs = [run for both in self.both_runs for run in both]
        if len({run.rank_load.shape[1:] for run in runs}) > 1:
            raise ReportError("expected the same layers and ranks in all runs")
        if self.others and len({len(run.loss) for run in runs}) > 1:
            raise ReportError("expected as many steps from every seed")
        if self.counts.ndim != 4 or not self.counts.size:
            raise ReportError(f"expected counts [T, L, R, E] with at least one step, got {list(self.counts.shape)}")

    @property
    def both_runs(self) -> list[tuple[Run, Run]]:
        """Both runs, from every seed."""
        return [(self.before, self.after), *self.others]


# --- the numbers behind the figures -------------------------------------------------------------------


def max_mean(rank_load: Ints | FloatArray) -> FloatArray:
    """Largest rank load over the mean, over the last dimension; 1 where there are no tokens."""
    load = np.asarray(rank_load, dtype=np.float64)
    mean = load.mean(axis=-1)
    ratio: FloatArray = np.where(mean > 0, load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)
    return ratio


def relative_difference(a: FloatArray, b: FloatArray) -> FloatArray:
    """|a - b| / |a|, elementwise over their common length."""
    n = min(len(a), len(b))
    x, y = np.asarray(a[:n], dtype=np.float64), np.asarray(b[:n], dtype=np.float64)
    difference: FloatArray = np.abs(x - y) / np.maximum(np.abs(x), 1e-300)
    return difference


def similarity_by_distance(counts: Ints, distances: Sequence[int]) -> FloatArray:
    """Mean similarity of steps `distances[i]` apart, [len(distances), L]; NaN where there are none."""
    steps, layers = counts.shape[:2]
    result = np.full((len(distances), layers), np.nan)
    for i, d in enumerate(distances):
        # At most 64 pairs of steps for each distance: a long run would take minutes, and the mean no longer moves
        starts = np.unique(np.linspace(0, steps - 1 - d, num=min(64, max(0, steps - d))).astype(int))
        for layer in range(layers):
            pairs = [similarity(counts[t, layer], counts[t + d, layer]) for t in starts]
            if pairs:
                result[i, layer] = float(np.mean(pairs))
    return result


def expert_shares_by_step(counts: Ints, *, columns: int = 200) -> FloatArray:
    """Each expert's share of its layer's tokens, [L, E, C]; steps are averaged into C columns."""
    # [T, L, E]
    per_step = counts.sum(axis=2, dtype=np.int64).astype(np.float64)
    shares = per_step / np.maximum(per_step.sum(axis=-1, keepdims=True), 1.0)
    # More columns than a screen has pixels would only make the file larger
    bins = np.array_split(np.arange(len(shares)), min(columns, len(shares)))
    grouped: FloatArray = np.stack([shares[b].mean(axis=0) for b in bins], axis=-1)
    return grouped


# --- figures ------------------------------------------------------------------------------------------


def _balance_over_steps(report: Report) -> str:
    loss = report.after.loss
    # A monitored run has losses of one run only: they cannot be compared, but their course is worth a panel
    beside = bool(np.isfinite(loss).any()) and not np.isfinite(report.before.loss).any()

    def draw(figure: Any) -> None:
        axes, *below = figure.subplots(1 + beside, 1, sharex=True, squeeze=False)[:, 0]
        for runs, colour in zip(zip(*report.both_runs, strict=True), (BEFORE, AFTER), strict=True):
            # [T, layers of all seeds]
            ratio = np.concatenate([max_mean(run.rank_load) for run in runs], axis=1)
            steps = np.arange(1, len(ratio) + 1)
            axes.fill_between(steps, ratio.min(axis=1), ratio.max(axis=1), color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, np.median(ratio, axis=1), color=colour, label=runs[0].name)
        axes.axhline(1.0, color=INK, linewidth=0.6, linestyle=(0, (3, 3)))
        axes.set(ylabel="busiest rank / mean", ylim=(0.95, None))
        axes.legend(loc="upper right", ncols=2)
        for under in below:
            under.plot(np.arange(1, len(loss) + 1), loss, color=INK)
            under.set(ylabel="loss")
        (axes, *below)[-1].set_xlabel("step")

    return draw_figure(draw, height_in=2.5 + 1.5 * beside, label="Busiest rank over the mean, by step")


def _load_by_rank(report: Report) -> str:
    loads = []
    for run in (report.before, report.after):
        load = run.rank_load.astype(np.float64)
        # Each step counts alike, whatever its tokens: the mean is of ratios
        loads.append((run.name, (load / np.maximum(load.mean(axis=2, keepdims=True), 1e-9)).mean(axis=0)))
    layers = range(report.before.rank_load.shape[1])
    return draw_load_by_rank(loads, layers, label="Load by rank, before and after")


def _expert_heat(report: Report) -> str:
    shares = expert_shares_by_step(report.counts)
    layers, experts, _ = shares.shape
    shown = min(layers, 8)

    def draw(figure: Any) -> None:
        grid = np.atleast_1d(figure.subplots(shown, 1, sharex=True))
        image: Any = None
        # A few extreme steps would leave all others dark
        top = float(np.percentile(shares, 99.5)) * experts
        for layer, axes in enumerate(grid):
            image = axes.imshow(
                shares[layer] * experts,
                aspect="auto",
                cmap="cividis",
                vmin=0,
                vmax=max(top, 1.0),
                interpolation="nearest",
                extent=(0.5, len(report.counts) + 0.5, experts - 0.5, -0.5),
            )
            axes.grid(visible=False)
            axes.set_ylabel(f"layer {layer}", fontsize=8)
            axes.set_yticks(few(experts, 3))
        grid[-1].set_xlabel("step")
        bar = figure.colorbar(image, ax=list(grid), location="top", fraction=0.04, aspect=40)
        bar.set_label("expert's tokens / mean of the experts")
        bar.outline.set_visible(False)

    return draw_figure(draw, height_in=0.8 + 0.75 * shown, label="Load of every expert over steps")


def _similarity(report: Report) -> str:
    steps = len(report.counts)
    # Fibonacci's numbers: near steps closely, far ones sparsely, as the axis is logarithmic
    distances = [d for d in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987) if d < steps] or [0]
    by_distance = similarity_by_distance(report.counts, distances)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        low, high = by_distance.min(axis=1), by_distance.max(axis=1)
        axes.fill_between(distances, low, high, color=THIRD, alpha=0.25, linewidth=0)
        axes.plot(distances, by_distance.mean(axis=1), color=THIRD, marker="o", markersize=3)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(distances[:: max(1, len(distances) // 6)])
        axes.get_xaxis().set_major_formatter(lambda x, _: f"{x:g}")
        axes.minorticks_off()
        axes.set(xlabel="steps apart", ylabel="overlap of routing", ylim=(min(0.5, float(low.min())), 1.0))

    return draw_figure(draw, label="Similarity of routing by distance between steps")


def _losses(report: Report) -> str:
    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        largest = 0.0
        for i, runs in enumerate(report.both_runs):
            # The second line is thin and dashed, so that the first shows where both are equal
            for run, colour, width, dash in zip(runs, (BEFORE, AFTER), (2.6, 1.1), ("solid", (0, (4, 2))), strict=True):
                label = run.name if i == 0 else None
                steps = np.arange(1, len(run.loss) + 1)
                top.plot(steps, run.loss, color=colour, linewidth=width, ls=dash, label=label)
            difference = relative_difference(runs[0].loss, runs[1].loss)
            # A logarithmic axis has no zero; steps that are equal in every bit have no point
            differs = np.flatnonzero(difference)
            bottom.plot(differs + 1, difference[differs], ".", color=THIRD, markersize=3)
            largest = max(largest, float(difference.max()))
        top.set_ylabel("loss, nats / byte")
        top.legend()
        bottom.set_yscale("log")
        bottom.set_ylim(1e-9, max(1e-5, 3.0 * largest))
        bottom.set(xlabel="step", ylabel="relative\ndifference")

    return draw_figure(draw, height_in=3.2, label="Losses of both runs, and their difference")


def _two_blocks(report: Report) -> str:
    shown = chosen_spans({report.after.name: report.spans}, blocks=middle_blocks(report.spans))
    colours = {"experts": AFTER, "rest": FAINT, "tokens": BEFORE, "Trans": THIRD, "Agg": FOURTH}
    return draw_figure(
        lambda figure: paint_step(figure, shown, colours), height_in=height_in(shown), label="Two blocks of a step"
    )


def _gain(report: Report) -> str:
    assert report.pairs is not None
    return draw_gain(report.pairs, (report.before.name, report.after.name))


_SECTIONS: tuple[tuple[str, str, Callable[[Report], str]], ...] = (
    (
        "Does a step get shorter?",
        "Two equal models train side by side on the same tokens, one with balancing. They take turns of a few "
        "steps, and the order alternates. A point is one pair of turns: the median step with balancing over the "
        "median step without. Below 1 (dashed), balancing gains time.",
        _gain,
    ),
    (
        "How much busier is the busiest rank?",
        "All ranks wait for the busiest one. At 1.0 (dashed) every rank computes the same number of "
        "tokens. The line is the median over layers and seeds, the band reaches from the best to the worst.",
        _balance_over_steps,
    ),
    (
        "Load by rank",
        "Tokens each rank computes, over the mean of the ranks, averaged over all steps. Tall bars are "
        "ranks that others wait for, short bars are ranks that wait.",
        _load_by_rank,
    ),
    (
        "The loss does not notice",
        "From each seed both runs start with the same parameters and see the same tokens. The lower panel is the "
        "relative difference of their losses. It comes from adding the same numbers in another order. Steps without "
        "a point are equal in every bit.",
        _losses,
    ),
    (
        "Which experts are hot, and for how long",
        "One row per expert. Bright rows are experts that many tokens choose. Rows that stay bright are "
        "why the next step can be planned from the last ones.",
        _expert_heat,
    ),
    (
        "How long routing stays the same",
        "Overlap of the experts' shares between two steps: 1 is the same shares, 0 is entirely other "
        "experts. The line is the mean of the layers, the band their range.",
        _similarity,
    ),
    (
        "What hides under what",
        "The forward pass of two neighbouring blocks in the last step, on every rank: what it computes, the "
        "all-to-all, and the transfers of experts, which run beside both.",
        _two_blocks,
    ),
)

# --- the page ---


def _timelines(report: Report) -> str:
    about = (
        "What every rank did in one step, from begin to end. Open a file in ui.perfetto.dev or chrome://tracing: "
        "they read it in the browser and send it nowhere."
    )
    return links("Timelines", about, report.timelines)


def render_report(report: Report) -> str:
    """The page as one string of HTML; raises `ReportError` when matplotlib is missing."""
    # Sections that have nothing to show are left out
    known = np.isfinite(report.before.loss).any() and np.isfinite(report.after.loss).any()
    transfers = any(s.stream == "weights" for s in report.spans)
    timed = report.pairs is not None
    left_out = [draw for draw, has in ((_gain, timed), (_losses, known), (_two_blocks, transfers)) if not has]
    shown = [s for s in _SECTIONS if s[2] not in left_out]
    sections = "".join(section(title, caption, draw(report)) for title, caption, draw in shown)
    return page(
        report.title,
        report.lead,
        tiles(report.figures)
        + f'\n<div class="columns">{sections}{_timelines(report)}{remarks(report.remarks)}</div>\n'
        + "".join(table_html(t) for t in report.tables),
    )


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Render `report` into the file `path`."""
    write_page(path, render_report(report))
