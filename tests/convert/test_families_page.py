"""Every family with experts in the installed transformers stands in one of the page's two tables."""

from __future__ import annotations

import pytest

from tests.helpers.families import modeling_files
from tests.helpers.family_page import families_that
from tests.helpers.launch import ROOT

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")


def test_every_family_is_on_the_page_once() -> None:
    convert, refused = families_that("convert"), families_that("are refused")
    assert len(convert) == len(set(convert))
    assert not set(convert) & set(refused)
    assert set(modeling_files()) <= set(convert) | set(refused), "no table of docs/families.md has these"


def test_the_numbers_in_words_are_those_of_the_tables() -> None:
    convert, refused = len(families_that("convert")), len(families_that("are refused"))
    assert f"{convert} convert and {refused} are refused" in (ROOT / "docs/families.md").read_text()
    assert f"{convert} of the {convert + refused} families" in (ROOT / "README.md").read_text()
