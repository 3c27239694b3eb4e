"""What commands show is whole at any width: tables, in a real terminal and beside it, and lines of progress."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from prophet import terminal
from prophet.terminal import FILE_WIDTH, Column, FittedTable, console, print_table, progress, working
from prophet.traces.npz import RoutingTrace, write_trace
from tests.helpers.commands import command_names
from tests.helpers.in_a_terminal import Shown, check_whole, noted, printed, shown

WIDTHS = (200, 80, 60, 45)
# --------------------------------------------------------------------------------------------------- a table

COLUMNS = (
    Column("planner", align="left"),
    Column("max/mean\nmedian"),
    Column("what was done", 2, "left", wrap=True),
    Column("A2A\nms", 1),
    Column("exposed\nms", 3),
)
ROWS = [
    ["static", "3.141", "nothing at all was done [b]here[/b]", "12.5 ms", "0.25"],
    ["pro-prophet", "1.059", "two hot experts copied", "2,718.3 ms", "0.125"],
]


TABLE = FittedTable(COLUMNS, ROWS)


@pytest.mark.parametrize("width", range(14, 121, 3))
def test_a_table_is_whole_at_every_width(width: int) -> None:
    check_whole(printed(TABLE, width), width, noted(TABLE))


def test_columns_go_by_rank_and_are_named() -> None:
    def left_out(width: int) -> list[str]:
        return check_whole(printed(TABLE, width), width, noted(TABLE))

    assert left_out(100) == left_out(66) == []
    assert left_out(58) == ["exposed ms"]
    assert left_out(40) == ["what was done", "exposed ms"]
    assert left_out(30) == ["what was done", "A2A ms", "exposed ms"]
    narrow = printed(TABLE, 19)
    assert "max/mean median:" in narrow
    assert "exposed ms: 0.125" in narrow


def test_cells_are_shown_as_they_are() -> None:
    shown = printed(FittedTable(COLUMNS, ROWS, title="[i]A title[/i]", caption="of [7]"), 100)
    assert "[b]here[/b]" in shown
    assert shown.startswith("[i]A title[/i]\n")
    assert shown.rstrip().endswith("of [7]")
    styled = FittedTable([Column("ratio"), Column("other")], [[Text("1.500", style="red"), "2"]])
    for width in (40, 8):  # as a table, and line by line
        assert "1.500" in printed(styled, width)
    assert printed(FittedTable(COLUMNS, []), 100).split()[:2] == ["max/mean", "A2A"]


def test_a_pipe_gets_a_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert console().width >= FILE_WIDTH
    wide = [Column(f"{i}" * 30) for i in range(3)]
    print_table(wide, [["1", "2", "3"]])
    assert "Left out" not in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- progress


def test_progress_is_silent_beside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("things", iter(range(3)), 3) as items, working("More"):
        assert list(items) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 45])
def test_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(
        terminal, "console", lambda **_: Console(file=stderr, width=width, force_terminal=True, highlight=False)
    )
    words = "Placing 4,096 ranks by pro-prophet's equation 8 for the third of four sizes"
    with progress(words, range(3), 3) as items:
        assert list(items) == [0, 1, 2]
    with working(words):
        pass
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stderr.getvalue())
    assert "…" not in text
    assert "3/3" in text
    assert {*words.split()} <= {*text.split()}


def test_progress_ends_with_an_error() -> None:
    with pytest.raises(KeyError), working("Measuring"):
        raise KeyError


# ------------------------------------------------------------------------------------ commands in a terminal

NO_TABLE = {"report"}
IN_PYTHON = {"demo"}  # tests/demo/test_results.py has its tables: they need PyTorch


def steps_file(folder: Path) -> Path:
    """A run of 12 layers with large figures."""
    layers, folder = 12, folder / "run"
    folder.mkdir()
    start = {"layers": layers, "ranks": 64, "experts": [256] * layers, "planner": "pro-prophet"}
    rows = [
        {
            "step": 12_345 + t,
            "time_s": 1.0,
            "step_s": 1.25,
            "max_mean": [1.0625 + i for i in range(layers)],
            "max_mean_static": [12.375 + i for i in range(layers)],
            "copies": [128 + i for i in range(layers)],
            "dropped": [65_536] * layers,
            "rows": [1 << 20] * layers,
            "hottest": [[[17, 12.375], [240, 11.5], [3, 9.25], [128, 8.125]]] * layers,
            "gain_predicted": [1.625] * layers,
            "gain_measured": 1.5,
            "exposed_s": 0.00325,
            "seconds": {"a2a": 0.5, "expert": 0.25, "exposed_trans": 0.125, "split": 0.0625},
        }
        for t in range(2)
    ]
    lines = [{"format": 1, "start": start}, *rows]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def calibrated(folder: Path) -> Path:
    """What `prophet calibrate --check --json` prints."""
    operations = [
        {
            "operation": name,
            "unit": unit,
            "fixed_s": 0.012345,
            "count_s": 0.00125,
            "unit_s": 1e-6 if unit == "token" else 1e-9 / 3,
            "mean_error": 0.0625,
            "max_error": 0.125,
            "points": [{"size": 1, "experts": 1, "seconds": 1.0, "spread": 0.5, "held_out": False}],
        }
        for name, unit in (("all-to-all", "byte"), ("expert_forward", "token"), ("trans", "byte"))
    ]
    answer = {
        "ranks": 2,
        "device": "cpu",
        "dim": 256,
        "hidden": 512,
        "activation": "gelu",
        "dtype": "float32",
        "repeats": 25,
        "file": "new/topology.toml",
        "folders_made": ["new"],
        "topology": {"overlap_cost": 0.25},
        "operations": operations,
        "model": operations,
    }
    (folder / "calibrated.json").write_text(json.dumps(answer))
    return folder / "calibrated.json"


def examined(folder: Path) -> Path:
    """What a doctor has seen."""
    versions = {"moe-prophet": "0.1.0.dev0", "torch": "2.13.0+cu126", "transformers": "not installed"}
    checks = [
        {"name": "core", "state": "sound", "message": "built from these sources", "mend": ""},
        {"name": "disk", "state": "finding", "message": "0.125 GiB free of 64", "mend": "remove files from /data/run"},
    ]
    (folder / "examined.json").write_text(json.dumps({"versions": versions, "checks": checks}))
    return folder / "examined.json"


def gpu_checked(folder: Path) -> Path:
    """What checks of a machine with GPUs have found."""
    lines = [
        {"name": "engine", "state": "sound", "message": "4 steps, 30 replicas: as on one rank", "mend": ""},
        {"name": "kernels", "state": "finding", "message": "bfloat16 by 12.5", "mend": "please send the JSON below"},
    ]
    checks = [{"name": line["name"], "lines": [line]} for line in lines]
    (folder / "gpu-checked.json").write_text(json.dumps({"device": "2 x NVIDIA H100", "checks": checks}))
    return folder / "gpu-checked.json"


def commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of every command that prints a table, on something that it can work on at once."""
    counts = np.full((3, 2, 4, 8), 10)
    counts[..., 0] = 4000
    write_trace(folder / "routing.npz", RoutingTrace(counts, np.arange(3, dtype=np.int32), {"top_k": 1}))
    found = {
        "plan": ["plan", str(folder / "routing.npz")],
        "simulate": ["simulate", "--ranks", "8,4096", "--layers", "2", "--steps", "2"],
        "switch": ["switch", "--model", "llama2-70b", "--from", "tp4,pp2,dp2", "--to", "tp4,pp4,dp1"],
        "watch": ["watch", str(steps_file(folder)), "--once"],
        "calibrate": ["calibrate", str(calibrated(folder))],
        "doctor": ["doctor", str(examined(folder))],
        "gpu-check": ["gpu-check", str(gpu_checked(folder))],
    }
    assert command_names() == found.keys() | NO_TABLE | IN_PYTHON
    return found


