"""The command line: answers, exit codes, one-line errors, and the check for the other `prophet`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prophet
from prophet.cli import BAD_INPUT, FAILED, INTERRUPTED, NAME_CONFLICT, OK, main, name_conflict
from prophet.commands.arguments import check_can_write
from prophet.errors import UsageError
from prophet.machine.topology import write_topology
from prophet.planner import core
from prophet.spec import Topology
from prophet.traces.npz import RoutingTrace, write_trace
from tests.helpers.commands import command_names, options_of

ODD_FILES = ("SHORT", "UNEVEN", "BROKEN", "ODD", "EMPTY", "OTHER", "data.parquet")
COMMANDS = ("demo", "plan", "calibrate", "simulate", "watch", "report")


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    counts = np.full((3, 2, 4, 8), 10)
    counts[..., 0] = 4000
    write_trace(tmp_path / "t.npz", RoutingTrace(counts, np.arange(3, dtype=np.int32), {"top_k": 1}))
    return tmp_path / "t.npz"


def test_a_page_that_cannot_be_drawn_is_refused_before_the_work(
    skewed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("began to work")

    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("prophet.traces.importers.read_any", work)
    monkeypatch.setattr(importlib.import_module("prophet.monitor.read"), "read_steps", work)
    (skewed.parent / "steps.jsonl").write_text("{}")
    for command in (["plan", str(skewed), "--html", "page.html"], ["report", str(skewed.parent)]):
        assert main(command) == FAILED
        assert "the page needs matplotlib: pip install '.[report]'" in capsys.readouterr().err


def test_without_its_core_a_planner_says_what_to_run(
    skewed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = core.Missing("the planner's compiled core is not there: `pip install -v -e .` builds it")
    monkeypatch.setattr(core, "native", missing)
    assert main(["plan", str(skewed), "--planner", "pro-prophet"]) == OK
    assert main(["plan", str(skewed), "--planner", "prophet"]) == FAILED
    assert capsys.readouterr().err == f"prophet: error: {missing.reason}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "absent.npz"], "absent.npz: expected a routing trace"),
        (["plan", "TRACE", "absent.csv"], "absent.csv: expected a routing log, there is no such file"),
        (["plan", "TRACE", "--planner", "magic"], "no planner 'magic'"),
        (["plan", "TRACE", "--planner", "pro-profet"], "no planner 'pro-profet'; did you mean 'pro-prophet'?"),
        (["plan", "TRACE", "--machine", "h100-nvlin"], "no machine 'h100-nvlin'; did you mean 'h100-nvlink'?"),
        (["plan", "TRACE", "--machine", "Mixtral-8x7B"], "no machine 'Mixtral-8x7B'"),
        (["plan", "TRACE", "--planner", "static", "--html", "x.html"], "at least one planner besides static"),
        (["plan", "TRACE", "--html", "FOLDER"], "is a folder"),
        (["plan", "TRACE", "--experts", "7"], "--experts 7: "),
        (["plan", "ODD"], "meta: top_k: expected a whole number from 1 to 16777216, got 'two'"),
        (["simulate", "--ranks", "96", "--ep", "5"], "expected a divisor of the 8 experts, got 5"),
        (["simulate", "--ranks", "8", "--planner", "forced"], "did you mean 'forced-balance'?"),
        (["simulate", "--ranks", "8", "--machine", "absent.toml"], "absent.toml: expected a topology file (TOML)"),
        (["simulate", "--model", "elephant"], "--model: there is no model 'elephant'"),
        (["plan", "TRACE", "--machine", "absent.toml"], "absent.toml: expected a topology file (TOML)"),
        (["plan", "TRACE", "--machine", "BROKEN"], "intra.bytes_per_s: expected a finite number, got 'fast'"),
        (["plan", "TRACE", "--machine", "TWO"], "has 2 ranks"),
        (["plan", "TRACE", "--model", "Mixtral"], "did you mean 'Mixtral-8x7B'?"),
        (["plan", "TRACE", "--model", "Mixtral-8x7B"], "Mixtral-8x7B has top_k 2, "),
        (["plan", "TRACE", "--ranks", "32"], "32 of 4 recorded ones take 8 steps each, there are 3: record more steps"),
        (["plan", "TRACE", "--ep", "3"], "ranks: expected a multiple of 3, its layers have 4 ranks"),
        (["plan", "TRACE", "--ep", "2", "--dp", "1"], "has 2 groups that train the same layers"),
        (
            ["plan", "TRACE", "--top-k", "2", "--tokens", "2000000000"],
            "tokens: expected 1 to 2147483647 choices of a rank",
        ),
        (
            ["plan", "TRACE", "--html", "/proc/page.html"],
            "a file that can be written, /proc/page.html cannot: ",
        ),
        (["plan", "TRACE", "--heads", "5"], "heads: expected a divisor of dim 4096, got 5"),
        (["plan", "OTHER"], "meta: experts: expected the 8 of its counts, got 16"),
        (["plan", "data.parquet"], "a Parquet file: write it as CSV"),
        (["calibrate"], "expected --out FILE, --check or --json"),
        (["calibrate", "--machine", "FOUR"], "--machine goes with --check"),
        (["calibrate", "--check", "--machine", "absent.toml"], "absent.toml: expected a topology file"),
        (["calibrate", "--check", "--machine", "h100-ib"], "--machine: expected a topology file, got h100-ib"),
        (["calibrate", "--check", "--machine", "FOUR", "--ranks", "2"], "is for 4 ranks"),
        (["calibrate", "--check", "--rows", "64", "8"], "--rows: expected the smaller number first, got 64 8"),
        (["calibrate", "--check", "--ranks", "100000"], "--ranks: expected at most four ranks per core"),
        (["calibrate", "--check", "--dim", "1000000"], "expected sizes of an expert up to 65536, got 1000000 x 512"),
        (["calibrate", "--check", "--model", "LLaMA2-7B"], "LLaMA2-7B has no experts: give --experts"),
        (["plan", "TRACE", "--machine", "cray"], "no machine 'cray'"),
        (["plan", "TRACE", "--machine", "h100-ib:DeepSeek-V3"], "write --machine h100-ib --model DeepSeek-V3"),
        (["plan", "EMPTY"], "counts: expected tokens in the iterations that are judged, all of their counts are 0"),
        (["calibrate", "--check", "--out", "FOLDER"], "--out: expected a file"),
        (
            ["plan", "UNEVEN"],
            "9 experts cannot be divided among 4 ranks, and every rank is home to as many: give --ranks 9, or for a "
            "log in which experts without tokens are missing --experts 12",
        ),
        (["demo", "--text", "absent"], "--text: absent: expected a text file"),
        (["demo", "--ranks", "3"], "16 experts cannot be divided among 3"),
        (["demo", "--ranks", "1"], "--ranks: expected at least 2: one rank computes all tokens"),
    ],
)
def test_bad_input_is_one_line(
    skewed: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = np.zeros((3, 1, 4, 8), dtype=np.int64)
    empty[0] = 1  # the first iteration is planned from, and not judged
    write_trace(skewed.parent / "EMPTY", RoutingTrace(empty, np.arange(3)))
    for name, shape in (("SHORT", (1, 1, 2, 2)), ("UNEVEN", (2, 1, 4, 9))):
        steps = np.arange(shape[0], dtype=np.int32)
        write_trace(skewed.parent / name, RoutingTrace(np.ones(shape, int), steps))
    write_trace(skewed.parent / "ODD", RoutingTrace(np.ones((2, 1, 4, 8), int), np.arange(2), {"top_k": "two"}))
    write_trace(skewed.parent / "OTHER", RoutingTrace(np.ones((2, 1, 4, 8), int), np.arange(2), {"experts": 16}))
    (skewed.parent / "data.parquet").write_text("not even that")
    for ranks, name in ((2, "TWO"), (4, "FOUR")):
        write_topology(skewed.parent / name, Topology.uniform(ranks, name="here"))
    text = (skewed.parent / "FOUR").read_text().replace("bytes_per_s = 10000000000.0", 'bytes_per_s = "fast"', 1)
    (skewed.parent / "BROKEN").write_text(text)
    names = {
        "TRACE": str(skewed),
        **{n: str(skewed.parent / n) for n in (*ODD_FILES, "TWO", "FOUR")},
        "FOLDER": str(skewed.parent),
    }
    arguments = [":".join(names.get(word, word) for word in a.split(":")) for a in arguments]
    if arguments[0] == "demo":
        arguments += ["--out", str(skewed.parent / "out")]
    assert main(arguments) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("prophet: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["juggle"],
        ["plan"],
        ["plan", "x", "--slots", "-1"],
        ["plan", "x", "--preset", "hpnv"],
        ["plan", "--planner", "prophet"],
        ["demo", "--steps", "0"],
        ["calibrate", "--ranks", "0"],
        ["calibrate", "--activation", "relu"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == BAD_INPUT
    assert "usage: prophet" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS), ["--version"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == OK
    shown = capsys.readouterr().out
    assert shown.strip()
    assert max(len(line) for line in shown.splitlines()) <= 110


def test_a_word_means_one_thing_in_every_command_and_few_are_needed() -> None:
    """An option that several commands share is one thing to learn."""
    options = {command: options_of(command) for command in command_names()}
    assert all(1 < len(of) <= 20 for of in options.values()), options
    assert 20 < len(set().union(*options.values())) <= 40, options
    shared = options["plan"] & options["simulate"]
    assert shared >= {"--planner", "--machine", "--model", "--slots", "--json"}
    assert not set().union(*options.values()) & {"--preset", "--topology", "--policy", "--trace", "--expert"}


def test_every_command_has_json() -> None:
    assert command_names() >= {*COMMANDS, "switch"}
    assert not [command for command in command_names() if "--json" not in options_of(command)]


def recorded_run(folder: Path, *, more: str = "") -> Path:
    """What `prophet.monitor` writes of two steps."""
    start = {"layers": 2, "ranks": 2, "experts": [4, 4], "planner": "prophet"}
    lines = [{"format": 1, "start": start}]
    for step in range(2):
        row = {name: [1.0, 1.5] for name in ("max_mean", "max_mean_static")}
        row |= {name: [1, 2] for name in ("copies", "dropped", "rows")}
        row |= {"step": step, "time_s": 1.0, "step_s": 0.25, "exposed_s": 0.125, "hottest": [[[0, 1.5]]] * 2}
        row |= {"experts": [[1, 2, 3, 4]] * 2, "rank_load": [[4, 6]] * 2, "rank_load_static": [[3, 7]] * 2}
        lines.append(row | {"seconds": {"expert": 0.5}})
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + more)
    return folder


def test_watch_once_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(tmp_path, more="garbage\n")
    assert main(["watch", str(tmp_path), "--once", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(tmp_path / "steps.jsonl")
    assert (found["starts"], found["start"]["ranks"], found["lines_left_out"]) == (1, 2, 1)
    assert found["last_step"]["step"] == 1
    assert found["last_step"]["max_mean"] == [1.0, 1.5]
    assert main(["watch", str(tmp_path), "--json"]) == BAD_INPUT
    error = capsys.readouterr().err
    assert "--json goes with --once" in error
    assert str(tmp_path / "steps.jsonl") in error


def test_report_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(tmp_path, more="garbage\n")
    page = tmp_path / "pages" / "run.html"
    assert main(["report", str(tmp_path), "--out", str(page), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert page.read_text(encoding="utf-8").count("<svg") > 2
    assert found["page"] == str(page)
    assert (found["first_step"], found["last_step"], found["lines_left_out"]) == (0, 1, 1)
    assert (found["max_mean_median"], found["copies_per_step_mean"], found["dropped"]) == (1.25, 3.0, 6)
    assert (found["step_s_median"], found["exposed_s_median"], found["gain_measured_median"]) == (0.25, 0.125, None)


def test_demo_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_demo(config: Any, console: Any, *, cores: int) -> dict[str, Any]:
        assert console is None
        return {"ranks": config.ranks, "out": str(config.out)}

    monkeypatch.setattr("prophet.demo.main.run_demo", run_demo)
    assert main(["demo", "--ranks", "2", "--out", str(tmp_path / "demo"), "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == {"ranks": 2, "out": str(tmp_path / "demo")}


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (0, (), "--device cuda: torch sees no GPU here (it was built for the CPU); --device cpu needs none"),
        (1, (), "--device cuda: 2 ranks need a GPU each, and torch sees 1 GPU"),
        (2, ("--ranks", "4"), "--device cuda: 4 ranks need a GPU each, and torch sees 2 GPUs"),
    ],
)
def test_demo_on_too_few_gpus(
    gpus: int, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("prophet.demo.main.run_demo", None)
    assert main(["demo", "--device", "cuda", *options]) == BAD_INPUT
    assert capsys.readouterr().err.endswith(f"prophet: error: {said}\n")


def test_demo_on_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    monkeypatch.setattr("prophet.demo.main.run_demo", lambda config, *_, **__: asked.append(config) or {})
    for options in ([], ["--ranks", "2"], ["--device", "cuda"], ["--device", "cuda", "--ranks", "2"]):
        assert main(["demo", "--json", *options]) == OK
    assert [config.on_gpus for config in asked] == [False, False, True, True]
    assert [config.ranks for config in asked[1:]] == [2, 4, 2], "the most that experts can be divided among"
    assert [config.train.model.dim for config in asked] == [96, 96, 1024, 1024]


@pytest.mark.parametrize("place", ["/proc/page", "FILE/page", "FOLDER", "/dev/full/page"])
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("began to work")

    run = recorded_run(tmp_path)
    for name in ("prophet.demo.main.run_demo", "prophet.ranks.launch.run_ranks"):
        monkeypatch.setattr(name, work)
    monkeypatch.setattr(importlib.import_module("prophet.monitor.read"), "read_steps", work)
    (tmp_path / "FILE").write_text("kept")
    (tmp_path / "FOLDER").mkdir()
    there = str(tmp_path / place)  # an absolute place stays as it is
    commands = [["report", str(run), "--out", there], ["calibrate", "--out", there]]
    commands += [["demo", "--ranks", "2", "--out", there]] if place != "FOLDER" else []
    for command in commands:
        assert main(command) == BAD_INPUT
        error = capsys.readouterr().err.replace("Importing PyTorch\n", "")
        assert error.startswith("prophet: error: --out: expected a f")
        assert there in error
        assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["FILE", "FOLDER", "steps.jsonl"]
    assert (tmp_path / "FILE").read_text() == "kept"


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    for place in ("there", "new", "a/b/new"):
        check_can_write("--out", tmp_path / place)
    for place in ("new", "a/b"):
        check_can_write("--out", tmp_path / place, folder=True)
    with pytest.raises(UsageError, match=r"--out: expected a folder, .*there is a file"):
        check_can_write("--out", tmp_path / "there", folder=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]
    assert (tmp_path / "there").read_text() == "kept"


def test_failures_and_interrupts_have_codes_of_their_own(
    skewed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: BaseException) -> int:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("prophet.traces.importers.read_any", raise_it)
        return main(["plan", str(skewed)])

    assert failing(PermissionError("may not")) == FAILED
    assert failing(KeyboardInterrupt()) == INTERRUPTED
    assert capsys.readouterr().err == "prophet: error: may not\nprophet: error: interrupted\n"


def test_the_other_prophet_is_recognised() -> None:
    assert name_conflict(prophet, False) is None
    beside = name_conflict(prophet, True)
    assert beside is not None
    assert not beside[1]
    theirs = types.ModuleType("prophet")
    over = name_conflict(theirs, True)
    assert over is not None
    assert over[1]
    assert "pip uninstall prophet" in over[0]


def test_the_version_names_the_other_prophet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (
        ("prophet-notes.txt", False),
        ("prophetic-1.0.dist-info", False),
        ("Prophet-1.1.dist-info", True),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(SystemExit):
            main(["--version"])
        shown = capsys.readouterr()
        assert shown.out == f"moe-prophet {prophet.__version__}\n"
        assert ("the distribution `prophet` (forecasting) is installed too" in shown.err) == said
    monkeypatch.setattr(prophet, "__all__", ["Prophet"])
    assert main(["--version"]) == NAME_CONFLICT
    assert "the forecasting library" in capsys.readouterr().err


def test_the_other_prophet_on_disk(tmp_path: Path) -> None:
    """Its `__init__.py` written over ours, as an installer would."""
    package = tmp_path / "prophet"
    package.mkdir()
    (package / "__init__.py").write_text("class Prophet: ...\n")
    (package / "cli.py").write_text((Path(prophet.__file__).parent / "cli.py").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-c", "from prophet.cli import main; raise SystemExit(main(['--help']))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == NAME_CONFLICT
    assert "the forecasting library" in done.stderr
    assert done.stderr.count("\n") == 1
