"""The HTML report: self-contained, escaped, and drawn from the numbers it is given."""

from __future__ import annotations

import dataclasses
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from prophet.engine.history import similarity
from prophet.errors import ReportError
from prophet.report import (
    Comparison,
    Report,
    Run,
    Table,
    expert_shares_by_step,
    max_mean,
    relative_difference,
    render_comparison,
    render_report,
    similarity_by_distance,
    write_report,
)
from prophet.scheduler.timeline import Span
from prophet.traces.replay import Replay


def report(steps: int = 12, layers: int = 3, ranks: int = 4, experts: int = 8) -> Report:
    rng = np.random.default_rng(0)
    loss = np.linspace(5, 2, steps)
    return Report(
        title="A <b>title</b> & more",
        lead="One sentence.",
        before=Run(
            name="off",
            loss=loss,
            rank_load=rng.integers(1, 99, (steps, layers, ranks)),
        ),
        after=Run(
            name="on",
            loss=loss * (1 + 1e-6),
            rank_load=np.full((steps, layers, ranks), 50),
        ),
        counts=rng.integers(0, 9, (steps, layers, ranks, experts)),
        figures=(("1.5 → 1.0", "busiest rank / mean"),),
        tables=(Table(title="Numbers", caption="Read it.", columns=("", "off"), rows=(("<loss>", "2.0"),)),),
        remarks=("Two cores <cannot> show this.",),
    )


@pytest.fixture(scope="module")
def page() -> str:
    return render_report(report())


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects what the page refers to."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert all(r.startswith(("#", "data:image/png;base64,")) for r in tags.references)
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(svg)
    assert not re.findall(r"url\((?!#)", page)
    assert "@import" not in page
    assert "<script" not in page


def test_every_part_is_there(page: str) -> None:
    assert page.count("<svg") == 5
    assert page.count('role="img" aria-label="') == 5
    for heading in ("Load by rank", "Which experts are hot", "How long routing stays the same", "The loss"):
        assert heading in page
    assert "width=device-width" in page
    assert "prefers-color-scheme:dark" in page


def test_figures_follow_the_theme(page: str) -> None:
    assert page.count("var(--before)") > 3
    assert page.count("var(--after)") > 3
    assert not re.search(r"#010203|#040506|#070809|#0a0b0c|#0d0e0f", page)


def test_text_is_escaped(page: str) -> None:
    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in page
    assert "&lt;loss&gt;" in page
    assert "&lt;cannot&gt;" in page


def test_identical_reports_are_identical_pages(page: str) -> None:
    assert render_report(report()) == page


def test_the_smallest_report_is_drawn(tmp_path: Path) -> None:
    write_report(tmp_path / "new" / "r.html", report(steps=1, layers=1, ranks=1, experts=1))
    assert (tmp_path / "new" / "r.html").read_text(encoding="utf-8").count("<svg") == 5


def test_many_layers_and_ranks_are_drawn() -> None:
    assert render_report(report(steps=3, layers=12, ranks=32, experts=64)).count("<svg") == 5


def test_two_blocks_of_a_recorded_step_are_drawn(page: str) -> None:
    spans = [
        Span(10.0 + 0.1 * b + at, 10.0 + 0.1 * b + at + 0.02, rank, stream, name)
        for rank in range(2)
        for b in range(4)
        for at, stream, name in (
            (0.0, "compute", f"route({b})"),
            (0.02, "tokens", f"dispatch of layer {b}"),
            (0.04, "compute", f"FEC({b})"),
            (0.05, "weights", f"Trans chunk 0 of layer {b + 1}"),
            (0.06, "compute", f"FNEC({b})"),
        )
    ]
    heading = "What hides under what"
    assert heading not in page
    drawn = render_report(dataclasses.replace(report(), spans=spans))
    assert heading in drawn
    assert drawn.count("<svg") == page.count("<svg") + 1
    for words in ("rank 1 transfers", "all-to-all", "Trans"):
        assert words in drawn
    alone = [s for s in spans if s.stream != "weights"]  # nothing to hide: nothing to see
    assert render_report(dataclasses.replace(report(), spans=alone)) == page
    first = [s for s in spans if s.name.endswith("(0)") or s.stream == "weights"]  # one block is drawn, too
    assert heading in render_report(dataclasses.replace(report(), spans=first))


def test_parts_that_do_not_fit_are_refused() -> None:
    good = report()
    with pytest.raises(ReportError, match="run 'off': expected loss"):
        replace(good.before, loss=np.ones(3))
    with pytest.raises(ReportError, match="same layers and ranks"):
        replace(good, after=replace(good.after, rank_load=np.ones((12, 3, 5), int)))
    with pytest.raises(ReportError, match="at least one step"):
        replace(good, counts=np.zeros((0, 3, 4, 8), int))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"pip install '\.\[report\]'"):
        render_report(report())


