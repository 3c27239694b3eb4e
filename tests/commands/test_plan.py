"""`prophet plan`: whose sizes it takes, what it says of a step, and what it advises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prophet.cli import BAD_INPUT, OK, main
from prophet.commands.advice import milliseconds
from prophet.machine.models import MODELS
from prophet.machine.sizes import ModelSizes
from prophet.machine.topology import write_topology
from prophet.spec import Topology
from prophet.traces.npz import RoutingTrace, write_trace

REAL_TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "smartmoe-gpt-32e-dev.npz"
MEASURED = re.compile(r"^Measured on this machine: .*$", re.M)


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    counts = np.full((3, 2, 4, 8), 10)
    counts[..., 0] = 4000
    return written(tmp_path / "t.npz", counts, top_k=1)


def written(file: Path, counts: np.ndarray, iteration: np.ndarray | None = None, **meta: Any) -> Path:
    write_trace(file, RoutingTrace(counts, np.arange(len(counts)) if iteration is None else iteration, meta))
    return file


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What `--json` prints, without what is measured."""
    assert main(["plan", *map(str, arguments), "--planner", "prophet", "--json"]) == OK
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    for one in answer.get("traces", [answer]):
        for planner in one["planners"]:
            assert planner.pop("planning_s") >= 0
            assert planner.pop("splitting_s") >= 0
    return answer


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main(["plan", *map(str, arguments)]) == OK
    return capsys.readouterr().out.splitlines()


def test_a_table_and_what_follows_from_it(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, skewed, "--machine", "h100-nvlink")
    assert lines[0] == "The sizes of Mixtral-8x7B are assumed: give --model."
    assert lines[1].startswith("Machine: h100-nvlink, by data sheets. Yours: prophet calibrate --out")
    shown = " ".join(" ".join(lines).split())
    for words in ("2 layers, 4 ranks, 8 experts, top 1, 4,070 tokens per rank", "static", "top2", "pro-prophet"):
        assert words in shown
    assert re.search(r"'prophet' is predicted to make a step \d\.\d\d times as fast", shown)
    assert re.search(r"A step without balancing: [\d.]+ ms in 2 MoE layers", shown)
    assert re.search(r"It costs at most [\d.]+ GiB of a rank's 80 GiB: \d+ replicas of 672 MiB each", shown)
    assert lines[-2].startswith("To gain it, add to your loop: prophet.convert(model), then prophet.attach")
    assert len(MEASURED.findall("\n".join(lines))) == 1


