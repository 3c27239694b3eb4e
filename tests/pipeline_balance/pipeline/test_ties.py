"""Tied parameters have one gradient and stay equal, wherever their units run; what comes apart is noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.layers import ModuleChain
from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.pipeline.run.ties import (
    Tie,
    refuse_untied,
    share_tied_weights,
    sum_tied_gradients,
    tie_digests,
    ties_of,
)
from pipeline_balance.spec import StageMap
from prophet.errors import TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.json_messages import gather_json
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    """An embedding shared with the head and with a unit between; two bias-free units that share another one."""
    units = nn.Sequential(nn.Embedding(5, 3), *(nn.Linear(3, 5, bias=i == 2) for i in range(5)))
    units[3].weight = units[5].weight = units[0].weight
    units[4].weight = units[1].weight
    return units


def ties_in(units: nn.Sequential) -> tuple[Tie, ...]:
    return ties_of(Ownership(ModuleChain(units, nn.functional.mse_loss)))


def test_ties_are_seen_and_named_as_the_unsplit_model_does() -> None:
    units = model()
    ties = ties_in(units)
    assert [(t.name, t.units) for t in ties] == [("0.weight", (0, 3, 5)), ("1.weight", (1, 4))]
    assert ties[0].parameter is units[5].weight
    # one module used twice, and two modules of one unit, are no tie between units
    inner = nn.Linear(2, 2)
    assert not ties_in(nn.Sequential(nn.Sequential(inner, inner)))
    assert [t.units for t in ties_in(nn.Sequential(inner, inner))] == [(0, 1)] * 2  # weight and bias


@pytest.mark.parametrize(
    ("ranks", "holders"), [((0, 1, 2, 3, 3, 1), (0, 3, 1)), ((2, 2, 1, 0, 0, 2), (2, 0)), ((1,) * 6, (1,))]
)
def test_holders_are_in_stage_order_and_two_units_of_a_rank_are_one(
    ranks: tuple[int, ...], holders: tuple[int, ...]
) -> None:
    assert ties_in(model())[0].holders(StageMap.from_assignment(ranks)) == holders


def part(rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3, 3, 1), (2, 2, 1, 0, 0, 2), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("without", [(), (1, 2), (0, 1, 2, 3)])
def test_the_sum_has_the_same_bits_on_all_holders(ranks: tuple[int, ...], without: tuple[int, ...]) -> None:
    stage_map = StageMap.from_assignment(ranks)

    def run(pipeline: Collective) -> Tensor | None:
        units = model()
        ties = ties_in(units)
        tie = ties[0]
        if pipeline.rank in tie.holders(stage_map) and pipeline.rank not in without:
            tie.parameter.grad = part(pipeline.rank)
        sum_tied_gradients(ties, stage_map, pipeline)
        assert ties[1].parameter.grad is None
        return tie.parameter.grad

    units = model()
    holders = ties_in(units)[0].holders(stage_map)
    expected: Tensor | None = None
    for r in holders:
        if r not in without:
            expected = part(r) if expected is None else expected + part(r)
    for rank, grad in enumerate(ThreadWorld(4, timeout_s=20.0).run(run)):
        if rank in holders and expected is not None:
            assert grad is not None
            assert torch.equal(grad, expected)
        else:
            assert grad is None


def test_frozen_ones_are_left_alone() -> None:
    stage_map = StageMap.from_assignment((0, 1, 1, 1, 1, 1))

    def run(pipeline: Collective) -> float:
        units = model()
        ties = ties_in(units)
        ties[0].parameter.grad = torch.full((5, 3), 1.0 + pipeline.rank)
        ties[0].parameter.requires_grad_(False)
        sum_tied_gradients(ties, stage_map, pipeline)
        return float(ties[0].parameter.grad[0, 0])

    assert ThreadWorld(2, timeout_s=20.0).run(run) == [1.0, 2.0]


def test_holders_start_with_the_weights_of_the_first() -> None:
    stage_map = StageMap.from_assignment((2, 0, 0, 1, 1, 1))

    def run(pipeline: Collective) -> Tensor:
        units = model()
        ties = ties_in(units)
        with torch.no_grad():
            ties[0].parameter.fill_(float(pipeline.rank))
        share_tied_weights(ties, stage_map, pipeline)
        return ties[0].parameter.detach()

    assert [float(w[0, 0]) for w in ThreadWorld(4, timeout_s=20.0).run(run)] == [0.0, 2.0, 2.0, 3.0]


def state_of(tie: Tie, step: float) -> dict[int, dict[str, Any]]:
    return {id(tie.parameter): {"step": step, "exp_avg": torch.full_like(tie.parameter, step), "none": None}}


@pytest.mark.parametrize(
    ("spoiled", "what"), [("weights", "weights"), ("moments", "state"), ("step", "state"), ("", "")]
)
def test_what_has_come_apart_is_named_on_all_ranks(spoiled: str, what: str) -> None:
    """Two replicas of three ranks, of which rank 1 holds nothing; process 5 is the last rank of the second."""
    stage_map, grid = StageMap.from_assignment((0, 1, 1, 2, 1, 2)), Grid.of(6, 2)
    whole = model()

    def run(world: Collective) -> str:
        units = copy.deepcopy(whole)
        ties = ties_in(units)
        state = state_of(ties[0], 2.0)
        entry = state[id(ties[0].parameter)]
        if world.rank == 5:
            with torch.no_grad():
                ties[0].parameter[4, 2] += 1e-6 if spoiled == "weights" else 0.0
                entry["exp_avg"][0, 0] += 1e-6 if spoiled == "moments" else 0.0
            entry["step"] += spoiled == "step"
        if world.rank == 4:  # it holds nothing, whatever it has
            torch.utils.swap_tensors(ties[0].parameter, nn.Parameter(torch.empty(5, 3, device="meta")))
        said = tie_digests(ties, stage_map, grid.pipeline_rank_of(world.rank), state)
        try:
            refuse_untied(ties, stage_map, grid, gather_json(said, world, Operation("comparing ties")))
        except TransitionError as error:
            return str(error)
        return ""

    for said in ThreadWorld(6, timeout_s=20.0).run(run):
        assert ("'0.weight'" in said and f"{what} on rank(s) [5] than on rank 0" in said) if spoiled else not said
