"""What the demo says of made-up results: the gain first, no difference where there is none, no time on shared cores."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from prophet.demo import main
from prophet.demo.launch import LaunchConfig, Results, default_ranks
from prophet.demo.results import (
    Prediction,
    headline,
    make_report,
    measured_table,
    outcome_of,
    predicted_table,
    remarks,
    summarise,
    turn_medians,
)
from prophet.demo.train import ACTIVITIES, RunResult, TrainConfig
from prophet.report import render_report
from prophet.scheduler.timeline import Span
from tests.helpers.in_a_terminal import check_whole, noted, printed

STEPS, TURN, LAYERS, RANKS, EXPERTS = 12, 2, 2, 2, 4
CONFIG = LaunchConfig(out=Path("unused"), ranks=RANKS, seeds=(0, 1), train=TrainConfig(steps=STEPS, turn=TURN))


def run(name: str, step_s: float, *, noise: float = 0.0, seed: int = 0) -> RunResult:
    rng = np.random.default_rng((seed, len(name)))
    load = np.full((STEPS, LAYERS, RANKS), 50)
    if name == "off":
        load[..., 0] += 25
        load[..., 1] -= 25
    return RunResult(
        name=name,
        tokens_per_step=100,
        loss=np.linspace(5, 3, STEPS) * (1 + (1e-6 if name == "on" else 0.0)),
        step_s=step_s * (1 + noise * rng.uniform(-1, 1, STEPS)),
        rank_load=load,
        copies=np.full((STEPS, LAYERS, RANKS), int(name == "on")),
        counts=rng.integers(1, 30, (STEPS, LAYERS, RANKS, EXPERTS)),
        seconds=dict.fromkeys(ACTIVITIES, 0.01),
        held_out_loss=3.5,
        spans=(Span(0.0, 0.02, 0, "compute", "FEC(0)"), Span(0.0, 0.01, 0, "weights", "Trans chunk 0 of layer 1")),
    )


def results(on_s: float, *, noise: float = 0.0) -> Results:
    return {
        seed: {"off": run("off", 0.5, noise=noise, seed=seed), "on": run("on", on_s, noise=noise, seed=seed)}
        for seed in (0, 1)
    }


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (3, 2), (4, 4), (6, 4), (7, 4), (8, 8), (96, 8)])
def test_a_rank_per_core(cores: int, ranks: int) -> None:
    assert default_ranks(cores, experts=16) == ranks


def test_a_turn_is_worth_its_median_step() -> None:
    assert turn_medians(np.array([1, 2, 9, 4, 4, 4, 7.0]), 3).tolist() == [2, 4]


def test_the_gain_comes_first() -> None:
    outcome = outcome_of(results(0.4), CONFIG, cores=2)
    assert headline(outcome) == (
        "With balancing a step takes 0.800 of the time without (90% interval 0.800 to 0.800, 10 pairs of turns, "
        "2 seeds): 500 → 400 ms."
    )
    summary = summarise(outcome)
    assert summary["step_ratio"]["warm_up_pairs_left_out"] == 2
    assert summary["step_ratio"]["by_seed"] == pytest.approx({"seed 0": 0.8, "seed 1": 0.8})
    page = render_report(make_report(outcome, CONFIG, [], source="text"))
    assert (
        page.index("takes 0.800 of the time") < page.index("1.50 times the mean") < page.index("losses do not change")
    )
    headings = re.findall(r"<section><h2>(.*?)</h2>", page)
    assert headings[:4] == [
        "Does a step get shorter?",
        "How much busier is the busiest rank?",
        "Load by rank",
        "The loss does not notice",
    ]
    assert "warm-up" in " ".join(remarks(outcome, CONFIG))


def test_no_difference_is_called_that() -> None:
    outcome = outcome_of(results(0.5, noise=0.1), CONFIG, cores=2)
    assert headline(outcome).startswith("No difference measurable")
    assert summarise(outcome)["step_ratio"]["measurable"] is False
    page = render_report(make_report(outcome, CONFIG, [], source="text"))
    assert "<b>no difference measurable</b>" in page
    assert "more steps (--steps)" in page
    assert not re.search(r"<b>[^<]* ms</b>", page)


def test_ranks_on_gpus_share_no_cores() -> None:
    outcome = outcome_of(results(0.4), replace(CONFIG, on_gpus=True), cores=1)
    assert headline(outcome).startswith("With balancing a step takes 0.800 of the time without")
    assert (summarise(outcome)["device"], summarise(outcome)["cores"]) == ("cuda", 1)
    said = " ".join(remarks(outcome, CONFIG))
    assert "own GPU" in said
    assert "parameters travel between GPUs." in said
    assert not re.search(r"\bcore\b|loopback", said)
    table = measured_table(outcome)
    assert "What passes on the GPU in a step" in table.caption
    assert ("  in experts", "10.0 ms", "10.0 ms") in table.rows
    page = render_report(make_report(outcome, CONFIG, [], source="text"))
    assert "Does a step get shorter?" in page
    # its spans would be those of the host, which launches
    assert "What hides under what" not in page
    # noise on GPUs has another cause than that on cores
    noisy = outcome_of(results(0.5, noise=0.1), replace(CONFIG, on_gpus=True), cores=1)
    assert "Other work on the GPUs" in " ".join(remarks(noisy, CONFIG))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_too_few_steps_have_no_ratio(steps: int) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, steps=steps))
    outcome = outcome_of(results(0.4), config, cores=2)
    assert outcome.pairs is None
    assert "too few steps" in headline(outcome)


@pytest.mark.parametrize("width", [80, 60, 45])
def test_tables_are_whole_in_a_narrow_terminal(width: int) -> None:
    predictions = [
        Prediction(preset=name, static_layer_s=1.25, balanced_layer_s=0.0625, rest_s=0.5)
        for name in ("h100-nvlink:Mixtral-8x7B", "ethernet-25g:Mixtral-8x7B")
    ]
    measured = main.fitted(measured_table(outcome_of(results(0.4), CONFIG, cores=2)), (0, 0, 0))
    assert not check_whole(printed(measured, width), width, noted(measured))
    predicted = main.fitted(predicted_table(predictions), (0, 2, 1, 3, 0))
    missing = check_whole(printed(predicted, width), width, noted(predicted))
    assert missing == {80: [], 60: ["layer gain"], 45: ["balancing off", "layer gain"]}[width]


def words_of_time(text: str) -> list[str]:
    return re.findall(r"\d ms\b|step time|tokens per second|0\.800|of the time", text)


def test_on_shared_cores_no_time_is_shown_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, out=tmp_path)
    monkeypatch.setattr(main, "launch", lambda _: results(0.4))
    monkeypatch.setattr(main, "predict", lambda *_: [])

    def shown(cores: int) -> tuple[str, str, str]:
        console = Console(file=io.StringIO(), width=200)
        summary = main.run_demo(config, console, cores=cores)
        assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary
        page = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", (tmp_path / "report.html").read_text(encoding="utf-8"))
        return console.file.getvalue(), page, json.dumps(summary)

    assert "What hides under what" in shown(2)[1]
    for text in shown(2):  # the same words are there where cores suffice: the search below would find them
        assert words_of_time(text) or '"step_s_median"' in text
    text, page, summary = shown(1)
    assert text.startswith("Time shows nothing here: 2 ranks share 1 core.\n")
    assert "Time shows nothing here: 2 ranks share 1 core." in page
    assert not [heading for heading in ("Does a step get shorter?", "What hides under what") if heading in page]
    assert not words_of_time(text)
    assert not words_of_time(page)
    assert not {"step_ratio", "step_s_median", "tokens_per_s"} & set(re.findall(r"\w+", summary))