def test_json(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answered(capsys, skewed, "--slots", 2)
    assert [p["planner"] for p in answer["planners"]] == ["static", "prophet"]
    static, balanced = answer["planners"]
    assert static["predicted_speed_up"] == static["predicted_step_speed_up"] == 1.0
    assert static["max_mean_median"] > 3.5
    assert balanced["max_mean_median"] < static["max_mean_median"]
    assert balanced["predicted_speed_up"] > balanced["predicted_step_speed_up"] > 1.0
    assert 1 <= balanced["copies_on_fullest_rank"] <= 2
    assert balanced["replicas_on_fullest_rank"] == 2 * balanced["copies_on_fullest_rank"]  # of two layers
    trace = answer["trace"]
    assert (trace["top_k"], trace["iterations_judged"], trace["top_k_assumed"]) == (1, 2, False)


def test_several_traces_and_logs(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = skewed.parent / "log.csv"
    rows = [f"{t},0,{r},{e},{1000 if e == 3 else 5}" for t in range(3) for r in range(2) for e in range(4)]
    log.write_text("\n".join(["step,layer,rank,expert,count", *rows]))
    answer = answered(capsys, skewed, log)
    assert [t["trace"]["ranks"] for t in answer["traces"]] == [4, 2]
    assert [t["trace"]["file"] for t in answer["traces"]] == [str(skewed), str(log)]
    assert [t["advice"][:11] for t in answer["traces"]] == ["To gain it,"] * 2
    assert all([p["planner"] for p in t["planners"]] == ["static", "prophet"] for t in answer["traces"])
    shown = "".join("".join(printed(capsys, log, "--planner", "prophet")).split())
    assert "log.csv:1layers,2ranks,4experts,top2(assumed)" in shown


def test_one_dump_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        rows = "".join(f"3,{e},{1000 >> e + rank}\n" for e in range(4))
        name = f"expert_distribution_rank{rank}_timestamp17.{rank}.csv"
        (tmp_path / name).write_text("layer_id,expert_id,count\n" + rows)
    out = " ".join(" ".join(printed(capsys, tmp_path, "--planner", "prophet")).split())
    assert "1 layers, 2 ranks, 4 experts" in out
    assert "its only iteration judged, planned from itself: no more than this can be gained." in out
    assert main(["plan", str(tmp_path / name), "--planner", "prophet"]) == BAD_INPUT
    assert "prophet plan --ep N" in capsys.readouterr().err
    trace = answered(capsys, tmp_path / name, "--experts", 4, "--ep", 4)["trace"]
    assert (trace["ranks"], trace["planned_from"]) == (4, "itself")


# ------------------------------------------------------------------------------------------------- whose sizes


def random_counts() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.multinomial(4096, rng.dirichlet(np.full(8, 0.3)), size=(4, 3, 4))


OWN = ModelSizes(name="own", dim=768, hidden=1536, layers=3, experts=8, top_k=4, heads=12)


def test_sizes_of_the_trace_of_options_and_of_a_preset_are_equal_to_the_digit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "own", OWN)
    said = {"dim": 768, "hidden": 1536, "layers": 3, "experts": 8, "top_k": 4, "heads": 12}
    by_meta = answered(capsys, written(tmp_path / "meta.npz", random_counts(), **said))
    bare = written(tmp_path / "bare.npz", random_counts())
    options = [f"--{name.replace('_', '-')}={value}" for name, value in said.items()]
    by_options, by_model = answered(capsys, bare, *options), answered(capsys, bare, "--model", "own")
    assert by_meta["planners"] == by_options["planners"] == by_model["planners"]
    assert by_meta["step"] == by_options["step"] == by_model["step"]
    assert answered(capsys, bare)["planners"] != by_meta["planners"]
    assert by_meta["model"] | {"name": ""} == by_options["model"] | {"name": ""} == by_model["model"] | {"name": ""}
    # a preset of the table too, with all that its file says
    sizes = MODELS["Qwen3-30B-A3B"]
    fields = ("dim", "hidden", "top_k", "heads", "kv_heads", "head_dim", "layers", "vocabulary", "sequence")
    meta = {n: getattr(sizes, n) for n in fields} | {"activation": "swiglu", "bias": False, "moe_layers": 48}
    own = answered(capsys, written(tmp_path / "own.npz", random_counts(), **meta))
    preset = answered(capsys, bare, "--model", "qwen3-30b-a3b")
    assert own["planners"] == preset["planners"]
    assert own["step"] == preset["step"]


def test_options_win_over_the_model_and_it_over_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t.npz", random_counts(), dim=768, hidden=1536, top_k=2, dtype="torch.float32")
    assert main(["plan", str(file), "--model", "Mixtral-8x7B"]) == BAD_INPUT
    error = capsys.readouterr().err
    assert f"--model: Mixtral-8x7B has dim 4096, hidden 14336, {file} was recorded with dim 768, hidden 1536: " in error
    assert "as with --dim 4096 --hidden 14336" in error
    answer = answered(capsys, file, "--model", "Mixtral-8x7B", "--dim", 1024, "--hidden", 14336)
    model = answer["model"]
    assert (model["dim"], model["hidden"], model["kv_heads"], model["element_bytes"]) == (1024, 14336, 8, 4)
    assert answer["replica_bytes"] == 2 * 4 * 3 * 1024 * 14336
    model = answered(capsys, file, "--hidden", 512)["model"]
    assert (model["dim"], model["hidden"], model["experts"], model["layers"]) == (768, 512, 8, 3)


def test_what_nobody_says_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t.npz", random_counts(), dim=64, hidden=128, model="mine\x1b[2J")
    write_topology(tmp_path / "m.toml", Topology.uniform(4, name="here"))
    lines = printed(capsys, file, "--machine", tmp_path / "m.toml")
    assert " ".join(" ".join(lines).split()).startswith(
        "Model: mine[2J, 64 x 128, swiglu. Assumed: top 1, swiglu, attention of one head, sequences of 4096 tokens, no "
        "output head. Machine: here ("
    )
    assert "".join("".join(lines).split()).count("top1(assumed)") == 1


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"dim": 0}, "dim: expected a whole number from 1 to 16777216, got 0"),
        ({"hidden": True}, "hidden: expected a whole number from 1 to 16777216, got True"),
        ({"heads": 1 << 60}, "heads: expected a whole number from 1"),
        ({"activation": "tanh"}, "activation: expected one of identity,"),
        ({"activation": []}, "activation: expected one of identity,"),
        ({"bias": "both"}, "bias: expected true, false, 'in' or 'out', got 'both'"),
        ({"dtype": "int8"}, "dtype: expected one of float64, float32,"),
        ({"model": 3}, "model: expected a name, got 3"),
        ({"groups": 2}, "groups: expected a divisor of its 3 layers"),
    ],
)
def test_metadata_of_no_model_is_refused(
    tmp_path: Path, meta: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "t.npz", random_counts(), **meta)
    assert main(["plan", str(file)]) == BAD_INPUT
    assert f"prophet: error: {file}: meta: {message}" in capsys.readouterr().err


