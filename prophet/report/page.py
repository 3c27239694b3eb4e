"""What every report page is made of: themed figures, tables, and one file without network, scripts or fonts.

Figures are inline SVG whose colours are CSS variables, so that one file follows the reader's light or dark;
matplotlib is imported when the first figure is drawn.
"""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prophet.errors import ReportError


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table for a page.

    Attributes:
        title: Its heading.
        caption: A sentence that says what to see in it.
        columns: Heads of the columns.
        rows: Cells of every row, as text.
    """

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


# --- figures ---

# Matplotlib draws with these stand-ins, and the SVG gets CSS variables instead. Contrast holds in light and
# dark.
_COLOURS = {
    "#010203": "var(--ink)",
    "#040506": "var(--faint)",
    "#070809": "var(--before)",
    "#0a0b0c": "var(--after)",
    "#0d0e0f": "var(--third)",
    "#101112": "var(--fourth)",
}
INK, FAINT, BEFORE, AFTER, THIRD, FOURTH = _COLOURS


def check_can_draw() -> None:
    """Check that matplotlib is there; call it before the work that a page is made of.

    Raises:
        ReportError: It is missing.
    """
    try:
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ReportError("the page needs matplotlib: pip install '.[report]'") from None


def draw_figure(draw: Callable[[Any], None], *, height_in: float = 2.5, label: str) -> str:
    """Draw a phone-sized figure and return it as themed inline SVG.

    Args:
        draw: Draws onto the figure that it is given.
        height_in: Height in inches; the width is 4.5.
        label: What the figure shows, for readers that cannot see it; different for every figure of a page.

    Raises:
        ReportError: matplotlib is missing.
    """
    check_can_draw()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        # Text stays text: it can be searched, and takes the page's font
        "svg.fonttype": "none",
        # Identifiers would be random, and equal pages differ
        "svg.hashsalt": "prophet",
        "font.family": "sans-serif",
        "font.size": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.5,
        "axes.axisbelow": True,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.5, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    # Without the XML declaration, which may only stand at the top of a file
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in _COLOURS.items():
        svg = svg.replace(stand_in, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Identifiers are unique within a figure only; several figures share a page.
    prefix = re.sub(r"\W+", "-", label.lower())[:40]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # Without a fixed size, CSS can fit the figure to the column
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg ', _accessible(label), svg, count=1)
    return svg


def _accessible(label: str) -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        return f'<svg role="img" aria-label="{html.escape(label, quote=True)}" {match.group(1) or ""}'

    return replace


def few(n: int, most: int = 9) -> list[int]:
    """At most `most` ticks for 0 .. n-1."""
    return list(range(0, n, -(-n // most)))


_STYLE = """
:root{color-scheme:light dark;
--page:#fbfaf8;--card:#fff;--ink:#1f2328;--soft:#59636e;--faint:#d8d6d1;
--before:#c2410c;--after:#1d6fb8;--third:#15803d;--fourth:#7e3aa8}
@media(prefers-color-scheme:dark){:root{
--page:#14171a;--card:#1c2024;--ink:#e6e8ea;--soft:#9da7b1;--faint:#3a4048;
--before:#ff9a5c;--after:#6cb8ff;--third:#5fd08a;--fourth:#c79bf0}}
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
thead th{border-top:0;color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}
ul{padding-left:1.2rem;margin:.3rem 0;max-width:46rem}
li{margin:.3rem 0}
a{color:var(--after)}
"""


# --- the page ---


def table_html(table: Table) -> str:
    """A table under its heading, as HTML."""
    text = html.escape
    head = "".join(f'<th scope="col">{text(c)}</th>' for c in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{text(c)}</td>" for c in row) + "</tr>" for row in table.rows)
    return (
        f'<section><h2>{text(table.title)}</h2><p class="soft">{text(table.caption)}</p>'
        '<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def section(title: str, caption: str, figure: str) -> str:
    """A figure under its heading, as HTML.

    Args:
        title: The heading.
        caption: Sentences that say what to see in it.
        figure: The figure, as SVG.
    """
    return (
        f"<section><h2>{html.escape(title)}</h2><figure><figcaption>{html.escape(caption)}</figcaption>"
        f"{figure}</figure></section>"
    )


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Figures, each with what it is of, side by side, as HTML."""
    found = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(of)}</span></div>' for value, of in figures
    )
    return f'<div class="tiles">{found}</div>' if found else ""


def remarks(lines: Sequence[str], title: str = "What this shows, and what it cannot") -> str:
    """A list of sentences under a heading; nothing where there are none."""
    found = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<section><h2>{html.escape(title)}</h2><ul>{found}</ul></section>" if found else ""


def links(title: str, caption: str, files: Sequence[tuple[str, str]]) -> str:
    """Files that lie beside the page under a heading, as HTML; nothing where there are none.

    Args:
        title: The heading.
        caption: What the files are.
        files: A name for readers and the path from the page, for every file.
    """
    found = "".join(f'<li><a href="{html.escape(path)}">{html.escape(name)}</a></li>' for name, path in files)
    text = f'<h2>{html.escape(title)}</h2><p class="soft">{html.escape(caption)}</p>'
    return f"<section>{text}<ul>{found}</ul></section>" if found else ""


def page(title: str, lead: str, body: str) -> str:
    """The whole page as one string of HTML.

    Args:
        title: Title and heading.
        lead: The sentences below it.
        body: All that follows, as HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>{body}</main></body></html>\n'
    )


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Write a page into the file `path`; its folder is made."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
