"""`prophet doctor`: nothing on a sound machine, and one finding with its line for each thing that is made wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prophet.cli import FAILED, OK, main
from prophet.doctor import devices, disks, pair
from prophet.doctor.check import Check, sound
from prophet.planner import core

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_USE_AGENT_STORE")
PROMISED_S = 30.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # where others compute as well, so much longer


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a port that the system gives and so is free, folders of the test's own."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "0")
    for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


class Two:
    """In the place of two processes."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def checks(self, left_s: float) -> list[Check]:
        return [sound("exchange", "two ranks")]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes are started."""
    monkeypatch.setattr(pair, "Pair", Two)


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], list[dict[str, str]]]:
    """Exit code, the whole answer, and its findings."""
    code = main(["doctor", "--json", *options])
    answer = json.loads(capsys.readouterr().out)
    return code, answer, [check for check in answer["checks"] if check["state"] == "finding"]


@pytest.mark.usefixtures("alone")
def test_a_sound_machine_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer, findings = doctor(capsys, "--checkpoints", str(tmp_path))
    assert findings == []
    assert code == OK
    assert answer["sound"]
    assert answer["versions"]["torch"] != "none"
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert states["topology"] == "not checked"
    assert list(tmp_path.iterdir()) == []


Wrong = Callable[[pytest.MonkeyPatch, Path], Iterator[list[str]]]


def wrong_backend(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    patch.setattr(devices, "see", lambda: devices.Seen(0, 0, None))
    yield ["--backend", "nccl"]


def half_a_launcher(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    patch.setenv("RANK", "0")
    patch.setenv("WORLD_SIZE", "2")
    yield []


def cache_that_refuses(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    patch.setenv("TRITON_CACHE_DIR", "/sys/prophet")  # where nobody writes a file, root neither
    yield []


def port_taken(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    with socket.create_server(("", 0)) as taken:
        patch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        yield []


def core_missing(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    patch.setattr(core, "native", core.Missing("the core was not built: run `pip install -v -e .` in the checkout"))
    yield []


def disk_full(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    patch.setattr(disks, "_CHECKPOINT_BYTES", 1 << 60)
    yield ["--checkpoints", str(path)]


def gpus_absent(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64))))  # more than any machine has
    yield []


def other_prophet(patch: pytest.MonkeyPatch, path: Path) -> Iterator[list[str]]:
    distribution(path / "beside", "prophet", "1.1.7")
    patch.syspath_prepend(str(path / "beside"))
    yield []


def distribution(folder: Path, name: str, version: str) -> None:
    """Metadata of an installed distribution."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "name", "message", "mend"),
    [
        (wrong_backend, "backend", "torch sees none here", "--backend gloo"),
        (half_a_launcher, "launcher", "not MASTER_ADDR", "torchrun --standalone"),
        (cache_that_refuses, "Triton's cache", "/sys cannot be written to", "export TRITON_CACHE_DIR="),
        (port_taken, "port", "cannot be opened: Address already in use", "--master-port"),
        (core_missing, "core", "was not built", "pip install -v -e ."),
        (disk_full, "checkpoints", "MiB free, expected at least", "df -h"),
        (gpus_absent, "GPUs", "names 64", "CUDA"),
        (other_prophet, "import name", "`prophet` 1.1.7 is installed too", "pip uninstall prophet"),
    ],
)
def test_what_is_wrong_is_the_one_finding(
    make: Wrong,
    name: str,
    message: str,
    mend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options in make(monkeypatch, tmp_path):
        code, _, findings = doctor(capsys, *options)
    assert code == FAILED
    (only,) = findings
    assert only["name"] == name
    assert message in only["message"]
    assert mend in only["mend"]


@pytest.mark.usefixtures("alone")
def test_the_report_for_people_has_versions_and_what_mends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/sys/prophet")
    assert main(["doctor", "--machine", "absent.toml"]) == FAILED
    shown = capsys.readouterr().out
    for part in ("torch", "ok core", "-- checkpoints: no folder was given", "!! topology: absent.toml", "!! Triton's"):
        assert part in shown
    assert shown.count("   mend: ") == 2
    assert "2 findings, 1 not checked." in shown


@pytest.mark.parametrize(
    ("program", "state", "message"),
    [
        ("exec sleep 60", "not checked", "is the machine busy?"),
        ("echo one >&2; echo 'unable to resolve' >&2; exit 3", "finding", "exit code 3: unable to resolve"),
    ],
    ids=["busy", "broken"],
)
def test_ranks_that_do_not_end_well_are_a_finding_only_if_they_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, state: str, message: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    two = pair.Pair(dict(os.environ), 1.0)
    (only,) = two.checks(0.5 if state == "not checked" else 30.0)
    two.close()
    assert only.state == state
    assert message in only.message
    assert all(process.poll() is not None for process in two._processes)
    assert list(tmp_path.iterdir()) == [python]


def test_without_a_folder_to_meet_in_the_exchange_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(**_: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(pair.tempfile, "TemporaryDirectory", no_room)
    _, answer, _ = doctor(capsys)
    (only,) = [check for check in answer["checks"] if check["name"] == "exchange"]
    assert only["state"] == "not checked"
    assert "Read-only file system" in only["message"]


# --- the real things, with processes and mounts --------------------------------------------------------------


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> tuple[int, list[Check], float, str]:
    """Exit code, findings, seconds and stderr of a command whose rank 0 prints `--json`."""
    began = time.monotonic()
    paths = os.pathsep.join([*filter(None, [environment.pop("BEFORE", "")]), str(ROOT), str(ROOT / "integrations")])
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=4 * PROMISED_S,
        check=False,
    )
    took_s = time.monotonic() - began
    begins, ends = done.stdout.find("{"), done.stdout.rfind("}") + 1
    assert begins >= 0, done.stderr
    found = [Check(**check) for check in json.loads(done.stdout[begins:ends])["checks"]]
    return done.returncode, [check for check in found if check.state == "finding"], took_s, done.stderr


DOCTOR = (sys.executable, "-m", "prophet", "doctor", "--json")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
slow = [pytest.mark.slow, pytest.mark.timeout(300)]


class TestReal:
    pytestmark = slow

    def test_alone_two_ranks_are_started_and_sound(self) -> None:
        code, findings, took_s, _ = run(*DOCTOR)
        assert (code, findings) == (0, [])
        assert took_s < PROMISED_S

    def test_under_torchrun_all_ranks_are_sound(self) -> None:
        code, findings, took_s, _ = run(*TORCHRUN, "--standalone", *DOCTOR[1:])
        assert (code, findings) == (0, [])
        assert took_s < PROMISED_S

    def test_one_rank_with_another_torch(self, tmp_path: Path) -> None:
        distribution(tmp_path, "torch", "9.9.9")
        program = f'[ "$RANK" = 1 ] && export PYTHONPATH={tmp_path}:$PYTHONPATH; exec "$@"'
        ranks_of = (*TORCHRUN, "--standalone", "--no-python", "sh", "-c", program, "sh")
        code, findings, took_s, _ = run(*ranks_of, *DOCTOR)
        assert code == 1
        (only,) = findings
        assert "9.9.9 on rank 1" in only.message
        assert "pip install torch==" in only.mend
        assert took_s < PROMISED_S

    def test_a_rank_that_waits_for_none(self) -> None:
        code, findings, took_s, _ = run(*DOCTOR, RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
        assert code == 1
        assert [(f.name, "GLOO_SOCKET_IFNAME" in f.mend) for f in findings] == [("exchange", True)]
        assert took_s < PROMISED_S

    def test_a_port_that_another_program_has(self) -> None:
        with socket.create_server(("", 0)) as taken:
            number = str(taken.getsockname()[1])
            code, findings, took_s, _ = run(
                *DOCTOR, RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=number
            )
        assert code == 1
        assert [f.name for f in findings] == ["port"]
        assert took_s < PROMISED_S

    def test_a_checkout_without_a_core(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "prophet", tmp_path / "prophet", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        # not with an editable install's finder: it finds what the copy lacks, and so its own core
        ours = "[f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]"
        (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.meta_path[:] = {ours}\n")
        code, findings, took_s, _ = run(*DOCTOR, cwd=tmp_path, BEFORE=str(tmp_path))
        assert code == 1
        (only,) = findings
        assert only.name == "core"
        assert "pip install -v -e ." in only.mend
        assert took_s < PROMISED_S

    @pytest.mark.parametrize(
        ("mounts", "message"),
        [
            ("mount --bind {0} {0} && mount -o remount,ro,bind {0}", "Read-only file system"),
            ("mount -t tmpfs -o size=2m none {0} && head -c 2m /dev/zero >{0}/all", "No space left on device"),
        ],
        ids=["read-only", "full"],
    )
    def test_a_folder_of_a_disk_that_takes_nothing(self, tmp_path: Path, mounts: str, message: str) -> None:
        folder = tmp_path / "cache"
        folder.mkdir()
        made = f"{mounts.format(folder)} || exit 77; "
        inside = ("unshare", "--mount", "sh", "-c")
        if subprocess.run([*inside, made], capture_output=True, timeout=60, check=False).returncode:
            pytest.skip("needs the right to mount")
        code, findings, took_s, _ = run(*inside, f'{made}exec "$@"', "sh", *DOCTOR, TRITON_CACHE_DIR=str(folder))
        assert code == 1
        (only,) = findings
        assert (only.name, message in only.message) == ("Triton's cache", True)
        assert "export TRITON_CACHE_DIR=" in only.mend
        assert took_s < PROMISED_S
