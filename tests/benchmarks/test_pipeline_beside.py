"""Moves in turns with another checkout's: what is asked for is checked, and both codes' processes answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pipeline import beside
from benchmarks.pipeline.__main__ import main
from tests.helpers.house import ROOT


def test_a_row_has_every_move() -> None:
    row = beside.row_of("former", [(0.3, 8), (0.1, 8), (0.2, 10)])
    assert row == {"code": "former", "median_s": 0.2, "least_s": 0.1, "seconds": [0.3, 0.1, 0.2], "wire_bytes": 8}


def test_the_other_code_must_be_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--former", str(tmp_path)]) == 2
    assert "is no checkout of this project" in capsys.readouterr().err


@pytest.mark.slow
def test_both_codes_move_in_turns() -> None:
    found = beside.compare(ROOT, timeout_s=60.0, rounds=2, warm_up=1)
    present, former = found["rows"]
    assert (present["code"], former["code"]) == ("present", "former")
    assert len(present["seconds"]) == len(former["seconds"]) == 2
    assert present["wire_bytes"] == former["wire_bytes"] > 0, "the same code sends the same"
    assert found["present_over_former"] == present["median_s"] / former["median_s"]
