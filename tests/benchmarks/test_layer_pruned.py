"""The benchmark of pruned layers: both forms agree before they are timed, and the break-even lies between shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.layer import pruned as command
from benchmarks.layer.pruned import break_even
from pipeline_balance.dynamics import pruning

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
SMALL = ["--dim", "16", "--tokens", "8", "--kept", "0.1", "0.5", "--repeats", "2"]


def test_rows_have_both_forms_and_the_file_the_break_even(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "pruned.json", tmp_path / "pruned.png"
    assert command.main([*SMALL, "--json", str(file), "--plot", str(picture)]) == 0
    found = json.loads(file.read_text())
    assert [row["kept"] for row in found["rows"]] == [0.1, 0.5]
    for row in found["rows"]:
        assert row["speedup"] == row["dense_ms"] / row["sparse_ms"] > 0
    assert found["environment"]["break_even"] == break_even(found["rows"])
    assert "break-even: sparse_below=" in capsys.readouterr().out
    assert picture.stat().st_size > 0


def test_a_form_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = pruning.product
    monkeypatch.setattr(pruning, "product", lambda x, values, pattern: right(x, values * 1.01, pattern))
    assert command.main(SMALL) == 1
    assert "2 differed and were not timed" in capsys.readouterr().err


def test_the_break_even_is_where_the_line_meets_one() -> None:
    rows = [{"kept": 0.2, "speedup": 0.5}, {"kept": 0.1, "speedup": 1.5}]
    assert break_even(rows) == pytest.approx(0.15)
    assert break_even(rows[:1]) == 0.0
    assert break_even(rows[1:]) == 0.1
    assert break_even([{"kept": 0.1, "wrong": "differs"}]) == 0.0


def test_shares_and_sizes_are_checked() -> None:
    for wrong in (["--kept", "0"], ["--kept", "1.5"], ["--dim", "0"]):
        with pytest.raises(SystemExit):
            command.main([*SMALL, *wrong])
