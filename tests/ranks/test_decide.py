"""One decision of all ranks: yes where every one is ready, no where one is not or does not come."""

from __future__ import annotations

import time

import pytest

from prophet.ranks.collective import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import run_gloo

OP = Operation("deciding")


@pytest.mark.parametrize("unready", [None, 0, 2])
def test_threads_decide_alike(unready: int | None) -> None:
    found = ThreadWorld(3, timeout_s=20.0).run(lambda c: c.decide(OP, ready=c.rank != unready))
    assert found == [unready is None] * 3


def _decisions(rank: int, size: int) -> list[bool]:
    collective = ProcessGroupCollective(timeout_s=4.0)
    found = [collective.decide(OP, ready=True), collective.decide(OP, ready=rank != 1)]
    if rank == 1:
        time.sleep(7.0)  # the others have given up by now, and a late yes changes nothing
    found.append(collective.decide(OP, ready=True))
    return [*found, collective.decide(OP, ready=True)]


def test_processes_decide_alike_also_where_one_comes_too_late() -> None:
    results = run_gloo(_decisions, 3)
    assert [row[:2] for row in results] == [[True, False]] * 3
    assert [row[2] for row in results] == [False, results[1][2], False]
