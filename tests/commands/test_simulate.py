"""`prophet simulate`: the job that it takes, what it says, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prophet.cli import main
from prophet.commands.advice import TOO_DEAR, WORTH
from prophet.machine.topology import write_topology
from prophet.spec import Link, Topology
from prophet.traces.extrapolate import BALANCED, PARTS

SMALL = Topology.uniform(
    4, ranks_per_node=2, flops_per_s=1e12, intra=Link(bytes_per_s=1e11), inter=Link(bytes_per_s=1e10)
)
SIZES = ["--layers", "2", "--experts", "16", "--dim", "64", "--hidden", "64", "--heads", "8", "--tokens", "256"]
FEW = [*SIZES, "--steps", "4", "--planner", "prophet"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["simulate", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.toml"
    write_topology(file, SMALL)
    words = ["--ranks", "8,16", "--machine", str(file), *FEW]
    found = answer(capsys, *words)
    assert [(r["ranks"], r["planner"]) for r in found["rows"]] == [
        (n, p) for n in (8, 16) for p in ("static", "prophet", BALANCED)
    ]
    for row in found["rows"]:
        static, even = (
            next(r for r in found["rows"] if (r["ranks"], r["planner"]) == (row["ranks"], name))
            for name in ("static", BALANCED)
        )
        assert row["low_s"] <= row["step_s"] <= row["high_s"]
        assert row["gain"] == static["step_s"] / row["step_s"]
        assert row["fraction_of_even_routing"] == even["step_s"] / row["step_s"]
        assert row["parts_s"][row["limited_by"]] == max(row["parts_s"][part] for part in PARTS)
    assert "emulated hosts" in found["error"]["source"]
    assert not any("data sheet" in item for item in found["assumed"]), "this machine was measured"
    assert answer(capsys, *words) == found, "equal from run to run, to the digit"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (8, 1, 1)),
        (["--ep", "4"], (4, 2, 1)),
        (["--dp", "4"], (2, 4, 1)),
        (["--ep", "2", "--dp", "2", "--pp", "2"], (2, 2, 2)),
        (["--ranks", "1000"], (8, 125, 1)),
        (["--ranks", "65"], (1, 65, 1)),
        (["--ranks", "128"], (16, 8, 1)),
        (["--ranks", "128", "--experts", "256"], (64, 2, 1)),
    ],
)
def test_groups_and_stages(words: list[str], expected: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    row = answer(capsys, "--ranks", "8", *SIZES, "--planner", "static", *words)["rows"][0]
    assert (row["group"], row["groups"], row["stages"]) == expected


def test_options_win_over_the_model_and_change_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    def static(*words: str) -> Any:
        found = answer(capsys, "--ranks", "8", "--planner", "static", "--layers", "2", *words)
        return found | {"row": found["rows"][0]}

    base = static()
    assert (base["experts"], base["layers"]) == (8, 2)
    assert "the sizes of Mixtral-8x7B" in base["assumed"]
    named = static("--model", "Qwen3-30B-A3B")
    assert named["experts"] == 128
    assert "the sizes of Mixtral-8x7B" not in named["assumed"]
    for words in (["--dim", "8192"], ["--hidden", "7168"], ["--top-k", "1"], ["--tokens", "8192"], ["--heads", "64"]):
        changed = static(*words)["row"]["step_s"] != base["row"]["step_s"]
        assert changed or words[0] == "--heads", "heads of Mixtral share their width"
    assert static("--microbatches", "3")["row"]["step_s"] > 2 * base["row"]["step_s"]
    # a model of which some blocks have no experts
    whole, half = (
        static("--model", "DeepSeek-V3", "--layers", "61"),
        static("--model", "Mixtral-8x7B", "--layers", "61"),
    )
    assert (whole["layers"], half["layers"]) == (58, 61)


def test_what_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--ranks", "8", *FEW)
    assert "Assumed: the sizes of Mixtral-8x7B" in text
    assert "prophet calibrate --out topology.toml" in text
    assert "8 ranks: 1 group of 8 ranks, 2 experts of a layer on a rank." in text
    assert "Nothing was measured at these sizes." in text
    assert "have nothing to balance" in said(capsys, "--ranks", "65", *FEW)
    assert "leave --slots out" in said(capsys, "--ranks", "8", *FEW, "--slots", "0")
    large = ["--ranks", "8", "--planner", "prophet", "--steps", "2"]
    even = said(capsys, *large, "--layers", "1", "--skew", "0")
    assert "8 ranks: no planner gains 1 % or more." in even
    assert "is the router trained?" in even
    average = said(capsys, *large, "--layers", "1", "--ranks", "512", "--tokens", "16")
    assert "Most of this step is gradient average, and balancing does not change that" in average
    full = said(capsys, *large, "--layers", "64")
    assert re.search(r"would make a step 1\.\d+ times .* for replicas, which do not fit into 80 GiB, and", full)
    assert "give fewer --slots, and set replica_memory_bytes in EngineConfig." in full
    gains = said(capsys, *large, "--layers", "2")
    assert "makes a step" in gains
    assert "times as fast as static. It costs" in gains
    assert "do not fit" not in gains
    assert "To gain it, add to your loop: prophet.convert(model)" in gains


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], TOO_DEAR),
        (["--planner", "static"], "leave --planner out"),
        (["--steps", "1"], "nothing has been planned yet"),
    ],
)
def test_why_nothing_is_gained_where_even_routing_would(
    words: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dear = ["--ranks", "8", "--layers", "2", "--machine", "ethernet-25g", "--tokens", "512", "--steps", "5"]
    found = answer(capsys, *dear, *words)
    assert found["rows"][-1]["planner"] == BALANCED
    assert found["rows"][-1]["gain"] > 1.3
    assert max(r["gain"] for r in found["rows"][:-1]) < WORTH
    assert advice in found["advice"]


def test_ranks_named_twice_are_simulated_once(capsys: pytest.CaptureFixture[str]) -> None:
    twice, once = (answer(capsys, "--ranks", ranks, *FEW) for ranks in ("16,8,16", "16,8"))
    assert twice == once
    assert "forced-balance makes" not in said(capsys, "--ranks", "8,8", *FEW)


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert f"Page: {page}" in said(capsys, "--ranks", "8,16", *FEW, "--html", str(page))
    text = page.read_text()
    assert text.count("<svg") == 2
    for words in ("forced-balance", "16 ranks", "To measure this machine", "of even routing"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "none.toml"], "none.toml: expected a topology file"),
        (["--machine", "none"], "none"),
        (["--planner", "none"], "none"),
        (["--model", "LLaMA2-7B"], "LLaMA2-7B has no experts: give --experts and --top-k"),
        (["--ep", "3"], "--ep: expected a divisor of the 16 experts, got 3"),
        (["--ranks", "96", "--ep", "16", "--pp", "4"], "--pp: expected at most the 2 layers with experts, got 4"),
        (["--ranks", "9", "--pp", "2"], "--ranks: expected a multiple of the 2 pipeline stages, got 9"),
        (["--ranks", "24", "--ep", "16"], "--ranks: expected a multiple of --ep 16 x --pp 1, got 24"),
        (["--ranks", "16", "--ep", "4", "--dp", "2"], "--ranks: expected --ep 4 x --dp 2 x --pp 1, got 16"),
        (["--ranks", "8,0"], "expected a whole number from 1 to 2147483647, got 0"),
        (["--ranks", "70000"], "expected numbers of ranks from 1 to 65536"),
        (["--layers", "20000"], "--layers: expected at most 10000 to simulate, got 20000"),
        (["--experts", "1000000"], "--experts: expected at most 65536 to simulate, got 1000000"),
        (["--ranks", "4096", "--ep", "4096", "--experts", "4096"], "expected splits of at most 8 GiB for 2 layers"),
        (["--skew", "9"], "expected a number from 0 to 8"),
        (["--html", "/"], "--html: expected a file, / is a folder"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [] if "--model" in words else SIZES
    try:
        code = main(["simulate", "--ranks", "8", *sizes, *words])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    assert message in err
    assert not out
