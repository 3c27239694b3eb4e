"""Ranks that do not agree: an error on every rank that names the odd one, and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import prophet
from prophet.errors import ConfigMismatch, OutOfStep, PlanMismatch, RoutingError, SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.spec import IntArray, Placement, PlanContext, Split, Topology
from tests.helpers.support import FixedPlanner, Lopsided, TinyModel, everywhere, on_threads
from tests.helpers.training import Case, Run

RANKS = 3
CASE = Case(ranks=RANKS, shapes=((4,),) * RANKS, seed=5)
ALL = everywhere(CASE.num_experts, RANKS)
LIMIT_S = 20.0


def errors(body: Callable[[ThreadCollective], object], ranks: int = RANKS) -> list[BaseException]:
    """What `body` raises on every rank; a rank that raises nothing fails the test."""

    def catch(group: ThreadCollective) -> BaseException:
        try:
            body(group)
        except Exception as error:
            return error
        raise AssertionError(f"rank {group.rank} raised nothing")

    return on_threads(ranks, catch, timeout_s=LIMIT_S)


def check(found: list[BaseException], kind: type[BaseException], *texts: str) -> None:
    for rank, error in enumerate(found):
        assert type(error) is kind, f"rank {rank}: {error!r}"
        for text in texts:
            assert text in str(error), f"rank {rank}: {error}"


def test_another_placement() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(ALL[1:] if group.rank == 1 else ALL), slots_per_rank=8)
        for s in range(3):
            run.whole_step(s)

    check(errors(body), PlanMismatch, "placement of rank(s) [1]", "MoE layer 0", "step 1")


@pytest.mark.parametrize("check_every", [1, 50])
def test_another_split(check_every: int) -> None:
    def body(group: Collective) -> None:
        planner = Lopsided(ALL) if group.rank == 2 else FixedPlanner(ALL)
        run = Run(CASE, group, planner, slots_per_rank=8, check_every=check_every)
        for s in range(3):
            run.whole_step(s)

    check(errors(body), PlanMismatch, "the split of rank(s) [2]", "MoE layer 0", "step 1")


def test_another_step() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8)
        run.engine.step += int(group.rank == 0)
        run.whole_step(0)

    check(errors(body), OutOfStep, "step of rank(s) [0]", "[1, 0, 0] by rank")


def test_one_rank_evaluates_while_the_others_train() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8)
        run.whole_step(0)
        run.model.train(group.rank != 1)
        run.forward(1)

    # where the placements need a comparison, the one rank tells its counts instead
    check(errors(body), OutOfStep, "rank(s) [1] at MoE layer 0 of forward pass 2 (evaluation)", "rank(s) [0, 2] at ")


def test_one_rank_evaluates_in_the_middle_of_the_others_step() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8)
        run.whole_step(0)
        run.backward(1)
        run.model.train(group.rank != 1)
        run.forward(2)

    check(errors(body), OutOfStep, "rank(s) [1] at MoE layer 0 of forward pass 3 (evaluation)")


@pytest.mark.parametrize(
    "odd",
    [
        {"slots_per_rank": 2},
        {"schedule": "blocking"},
        {"accumulation_steps": 2},
        {"check_every": 7},
        {"replica_memory_bytes": 1 << 30},
        {"topology": Topology.uniform(RANKS, flops_per_s=2e12)},
        {"windows": prophet.EngineConfig(planner=FixedPlanner(())).windows.__class__(fnec_s=1.0)},
    ],
)
def test_another_engine_configuration(odd: dict[str, Any]) -> None:
    def body(group: Collective) -> None:
        Run(CASE, group, FixedPlanner(ALL), **(odd if group.rank == 1 else {}))

    check(errors(body), ConfigMismatch, "engine configuration of rank(s) [1]", "rank ")


@pytest.mark.parametrize(
    "odd",
    [
        {"hidden": 7},
        {"top_k": 1},
        {"activation": "swiglu"},
        {"bias": False},
        {"gate": prophet.GateConfig(score="sigmoid")},
    ],
)
def test_another_layer(odd: dict[str, object]) -> None:
    def body(group: Collective) -> None:
        model = TinyModel(num_experts=6, group=group, **(odd if group.rank == 2 else {}))  # type: ignore[arg-type]
        prophet.attach(model, config=CASE.engine_config(FixedPlanner(())))

    check(errors(body), ConfigMismatch, "MoE layers of rank(s) [2]")


def test_another_number_of_layers() -> None:
    def body(group: Collective) -> None:
        model = TinyModel(num_experts=6, group=group, blocks=3 if group.rank == 0 else 2)
        prophet.attach(model, config=CASE.engine_config(FixedPlanner(())))

    check(errors(body), ConfigMismatch, "number of MoE layers of rank(s) [0]")


def test_after_a_refused_attach_the_model_is_as_before() -> None:
    def body(group: Collective) -> None:
        model = TinyModel(num_experts=6, group=group)
        config = CASE.engine_config(FixedPlanner(()), slots_per_rank=1 + group.rank)
        with pytest.raises(ConfigMismatch):
            prophet.attach(model, config=config)
        model(torch.arange(3))
        prophet.attach(model, config=CASE.engine_config(FixedPlanner(()))).close()

    on_threads(RANKS, body)


# --- scores that cannot be routed ---


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_gate_on_one_rank(value: float) -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8)
        run.whole_step(0)
        if group.rank == 1:
            with torch.no_grad():
                run.model.moe(1).gate.weight[2] = value
        run.whole_step(1)

    check(errors(body), RoutingError, "MoE layer 1, step 1", "rank(s) [1]", "NaN or infinite")


def test_broken_input_on_two_ranks_without_an_engine() -> None:
    def body(group: Collective) -> None:
        layer = prophet.MoE(4, 4, 6, group=group)
        layer(torch.full((2, 4), torch.nan if group.rank != 1 else 1.0))

    check(errors(body), RoutingError, "MoE layer, step 0", "rank(s) [0, 2]")


def test_training_goes_on_after_a_broken_batch() -> None:
    from tests.helpers.training import Step, compare, expected

    def body(group: Collective) -> list[Step]:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8)
        steps = []
        for s in range(3):
            good = run.model.moe(1).gate.weight.detach().clone()
            if group.rank == 2:
                with torch.no_grad():
                    run.model.moe(1).gate.weight.fill_(torch.nan)
            with pytest.raises(RoutingError):
                run.forward(s)
            with torch.no_grad():
                run.model.moe(1).gate.weight.copy_(good)
            steps.append(run.whole_step(s))
        run.close()
        return steps

    compare(expected(CASE), on_threads(RANKS, body))


# --- a peer that is gone, on threads ---


def test_a_rank_that_ends_wakes_the_others() -> None:
    class Gone(RuntimeError):
        pass

    def body(group: Collective) -> None:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8)
        run.whole_step(0)
        if group.rank == 1:
            raise Gone("power cut")
        with pytest.raises(prophet.ranks.process_group.PeerLost, match=r"rank \d: .* of layer 0 failed: .*power cut"):
            run.whole_step(1)

    with pytest.raises(Gone):
        on_threads(RANKS, body, timeout_s=LIMIT_S)


def test_a_rank_that_does_nothing_is_waited_for_only_so_long() -> None:
    def body(group: Collective) -> str:
        run = Run(CASE, group, FixedPlanner(ALL), slots_per_rank=8, timeout_s=0.3)
        run.whole_step(0)
        if group.rank == 1:
            return ""
        with pytest.raises(prophet.ranks.process_group.CollectiveTimeout) as caught:
            run.whole_step(1)
        run.engine.close()
        return str(caught.value)

    found = on_threads(RANKS, body)
    for rank in (0, 2):
        # in a message of its own, or with the first counts
        wheres = ("comparison of placements", "exchange of counts of layer 0")
        assert any(f"rank {rank}: {where} failed" in found[rank] for where in wheres)
        assert "no answer from rank 1 within 0.3 s" in found[rank]


# --- planners that break their word ---


class Careless(FixedPlanner):
    """Answers that contradict the question."""

    def __init__(self, fault: str) -> None:
        super().__init__(ALL)
        self.fault = fault

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        placement = super().place(load, context)
        if self.fault == "home":
            return Placement.with_replicas(placement.home[::-1], context.ranks, ())
        if self.fault == "experts":
            return Placement.homes_only(context.experts * 2, context.ranks)
        if self.fault == "place raises":
            raise ZeroDivisionError("planner at fault")
        return placement

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        tokens = super().split(load, placement, context).tokens.copy()
        if self.fault == "loses tokens":
            tokens[:, 0, :] = 0
        if self.fault == "stray":
            return Split(np.roll(Split.to_homes(load, placement).tokens, 1, axis=2))
        return Split(tokens)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("home", SpecError, "home"),
        ("experts", SpecError, "experts"),
        ("slots", SpecError, "slots_per_rank"),
        ("loses tokens", SpecError, "conserve"),
        ("stray", SpecError, "does not hold"),
        ("place raises", ZeroDivisionError, "planner at fault"),
    ],
)
def test_a_careless_planner_is_found_out(fault: str, kind: type[Exception], text: str) -> None:
    def body(group: Collective) -> None:
        planner = Careless(fault)
        if fault == "stray":
            planner.pairs = tuple((e, r) for e, r in ALL if e == 0)
        run = Run(CASE, group, planner, slots_per_rank=1 if fault == "slots" else 8)
        for s in range(3):
            run.whole_step(s)

    check(errors(body), kind, text)


def test_the_world_of_one_agrees_with_itself() -> None:
    case = replace(CASE, ranks=1, experts_per_rank=4, shapes=((4,),))
    run = Run(case, ThreadWorld(1).collective(0), FixedPlanner(()))
    for s in range(3):
        run.whole_step(s)
    run.close()
