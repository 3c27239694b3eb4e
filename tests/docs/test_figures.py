"""Tables of figures say where these come from: date and commit, a page of results, or the test that holds them."""

from __future__ import annotations

import pytest

from tests.helpers.page_blocks import Table, named, read_pages, says_where_from, shows_figures, tables_of

TEXTS = {named(page): page.read_text(encoding="utf-8") for page in read_pages()}
TABLES = [table for name, text in TEXTS.items() for table in tables_of(name, text)]


@pytest.mark.parametrize("table", [t for t in TABLES if shows_figures(t)], ids=lambda t: f"{t.page}:{t.line}")
def test_a_table_says_where_its_figures_come_from(table: Table) -> None:
    assert says_where_from(table.near), "add date and commit, a link into benchmarks/results, or the test's file"


def test_tables_are_found() -> None:
    assert len(TABLES) > 50
    assert any(table.page == "README.md" and shows_figures(table) for table in TABLES)


@pytest.mark.parametrize(
    ("cells", "figures"),
    [
        (["350 ms", "1.28"], True),
        (["1.8 to 3.4 %"], True),
        (["1e-6, relative", "below"], True),
        (["5.1 times", "words", "words"], False),
        (["393352"], True),
        (["1, a callback", "2 with a model"], False),
        (["few", "120 s by default"], True),
        (["0.5.1"], True),
        (["as 3.5"], False),
    ],
)
def test_figures_are_told_from_words(cells: list[str], figures: bool) -> None:
    rows = "".join(f"| first | {cell} |\n" for cell in cells)
    (table,) = tables_of("page.md", f"# Title\n\n| a | b |\n|---|---|\n{rows}\nAfter.\n")
    assert (table.line, shows_figures(table)) == (3, figures)


@pytest.mark.parametrize(
    ("near", "said"),
    [
        ("Measured on 2026-11-22 (commit 3f2c119).", True),
        ("See [results](../benchmarks/results/2026-11-25-slices.md).", True),
        ("`tests/docs/test_figures.py` holds them.", True),
        ("`tests/docs/test_gone.py` holds them.", False),
        ("Measured on 2026-11-22.", False),
        ("Measured at commit 3f2c119.", False),
        ("On 2026-11-22 it was defaced, in 1234567 steps.", True),
        ("On 2026-11-22 it was defaced.", False),
    ],
)
def test_where_figures_come_from(near: str, said: bool) -> None:
    (table,) = tables_of("page.md", f"{near}\n\n| a | b |\n|---|---|\n| c | 1.5 s |\n\nAfter.\n\nFar.\n")
    assert says_where_from(table.near) == said
    assert "Far" not in table.near


def test_tables_in_code_are_none() -> None:
    assert list(tables_of("page.md", "```\n\n| a | b |\n|---|---|\n| c | 1.5 s |\n\n```\n")) == []
