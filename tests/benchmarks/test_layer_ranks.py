"""The layer benchmark on two real ranks: every peer that is installed computes our function, and is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.layer.__main__ import main

SMALL = ["--tokens", "32", "--dim", "16", "--hidden", "16", "--experts", "8", "--repetitions", "2"]


def test_all_implementations_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    out = tmp_path / "layer.json"
    assert main(["--ranks", "2", "--skews", "one-expert-90%", "--json", str(out), *SMALL]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["impl"] for r in rows] == ["prophet", "static", "deepspeed", "tutel"]
    assert not [r for r in rows if "wrong" in r]
    for row in rows:
        if "note" in row:
            assert row["impl"] in ("deepspeed", "tutel")
            assert row["note"].startswith("not installed: ")
        else:
            assert row["fwd_bwd_ms"] > row["fwd_ms"] > 0
            assert row["ratio_to_prophet"] == pytest.approx(row["fwd_bwd_ms"] / rows[0]["fwd_bwd_ms"])
