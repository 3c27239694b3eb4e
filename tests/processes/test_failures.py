"""Processes that die, hang or disagree: the others end by themselves, in time, with an error that says where."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from prophet.engine.engine import Engine
from prophet.errors import CollectiveError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import Outcome, mark, process_outcomes, wait_for
from tests.helpers.support import FixedPlanner, Lopsided, everywhere
from tests.helpers.training import Case, Run

RANKS = 4
VICTIM = 2
LIMIT_S = 45.0  # for a whole test, on a loaded machine; the library's own limit is TIMEOUT_S
TIMEOUT_S = 20.0
PATIENCE_S = 4.0  # where a rank is silent on purpose
CASE = Case(ranks=RANKS, shapes=((4,),) * RANKS, experts_per_rank=1, seed=11)
ALL = everywhere(RANKS, RANKS)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Until all others have given up."""
    wait_for(*(f"{rank} has given up" for rank in range(RANKS) if rank != VICTIM))
    die()


def strike_in_all_to_all(engine: Engine, name: str, layer: int, blow: Any) -> None:
    """Let this rank fall as it is about to take part in an all-to-all of the next step."""
    collective = engine.collective
    original = collective.all_to_all

    def all_to_all(*args: Any, op: Operation, **options: Any) -> Any:
        if op == Operation(name, layer):
            blow()
        return original(*args, op=op, **options)

    collective.all_to_all = all_to_all  # type: ignore[method-assign]


def struck(where: str, layer: int, fate: str) -> None:
    """Two good steps; then the victim falls, and the others go on until they notice."""
    run = Run(
        CASE,
        collective_for(None),
        FixedPlanner(ALL),
        slots_per_rank=4,
        schedule="blocking",
        transfers="direct",
        timeout_s=TIMEOUT_S if fate == "dies" else PATIENCE_S,
    )
    for s in range(2):
        run.whole_step(s)
    if run.group.rank == VICTIM:
        strike_in_all_to_all(run.engine, where, layer, {"dies": die, "hangs": hang}[fate])
    try:
        for s in range(2, 5):
            run.whole_step(s)
    except CollectiveError:
        mark(f"{run.group.rank} has given up")
        raise


def assert_others_ended_well(outcomes: list[Outcome], operation: str) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        assert outcome.exit_code == 3, f"rank {rank}: {outcome}"
        assert outcome.seconds < LIMIT_S
        assert outcome.error is not None
        first = outcome.error.splitlines()[0]
        assert re.match(rf"(PeerLost|CollectiveTimeout|CollectiveError): rank {rank}: {operation} failed: ", first), (
            first
        )


@pytest.mark.parametrize(
    ("where", "layer"),
    [("dispatch", 1), ("combine backward", 0), ("Trans chunk 0", 1), ("Agg chunk 0", 0)],
)
def test_one_of_four_dies(where: str, layer: int) -> None:
    outcomes = process_outcomes(RANKS, struck, where, layer, "dies", timeout_s=LIMIT_S)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    # Aggs are under way together and waited for one after another: which of them notices first is a matter of timing
    noticed = "Agg chunk 0 of layer [01]" if where.startswith("Agg") else f"{where} of layer {layer}"
    assert_others_ended_well(outcomes, noticed)
    assert any("PeerLost" in (o.error or "") for o in outcomes)


def test_one_of_four_hangs() -> None:
    outcomes = process_outcomes(RANKS, struck, "dispatch", 1, "hangs", timeout_s=LIMIT_S)
    assert_others_ended_well(outcomes, "dispatch of layer 1")
    assert any(f"no answer within {PATIENCE_S:g} s" in (o.error or "") for o in outcomes)


def disagree(about: str) -> None:
    """The odd rank has its own idea of the plan."""
    group = collective_for(None)
    odd = group.rank == VICTIM
    planner = FixedPlanner(ALL)
    if about == "placement":
        # it makes no room for what rank 0 would send, and sends rank 1 what that has no room for
        planner = FixedPlanner([p for p in ALL if p != ((0, VICTIM) if odd else (VICTIM, 1))])
    run = Run(CASE, group, planner, slots_per_rank=4, check_every=50, timeout_s=TIMEOUT_S)
    for s in range(3):
        run.whole_step(s)
    if about == "split" and odd:  # from step 3 on, when splits are not compared before they are used
        run.engine.planner = Lopsided(ALL)
    for s in range(3, 6):
        run.whole_step(s)


def test_another_placement_names_the_rank_everywhere() -> None:
    for rank, outcome in enumerate(process_outcomes(RANKS, disagree, "placement", timeout_s=LIMIT_S)):
        assert outcome.exit_code == 3, f"rank {rank}: {outcome}"
        assert f"PlanMismatch: MoE layer 0, step 1: the placement of rank(s) [{VICTIM}] differs" in (
            outcome.error or ""
        )


def test_another_split_between_two_comparisons() -> None:
    """Gloo itself ends a process that receives more than it expected; at least nobody trains on, and nobody hangs."""
    for rank, outcome in enumerate(process_outcomes(RANKS, disagree, "split", timeout_s=LIMIT_S)):
        assert outcome.exit_code in (3, -signal.SIGABRT), f"rank {rank}: {outcome}"
        assert outcome.seconds < LIMIT_S
