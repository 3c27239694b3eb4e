"""`prophet gpu-check` as a whole: on the CPU, without a GPU, and with checks that hang, die, or fill what there is."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from prophet.cli import BAD_INPUT, FAILED, OK, main
from prophet.gpu_check import checks
from tests.helpers.gpu_check_bodies import BLOWS
from tests.helpers.house import ROOT
from tests.helpers.releases import needs_interpreter


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def checked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code, the whole answer, and its checks by name."""
    code = main(["gpu-check", "--device", "cpu", "--json", *options])
    found = json.loads(capsys.readouterr().out)
    return code, found, {one["name"]: one for one in found["checks"]}


@pytest.mark.timeout(280)
def test_what_hangs_or_dies_is_a_line_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "TASKS", BLOWS)
    code, found, by_name = checked(capsys, "--out", str(tmp_path / "page.md"))
    assert code == FAILED
    assert not found["sound"]
    said = {
        "hangs": "no end within 4 s, and was ended",
        "one-hangs": "and was ended",  # on a busy machine before its ranks were there, whose names are told otherwise
        "dies": "ended by SIGSEGV",
        "memory": "MemoryError",
        "raises": "KeyError: 'x'",
        "finds": "wrong at 18 s",
    }
    assert {name for name, one in by_name.items() if one["state"] == "finding"} == said.keys()
    for name, text in said.items():
        assert text in by_name[name]["lines"][0]["message"], by_name[name]
    assert "in raises" in by_name["raises"]["output"], "the traceback comes along"
    assert by_name["garbage"]["lines"] == [{"name": "garbage", "state": "sound", "message": "went on", "mend": ""}]
    assert by_name["last"]["lines"][0]["message"] == "1 rank on cpu"
    assert found["paste"] == ["unset IT"]
    assert all(c.isprintable() or c == "\n" for c in (tmp_path / "page.md").read_text())


def test_a_page_that_cannot_be_written_loses_no_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: object, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checks, "TASKS", [task for task in BLOWS if task.name == "last"])
    monkeypatch.setattr("prophet.report.page.write_page", full)
    code = main(["gpu-check", "--device", "cpu", "--json", "--out", str(tmp_path / "page.md")])
    out, err = capsys.readouterr()
    assert code == FAILED
    assert [one["name"] for one in json.loads(out)["checks"]] == ["last"]
    assert "No space left on device" in err


@needs_interpreter
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "names",
    [
        "kernels,engine",
        pytest.param("channels,pipeline,switch", marks=pytest.mark.slow),
        pytest.param("lost-rank,calibration,layer,model", marks=pytest.mark.slow),
    ],
)
def test_all_checks_pass_on_the_cpu(names: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = tmp_path / "topology.toml"
    keep = ["--machine", str(machine)] if "calibration" in names else []
    code, found, by_name = checked(capsys, "--checks", names, *keep)
    assert by_name.keys() == {"environment", *names.split(",")}
    assert code == OK, [line for one in found["checks"] for line in one["lines"]]
    allowed = {"sound", "not checked"} if "calibration" in names else {"sound"}  # a busy machine has no rate of a link
    assert {one["state"] for one in by_name.values()} <= allowed
    assert machine.exists() == (found["topology"] == str(machine))
    for name in {"layer", "model"} & by_name.keys():
        assert [line["name"] for line in by_name[name]["lines"]] == [name, "throughput", "prediction"]
        assert by_name[name]["figures"]["prophet_tokens_per_s"] > 0
    if "engine" in names:
        assert by_name["engine"]["figures"]["copies"] > 0
    assert not any(one["output"] for one in by_name.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gpu-check", "--checks", "environment"]) == BAD_INPUT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "no GPU that torch can use" in shown.err
    assert "`prophet gpu-check --device cpu`" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checks", "kernel"], "there is no check 'kernel'; did you mean 'kernels'"),
        (["--out", "page.txt"], "--out: expected a file that ends in .md or .html, got page.txt"),
        (["--checks", "kernels", "--machine", "t.toml"], "--machine: keeps the calibration, which --checks leaves out"),
        (["--machine", "/proc/x/y.toml"], "--machine: expected a file that can be written"),
    ],
)
def test_mistakes_are_refused_before_the_work(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu-check", "--device", "cpu", *options]) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_under_a_launcher_it_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["gpu-check", "--device", "cpu"]) == BAD_INPUT
    assert "run it without torchrun" in capsys.readouterr().err


def _program(folder: Path, *options: str) -> subprocess.Popen[str]:
    """The command as a program in `folder`, which holds its temporary files, too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "prophet", "gpu-check", "--device", "cpu", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _processes(folder: Path) -> list[str]:
    """Command lines of the processes that work on a check in `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and "gpu_check.child" in line:
                found.append(line)
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes by /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_checks_too(number: int, tmp_path: Path) -> None:
    """As a closed terminal, `timeout` or a queue's limit sends it: the GPU must be free afterwards."""
    with _program(tmp_path, "--checks", "kernels") as process:
        while not _processes(tmp_path) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not _processes(tmp_path)
    assert not list(tmp_path.glob("prophet-gpu-check-*"))


def test_files_of_the_folder_that_it_is_called_in_stand_for_no_modules(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the user's file was imported')")
    with _program(tmp_path, "--checks", "environment") as process:
        shown, errors = process.communicate(timeout=120)
    assert process.returncode == OK, shown + errors
    assert "No findings" in shown
