"""Our planners in the engine: replicas on several ranks, from step to step, and the oracle's gradients."""

from __future__ import annotations

import pytest

from prophet.ranks.collective import Collective
from prophet.spec import Link, Topology, Windows
from tests.helpers.support import on_threads
from tests.helpers.training import Array, Case, Run, Step, compare, expected

# A token's way takes longer than its products, and nearly all of it goes to experts 0 and 3.
CASE = Case(ranks=4, shapes=((2, 3), (4,), (5,), (3,)), steps=4, favourites=(0, 3))
MACHINE = Topology.uniform(
    4, ranks_per_node=2, flops_per_s=1e7, intra=Link(bytes_per_s=4e6), inter=Link(bytes_per_s=1e6)
)


@pytest.fixture(scope="module")
def wanted() -> list[tuple[float, dict[str, Array]]]:
    return expected(CASE)


def test_gradients_of_replicas_that_the_planner_chose(wanted: list[tuple[float, dict[str, Array]]]) -> None:
    def body(group: Collective) -> list[Step]:
        options = {"planner": "prophet", "topology": MACHINE, "windows": Windows(fnec_s=1.0, bnec_s=1.0)}
        run = Run(CASE, group, slots_per_rank=3, **options)
        steps = [run.whole_step(s) for s in range(CASE.steps)]
        run.close()
        return steps

    by_rank = on_threads(4, body)
    compare(wanted, by_rank)
    for steps in zip(*by_rank, strict=True):
        placements = [s.report.placements for s in steps if s.report is not None]
        assert all(p == placements[0] for p in placements)
    reports = [s.report for s in by_rank[0] if s.report is not None]
    assert len(reports) == CASE.steps
    assert sum(r.copies.sum() > 0 for r in reports) >= CASE.steps - 2, "copies pay here"
