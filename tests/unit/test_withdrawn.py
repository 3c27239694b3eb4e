"""Steps that go on without their replicas: the rest of Trans is not sent, nor any Agg, and gradients are whole."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prophet.comm import Collective
from prophet.scheduler.actions import Window
from prophet.scheduler.blockwise import block_wise, blocking, cover_of, runs_ahead
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.pieces import GRAIN, held_back
from prophet.scheduler.transfers import Trans
from prophet.spec import IntArray, LayerShape, Link, Placement, PlanContext, Split, Topology
from tests.support import FixedPlanner, everywhere, on_threads
from tests.training import Case, Run, Step, compare, expected

CASE = Case(ranks=2, shapes=((2, 3), (4,)), seed=11, steps=4)
# a home's parameters take seconds to send: nothing hides that, and nothing is worth it
SLOW = replace(Topology.uniform(2), intra=Link(bytes_per_s=1e3), inter=Link(bytes_per_s=1e3))


class Withdrawing(FixedPlanner):
    """Replicas that the engine may withdraw."""

    withdraws = True


def train(case: Case, **options: Any) -> list[list[Step]]:
    planner = Withdrawing(everywhere(case.num_experts, case.ranks))

    def rank(group: Collective) -> list[Step]:
        run = Run(case, group, planner, **{"slots_per_rank": 8, "topology": SLOW, **options})
        steps = [run.whole_step(s) for s in range(case.steps)]
        run.close()
        return steps

    by_rank = on_threads(case.ranks, rank)
    compare(expected(case), by_rank)
    return by_rank


def launched(step: Step) -> list[str]:
    assert step.report is not None
    return [str(a) for a in step.report.actions]


CASES = {
    "plain": CASE,
    "accumulated": replace(CASE, microbatches=2),
    "look-ahead": replace(CASE, schedule="look-ahead"),
    "blocking": replace(CASE, schedule="blocking"),
    "two-phase": replace(CASE, transfers="two-phase"),
    "refetched": replace(CASE, replica_memory="refetch"),
    "recomputed": replace(CASE, checkpointing="non-reentrant"),
    "used twice": replace(CASE, uses=2),
}


@pytest.mark.parametrize("name", CASES)
def test_replicas_that_are_not_worth_it_are_withdrawn(name: str) -> None:
    for steps in train(CASES[name]):
        for step in steps[2:]:  # before the second step no window has been measured
            assert step.report is not None
            assert step.report.withdrawn == (0, 1)
            assert not step.report.copies.any()
            np.testing.assert_array_equal(step.report.rank_load, step.report.rank_load_static)
            assert not any(a.startswith(("AGG", "FETCH")) for a in launched(step))
            assert not any(re.match(r"TRANS\((\d),\d\)@FEC\(\1\)", a) for a in launched(step)), "the rest was sent"


@pytest.mark.parametrize("name", CASES)
def test_every_mixture_of_used_and_withdrawn_replicas_gives_the_same_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided by a hash of the load, which all ranks share."""

    def decide(load: IntArray, split: Split, context: PlanContext, *, unhidden_s: float, microbatches: int) -> bool:
        assert unhidden_s >= 0
        assert microbatches == CASES[name].microbatches
        return int((load * np.arange(1, load.size + 1).reshape(load.shape)).sum()) % 3 != 0

    monkeypatch.setattr("prophet.engine.pays", decide)
    withdrawn = [s.report.withdrawn for s in train(replace(CASES[name], steps=8))[0][2:] if s.report]
    assert any(withdrawn)
    assert not all(len(w) == 2 for w in withdrawn)


def test_what_was_under_way_is_waited_for_when_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    abandon = Trans.abandon

    def counted(self: Trans) -> None:
        assert self._flying, "something was sent"
        abandon(self)
        waited.append(not self._flying)

    monkeypatch.setattr(Trans, "abandon", counted)
    monkeypatch.setattr("prophet.engine.pays", lambda *_, **__: False)
    train(CASE, topology=None)  # on fast links all of Trans is sent before the counts are known
    assert waited == [True] * 3 * 2 * 2, "steps, blocks, ranks"


def test_what_no_window_hides_follows_once_the_counts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prophet.engine.pays", lambda *_, **__: True)
    for steps in train(CASE):
        for step in steps[2:]:  # before the second step no window has been measured
            assert step.report is not None
            assert [len(f.trans_cut) for f in step.report.forms] == [4, 4]
            trans = [a for a in launched(step) if a.startswith("TRANS")]
            assert trans == [
                "TRANS(0,0)@START",
                "TRANS(0,1)@START",
                "TRANS(0,2)@FEC(0)",
                "TRANS(1,0)@FEC(0)",
                "TRANS(1,1)@FNEC(0)",
                "TRANS(1,2)@FEC(1)",
            ]


