"""Steps that go on without their replicas: the rest of Trans is not sent, nor any Agg, and gradients are whole."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prophet.ranks.collective import Collective
from prophet.scheduler.actions import Window
from prophet.scheduler.forms import FormChooser
from prophet.scheduler.pieces import GRAIN, Form, held_back, phase_shares
from prophet.scheduler.replica_transfers import Trans
from prophet.scheduler.replicas import BlockReplicas
from prophet.scheduler.schedules import block_wise, blocking, cover_of, runs_ahead
from prophet.spec import Cover, IntArray, LayerShape, Link, Placement, PlanContext, Split, Topology, TransferSeconds
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected

CASE = Case(ranks=2, shapes=((2, 3), (4,)), seed=11, steps=4)
# a home's parameters take seconds to send: nothing hides that, and nothing is worth it
SLOW = replace(Topology.uniform(2), intra=Link(bytes_per_s=1e3), inter=Link(bytes_per_s=1e3))


class Withdrawing(FixedPlanner):
    """Replicas that the engine may withdraw."""

    withdraws = True


class Moving(Withdrawing):
    """Every step another one of the replicas."""

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        chosen = self.pairs[int(load.sum(axis=0) @ np.arange(load.shape[1])) % len(self.pairs)]
        return Placement.with_replicas(context.home, context.ranks, [chosen])


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
    "refetched": replace(CASE, refetch=True),
    "recomputed": replace(CASE, checkpointing="non-reentrant"),
    "used twice": replace(CASE, uses=2),
}


@pytest.mark.parametrize("name", CASES)
def test_replicas_that_are_not_worth_it_are_withdrawn(name: str) -> None:
    for steps in train(CASES[name]):
        for step in steps[1:]:
            assert step.report is not None
            assert step.report.withdrawn == (0, 1)
            assert not step.report.copies.any()
            np.testing.assert_array_equal(step.report.rank_load, step.report.rank_load_static)
            assert not any(a.startswith(("AGG", "FETCH")) for a in launched(step))
        for step in steps[2:]:  # before the second step no window has been measured, and nothing is held back
            assert not any(re.match(r"TRANS\((\d),\d\)@FEC\(\1\)", a) for a in launched(step)), "the rest was sent"


@pytest.mark.parametrize("name", CASES)
def test_every_mixture_of_used_and_withdrawn_replicas_gives_the_same_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided by a hash of the load, which all ranks share."""

    def decide(
        load: IntArray,
        split: Split,
        context: PlanContext,
        trans: TransferSeconds,
        agg: TransferSeconds,
        *,
        ahead: bool,
        microbatches: int,
    ) -> bool:
        assert trans.exposed_seconds(Cover(), 0.0) > 0
        assert agg.exposed_seconds(Cover(), 0.0) > 0
        assert ahead == (name != "blocking")
        assert microbatches == CASES[name].microbatches
        return int((load * np.arange(1, load.size + 1).reshape(load.shape)).sum()) % 3 != 0

    monkeypatch.setattr("prophet.engine.balanced_layer.pays", decide)
    withdrawn = [s.report.withdrawn for s in train(replace(CASES[name], steps=8))[0][1:] if s.report]
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
    monkeypatch.setattr("prophet.engine.balanced_layer.pays", lambda *_, **__: False)
    train(CASE, topology="uniform")  # on fast links all of Trans is sent before the counts are known
    assert waited == [True] * 3 * 2 * 2, "steps, blocks, ranks"


def test_what_no_window_hides_follows_once_the_counts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prophet.engine.balanced_layer.pays", lambda *_, **__: True)
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