@pytest.fixture(scope="module")
def in_terminals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Shown]:
    folder = tmp_path_factory.mktemp("terminal")
    cases = [(name, width, arguments) for name, arguments in commands(folder).items() for width in WIDTHS]
    found = shown([(width, arguments) for _, width, arguments in cases], folder)
    return {(name, width): one for (name, width, _), one in zip(cases, found, strict=True)}


@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_is_whole_in_a_terminal(in_terminals: dict[tuple[str, int], Shown], width: int) -> None:
    for (_, at), one in in_terminals.items():
        if at == width:
            assert one.tables
            for table in one.tables:
                missing = check_whole(one.text, width, table)
                assert width < 200 or not missing
                assert width < 60 or len(missing) < len(table.names) - 1  # more than one figure is left to read


def test_a_number_is_in_a_narrow_terminal_as_it_is_in_a_wide_one(
    in_terminals: dict[tuple[str, int], Shown],
) -> None:
    def numbers(name: str, width: int) -> set[str]:
        text = " ".join(in_terminals[name, width].text.split())
        varies = r"Left out at \d+ columns|\d+ s ago|\d+/\d+ [\d:-]+|Measured on this machine: .*? extra\."
        text = re.sub(varies, "", text)
        return set(re.findall(r"\d[\d.,]*\d|\d", text))

    for name, width in in_terminals:
        assert numbers(name, width) <= numbers(name, WIDTHS[0])


def test_the_live_view_fits_its_terminal(tmp_path: Path) -> None:
    from prophet.monitor.read import Tail
    from prophet.monitor.view import frame

    tail = Tail(steps_file(tmp_path) / "steps.jsonl")
    tail.poll()
    for width, height in ((200, 24), (80, 24), (60, 24), (45, 24), (45, 40)):
        text = printed(frame(tail, now_s=2.0, height=height, width=width), width)
        assert len(text.splitlines()) <= height, (width, height, text)