def test_other_planners_keep_what_they_placed() -> None:
    planner = FixedPlanner(everywhere(CASE.num_experts, CASE.ranks))

    def rank(group: Collective) -> list[Step]:
        run = Run(CASE, group, planner, slots_per_rank=8, topology=SLOW)
        steps = [run.whole_step(s) for s in range(3)]
        run.close()
        return steps

    for steps in on_threads(CASE.ranks, rank):
        assert all(s.report is not None and s.report.withdrawn == () for s in steps)
        assert steps[2].report is not None
        assert steps[2].report.copies.any()


# --- how much is held back ---


def form(cover_s: float, agg_cover_s: float = 1e9, *, ahead: bool = True, overlap_cost: float = 0.0) -> Any:
    """Of one expert of 800 bytes sent to one other rank at 100 bytes/s: Trans and Agg take 8 s each."""
    topology = replace(Topology.uniform(2), intra=Link(bytes_per_s=100.0), overlap_cost=overlap_cost)
    shape = LayerShape(dim=10, hidden=10, param_bytes=4, grad_bytes=4, bias=False)
    context = PlanContext(topology=topology, shape=shape, home=(0, 1), slots_per_rank=1)
    placement = Placement.with_replicas((0, 1), 2, [(0, 1)])
    return FormChooser(1, "direct").form(
        0, placement, context, trans_cover_s=cover_s, agg_cover_s=agg_cover_s, ahead=ahead
    )


def test_as_much_is_held_back_as_no_window_hides() -> None:
    found = form(6.0)
    assert found.trans_cut == (0, GRAIN * 3 // 8, GRAIN * 3 // 4, GRAIN)
    assert found.unhidden_s == pytest.approx(2.0)
    assert form(8.0).trans_cut == (0, GRAIN // 2, GRAIN)
    assert form(8.0).unhidden_s == 0.0
    assert form(7.9).trans_cut == (0, GRAIN // 2, GRAIN), "too little for a message of its own"
    assert form(7.9).unhidden_s == 0.0


def test_agg_that_no_window_hides_can_be_saved_and_so_can_what_hiding_costs() -> None:
    assert form(8.0, 5.0).unhidden_s == pytest.approx(3.0)
    assert form(8.0, 5.0, overlap_cost=0.5).unhidden_s == pytest.approx(3.0 + 0.5 * 5.0)
    assert form(6.0, 5.0).unhidden_s == pytest.approx(2.0 + 3.0)


def test_the_first_block_is_planned_without_experts_before_it() -> None:
    def windows(group: Collective) -> list[bool]:
        run = Run(CASE, group, Withdrawing([]))
        found = [c.windows.experts for c in run.engine.contexts]
        run.close()
        return found

    assert on_threads(CASE.ranks, windows) == [[False, True]] * 2


def test_before_windows_are_known_nothing_is_held_back() -> None:
    assert form(0.0, 0.0).trans_cut == (0, GRAIN // 2, GRAIN)
    assert form(0.0, 0.0).unhidden_s == 0.0


def test_all_of_a_transfer_that_starts_after_the_counts_can_be_saved() -> None:
    found = form(0.0, 0.0, ahead=False)
    assert found.trans_cut == (0, GRAIN // 2, GRAIN)
    assert found.unhidden_s == pytest.approx(16.0)


def test_held_back_chunks_keep_the_proportions_of_the_others() -> None:
    assert held_back((0, GRAIN // 4, GRAIN), 0.5) == (0, GRAIN // 8, GRAIN // 2, GRAIN)
    assert held_back((0, GRAIN), 1.0) == (0, 0, GRAIN)


def test_a_block_does_not_hide_its_own_parameters() -> None:
    weights = {Window("FEC", 0): 5, Window("FNEC", 0): 7, Window("FEC", 1): 100, Window("START"): 3}
    assert [cover_of(block_wise(2), "TRANS", b, weights) for b in (0, 1)] == [3, 12]
    assert [cover_of(blocking(2), "TRANS", b, weights) for b in (0, 1)] == [0, 0]
    assert [runs_ahead(block_wise(2), b) for b in (0, 1)] == [True, True]
    assert [runs_ahead(blocking(2), b) for b in (0, 1)] == [False, False]
