"""The demo with real processes: what it writes, that balancing changes nothing but the balance, and how it ends."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from prophet.demo.launch import LaunchConfig, launch
from prophet.demo.main import run_demo
from prophet.demo.model import ModelConfig
from prophet.demo.text import load_corpus
from prophet.demo.train import RunResult, TrainConfig, train
from prophet.errors import RankFailed, SpecError
from prophet.traces.npz import read_trace
from tests.helpers.timelines import read_timeline

SMALL = TrainConfig(
    model=ModelConfig(dim=16, heads=2, blocks=2, hidden=16, experts=4, length=32),
    steps=4,
    turn=2,
    sequences_per_rank=2,
    held_out_sequences_per_rank=2,
    timeout_s=30.0,
)
SEEDS = (3, 5)


def test_two_ranks_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = LaunchConfig(out=tmp_path / "out", train=SMALL, ranks=2, seeds=SEEDS, limit_s=240)
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        summary = run_demo(config, Console(file=log, width=100), cores=2)
    assert json.loads((config.out / "summary.json").read_text(encoding="utf-8")) == summary
    assert summary["step_ratio"]["pairs"] == summary["step_ratio"]["warm_up_pairs_left_out"] == 2
    assert set(summary["step_ratio"]["by_seed"]) == {"seed 3", "seed 5"}
    assert set(summary["losses"]) == {"3", "5"}
    assert (summary["ranks"], summary["cores"]) == (2, 2)
    assert summary["loss_max_relative_difference"] < 1e-5
    assert summary["off"]["copies_per_rank_mean"] == 0
    assert summary["on"]["max_mean_median"] <= summary["off"]["max_mean_median"]

    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # 3 and 5 are odd: the balanced run begins
    turns = [("on", 0), ("on", 1), ("off", 0), ("off", 1), ("off", 2), ("off", 3), ("on", 2), ("on", 3)]
    assert [(x["seed"], x["run"], x["step"]) for x in lines] == [(s, *turn) for s in SEEDS for turn in turns]
    trace = read_trace(config.out / "routing.npz")
    assert trace.counts.shape == (4, 2, 2, 4)
    assert trace.counts.sum(axis=(2, 3)).tolist() == [[4 * 32 * 2] * 2] * 4
    assert trace.iteration.tolist() == [0, 1, 2, 3]
    assert trace.meta["top_k"] == 2
    step = read_timeline(config.out / "step.json")
    assert {s.rank for s in step["on"]} == {0, 1}
    assert {"FEC(0)", "FEC(1)"} <= {s.name for s in step["on"]}
    assert "<svg" in (config.out / "report.html").read_text(encoding="utf-8")
    shown = (tmp_path / "log").read_text(encoding="utf-8")
    assert shown.startswith("No difference measurable: too few steps")
    assert f"Open {config.out / 'report.html'} in a browser." in shown
    for word in ("busiest rank / mean, median", "seed 5: held-out loss", "Predicted, not measured", "summary.json"):
        assert word in shown
    told = capfd.readouterr().err
    for word in ("importing PyTorch", "16/16 steps  ending", "Drawing the report"):
        assert word in told
    names = {"summary.json", "metrics.jsonl", "routing.npz", "report.html", "step.json"}
    assert {p.name for p in config.out.iterdir()} == names


def test_a_killed_rank_ends_the_demo_with_its_name(tmp_path: Path) -> None:
    config = LaunchConfig(out=tmp_path, train=replace(SMALL, steps=100_000), ranks=2, limit_s=200)
    metrics = tmp_path / "metrics.jsonl"

    def kill_rank_one() -> None:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
            time.sleep(0.1)
        for child in multiprocessing.active_children():
            if child.name == "rank 1":
                child.kill()

    killer = threading.Thread(target=kill_rank_one)
    killer.start()
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 was ended by SIGKILL"):
        launch(config)
    killer.join()
    assert time.monotonic() - began < 190
    assert not [c for c in multiprocessing.active_children() if c.name.startswith("rank ")]


def test_time_runs_out(tmp_path: Path) -> None:
    config = LaunchConfig(out=tmp_path, train=replace(SMALL, steps=100_000), ranks=2, limit_s=0.5)
    with pytest.raises(RankFailed, match=r"took more than 0.5 s and was ended; still running: rank 0, rank 1"):
        launch(config)
    assert not [c for c in multiprocessing.active_children() if c.name.startswith("rank ")]


def test_a_failing_rank_is_quoted(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short to train on, by far")
    config = LaunchConfig(out=tmp_path / "out", train=SMALL, ranks=2, text=text, limit_s=120)
    with pytest.raises(RankFailed, match=r"rank \d failed: TextError: the text has \d+ bytes, expected at least 33"):
        launch(config)


def test_what_cannot_be_divided_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="4 experts cannot be divided among 3"):
        LaunchConfig(out=tmp_path, train=SMALL, ranks=3)
    with pytest.raises(SpecError, match=r"different seeds, at least one, got \(1, 1\)"):
        LaunchConfig(out=tmp_path, train=SMALL, ranks=2, seeds=(1, 1))


def test_one_rank_repeats_bitwise_and_learns(tmp_path: Path) -> None:
    config = replace(SMALL, steps=12, learning_rate=3e-3)
    runs = train(config, load_corpus(max_bytes=1 << 18), planners={"a": "static", "b": "prophet"})
    first, second = runs["a"], runs["b"]
    assert first.loss.tolist() == second.loss.tolist()
    assert first.held_out_loss == second.held_out_loss
    assert first.loss[-1] < first.loss[0]
    first.save(tmp_path / "a.npz")
    again = RunResult.load(tmp_path / "a.npz")
    assert again.name == "a"
    assert again.seconds == first.seconds
    assert np.array_equal(again.counts, first.counts)


@pytest.mark.parametrize(("seed", "order"), [(0, "abc bca cab abc"), (1, "bca cab abc bca")])
def test_runs_take_turns_and_the_order_rotates(seed: int, order: str) -> None:
    config = replace(SMALL, steps=7, seed=seed)
    heard: list[tuple[str, int]] = []
    told: list[str] = []
    train(
        config,
        load_corpus(max_bytes=1 << 18),
        planners=dict.fromkeys("abc", "static"),
        listeners=[lambda step: heard.append((step.run, step.step))],
        on_phase=told.append,
    )
    expected = [
        (run, step)
        for start, runs in zip((0, 2, 4, 6), order.split(), strict=True)
        for run in runs
        for step in range(start, min(start + SMALL.turn, 7))
    ]
    assert heard == expected
    assert told == ["building 3 equal models", "training", "measuring the loss on held-out text"]
