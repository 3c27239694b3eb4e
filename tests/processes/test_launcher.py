"""The tests' own launcher: fresh ranks for every case, and a named rank where one fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prophet.ranks.launch import open_store
from tests.helpers import launch
from tests.helpers.launch import on_processes, process_outcomes


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into the environment goes with the test."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


def sum_of_ranks() -> tuple[float, int, bool]:
    mine = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(mine)
    fresh = not hasattr(torch, "left_behind")
    torch.left_behind = True  # type: ignore[attr-defined]
    return float(mine), os.getpid(), fresh


def test_every_case_has_ranks_that_nobody_has_used() -> None:
    first, second = on_processes(2, sum_of_ranks), on_processes(3, sum_of_ranks)
    assert [total for total, _, _ in first] == [1.0, 1.0]
    assert [total for total, _, _ in second] == [3.0, 3.0, 3.0]
    assert len({pid for _, pid, _ in first + second}) == 5
    assert all(fresh for _, _, fresh in first + second)


def killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_is_killed_is_named_first() -> None:
    with pytest.raises(RuntimeError, match=rf"^rank 1 ended with {-signal.SIGKILL}: ended without a word"):
        on_processes(3, killed)


def one_fails() -> str:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    time.sleep(600)
    return "slept"


def test_a_failure_ends_the_others_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^rank 1 ended with 3: ValueError: no more"):
        on_processes(2, one_fails, timeout_s=120)
    assert time.monotonic() - began < 40


def test_a_rank_that_hangs_is_ended_in_time() -> None:
    slow, failed = process_outcomes(2, one_fails, timeout_s=3)
    assert failed.exit_code == 3
    assert slow.exit_code is None
    assert slow.error is not None
    first, *stack = slow.error.splitlines()
    assert first == "still running after 3 s"
    # where it hangs
    assert any("test_launcher.py" in line and "in one_fails" in line for line in stack)


def meets() -> tuple[int, str]:
    """Meet as a program does that a launcher has started: by environment variables, late on rank 0."""
    if os.environ["RANK"] == "0":
        time.sleep(1.0)
    dist.init_process_group("gloo")
    mine = torch.tensor(float(os.environ["ADDED"]))
    dist.all_reduce(mine)
    return int(mine), os.environ["MASTER_PORT"]


def test_ranks_meet_by_environment_variables_at_a_port_that_rank_0_has_opened() -> None:
    found = on_processes(2, meets, told={"ADDED": "1"})
    assert [total for total, _ in found] == [2, 2]
    assert len({port for _, port in found}) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_rank_0_opens_is_taken_from_then_on(rank: int, tmp_path: Path, own_environment: None) -> None:
    kept = open_store(0, tmp_path, timeout_s=10)
    port = int(os.environ["MASTER_PORT"])
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    if rank:
        # in the place of another process
        os.environ["MASTER_PORT"] = "0"
        open_store(1, tmp_path, timeout_s=10)
        assert int(os.environ["MASTER_PORT"]) == port
    del kept


def test_a_rank_0_that_opens_no_port_is_waited_for_no_longer_than_the_limit(
    tmp_path: Path, own_environment: None
) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        open_store(1, tmp_path, timeout_s=0.2)


def one_vanishes() -> str:
    if dist.get_rank() == 1:
        os._exit(1)
    return "here"


def test_a_rank_may_vanish_where_that_is_expected() -> None:
    assert on_processes(2, one_vanishes, vanishing={1}) == ["here", None]
    with pytest.raises(RuntimeError, match=r"^rank 1 ended with 1"):
        on_processes(2, one_vanishes)
