"""Replicas that run apart from the experts at home, over gloo: the same gradients, whoever has replicas."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from prophet.ranks.process_group import ProcessGroupCollective
from prophet.spec import Link, Topology
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner
from tests.helpers.training import Case, Run, Step, compare, expected

CASE = Case(ranks=3, shapes=((2, 3), (4,), (5,)), seed=5, steps=3, slots=8, blocks=3)
# transfers take so long that no window hides them
SLOW = replace(Topology.uniform(3), intra=Link(bytes_per_s=1e3), inter=Link(bytes_per_s=1e3))
# the last rank has none
PAIRS = [(2, 0), (4, 0), (5, 0), (0, 1), (4, 1), (5, 1)]


class Ours(FixedPlanner):
    """A planner of ours: the engine may run its replicas apart."""

    withdraws = True


def apart(case: Case, receive_first: bool) -> list[Step]:
    group = ProcessGroupCollective(timeout_s=60, receive_first=receive_first)
    with mock.patch("prophet.engine.balanced_layer.pays", return_value=True):
        run = Run(case, group, Ours(PAIRS), topology=SLOW)
        steps = [run.whole_step(s) for s in range(case.steps)]
        run.close()
    report = steps[-1].report
    assert report is not None
    assert "AGG(0,0)@BEC(0)" in map(str, report.actions)
    return steps


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize("transfers", ["direct", "two-phase"])
def test_gradients_are_those_of_one_rank(transfers: str, receive_first: bool) -> None:
    case = replace(CASE, transfers=transfers)
    compare(expected(case), on_processes(3, apart, case, receive_first, timeout_s=90))
