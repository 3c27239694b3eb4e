"""`prophet calibrate` with ranks that are processes: started by the command, or by a launcher such as torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prophet.cli import FAILED, OK, main
from prophet.machine.topology import read_fits, read_topology
from tests.helpers.launch import as_launched

SMALL = ["--dim", "16", "--hidden", "32", "--rows", "16", "128"]
OPERATIONS = {"a2a_intra", "expert_forward", "expert_backward", "trans", "agg"}


def test_two_ranks_are_started_measured_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prophet.commands.calibrate._REPEATS", 2)
    file = tmp_path / "sub" / "t.toml"
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", str(tmp_path), "--dim", "16", "--dtype", "float32"]
    assert main(["calibrate", "--ranks", "2", "--out", str(file), "--check", "--json", *model, *SMALL[4:]]) == OK
    answer = json.loads(capsys.readouterr().out)
    assert [answer[name] for name in ("dim", "hidden", "activation", "dtype")] == [16, 32, "swiglu", "float32"]
    assert answer["file"] == str(file)
    assert {row["operation"] for row in answer["operations"]} == OPERATIONS
    assert all(row["mean_error"] is not None for row in answer["operations"] + answer["model"])
    assert all(p["spread"] >= 0 for row in answer["operations"] for p in row["points"])
    topology = read_topology(file)
    assert (topology.ranks, topology.nodes) == (2, 1)
    assert topology.intra.bytes_per_s == answer["topology"]["intra"]["bytes_per_s"]
    fits = read_fits(file)
    assert topology.name == "t"
    assert fits["expert_forward"]["dim"] == 16
    assert fits["trans"]["mean_error"] == pytest.approx(answer["operations"][3]["mean_error"])

    # the file is checked with the expert it was made with, and nothing is written
    written = file.read_bytes()
    assert main(["calibrate", "--check", "--machine", str(file), *SMALL[4:]]) == OK
    shown = capsys.readouterr().out
    assert "an expert of 16 x 32 (swiglu, float32)" in shown
    assert all(operation in shown for operation in OPERATIONS)
    assert "%" in shown
    assert file.read_bytes() == written


def test_a_run_that_takes_too_long_is_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prophet.commands.calibrate._LIMIT_S", 1.0)
    monkeypatch.setattr("prophet.commands.calibrate._REPEATS", 1000)
    assert main(["calibrate", "--ranks", "2", "--check"]) == FAILED
    error = capsys.readouterr().err
    assert "the calibration took more than 1 s and was ended; still running: rank 0, rank 1" in error


def test_ranks_that_are_there_already_are_joined(tmp_path: Path) -> None:
    """As torchrun starts them: rank 0 speaks, the others are silent."""
    told = {"LOCAL_WORLD_SIZE": "1"}  # two nodes of one rank, as far as the ranks can tell
    file = tmp_path / "t.toml"
    said = as_launched("tests.helpers.calibrate_quickly", "--out", str(file), "--json", *SMALL, ranks=2, **told)
    assert said[1] == ""
    assert {row["operation"] for row in json.loads(said[0])["operations"]} == {
        "a2a_inter",
        "expert_forward",
        "expert_backward",
        "trans",
        "agg",
    }
    assert read_topology(file).nodes == 2
