"""The comparison of two checkouts: what differs is found, and the command runs on this one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.equality.__main__ import HERE, differences, main

ROWS: list[dict[str, Any]] = [
    {"losses": ["0x1p+1"], "placements": [3, 4], "splits": [5]},
    {"losses": ["0x1p+0"], "placements": [3, 4], "splits": [6]},
]


def test_equal_rows_differ_nowhere() -> None:
    ranks = [{"prophet, plain": ROWS}] * 2
    assert differences(ranks, copy.deepcopy(ranks)) == {"prophet, plain": []}


@pytest.mark.parametrize(("field", "value"), [("losses", ["0x1.1p+0"]), ("placements", [4, 3]), ("splits", [])])
def test_the_first_step_that_differs_is_named(field: str, value: list[Any]) -> None:
    before, after = ([{"case": copy.deepcopy(ROWS)} for _ in range(2)] for _ in range(2))
    after[1]["case"][1][field] = value
    assert differences(before, after) == {"case": [f"rank 1, step 1: {field}"]}


def test_a_folder_without_sources_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "is no checkout" in capsys.readouterr().err


def test_this_checkout_equals_itself(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["pro-prophet", "--modes", "refetch", "--ranks", "2", "--steps", "3", "--limit-s", "200"]
    assert main([str(HERE), *arguments]) == 0
    assert "bit-equal" in capfd.readouterr().out
