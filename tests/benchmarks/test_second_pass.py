"""The benchmark of the second pass: rows for both blocks, and none for a block that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.second_pass import __main__ as command
from benchmarks.second_pass.blocks import BLOCKS, Loop

SMALL = ["--tokens", "64", "--dim", "8", "--hidden", "12", "--experts", "4", "--repeats", "2", "--device", "cpu"]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SMALL, "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [r["block"] for r in rows] == ["loop", "switch"]
    assert all(0 < r["first_pass_s"] < r["converted_s"] for r in rows)
    assert (tmp_path / "rows.png").stat().st_size > 1000
    assert "switch" in capsys.readouterr().out


def test_a_wrong_block_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Drifting(Loop):
        """Answers anew every time."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.new_empty(()).uniform_()

    monkeypatch.setitem(BLOCKS, "loop", Drifting)
    assert command.main([*SMALL, "--blocks", "loop"]) == 1
    assert "1 blocks were wrong and were not timed" in capsys.readouterr().err
