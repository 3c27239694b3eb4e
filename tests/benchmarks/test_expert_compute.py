"""The benchmark of the experts' products: a wrong kernel is not timed, and the figures follow from the seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.common import Row
from benchmarks.expert_compute import __main__ as command
from benchmarks.expert_compute import measure as measuring
from prophet.kernels.grouped_ffn import grouped_ffn
from prophet.ranks.threads import ThreadCollective
from tests.helpers.launch import as_launched
from tests.helpers.support import on_threads

OPTIONS: dict[str, Any] = {
    "tokens_per_expert": [3, 8],
    "experts": [1, 2],
    "shapes": [(8, 16), (6, 4)],
    "dtypes": ["float32", "bfloat16"],
    "repeats": 2,
    "device": "cpu",
}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_rows(activation: str, tmp_path: Path) -> None:
    def body(ranks: ThreadCollective) -> list[Row]:
        return measuring.measure(ranks, **OPTIONS, activation=activation)  # type: ignore[arg-type]

    first, second = on_threads(2, body)
    assert first == second
    assert len(first) == 2 * 2 * 2 * 2 * 2
    matrices = 3 if activation == "swiglu" else 2
    for row in first:
        assert row["tokens"] == row["tokens_per_expert"] * row["experts"]
        flops = 2 * matrices * row["dim"] * row["hidden"] * row["tokens"]
        flops *= 2 if row["operation"] == "expert_backward" else 1
        assert row["flops_per_s"] == pytest.approx(flops / row["seconds"])
        assert row["fraction_of_dense"] == pytest.approx(row["dense_s"] / row["seconds"])
        assert len(row["seconds_by_rank"]) == row["ranks"] == 2
        assert row["seconds"] <= row["median_s"]
    command.plot(first, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, impl: str = "auto", **options: Any) -> torch.Tensor:
        out = grouped_ffn(*args, impl=impl, **options)  # type: ignore[arg-type]
        return out if impl == "naive" else out * 1.01

    monkeypatch.setattr(measuring, "grouped_ffn", broken)
    options = {**OPTIONS, "dtypes": ["float32"]}
    rows = on_threads(1, lambda ranks: measuring.measure(ranks, **options, activation="gelu"))[0]
    assert len(rows) == 8
    assert all("differs from the definition" in r["wrong"] and "seconds" not in r for r in rows)


def test_the_command_on_a_real_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sub" / "e.json"
    asked = ["--shapes", "8x16", "--tokens-per-expert", "4", "--experts", "1", "--dtypes", "float32", "--repeats", "1"]
    assert command.main([*asked, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["benchmark"] == "expert_compute"
    assert [r["operation"] for r in written["rows"]] == ["expert_forward", "expert_backward"]
    assert "8 x 16" in capsys.readouterr().out


def test_a_run_that_takes_too_long_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--limit-s", "0.05"]) == 1
    assert "benchmarks.expert_compute: the benchmark took more than 0.05 s and was ended" in capsys.readouterr().err


def test_ranks_that_are_there_already_are_joined(tmp_path: Path) -> None:
    """As torchrun starts them: rank 0 speaks and writes, the other is silent."""
    out = tmp_path / "e.json"
    arguments = ["--shapes", "8x16", "--tokens-per-expert", "4", "--dtypes", "float32", "--repeats", "1"]
    said = as_launched("benchmarks.expert_compute", *arguments, "--json", str(out), ranks=2)
    assert "8 x 16" in said[0]
    assert said[1] == ""
    assert {row["ranks"] for row in json.loads(out.read_text())["rows"]} == {2}


def test_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, word in (
        (["--shapes", "256"], "DIMxHIDDEN"),
        (["--shapes", "0x5"], "DIMxHIDDEN"),
        (["--experts", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert word in capsys.readouterr().err
    bad = {"dim": 1, "hidden": 1, "dtype": "float32", "experts": 1, "tokens_per_expert": 1, "wrong": "x"}
    monkeypatch.setattr(common, "rows_on_ranks", lambda *_, **__: [bad])
    assert command.main([]) == 1
    assert "were wrong" in capsys.readouterr().err
