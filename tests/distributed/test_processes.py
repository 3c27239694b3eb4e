"""Ranks as processes: how they end."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import pytest

from prophet.processes import RankFailed, run_ranks


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
