"""A machine that changes: the next plans are made for the new one; and what a report tells of the step."""

from __future__ import annotations

import pytest

from prophet.ranks.collective import Collective
from prophet.scheduler.pieces import Form
from prophet.spec import IntArray, Placement, PlanContext, Topology
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected

CASE = Case(ranks=2, shapes=((2, 3), (4,)), steps=4)


class BySpeed(FixedPlanner):
    """Replicas on the fastest rank only."""

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        fastest = context.topology.flops_per_s.index(max(context.topology.flops_per_s))
        pairs = [(e, fastest) for e in range(context.experts) if context.home[e] != fastest]
        return Placement.with_replicas(context.home, context.ranks, pairs)


def test_plans_follow_the_topology() -> None:
    def body(group: Collective) -> list[Step]:
        run = Run(CASE, group, BySpeed(()), slots_per_rank=4)
        steps = [run.whole_step(0), run.whole_step(1)]
        slow = Topology(
            ranks=2,
            ranks_per_node=2,
            intra=Topology.uniform(2).intra,
            inter=Topology.uniform(2).inter,
            flops_per_s=(1e11, 1e12),
            free_bytes=(1 << 40, 1 << 40),
        )
        run.engine.set_topology(slow)
        steps += [run.whole_step(2), run.whole_step(3)]
        run.close()
        return steps

    by_rank = on_threads(2, body)
    compare(expected(CASE), by_rank)
    for steps in by_rank:
        held = [None if s.report is None else s.report.copies.sum(axis=0).tolist() for s in steps]
        # the placement in force stays for the step after the change, whose counts are planned for the new machine
        assert held == [[0, 0], [4, 0], [4, 0], [0, 4]]


def test_a_topology_that_does_not_fit() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(everywhere(4, 2)), slots_per_rank=4)
        with pytest.raises(ValueError, match="a topology of 2 ranks, got 3"):
            run.engine.set_topology(Topology.uniform(3))
        run.backward(0)
        with pytest.raises(RuntimeError, match="between two steps"):
            run.engine.set_topology(Topology.uniform(2))
        run.step()
        run.close()

    on_threads(2, body)


def test_a_report_tells_what_was_in_force() -> None:
    placed = Placement.with_replicas([0, 0, 1, 1], 2, [(0, 1)])

    def body(group: Collective) -> list[Step]:
        run = Run(CASE, group, FixedPlanner([(0, 1)]))
        steps = [run.whole_step(s) for s in range(3)]
        run.close()
        return steps

    for steps in on_threads(2, body):
        reports = [s.report for s in steps if s.report is not None]
        assert reports[0].placements[0].is_static
        assert all(p == placed for r in reports[1:] for p in r.placements)
        assert all(isinstance(f, Form) for r in reports for f in r.forms)
