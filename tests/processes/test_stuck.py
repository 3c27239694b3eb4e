"""A rank whose main thread waits in torch for a device that waits for a rank that has failed: the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from prophet.errors import CollectiveTimeout
from prophet.ranks import process_group
from prophet.ranks.failures import stuck
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import process_outcomes

STUCK_S = 2.0
OP = Operation("exchange of counts", 3)


def _ranks(folder: str, *, busy: bool = True) -> int:
    """Make groups as if they were on a device, whose work never ends; this process's rank. Errors go to a file."""
    stuck.STUCK_S = STUCK_S
    ranks = collective_for(None, timeout_s=60.0)
    process_group._stuck[0].mark = lambda: lambda: not busy
    process_group._stuck[0].renew()
    os.dup2(os.open(f"{folder}/{ranks.rank}", os.O_CREAT | os.O_WRONLY), 2)
    ranks.meet(Operation("start"))
    return ranks.rank


def _wait_in_c(seconds: float) -> None:
    """As `loss.item()` does."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


def _fail(_: int) -> None:
    process_group._give_up_on_devices(CollectiveTimeout(1, OP, "no answer within 6 s"))


def _end(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _first_waits(folder: str, then: object) -> None:
    rank = _ranks(folder)
    if rank == 1:
        assert callable(then)
        then(rank)
        time.sleep(14)
    else:
        _wait_in_c(60)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (_fail, r"rank 1: CollectiveTimeout: rank 1: exchange of counts of layer 3 failed: no answer within 6 s"),
        (_end, "rank 1: its process has ended, when last heard of"),
    ],
)
def test_a_rank_that_is_stuck_ends_and_says_who_has_failed(then: object, says: str, tmp_path: Path) -> None:
    outcome = process_outcomes(2, _first_waits, str(tmp_path), then, timeout_s=45.0, grace_s=12.0)[0]
    said = (tmp_path / "0").read_text()
    assert outcome.exit_code == 1
    assert STUCK_S <= outcome.seconds < 40
    assert said.startswith("rank 0 ends. Its device waits for a rank that does not come")
    assert "lock.acquire(timeout=seconds)" in said
    assert says in said


class Counted:
    begun = 0


def _goes_on(folder: str, how: str) -> str:
    rank = _ranks(folder, busy=how != "idle")
    if rank == 1 and how in ("idle", "made anew", "moves"):
        _fail(rank)
    dist.barrier()
    if rank == 0:
        if how == "made anew":
            process_group._stuck[0].renew()
        if how == "moves":
            counter = Counted()
            process_group.presence().counters["a group"] = counter
            for _ in range(20):
                _wait_in_c(0.5)
                counter.begun += 1
        else:
            _wait_in_c(2.5 * STUCK_S)
    elif how == "stopped":
        # what wakes it up again
        wake = f"sleep {2 * STUCK_S}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how != "left":
        time.sleep(2.5 * STUCK_S)
    return "lives"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "well", "made anew", "moves", "stopped", "left"])
def test_a_rank_goes_on(how: str, tmp_path: Path) -> None:
    """Its device goes on; nobody has failed; groups were made since; it waits often, but goes on in between; the other
    rank is only silent, or has ended as it should."""
    assert [o.result for o in process_outcomes(2, _goes_on, str(tmp_path), how, timeout_s=60.0)] == ["lives", "lives"]
