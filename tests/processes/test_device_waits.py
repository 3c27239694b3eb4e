"""A rank waits for a number on its device, whose stream waits for a rank that does not come.

The host of such a rank sees no connection that is closed. Here the device is one whose events never end.
"""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import torch

from prophet.errors import CollectiveError
from prophet.ranks import works
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective, collective_for
from tests.helpers.launch import mark, process_outcomes, run_gloo, wait_for

LIMIT_S = 4.0
OP = Operation("exchange of counts", 3)


class _OnDevice(torch.Tensor):
    """A tensor of the host that says it is on a device."""

    device = property(lambda self: torch.device("xpu"))  # type: ignore[assignment]


def _read(ranks: ProcessGroupCollective, given_up: list[Any]) -> float:
    """Read a number whose collective is never over; the seconds until the error."""
    works.current_stream = lambda device: SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    began = time.monotonic()
    try:
        ranks.on_host(torch.ones(2).as_subclass(_OnDevice), op=OP)
    except CollectiveError as error:
        seconds = time.monotonic() - began
        given_up.append(f"{type(error).__name__}: {error}")
        try:
            ranks.all_gather(torch.ones(1), op=Operation("next"))
        except CollectiveError as later:
            given_up.append(str(later))
        return seconds
    raise AssertionError("a read that never ends has ended")


def _late(rank: int, size: int) -> tuple[float, list[str]]:
    ranks = collective_for(None, timeout_s=LIMIT_S)
    assert isinstance(ranks, ProcessGroupCollective)
    assert ranks.on_host(torch.ones(2), op=OP).tolist() == [1, 1]
    errors: list[str] = []
    if rank:
        wait_for("read")
        return 0.0, []
    seconds = _read(ranks, errors)
    mark("read")
    return seconds, errors


def test_a_rank_that_is_late_ends_the_wait_at_its_limit_with_the_place_of_all() -> None:
    seconds, (error, later) = run_gloo(_late, 2)[0]
    assert LIMIT_S <= seconds < LIMIT_S + 10
    assert error.startswith("CollectiveTimeout: rank 0: exchange of counts of layer 3 failed: no answer within 4 s")
    # its last operation was to make the collective
    assert "rank(s) [1]" in error
    assert "an earlier operation failed" in later


def _killed() -> tuple[float, list[str]]:
    ranks = collective_for(None, timeout_s=60.0)
    assert isinstance(ranks, ProcessGroupCollective)
    if ranks.rank:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    errors: list[str] = []
    return _read(ranks, errors), errors


def test_a_rank_that_is_killed_ends_the_wait_long_before_its_limit() -> None:
    seconds, (error, _) = process_outcomes(2, _killed, timeout_s=90.0)[0].result
    assert seconds < 20
    assert error.startswith("PeerLost: rank 0: exchange of counts of layer 3 failed: a connection was closed")
    assert "rank(s) [1] are gone" in error