def test_max_mean_by_hand() -> None:
    assert max_mean(np.array([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])).tolist() == [4.0, 1.0, 1.0]


def test_relative_difference_by_hand() -> None:
    assert relative_difference(np.array([2.0, 4.0]), np.array([2.0, 5.0, 9.0])).tolist() == [0.0, 0.25]


def test_similarity_by_distance_agrees_with_the_pairs() -> None:
    counts = np.random.default_rng(1).integers(0, 50, (9, 2, 3, 4))
    result = similarity_by_distance(counts, (1, 4))
    for i, d in enumerate((1, 4)):
        for layer in range(2):
            pairs = [similarity(counts[t, layer], counts[t + d, layer]) for t in range(9 - d)]
            assert result[i, layer] == pytest.approx(np.mean(pairs))
    assert np.isnan(similarity_by_distance(counts, (9,))).all()


def test_shares_are_averaged_into_columns() -> None:
    counts = np.zeros((4, 1, 2, 2), int)
    counts[:2, 0, :, 0] = 3
    counts[2:, 0, :, 1] = 5
    shares = expert_shares_by_step(counts, columns=2)
    assert shares[0].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert expert_shares_by_step(counts, columns=1)[0, :, 0].tolist() == [0.5, 0.5]


# --- the page of `prophet plan` ---


def results(layers: int = 3, ranks: int = 4, experts: int = 8, iterations: int = 5) -> list[Replay]:
    rng = np.random.default_rng(0)

    def one(name: str, scale: float) -> Replay:
        return Replay(
            planner=name,
            max_mean=1 + scale * rng.random(6),
            a2a_s=scale * 1e-3,
            expert_s=scale * 2e-3,
            exposed_trans_s=1e-4,
            exposed_agg_s=0.0,
            rank_load=1 + scale * rng.integers(0, 99, (layers, ranks)).astype(np.float64),
            copies=rng.integers(0, 3, (iterations, layers, experts)),
            layers_s=np.full((iterations, layers), scale * 3e-3 + 1e-4),
            rank_copies=rng.integers(0, 3, (iterations, layers, ranks)),
            place_s=1e-3,
            split_s=1e-3,
        )

    return [one("static", 2.0), one("a&b", 1.0), one("worse", 3.0)]


def plan_report(**sizes: int) -> Comparison:
    found = results(**sizes)
    return Comparison(
        name="<t>.npz",
        subtitle="sizes",
        iterations=range(len(found[0].copies)),
        results=found,
        step_s=[0.05, 0.04, 0.06],
        remarks=["It costs <much>."],
    )


def test_the_plan_page_is_well_formed_and_says_what_it_shows() -> None:
    page = render_comparison([plan_report(), plan_report(layers=1)])
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert all(r.startswith(("#", "data:image/png;base64,")) for r in tags.references)
    assert page.count("<svg") == 6
    for words in ("Load by rank", "Where the time goes", "Which experts were copied", "&lt;t&gt;.npz", "no balancing"):
        assert words in page
    assert "It costs &lt;much&gt;." in page
    assert "<b>1.25×</b>" in page  # of the step, as a tile
    assert "1.25×</td>" in page
    assert "<script" not in page
    assert not re.search(r"#010203|#040506|#070809|#0a0b0c|#0d0e0f|#101112", page)


def test_the_best_planner_is_shown_and_the_worst_layers() -> None:
    report = plan_report(layers=12)
    assert report.best.planner == "a&b"
    shown = report.worst_layers()
    assert len(shown) == 6
    assert shown == sorted(shown)
    ratio = max_mean(report.results[0].rank_load)
    assert min(ratio[shown]) >= max(np.delete(ratio, shown))
    assert "The 6 layers with the most unequal load" in render_comparison([report])
    assert "with the most unequal load" not in render_comparison([plan_report()])


def test_the_smallest_plan_page_is_drawn() -> None:
    assert render_comparison([plan_report(layers=1, ranks=1, experts=1, iterations=1)]).count("<svg") == 3


def test_a_plan_page_needs_something_to_show() -> None:
    good = plan_report()
    with pytest.raises(ReportError, match="at least one planner besides"):
        replace(good, results=good.results[:1])
    with pytest.raises(ReportError, match="expected 3 iterations"):
        replace(good, iterations=[1, 2, 3])
    with pytest.raises(ReportError, match="a step with each of 3 planners"):
        replace(good, step_s=[1.0])
    with pytest.raises(ReportError, match="at least one trace"):
        render_comparison([])