def test_sizes_that_contradict_each_other_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t.npz", random_counts(), dim=64, hidden=32, heads=4, kv_heads=3, model="mine")
    assert main(["plan", str(file)]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error == f"prophet: error: {file}: mine: kv_heads: expected a divisor of 4 heads, got 3\n"


def test_a_measured_machine(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for flops in (1e12, 1e11):
        file = skewed.parent / f"{flops:.0f}.toml"
        write_topology(file, Topology.uniform(4, flops_per_s=flops, name="here"))
        answer = answered(capsys, skewed, "--machine", file, "--model", "MoE-GPT-S", "--top-k", 1)
        assert answer["machine"] == f"here ({file})"
        assert answer["model"]["name"] == "MoE-GPT-S"
        seconds.append(answer["planners"][0]["predicted_expert_s"])
    assert seconds[1] == pytest.approx(10 * seconds[0])


# ---------------------------------------------------------------------------------------------- ranks, tokens, steps


def test_ranks_tokens_and_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    counts = rng.multinomial(100, rng.dirichlet(np.full(8, 0.3)), size=(6, 2, 8))
    file = written(tmp_path / "t.npz", counts, top_k=2)
    trace = answered(capsys, file, "--ranks", 4, "--tokens", 8192)["trace"]
    assert (trace["ranks"], trace["steps"], trace["tokens_per_rank"]) == (4, 6, 8192)
    trace = answered(capsys, file, "--ranks", 4)["trace"]
    assert trace["tokens_per_rank"] == 100
    answer = answered(capsys, file, "--ranks", 16, "--ep", 4)
    trace = answer["trace"]
    assert (trace["ranks"], trace["groups"], trace["layers"], trace["steps"]) == (4, 4, 8, 3)
    assert (answer["step"]["dp"], answer["step"]["moe_layers"]) == (4, 2)
    assert answered(capsys, file, "--ep", 4, "--dp", 8)["step"]["average_s"] > answer["step"]["average_s"]
    assert "2 layers, 4 ranks in each of 4 groups" in " ".join(
        " ".join(printed(capsys, file, "--ranks", 16, "--ep", 4)).split()
    )


def test_a_step_is_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums by hand, on a machine of round figures: two groups, of which the second has all the tokens' work."""
    counts = np.full((4, 2, 4, 4), 4096)
    counts[:, :, 2:] = 0
    counts[:, :, 2:, 0] = 4 * 4096
    file = written(tmp_path / "t.npz", counts, np.array([0, 0, 1, 1]))
    write_topology(tmp_path / "m.toml", Topology.uniform(2, flops_per_s=1e12, name="here"))
    sizes = ["--dim", 64, "--hidden", 128, "--layers", 3, "--top-k", 1, "--heads", 4]
    answer = answered(capsys, file, "--ep", 2, "--machine", tmp_path / "m.toml", *sizes)
    static = answer["planners"][0]
    flops_per_token = 2 * 3 * 64 * 128
    tokens = 4 * 4096
    # by microbatch and layer: the busiest rank's products, forward and twice that backward
    even_s, skewed_s = (3 * n * flops_per_token / 1e12 for n in (tokens, 2 * tokens))
    assert static["predicted_expert_s"] == pytest.approx((even_s + skewed_s) / 2)
    pair_s = {2 * 4096: 0.0, tokens: 0.0}
    pair_s = {rows: 4 * rows * 64 * 4 / 10e9 for rows in pair_s}  # four exchanges over 10 GB/s
    attention_s = 3 * tokens * (2 * 4 * 64 * 64 + 2 * 4096 * 64) / 1e12
    average_s = 2 * 4 * 3 * 4 * 64 * 64 * 3 / 4 / 10e9 + 2 * 4 * 3 * 2 * 3 * 64 * 128 / 2 / 10e9
    step = answer["step"]
    assert step["microbatches"] == 2
    assert step["blocks_s"] == pytest.approx(3 * attention_s)
    assert step["average_s"] == pytest.approx(average_s)
    assert step["head_s"] == step["dense_s"] == 0
    # the slower group decides, and two recorded layers stand for three
    layers_s = 3 * 2 * (skewed_s + pair_s[tokens])
    assert static["predicted_step_s"] == pytest.approx(layers_s + 2 * 3 * attention_s + average_s)


def test_blocks_without_experts_and_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t.npz", random_counts(), **{"top_k": 8})
    step = answered(capsys, file, "--model", "DeepSeek-V3")["step"]
    assert (step["layers"], step["moe_layers"]) == (61, 58)
    tokens, rate = 4096 / 8, 989.4e12 * 0.45
    assert step["head_s"] == pytest.approx(3 * tokens * 2 * 129280 * 7168 / rate)
    attention = MODELS["DeepSeek-V3"].attention
    dense = 2 * (attention + 3 * 7168 * 18432) + 2 * 4096 * 128 * 160
    assert step["dense_s"] == pytest.approx(3 * 3 * tokens * dense / rate)


# ------------------------------------------------------------------------------------------------------- advice


def even(ranks: int = 4) -> np.ndarray:
    return np.full((3, 2, ranks, 8), 1000)


def hot(tokens: int = 4000) -> np.ndarray:
    counts = np.full((3, 2, 4, 8), max(tokens // 400, 1))
    counts[..., 0] = tokens
    return counts


@pytest.mark.parametrize(
    ("counts", "options", "words"),
    [
        (even(), ["--slots=1", "--tokens=64"], "Routing this even leaves nothing to gain: is the router trained?"),
        (
            even(1),
            [],
            "The trace has one rank, so there is nothing to balance: record with ranks=8, or give --ranks 8.",
        ),
        (hot(), ["--slots=0"], "Without room for replicas nothing can be gained: leave --slots out."),
        (hot(), ["--planner=top2"], "prophet.attach(model, optimizer, config=prophet.EngineConfig(planner='top2'));"),
        (hot(), [], "To gain it, add to your loop: prophet.convert(model), then prophet.attach(model, optimizer);"),
        (hot(4), [], "A replica takes longer to send than it saves: try more tokens per rank (--tokens)"),
        (hot(4), ["--machine=ethernet-25g", "--dim=8192", "--hidden=64", "--slots=1"], "takes 84% of a layer, and"),
        (hot(), ["--dim=64", "--hidden=64", "--heads=1"], "too small a part of this step"),
        (hot(40000), ["--layers=160"], "The replicas do not fit into 80 GiB: give fewer --slots"),
    ],
)
def test_one_sentence_of_advice(
    tmp_path: Path, counts: np.ndarray, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "t.npz", counts, top_k=1, vocabulary=1 << 22)  # which counts where sizes are given
    shown = " ".join(" ".join(printed(capsys, file, *options)).split())
    assert words in shown
    assert ("every gain is 1.00" in shown) == (counts.shape[2] == 1)
    assert (
        "No planner is predicted to gain 1 % of a step here." in shown
        or "times as fast" in shown
        or counts.shape[2] == 1
    )


def test_no_figure_has_an_exponent() -> None:
    shown = [milliseconds(s) for s in (0.0, 1e-9, 1.23456e-6, 0.0123456, 0.99951, 12345.6)]
    assert shown == ["0", "<0.001", "0.00123", "12.3", "1000", "12345600"]


# ------------------------------------------------------------------------------------------------ pages and terminals


def test_all_planners(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prophet.planner import PLANNER_NAMES

    assert main(["plan", str(skewed), "--planner", "all", "--json"]) == OK
    assert {p["planner"] for p in json.loads(capsys.readouterr().out)["planners"]} == set(PLANNER_NAMES)


def test_a_page(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = skewed.parent / "sub" / "plan.html"
    lines = printed(capsys, skewed, skewed, "--html", page, "--planner", "prophet")
    assert lines[-1] == f"Page: {page}"
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 6
    for words in ("t.npz", "The sizes of Mixtral-8x7B are assumed", "To gain it, add to your loop", "of a rank&#x27;s"):
        assert text.count(words) >= 2
    assert re.search(r"<b>\d\.\d\d×</b><span>predicted gain of prophet, of the whole step", text)


def test_a_page_that_cannot_be_written_leaves_nothing(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (skewed.parent / "file").write_text("")
    page = skewed.parent / "file" / "sub" / "x.html"
    assert main(["plan", str(skewed), "--html", str(page)]) == BAD_INPUT
    assert "--html: expected a file that can be written" in capsys.readouterr().err
    assert sorted(p.name for p in skewed.parent.iterdir()) == ["file", "t.npz"]


@pytest.mark.parametrize(("columns", "left_out"), [(80, ["p95"]), (60, ["A2A ms", "exposed ms"]), (45, ["layer ms"])])
def test_figures_are_whole_in_narrow_terminals(
    skewed: Path, columns: int, left_out: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr("prophet.terminal.console", lambda **_: Console(width=columns))
    lines = printed(capsys, skewed)
    shown = " ".join(" ".join(lines).split())
    assert "…" not in shown
    assert max(map(len, lines)) <= columns
    missing = shown.partition(f"Left out at {columns} columns: ")[2].partition(".")[0]
    assert all(name in missing for name in left_out)
    assert not {"planner", "step gain"} & set(missing.split(", "))
    assert re.search(r" prophet .*\d\.\d\d× ", shown)


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the shared routing traces are not beside this checkout")
def test_a_published_trace(capsys: pytest.CaptureFixture[str]) -> None:
    static, balanced = answered(capsys, REAL_TRACE)["planners"]
    assert static["max_mean_median"] > 5
    assert balanced["predicted_speed_up"] > 2
