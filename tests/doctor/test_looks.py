"""Single looks of `prophet doctor`: what each says where something is wrong, and where nothing is."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from prophet.doctor import disks, installed, launcher, ranks
from prophet.doctor.check import Check, Look, finding, look, merged, sound, unseen
from prophet.doctor.devices import Seen, backend, gpus
from prophet.doctor.disks import Folder, writable
from prophet.doctor.extensions import first_use, locks
from prophet.ranks.collective import Collective
from tests.helpers.support import on_threads


def states(checks: list[Check]) -> list[str]:
    return [check.state for check in checks]


# --- looks and ranks ---


def test_a_look_that_hangs_or_fails_is_a_finding_and_holds_up_no_other() -> None:
    forever = threading.Event()

    def hangs() -> list[Check]:
        forever.wait(30)
        return []

    def fails() -> list[Check]:
        raise PermissionError("no\nway")

    began = time.monotonic()
    looks = [
        Look("disk", hangs, "ls"),
        Look("GPUs", fails, "nvidia-smi"),
        Look("core", lambda: [sound("core", "")], ""),
    ]
    found = look(0.2, looks)
    forever.set()
    assert time.monotonic() - began < 5
    assert found[0] == finding("disk", "no answer within 0 s", "ls")
    assert found[1] == finding("GPUs", "PermissionError: no way", "nvidia-smi")
    assert states(found) == ["finding", "finding", "sound"]


def test_findings_name_their_ranks_where_not_all_have_them() -> None:
    everywhere, here = finding("core", "gone", "build"), finding("disk", "full", "df")
    by_rank = [[everywhere, sound("disk", "free"), unseen("x", "why")], [here, everywhere], [here, everywhere]]
    expected = [everywhere, sound("disk", "free"), unseen("x", "why"), finding("disk", "ranks 1, 2: full", "df")]
    assert merged(by_rank) == expected


def test_versions_that_differ_are_named_with_what_to_install() -> None:
    usual = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "none", "core": "abc"}
    assert states(installed.equal([usual, usual])) == ["sound"]
    (only,) = installed.equal([usual, {**usual, "torch": "2.14.1"}, usual])
    assert only.message == "torch differs: 2.13.0 on ranks 0, 2; 2.14.1 on rank 1"
    assert only.mend == "`pip install torch==2.13.0` on the machine of rank 1"
    (core,) = installed.equal([usual, {**usual, "core": "none"}])
    assert "same checkout" in core.mend


def test_an_exchange_arrives_on_all() -> None:
    for checks in on_threads(3, lambda group: ranks.exchange(group, "cpu")):
        assert states(checks) == ["sound"]
        assert checks[0].message.startswith("3 ranks, 3 MiB each (cpu)")


def test_an_exchange_that_garbles_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Collective) -> list[Check]:
        plain = group.all_to_all

        def garbled(x, *rows, **options):  # type: ignore[no-untyped-def]
            return plain(x + (group.rank == 1), *rows, **options)

        monkeypatch.setattr(group, "all_to_all", garbled)
        return ranks.exchange(group, "cpu")

    for checks in on_threads(2, body):
        assert checks[0].message == "rank(s) [0, 1] received other numbers than were sent"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE are set, and not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0"}, "RANK is set, and not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "whole numbers, got RANK=x"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 is none of WORLD_SIZE=2"),
    ],
)
def test_half_of_a_launchers_environment_is_a_finding(environment: dict[str, str], message: str) -> None:
    (only,) = launcher.launcher(environment)
    assert only.state == "finding"
    assert message in only.message
    assert "torchrun --standalone" in only.mend


def test_a_whole_one_or_none_is_sound() -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert states(launcher.launcher(whole) + launcher.launcher({"MASTER_PORT": "1"})) == ["sound", "sound"]
    assert launcher.port(whole) == []  # rank 0 opens it
    assert states(launcher.port({**whole, "TORCHELASTIC_USE_AGENT_STORE": "True"})) == ["sound"]


# --- GPUs ---

CPU, CUDA = None, "12.8"


@pytest.mark.parametrize(
    ("told", "seen", "local_ranks", "message", "mend"),
    [
        ("0,1", Seen(0, 0, CPU), 1, "CUDA_VISIBLE_DEVICES=0,1 names 2, and torch sees 0: it was built", "unset"),
        ("0", Seen(0, 8, CPU), 1, "built for the CPU", "install PyTorch for CUDA"),
        ("0,1", Seen(1, 1, CUDA), 1, "names 2, and torch sees 1", "nvidia-smi -L"),
        (None, Seen(0, 8, CPU), 1, "8 are here, and torch was built for the CPU", "install PyTorch for CUDA"),
        (None, Seen(0, 8, CUDA), 1, "8 are here, and torch sees none", "nvidia-smi"),
        (None, Seen(4, 4, CUDA), 8, "8 ranks on this machine share 4", "--nproc-per-node 4"),
    ],
)
def test_gpus_that_cannot_be_used_are_a_finding(
    told: str | None, seen: Seen, local_ranks: int, message: str, mend: str
) -> None:
    environment = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    (only,) = gpus(environment, seen, local_ranks)
    assert only.state == "finding"
    assert message in only.message
    assert mend in only.mend


@pytest.mark.parametrize("told", [None, "", "-1"])
def test_no_gpus_are_no_finding(told: str | None) -> None:
    environment = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    assert states(gpus(environment, Seen(0, 0, CPU), 2)) == ["sound"]
    assert states(gpus({"CUDA_VISIBLE_DEVICES": "-1"}, Seen(0, 8, CUDA), 2)) == ["sound"]


@pytest.mark.parametrize(
    ("asked", "seen", "taken", "state"),
    [
        (None, Seen(0, 0, CPU), "gloo", "sound"),
        ("gloo", Seen(0, 0, CPU), "gloo", "sound"),
        ("nccl", Seen(0, 8, CPU), "gloo", "finding"),
        ("gloo", Seen(8, 8, CUDA), "gloo", "finding"),
    ],
)
def test_the_backend_suits_the_machine(asked: str | None, seen: Seen, taken: str, state: str) -> None:
    found, checks = backend(asked, seen)
    assert found == taken
    assert states(checks) == [state]


# --- folders ---


def folder(path: Path, need_bytes: int = 1) -> Folder:
    return Folder(name="cache", path=path, elsewhere="`export X=FOLDER`", need_bytes=need_bytes)


def test_a_folder_that_is_to_be_made_is_tried_above_and_nothing_stays(tmp_path: Path) -> None:
    assert states(writable(folder(tmp_path / "a" / "b"))) == ["sound"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folders_place_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (only,) = writable(folder(tmp_path / "a" / "b"))
    assert "Not a directory" in only.message
    assert "export X=FOLDER" in only.mend


def test_too_little_room_and_a_full_disk_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (little,) = writable(folder(tmp_path, need_bytes=1 << 60))
    assert f"expected at least {1 << 40} MiB" in little.message

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disks.os, "fsync", full)
    (none,) = writable(folder(tmp_path))
    assert "No space left on device" in none.message
    assert none.mend.startswith(f"delete files (`df -h {tmp_path}`)")
    assert list(tmp_path.iterdir()) == []


# --- extensions ---


def test_an_extension_that_was_built_needs_no_word(tmp_path: Path) -> None:
    told = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert "compiles some_op now" in first_use("some_op", told)
    assert states(locks(told)) == ["sound"]
    (tmp_path / "some_op").mkdir()
    assert "compiles some_op now" in first_use("some_op", told)
    (tmp_path / "some_op" / "some_op.so").touch()
    assert first_use("some_op", told) == ""


@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
def test_a_lock_is_named_with_its_age(tmp_path: Path, variable: str) -> None:
    told = {variable: str(tmp_path)}
    python = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    place = tmp_path if variable == "TORCH_EXTENSIONS_DIR" else tmp_path / "torch_extensions" / python
    lock = place / "some_op" / "lock"
    lock.parent.mkdir(parents=True)
    (lock.parent / "some_op.so").touch()
    lock.touch()
    os.utime(lock, (0, time.time() - 3000))
    message = first_use("some_op", told)
    assert f"{lock} is 50 min old" in message
    assert f"`rm {lock}`" in message
    (only,) = locks(told)
    assert f"{lock} is 50 min old" in only.message
    assert only.mend.endswith(f"`rm {lock}`")
