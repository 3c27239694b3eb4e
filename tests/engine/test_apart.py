"""Replicas that run apart from the experts at home: after them forward, before them backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.modules import ModulesBank
from prophet.ranks.collective import Channel, Collective, Pending
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.operation import Operation
from prophet.scheduler.replicas import BlockReplicas
from prophet.spec import Link, Topology
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected

CASE = Case(ranks=3, experts_per_rank=2, shapes=((2, 3), (4,), (5,)), seed=5, steps=3, slots=8)
# transfers take so long that no window hides them
SLOW = replace(Topology.uniform(3), intra=Link(bytes_per_s=1e3), inter=Link(bytes_per_s=1e3))
# the last rank has none
PAIRS = [(e, r) for e, r in everywhere(6, 3) if r < 2]


class Ours(FixedPlanner):
    """A planner of ours: the engine may withdraw its replicas, and run them apart."""

    withdraws = True


class Ordered(ForwardingCollective):
    """Writes down which all-to-alls begin, in order."""

    def __init__(self, inner: Collective) -> None:
        super().__init__(inner)
        self.begun: list[str] = []

    def around(self, inner: Collective) -> Collective:
        return self

    def transfer(self, launch: Any, op: Operation, channel: Channel) -> Pending:
        self.begun.append(str(op))
        pending: Pending = launch()
        return pending


CASES = {
    "plain": CASE,
    "accumulated": replace(CASE, microbatches=2),
    "one by one": replace(CASE, microbatches=2, announced=False),
    "look-ahead": replace(CASE, schedule="look-ahead", blocks=3),
    "operator": replace(CASE, schedule="operator"),
    "direct": replace(CASE, transfers="direct"),
    "two-phase": replace(CASE, transfers="two-phase"),
    "node-once": replace(CASE, transfers="node-once", ranks_per_node=2),
    "refetched": replace(CASE, refetch=True),
    "recomputed": replace(CASE, checkpointing="non-reentrant"),
    "used twice": replace(CASE, uses=2),
    "without bias": replace(CASE, bias=False, activation="swiglu"),
    "no rows": replace(CASE, shapes=((0,), (3,), (0,))),
    "naive": replace(CASE, impl="naive"),
}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are kept, whatever their transfers cost."""
    monkeypatch.setattr("prophet.engine.balanced_layer.pays", lambda *_, **__: True)


def train(case: Case, pairs: list[tuple[int, int]] = PAIRS, planner: type[FixedPlanner] = Ours) -> list[list[Step]]:
    def rank(group: Collective) -> list[Step]:
        ordered = Ordered(group)
        run = Run(case, ordered, planner(pairs), **({} if case.ranks_per_node else {"topology": SLOW}))
        steps = [run.whole_step(s) for s in range(case.steps)]
        run.close()
        begun.append(ordered.begun)
        return steps

    begun: list[list[str]] = []
    by_rank = on_threads(case.ranks, rank)
    assert all(ops == begun[0] for ops in begun), "ranks begin the same all-to-alls in one order"
    compare(expected(case), by_rank)
    return by_rank


def agg_of_the_first_block(by_rank: list[list[Step]]) -> set[str]:
    reports = [s.report for steps in by_rank for s in steps[1:]]
    return {str(a) for r in reports if r is not None for a in r.actions if (a.kind, a.block, a.chunk) == ("AGG", 0, 0)}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_rank(name: str) -> None:
    # the second round of a layer that is used twice comes last
    last = {"AGG(0,0)@UPDATE"} if CASES[name].uses > 1 else set()
    assert agg_of_the_first_block(train(CASES[name])) == {"AGG(0,0)@BEC(0)"} | last


def test_nothing_is_sent_early_under_a_blocking_schedule() -> None:
    assert agg_of_the_first_block(train(replace(CASE, schedule="blocking"))) == {"AGG(0,0)@UPDATE"}


def test_replicas_of_published_planners_run_with_the_experts_at_home() -> None:
    assert agg_of_the_first_block(train(CASE, planner=FixedPlanner)) == {"AGG(0,0)@END"}


def test_replicas_whose_transfers_are_hidden_run_with_the_experts_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prophet.engine.balanced_layer.all_hidden", lambda *_: True)
    assert agg_of_the_first_block(train(CASE)) == {"AGG(0,0)@END"}


def test_a_bank_that_cannot_run_them_apart_sends_before_the_rows_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prophet.layer.moe.RunsReplicas", ModulesBank)
    assert agg_of_the_first_block(train(CASE)) == {"AGG(0,0)@BEC(0)"}


def test_two_runs_are_bitwise_equal() -> None:
    for one, other in zip(train(CASE), train(CASE), strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.loss == b.loss
            for key, grad in {**a.dense, **a.experts}.items():
                np.testing.assert_array_equal(grad, {**b.dense, **b.experts}[key], err_msg=key)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the first block's experts and replicas do from now on, in order."""
    order: list[str] = []

    def note(cls: type, name: str, text: str, *, backward: bool = False) -> None:
        call = getattr(cls, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "_block", 0) == 0:
                order.append(text)
            out = call(self, *args, **kwargs)
            if backward:
                out.register_hook(lambda _: order.append(f"{text} backward"))
            return out

        monkeypatch.setattr(cls, name, run)

    note(BlockReplicas, "launch_all", "parameters leave")
    note(BlockReplicas, "arrived", "parameters are here")
    note(BlockReplicas, "launch_gradients", "gradients leave")
    note(FeedForwardBank, "run", "at home", backward=True)
    note(FeedForwardBank, "run_replicas", "replicas", backward=True)
    return order


def test_the_experts_at_home_run_while_parameters_come_and_gradients_go(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replace(CASE, blocks=1), RecordingCollective(0, 3), Ours(PAIRS), topology=SLOW)
    run.whole_step(0)
    order = noted(monkeypatch)
    run.whole_step(1)
    once = list(dict.fromkeys(order))
    assert once == [
        "parameters leave",
        "at home",
        "parameters are here",
        "replicas",
        "replicas backward",
        "gradients leave",
        "at home backward",
    ]


def test_a_rank_without_replicas_expects_gradients_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others send theirs before it is done: gloo lets no data leave for a rank that is not ready for it."""
    run = Run(replace(CASE, blocks=1), RecordingCollective(2, 3), Ours(PAIRS), topology=SLOW)
    run.whole_step(0)
    order = noted(monkeypatch)
    run.whole_step(1)
    once = list(dict.fromkeys(order))
    assert once == ["parameters leave", "at home", "parameters are here", "gradients leave", "at home backward"]
