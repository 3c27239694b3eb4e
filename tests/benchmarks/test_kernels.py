"""The kernel benchmark: sizes add up, a wrong kernel is not timed, the table has what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.kernels import __main__ as command
from benchmarks.kernels import ffn, peers
from benchmarks.kernels.timing import Timer
from benchmarks.kernels.workload import Shape, Tensors, group_sizes, shares_of

TINY = Shape(name="tiny", dim=16, hidden=24, experts=4, top_k=2)


def measured() -> list[Row]:
    return list(ffn.measure([TINY], lambda _: [32], (0, 2), torch.float32, Timer("cpu", 1, 0.0)))


@pytest.mark.parametrize("replicas", [0, 1, 5])
def test_group_sizes_add_up_and_replicas_take_from_the_hottest(replicas: int) -> None:
    sizes = group_sizes(np.array([0.7, 0.2, 0.1]), 101, replicas)
    assert len(sizes) == 3 + replicas
    assert sum(sizes) == 101
    if replicas:
        assert max(sizes) < 70


def test_every_skew_is_a_distribution() -> None:
    for skew in ("uniform", "trace", "one-expert-90%"):
        shares = shares_of(skew, 12)
        if shares is not None:
            assert shares.shape == (12,)
            assert shares.sum() == pytest.approx(1)


def test_rows_have_the_promised_columns() -> None:
    rows = [row for row in measured() if "note" not in row]
    assert {row["peer"] for row in rows} == set(peers.PEERS)
    assert {row["pass"] for row in rows} == {"forward", "forward+backward"}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"])
        assert row["ours_us"] > 0
        assert row["tflops"] > 0


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.ours

    def broken(shape: Shape) -> peers.Run:
        def run(t: Tensors) -> Tensor:
            return right(shape)(t) * 1.001

        return run

    monkeypatch.setattr(peers, "ours", broken)
    rows = [row for row in measured() if "note" not in row]
    assert rows
    assert all("off by" in row["wrong"] for row in rows)
    assert not any("ours_us" in row for row in rows)


def test_the_command_writes_json_and_fails_for_a_wrong_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [{"op": "permute", "shape": "tiny", "ours_us": 1.0, "peer": "definition", "peer_us": 2.0, "ratio": 2.0}]
    monkeypatch.setattr(command, "on_cpu", lambda *_: iter(found))
    out = tmp_path / "results" / "kernels.json"
    assert command.main(["--cpu", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["rows"] == found
    assert "no GPU: not measured" in capsys.readouterr().out
    monkeypatch.setattr(command, "on_cpu", lambda *_: iter([{"op": "permute", "wrong": "off by 3"}]))
    assert command.main(["--cpu"]) == 1
    assert "were wrong" in capsys.readouterr().err
