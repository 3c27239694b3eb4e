"""Lives on ranks without emulated hosts: every policy's copy goes through the same, and moves add what they send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cluster.host import Host
from benchmarks.pacing import Pace
from benchmarks.pipeline import swing
from benchmarks.pipeline.cases import Case, Dynamism
from benchmarks.pipeline.worker import Bench, RuleMismatch, check_alike
from pipeline_balance.dynamics.freezing import FreezingRule
from pipeline_balance.dynamics.gpt import Block, GPTShape
from pipeline_balance.dynamics.pruning import PrunedLinear, PruningSchedule
from prophet.demo.text import VOCABULARY
from tests.helpers.launch import run_gloo

STEPS, WARM_UP = 8, 2


def _block(number: int) -> Block:
    from torch import nn

    return Block(16, 2, mlp=nn.Sequential(PrunedLinear(16, 32), nn.ReLU(), PrunedLinear(32, 16)))


def _case(name: str) -> Case:
    shape = GPTShape(vocabulary=VOCABULARY, dim=16, heads=2, blocks=6, context=16)
    case = Case(name=name, shape=shape, make_block=_block, every_steps=1, microbatches=4, tokens=16)
    if name == "still":
        return case
    if name == "pruning":
        return replace(case, pruning=PruningSchedule(final=0.9, prunings=3, every_steps=2))
    return replace(case, freezing=FreezingRule(share=0.99, loss_rate=0.5, patience=1, most=6, in_turn=True))


def _bench(rank: int, size: int, name: str, policies: list[str], options: dict[str, Any]) -> dict[str, Any]:
    host = Host(rank, size, "127.0.0.1", "127.0.0.1", 0)
    bench = Bench(_case(name), host, pace=Pace(1.0), budget_bytes=1 << 20, **options)
    return bench.run(policies, steps=STEPS, warm_up=WARM_UP)


@pytest.mark.parametrize(
    ("name", "options"), [("freezing", {}), ("pruning", {}), ("freezing", {"replicas": 2, "zero": 1})]
)
def test_the_rules_of_every_copy_do_the_same(name: str, options: dict[str, Any]) -> None:
    ranks = 2 * options.get("replicas", 1)
    policies = ["optimal-at-start", "partition", "oracle"]
    found = run_gloo(_bench, ranks, name, policies, options)
    histories = [r["history"] for r in found]
    assert histories[0], "something has changed, by each copy's own rule, or the run would have raised"
    assert all(h == histories[0] for h in histories)
    for policy in policies:
        losses = found[0]["policies"][policy]["losses"]
        assert losses == pytest.approx(found[0]["policies"]["oracle"]["losses"], rel=1e-5)
        assert len(losses) == STEPS


def test_a_copy_whose_rule_sees_other_gradients_is_found() -> None:
    """A move after a step drops gradients that were used, which the rule of freezing reads."""
    with pytest.raises(RuntimeError, match="RuleMismatch: the copy of moves-after went through"):
        run_gloo(_bench, 2, "freezing", list(swing.POLICIES), {})


def test_copies_that_went_through_other_things_are_not_compared() -> None:
    case = _case("freezing")

    class Copy:
        def __init__(self, policy: str, history: list[tuple[int, list[int]]]) -> None:
            self.policy, self.dynamism = policy, Dynamism(case, STEPS, history=history)

    alike: list[Any] = [Copy(p, [(3, [1])]) for p in "ab"]
    check_alike(alike)
    with pytest.raises(RuleMismatch, match=r"of c went through \[\(4, \[1\]\)\], that of a through \[\(3, \[1\]\)\]"):
        check_alike([*alike, Copy("c", [(4, [1])])])  # type: ignore[list-item]


def test_what_a_move_adds_within_a_step_and_after_it() -> None:
    results = [r["policies"] for r in run_gloo(_bench, 2, "still", list(swing.POLICIES), {})]
    row = swing.row_of(results)
    assert row["losses_apart"] == 0.0, "moves change no bit"
    assert all(len(row["added_s_by_step"][p]) == STEPS for p in swing.SWINGING)
    # three quarters of the state are parameters and Adam's moments; beside gradients, masks are late
    assert 0.72 < row["early_share"] < 0.75
    assert results[0]["moves-after"]["early_bytes"] == 0 < results[0]["moves-after"]["bytes"]
    even = results[0]["moves-within"]["even"]
    assert even == [k % 2 == 0 for k in range(STEPS)], "a move in every step, to and fro"


def test_what_is_added_is_counted_from_the_map_with_which_a_step_began() -> None:
    def figures(step_s: list[float], **more: Any) -> dict[str, Any]:
        return {"step_s": step_s, "losses": [1.0] * 4, "early_bytes": 0, "bytes": 0, **more}

    even = {"even": [True, False, True, False]}
    rank = {
        "stays": figures([1.0, 1.0, 1.0, 9.0]),
        "stays-shifted": figures([2.0] * 4),
        "moves-after": figures([1.5, 2.5, 1.5, 2.5], **even),
        "moves-within": figures([1.1, 2.1, 1.1, 2.1], early_bytes=75, bytes=100, **even),
    }
    row = swing.row_of([rank, {**rank, "stays": figures([0.5] * 4)}])
    assert row["added_s"] == pytest.approx({"moves-after": 0.5, "moves-within": 0.1})
    assert row["within_of_after"] == pytest.approx(0.2)
    assert row["early_share"] == 0.75
