"""Ranks as processes: how they are found to be there already, and how they end."""

from __future__ import annotations

import atexit
import json
import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prophet.errors import RankFailed, SpecError
from prophet.ranks.launch import Launch, _explain, _watch, launched, run_ranks
from tests.helpers.launch import torchrun

JOINS = """
import dataclasses, json, pathlib, sys, torch
from prophet.ranks.process_group import Operation
from prophet.ranks.launch import joined_group, launched

launch = launched()
with joined_group(launch, timeout_s=30) as ranks:
    there = ranks.all_gather(torch.tensor([ranks.rank]), op=Operation("test")).flatten().tolist()
    found = {**dataclasses.asdict(launch), "device": launch.device, "there": there}
    pathlib.Path(sys.argv[1], f"{ranks.rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.timeout(150)
def test_ranks_that_torchrun_has_started_find_out_and_join(tmp_path: Path) -> None:
    program = tmp_path / "joins.py"
    program.write_text(JOINS, encoding="utf-8")
    torchrun(program, str(tmp_path), ranks=2, timeout_s=120)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found == {"ranks": 2, "local_rank": rank, "local_ranks": 2, "device": "cpu", "there": [0, 1]}


def test_a_launcher_is_known_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() is None  # of no rank
    monkeypatch.setenv("RANK", "3")
    assert launched() == Launch(ranks=4, local_rank=0, local_ranks=None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launch = launched()
    assert launch == Launch(ranks=4, local_rank=1, local_ranks=2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launch.device == "cuda:1"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert launch.device == "cpu"


@pytest.mark.parametrize(
    ("name", "text", "least"),
    [("WORLD_SIZE", "two", 1), ("WORLD_SIZE", "0", 1), ("LOCAL_RANK", "-1", 0), ("LOCAL_WORLD_SIZE", "", 1)],
)
def test_a_launchers_number_that_is_none_is_named(
    name: str, text: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other, value in (("RANK", "0"), ("WORLD_SIZE", "2"), (name, text)):
        monkeypatch.setenv(other, value)
    with pytest.raises(SpecError, match=rf"launcher's {name} must be a whole number of at least {least}, got '{text}'"):
        launched()


def _leaves_trouble(rank: int) -> None:
    """Does its work, and leaves something behind that brings the interpreter down at its end."""
    print(f"rank {rank} was here", flush=True)
    atexit.register(os.abort)


def _dies(rank: int) -> None:
    if rank == 1:
        os.abort()


def test_a_rank_that_has_done_its_work_ends_well_whatever_it_leaves_behind(tmp_path: Path) -> None:
    run_ranks(_leaves_trouble, (), ranks=2, folder=tmp_path, limit_s=60, timeout_s=30)


def test_a_rank_that_dies_at_work_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 was ended by SIGABRT"):
        run_ranks(_dies, (), ranks=2, folder=tmp_path, limit_s=60, timeout_s=30)


def _tells_its_origin(rank: int, folder: Path) -> None:
    (folder / f"origin-{rank}").write_text(f"{os.getppid()} {os.environ.get('TOLD')}", encoding="utf-8")


def test_ranks_are_forked_from_one_process_and_have_their_callers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = set()
    for value in ("first", "second"):
        folder = tmp_path / value
        folder.mkdir()
        monkeypatch.setenv("TOLD", value)
        run_ranks(_tells_its_origin, (folder,), ranks=2, folder=folder, limit_s=60, timeout_s=30)
        for rank in range(2):
            origin, told = (folder / f"origin-{rank}").read_text(encoding="utf-8").split()
            assert told == value
            origins.add(int(origin))
    assert len(origins) == 1
    assert origins != {os.getpid()}


class _EndsBetweenTwoReadings(ForkServerProcess):
    """A rank that fails: still running when its exit code is first read, ended whenever it is read again."""

    readings = 0

    @property
    def exitcode(self) -> int | None:
        self.readings += 1
        self.join(30)
        return None if self.readings == 1 else super().exitcode


def test_a_rank_that_dies_while_it_is_looked_at_is_named(tmp_path: Path) -> None:
    rank = _EndsBetweenTwoReadings(target=os.abort, name="rank 0", daemon=True)
    rank.start()
    with pytest.raises(RankFailed, match="rank 0 was ended by SIGABRT"):
        _watch([rank], tmp_path, limit_s=60, what="the run")


def test_the_rank_that_left_the_others_is_the_cause(tmp_path: Path) -> None:
    said = [("CollectiveTimeout", "no answer"), ("ValueError", "too hot"), ("PeerLost", "rank 1 is gone")]
    for rank, (kind, message) in enumerate(said):
        (tmp_path / f"error-{rank}.json").write_text(json.dumps({"kind": kind, "message": message}), encoding="utf-8")
    ranks: list[Any] = [SimpleNamespace(name=f"rank {rank}", exitcode=1) for rank in range(3)]
    assert _explain(ranks[0], ranks, tmp_path) == "rank 1 failed: ValueError: too hot; no answer"
