"""The host's time of a layer beside another checkout's: what is measured, and how it is put together."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import host
from benchmarks.planner.__main__ import main
from prophet.layer import moe


def test_training_is_timed_and_leaves_the_layer_as_it_was() -> None:
    before = moe.exchange_counts, moe.send_order
    row = host.training_times(4, 16)
    assert row["to_next_kernel_ms"] > 0
    assert 1.0 <= row["numbers_over_needed"] <= 1.3
    assert (moe.exchange_counts, moe.send_order) == before


def test_a_split_and_its_digest_are_timed() -> None:
    row = host.split_times(4, 16)
    assert row["split_and_digest_ms"] == row["split_ms"] + row["digest_ms"]
    assert row["split_ms"] > 0


def test_both_codes_take_turns_and_medians_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []

    def figures_of(root: Path) -> list[dict[str, Any]]:
        order.append("former" if root == tmp_path else "present")
        ms = {"present": 1.0, "former": 4.0}[order[-1]] * len(order)
        rows = [dict.fromkeys(host.FIGURES, ms) | {"ranks": r, "experts": e} for r, e in host.SIZES]
        del rows[-1]["to_next_kernel_ms"]
        return rows

    monkeypatch.setattr(host, "figures_of", figures_of)
    rows = list(host.host_rows(tmp_path, 3))
    assert order == ["former", "present", "present", "former", "former", "present"]
    first = rows[0]
    # Of 2, 3, 6 and of 4, 16, 20
    assert (first["present"], first["former"], first["present_over_former"]) == (3.0, 16.0, 3.0 / 16.0)
    assert first["former_range"] == "4 to 20"
    assert len(rows) == len(host.SIZES) * len(host.FIGURES) - 1


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 1, stdout="", stderr="no such core"),
    )
    with pytest.raises(host.HostError, match="no such core"):
        host.figures_of(tmp_path)
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, stdout=json.dumps({"ranks": 8}), stderr=""),
    )
    assert host.figures_of(tmp_path) == [{"ranks": 8}]


def test_a_folder_that_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--former", str(tmp_path)])
    assert "--former: expected a checkout of this project" in capsys.readouterr().err
