"""The HTML report of a run: one file, no network, readable on a phone, in the reader's light or dark.

Shape legend: T steps, L layers, R ranks, E experts.

`Report` holds the numbers and words, `render_report` turns them into a page. Figures are inline SVG whose
colours are CSS variables, so that one file follows the reader's theme; matplotlib is imported when the
first figure is drawn.
"""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prophet.history import similarity
from prophet.spec import FloatArray

Ints = npt.NDArray[np.integer[Any]]


class ReportError(ValueError):
    """The report's parts do not fit together, or it cannot be drawn; the message says what was expected."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Run:
    """One training run: `loss` [T] in nats per byte, `step_s` [T], `rank_load` [T, L, R] tokens computed."""

    name: str
    loss: FloatArray
    step_s: FloatArray
    rank_load: Ints

    def __post_init__(self) -> None:
        steps = len(self.loss)
        if self.rank_load.ndim != 3 or len(self.rank_load) != steps or len(self.step_s) != steps or steps < 1:
            raise ReportError(
                f"run {self.name!r}: expected loss [T], step_s [T], rank_load [T, L, R] for one T >= 1, got "
                f"{list(self.loss.shape)}, {list(self.step_s.shape)}, {list(self.rank_load.shape)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a heading, a sentence that says what to see in it, and one row of words per line."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Report:
    """All that the page shows; `before` and `after` train on the same tokens, `counts` are [T, L, R, E]."""

    title: str
    lead: str
    before: Run
    after: Run
    counts: Ints
    figures: Sequence[tuple[str, str]] = ()  # a figure and what it is of, for the head of the page
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.before.rank_load.shape[1:] != self.after.rank_load.shape[1:]:
            raise ReportError("expected the same layers and ranks in both runs")
        if self.counts.ndim != 4 or not self.counts.size:
            raise ReportError(f"expected counts [T, L, R, E] with at least one step, got {list(self.counts.shape)}")


# --- the numbers behind the figures -------------------------------------------------------------------


def max_mean(rank_load: Ints) -> FloatArray:
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
        starts = np.unique(np.linspace(0, steps - 1 - d, num=min(64, max(0, steps - d))).astype(int))
        for layer in range(layers):
            pairs = [similarity(counts[t, layer], counts[t + d, layer]) for t in starts]
            if pairs:
                result[i, layer] = float(np.mean(pairs))
    return result


def expert_shares_by_step(counts: Ints, *, columns: int = 200) -> FloatArray:
    """Each expert's share of its layer's tokens, [L, E, C]; steps are averaged into C columns."""
    per_step = counts.sum(axis=2, dtype=np.int64).astype(np.float64)  # [T, L, E]
    shares = per_step / np.maximum(per_step.sum(axis=-1, keepdims=True), 1.0)
    bins = np.array_split(np.arange(len(shares)), min(columns, len(shares)))
    grouped: FloatArray = np.stack([shares[b].mean(axis=0) for b in bins], axis=-1)
    return grouped


# --- figures ------------------------------------------------------------------------------------------

# Matplotlib is told these stand-ins, and the SVG gets CSS variables instead. Contrast holds in light and
# dark.
_COLOURS = {
    "#010203": "var(--ink)",
    "#040506": "var(--faint)",
    "#070809": "var(--before)",
    "#0a0b0c": "var(--after)",
    "#0d0e0f": "var(--third)",
}
_INK, _FAINT, _BEFORE, _AFTER, _THIRD = _COLOURS


def _draw(draw: Callable[[Any], None], *, height_in: float = 2.5, label: str) -> str:
    """Run `draw(figure)` on a phone-sized figure and return it as themed inline SVG."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError("the report needs matplotlib: pip install 'moe-prophet[report]'") from None
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "prophet",
        "font.family": "sans-serif",
        "font.size": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": _FAINT,
        "grid.linewidth": 0.5,
        "axes.axisbelow": True,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.5, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in _COLOURS.items():
        svg = svg.replace(stand_in, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Identifiers are unique within a figure only; several figures share a page.
    prefix = re.sub(r"\W+", "-", label.lower())[:40]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg ', _accessible(label), svg, count=1)
    return svg


def _accessible(label: str) -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        return f'<svg role="img" aria-label="{html.escape(label, quote=True)}" {match.group(1) or ""}'

    return replace


def _balance_over_steps(report: Report) -> str:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for run, colour in ((report.before, _BEFORE), (report.after, _AFTER)):
            ratio = max_mean(run.rank_load)  # [T, L]
            steps = np.arange(1, len(ratio) + 1)
            axes.fill_between(steps, ratio.min(axis=1), ratio.max(axis=1), color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, np.median(ratio, axis=1), color=colour, label=run.name)
        axes.axhline(1.0, color=_INK, linewidth=0.6, linestyle=(0, (3, 3)))
        axes.set(xlabel="step", ylabel="busiest rank / mean", ylim=(0.95, None))
        axes.legend(loc="upper right", ncols=2)

    return _draw(draw, label="Busiest rank over the mean, by step")


def _load_by_rank(report: Report) -> str:
    layers = report.before.rank_load.shape[1]
    rows = -(-layers // 2) if layers > 1 else 1

    def draw(figure: Any) -> None:
        grid = np.atleast_1d(figure.subplots(rows, min(2, layers), sharex=True, sharey=True)).ravel()
        for layer, axes in enumerate(grid):
            if layer >= layers:
                axes.set_axis_off()
                continue
            for offset, run, colour in ((-0.2, report.before, _BEFORE), (0.2, report.after, _AFTER)):
                load = run.rank_load[:, layer].astype(np.float64)
                mean = np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
                ranks = np.arange(load.shape[1])
                axes.bar(ranks + offset, (load / mean).mean(axis=0), 0.38, color=colour, label=run.name)
            axes.axhline(1.0, color=_INK, linewidth=0.6, linestyle=(0, (3, 3)))
            axes.set_title(f"layer {layer}", fontsize=8.5)
            axes.grid(visible=False, axis="x")
            axes.set_xticks(_few(report.before.rank_load.shape[2]))
        figure.supxlabel("rank", fontsize=8.5)
        figure.supylabel("load / mean", fontsize=8.5)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)

    return _draw(draw, height_in=0.9 + 1.15 * rows, label="Load by rank, before and after")


def _few(n: int, most: int = 9) -> list[int]:
    return list(range(0, n, -(-n // most)))


def _expert_heat(report: Report) -> str:
    shares = expert_shares_by_step(report.counts)
    layers, experts, _ = shares.shape
    shown = min(layers, 8)

    def draw(figure: Any) -> None:
        grid = np.atleast_1d(figure.subplots(shown, 1, sharex=True))
        image: Any = None
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
            axes.set_yticks(_few(experts, 3))
        grid[-1].set_xlabel("step")
        bar = figure.colorbar(image, ax=list(grid), location="top", fraction=0.04, aspect=40)
        bar.set_label("expert's tokens / mean of the experts")
        bar.outline.set_visible(False)

    return _draw(draw, height_in=0.8 + 0.75 * shown, label="Load of every expert over steps")


def _similarity(report: Report) -> str:
    steps = len(report.counts)
    distances = [d for d in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987) if d < steps] or [0]
    by_distance = similarity_by_distance(report.counts, distances)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        low, high = by_distance.min(axis=1), by_distance.max(axis=1)
        axes.fill_between(distances, low, high, color=_THIRD, alpha=0.25, linewidth=0)
        axes.plot(distances, by_distance.mean(axis=1), color=_THIRD, marker="o", markersize=3)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(distances[:: max(1, len(distances) // 6)])
        axes.get_xaxis().set_major_formatter(lambda x, _: f"{x:g}")
        axes.minorticks_off()
        axes.set(xlabel="steps apart", ylabel="overlap of routing", ylim=(min(0.5, float(low.min())), 1.0))

    return _draw(draw, label="Similarity of routing by distance between steps")


def _losses(report: Report) -> str:
    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for run, colour, width, dash in (
            (report.before, _BEFORE, 2.6, "solid"),
            (report.after, _AFTER, 1.1, (0, (4, 2))),
        ):
            top.plot(
                np.arange(1, len(run.loss) + 1),
                run.loss,
                color=colour,
                linewidth=width,
                ls=dash,
                label=run.name,
            )
        top.set_ylabel("loss, nats / byte")
        top.legend()
        difference = relative_difference(report.before.loss, report.after.loss)
        differs = np.flatnonzero(difference)
        bottom.plot(differs + 1, difference[differs], ".", color=_THIRD, markersize=3)
        bottom.set_yscale("log")
        bottom.set_ylim(1e-9, max(1e-5, 3.0 * float(difference.max())))
        bottom.set(xlabel="step", ylabel="relative\ndifference")

    return _draw(draw, height_in=3.2, label="Losses of both runs, and their difference")


_SECTIONS: tuple[tuple[str, str, Callable[[Report], str]], ...] = (
    (
        "How much busier is the busiest rank?",
        "All ranks wait for the busiest one. At 1.0 (dashed) every rank computes the same number of "
        "tokens. The line is the median layer, the band reaches from the best layer to the worst.",
        _balance_over_steps,
    ),
    (
        "Load by rank",
        "Tokens each rank computes, over the mean of the ranks, averaged over all steps. Tall bars are "
        "ranks that others wait for, short bars are ranks that wait.",
        _load_by_rank,
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
        "The loss does not notice",
        "Both runs start from one seed and see the same tokens. The lower panel is the relative difference of the "
        "two losses; it comes from adding the same numbers in another order. Steps without a point are equal in "
        "every bit.",
        _losses,
    ),
)

_STYLE = """
:root{color-scheme:light dark;
--page:#fbfaf8;--card:#fff;--ink:#1f2328;--soft:#59636e;--faint:#d8d6d1;
--before:#c2410c;--after:#1d6fb8;--third:#15803d}
@media(prefers-color-scheme:dark){:root{
--page:#14171a;--card:#1c2024;--ink:#e6e8ea;--soft:#9da7b1;--faint:#3a4048;
--before:#ff9a5c;--after:#6cb8ff;--third:#5fd08a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 -apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",Helvetica,Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .4rem}
h2{font-size:1.1rem;line-height:1.35;margin:0 0 .3rem}
p{margin:.2rem 0 .6rem}
.lead{font-size:1.05rem;max-width:46rem}
.soft,figcaption{color:var(--soft);font-size:.92rem;max-width:46rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:1rem;margin:1.2rem 0}
.tile,section{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:.9rem 1rem}
.tile b{display:block;font-size:1.35rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.88rem;line-height:1.35;display:block}
.columns{columns:24rem;column-gap:1rem;margin-bottom:1rem}
section{break-inside:avoid;margin:0 0 1rem}
figure{margin:0}
figure svg{width:100%;height:auto;display:block;margin-top:.5rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.35rem .6rem;border-top:1px solid var(--faint);white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:9rem}
thead th{border-top:0;color:var(--soft);font-weight:600}
ul{padding-left:1.2rem;margin:.3rem 0;max-width:46rem}
li{margin:.3rem 0}
"""


# --- the page -----------------------------------------------------------------------------------------


def _table(table: Table) -> str:
    text = html.escape
    head = "".join(f'<th scope="col">{text(c)}</th>' for c in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{text(c)}</td>" for c in row) + "</tr>" for row in table.rows)
    return (
        f'<section><h2>{text(table.title)}</h2><p class="soft">{text(table.caption)}</p>'
        '<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def render_report(report: Report) -> str:
    """The page as one string of HTML; raises `ReportError` when matplotlib is missing."""
    tiles = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(of)}</span></div>'
        for value, of in report.figures
    )
    sections = "".join(
        f"<section><h2>{html.escape(title)}</h2><figure><figcaption>{html.escape(caption)}</figcaption>"
        f"{draw(report)}</figure></section>"
        for title, caption, draw in _SECTIONS
    )
    lines = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    notes = f"<section><h2>What this shows, and what it cannot</h2><ul>{lines}</ul></section>" if lines else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(report.title)}</title><style>{_STYLE}</style></head>\n<body><main>"
        f'<h1>{html.escape(report.title)}</h1><p class="lead">{html.escape(report.lead)}</p>'
        + (f'<div class="tiles">{tiles}</div>' if tiles else "")
        + f'\n<div class="columns">{sections}{notes}</div>\n'
        + "".join(_table(t) for t in report.tables)
        + "</main></body></html>\n"
    )


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Render `report` into the file `path`."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render_report(report), encoding="utf-8")
