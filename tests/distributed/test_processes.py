"""Ranks as processes: how they end."""

from __future__ import annotations

import atexit
import os
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from prophet.processes import RankFailed, _watch, run_ranks


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


class _EndsBetweenTwoReadings(SpawnProcess):
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