@pytest.mark.parametrize("apart", [False, True])
def test_in_every_microbatch_what_was_held_back_goes_before_the_dispatch_or_after_it(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it where replicas run apart. Refetched ones are sent again for each microbatch."""
    launched_there: list[tuple[int, int]] = []
    use, launch_all = BlockReplicas.use, BlockReplicas.launch_all

    def watched(self: BlockReplicas, keep: bool, *rows: Any, apart: bool) -> None:
        trans = self._trans
        before = trans.launched if trans else -1
        use(self, keep, *rows, apart=apart)
        # what the rest of it finds
        self._noted = before, trans  # type: ignore[attr-defined]
        if not apart:
            launched_there.append((before, trans.launched if trans else -1))

    def later(self: BlockReplicas) -> None:
        before, trans = self.__dict__.pop("_noted", (None, None))
        if apart and before is not None:
            assert (trans.launched if trans else -1) == before, "nothing went before the dispatch"
        launch_all(self)
        if apart and before is not None:
            launched_there.append((before, trans.launched if trans else -1))

    monkeypatch.setattr("prophet.engine.balanced_layer.pays", lambda *_, **__: True)
    monkeypatch.setattr("prophet.engine.balanced_layer.all_hidden", lambda *_: not apart)
    monkeypatch.setattr(BlockReplicas, "use", watched)
    monkeypatch.setattr(BlockReplicas, "launch_all", later)
    case = replace(CASE, refetch=True, microbatches=2, steps=6)
    train(case, transfers="direct")
    steps_ranks_microbatches = 5 * 2 * 2
    assert len(launched_there) == steps_ranks_microbatches * case.blocks
    assert launched_there.count((2, 3)) >= 0.6 * len(launched_there), "but for the first steps, and the last block"


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


def form(cover_s: float, transfers: Any = "direct") -> Form:
    """Of one expert of 800 bytes sent to one other rank at 100 bytes/s: Trans takes 8 s, in two phases as well."""
    return chooser(transfers).form(ONE_COPY, slow_pair(), trans_cover_s=cover_s, agg_cover_s=1e9)


ONE_COPY = Placement.with_replicas((0, 1), 2, [(0, 1)])


def chooser(transfers: Any) -> FormChooser:
    return FormChooser(transfers)


def slow_pair() -> PlanContext:
    topology = replace(Topology.uniform(2), intra=Link(bytes_per_s=100.0))
    shape = LayerShape.feed_forward(dim=10, hidden=10, param_bytes=4, grad_bytes=4, bias=False)
    return PlanContext(topology=topology, shape=shape, home=(0, 1), slots_per_rank=1)


def test_as_much_is_held_back_as_no_window_hides() -> None:
    assert form(6.0).trans_cut == (0, GRAIN * 3 // 8, GRAIN * 3 // 4, GRAIN)
    assert form(8.0).trans_cut == (0, GRAIN // 2, GRAIN)
    assert form(7.9).trans_cut == (0, GRAIN // 2, GRAIN), "too little for a message of its own"


def test_where_windows_are_not_known_nothing_is_held_back() -> None:
    assert form(0.0).trans_cut == (0, GRAIN // 2, GRAIN)


def test_a_first_phase_is_never_held_back() -> None:
    """Of one of two receivers' halves the second phase takes 4 s; its window is a quarter of the cover."""
    two = Placement.with_replicas((0, 1, 2), 3, [(0, 1), (0, 2)])
    three = Topology.uniform(3, intra=Link(bytes_per_s=100.0))
    context = replace(slow_pair(), topology=three, home=(0, 1, 2))
    cut = (0, GRAIN * 3 // 4, GRAIN)
    found = chooser("two-phase").form(two, context, trans_cut=cut, trans_cover_s=12.0)
    assert found.trans_cut == (0, GRAIN // 2, GRAIN * 7 // 8, GRAIN)
    assert phase_shares(found.trans_cut) == [(1.0, 0.0), (0.0, 0.75), (0.0, 0.25)]
    found = chooser("two-phase").form(two, context, trans_cut=cut, trans_cover_s=16.0)
    assert found.trans_cut == cut
    first_block = chooser("two-phase").form(two, context, trans_cut=(0, GRAIN, GRAIN), trans_cover_s=16.0)
    assert phase_shares(first_block.trans_cut) == [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]


def test_the_decision_goes_by_what_transfers_take_alone() -> None:
    for transfers in ("auto", "direct", "two-phase", "node-once", "spread"):
        _, there, back = chooser(transfers).prepare(ONE_COPY, slow_pair())
        assert there.exposed_seconds(Cover(), 0.0) == back.exposed_seconds(Cover(), 0.0) == pytest.approx(8.0)
    many = Placement.with_replicas((0, 1, 2, 3), 4, [(0, 1), (0, 2), (0, 3)])
    context = replace(slow_pair(), topology=replace(SLOW, ranks=4, ranks_per_node=4, flops_per_s=(1.0,) * 4,
                      free_bytes=(1,) * 4), home=(0, 1, 2, 3))  # fmt: skip
    direct_s, two_phase_s, auto_s = (
        chooser(t).prepare(many, context).trans.exposed_seconds(Cover(), 0.0) for t in ("direct", "two-phase", "auto")
    )
    assert auto_s == two_phase_s < direct_s


def test_a_run_repeats_its_decisions_and_a_resumed_one_goes_on_with_them() -> None:
    """Windows are measured anew in every run, and must not decide which replicas are used."""
    case = replace(CASE, steps=8)
    # some placements are worth their transfers on these links, others are not
    links = replace(Topology.uniform(2), intra=Link(bytes_per_s=3e6), flops_per_s=(3e5, 3e5))

    def rank(group: Collective, resumed_at: int | None) -> list[Any]:
        def begin() -> Run:
            planner = Moving(everywhere(case.num_experts, case.ranks))
            return Run(case, group, planner, slots_per_rank=8, topology=links)

        run, seen = begin(), []
        for s in range(case.steps):
            if s == resumed_at:
                saved = run.engine.state_dict(), run.model.state_dict(), run.optimizer.state_dict()
                run.close()
                run = begin()
                for target, state in zip((run.engine, run.model, run.optimizer), saved, strict=True):
                    target.load_state_dict(state)
            step = run.whole_step(s)
            assert step.report is not None
            seen.append((step.report.withdrawn, float(step.loss)))
        run.close()
        return seen

    runs = [on_threads(case.ranks, lambda g, at=at: rank(g, at)) for at in (None, None, 3)]
    assert runs[0] == runs[1] == runs[2]
    assert len({w for w, _ in runs[0][0][1:]}) > 1, "links such that some are withdrawn and some are not"


def test_held_back_chunks_keep_the_proportions_of_the_others() -> None:
    assert held_back((0, GRAIN // 4, GRAIN), 0.5) == (0, GRAIN // 8, GRAIN // 2, GRAIN)
    assert held_back((0, GRAIN), 1.0) == (0, 0, GRAIN)


def test_the_phases_of_a_transfer_that_is_held_back_meet_where_they_met() -> None:
    third, half = GRAIN // 3, GRAIN // 2
    for cut in ((0, 100, GRAIN), (0, 1000, GRAIN), (0, 0, GRAIN), (0, 9, 300, 700, GRAIN)):
        for share in (0.25, 0.75, 1.0):
            before, after = phase_shares(cut), phase_shares(held_back(cut, share, two_phase=True))
            assert [f for f, _ in after[:-1]] == pytest.approx([f for f, _ in before], abs=4 / half)
            assert [s for _, s in after] == pytest.approx([(1 - share) * s for _, s in before] + [share], abs=9 / third)


def test_a_block_does_not_hide_its_own_parameters() -> None:
    weights = {Window("FEC", 0): 5, Window("FNEC", 0): 7, Window("FEC", 1): 100, Window("START"): 3}
    assert [cover_of(block_wise(2), "TRANS", b, weights) for b in (0, 1)] == [3, 12]
    assert [cover_of(blocking(2), "TRANS", b, weights) for b in (0, 1)] == [0, 0]
    assert [runs_ahead(block_wise(2), b) for b in (0, 1)] == [True, True]
    assert [runs_ahead(blocking(2), b) for b in (0, 1)] == [False, False]
