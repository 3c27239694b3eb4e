"""What benchmarks share: turns, the slowest rank's seconds, quartiles, and rows as text."""

from __future__ import annotations

import pytest

from benchmarks.measure import peak_memory_bytes, quartiles, reset_peak_memory, resident_bytes, rotated, slowest
from benchmarks.tables import columns, markdown, show, words


def test_every_candidate_is_first_in_its_turn() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], [*"abc"]]
    assert rotated([], 3) == []


def test_a_repetition_takes_what_its_slowest_rank_does() -> None:
    assert slowest([[1.0, 5.0], [3.0, 2.0]]) == [3.0, 5.0]
    assert quartiles([4.0, 1.0, 2.0, 3.0]) == [1.75, 3.25]
    assert quartiles([7.0]) == [7.0, 7.0]


def test_the_peak_counts_from_where_it_was_reset() -> None:
    reset_peak_memory()
    before, held = resident_bytes(), b"x" * (64 << 20)
    assert resident_bytes() > before + len(held) // 2
    assert peak_memory_bytes() > before + len(held) // 2


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert markdown(("a", "b"), [("1", "")]) == "| a | b |\n|---|---|\n| 1 |  |"
    assert columns(("name", "s"), [("x", "1.25"), ("long name", "")]) == "name          s\nx          1.25\nlong name"
    assert columns(("a", "b"), [("100", "x")], left=0) == "  a  b\n100  x"
    assert words({"case": "x", "s": 1.23456, "n": 12345, "none": None}) == "case x  s 1.23  n 12345  none "
    show(("case",), ("s", "ratio"), [("a case", "1.5"), ("another", "2.5", "0.5")], title="of which", width=100)
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "case" in line] == [
        ["case", "s", "ratio"],
        ["a", "case", "1.5"],
    ]
