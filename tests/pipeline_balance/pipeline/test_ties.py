"""Tied parameters have one gradient and stay equal, wherever their units run; what comes apart is noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.ties import (
    Tie,
    check_ties,
    counted_here,
    find_ties,
    share_tied_weights,
    sum_tied_gradients,
)
from pipeline_balance.spec import StageMap
from prophet.errors import TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    """An embedding shared with the head and with a unit between; two bias-free units that share another one."""
    units = nn.Sequential(nn.Embedding(5, 3), *(nn.Linear(3, 5, bias=i == 2) for i in range(5)))
    units[3].weight = units[5].weight = units[0].weight
    units[4].weight = units[1].weight
    return units


def test_ties_are_seen_and_named_as_the_unsplit_model_does() -> None:
    units = model()
    ties = find_ties(units, list(units))
    assert [(t.name, t.units) for t in ties] == [("0.weight", (0, 3, 5)), ("1.weight", (1, 4))]
    assert ties[0].parameter is units[5].weight
    # one module used twice, and two modules of one unit, are no tie between units
    inner = nn.Linear(2, 2)
    assert not find_ties(nn.Sequential(nn.Sequential(inner, inner)), [nn.Sequential(inner, inner)])
    assert [t.units for t in find_ties(nn.Sequential(inner, inner), [inner, inner])] == [(0, 1)] * 2  # weight and bias


@pytest.mark.parametrize(
    ("ranks", "holders"),
    [((0, 1, 2, 3, 3, 1), (0, 3, 1)), ((2, 2, 1, 0, 0, 2), (2, 0)), ((1,) * 6, (1,))],
)
def test_holders_are_in_stage_order_and_one_of_them_counts(ranks: tuple[int, ...], holders: tuple[int, ...]) -> None:
    stage_map = StageMap.from_assignment(ranks)
    units = model()
    tie, other = find_ties(units, list(units))
    assert tie.holders(stage_map) == holders
    counting = [r for r in range(4) if tie.name in counted_here([tie, other], stage_map, r)]
    assert counting == [holders[0]]


def part(rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3, 3, 1), (2, 2, 1, 0, 0, 2), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("without", [(), (1, 2), (0, 1, 2, 3)])
def test_the_sum_has_the_same_bits_on_all_holders(ranks: tuple[int, ...], without: tuple[int, ...]) -> None:
    stage_map = StageMap.from_assignment(ranks)

    def run(pipeline: Collective) -> Tensor | None:
        units = model()
        ties = find_ties(units, list(units))
        tie = ties[0]
        if pipeline.rank in tie.holders(stage_map) and pipeline.rank not in without:
            tie.parameter.grad = part(pipeline.rank)
        sum_tied_gradients(ties, stage_map, pipeline)
        assert ties[1].parameter.grad is None
        return tie.parameter.grad

    units = model()
    holders = find_ties(units, list(units))[0].holders(stage_map)
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
        ties = find_ties(units, list(units))
        ties[0].parameter.grad = torch.full((5, 3), 1.0 + pipeline.rank)
        ties[0].parameter.requires_grad_(False)
        sum_tied_gradients(ties, stage_map, pipeline)
        return float(ties[0].parameter.grad[0, 0])

    assert ThreadWorld(2, timeout_s=20.0).run(run) == [1.0, 2.0]


def test_holders_start_with_the_weights_of_the_first() -> None:
    stage_map = StageMap.from_assignment((2, 0, 0, 1, 1, 1))

    def run(pipeline: Collective) -> Tensor:
        units = model()
        ties = find_ties(units, list(units))
        with torch.no_grad():
            ties[0].parameter.fill_(float(pipeline.rank))
        share_tied_weights(ties, stage_map, pipeline)
        return ties[0].parameter.detach()

    assert [float(w[0, 0]) for w in ThreadWorld(4, timeout_s=20.0).run(run)] == [0.0, 2.0, 2.0, 3.0]


def state_of(tie: Tie, step: float) -> dict[nn.Parameter, dict[str, Any]]:
    return {tie.parameter: {"step": step, "exp_avg": torch.full_like(tie.parameter, step), "none": None}}


@pytest.mark.parametrize(
    ("spoiled", "what"), [("weights", "weights"), ("moments", "state"), ("step", "state"), ("", "")]
)
def test_what_has_come_apart_is_named_on_all_ranks(spoiled: str, what: str) -> None:
    stage_map = StageMap.from_assignment((0, 1, 2, 3, 1, 3))

    whole = model()

    def run(pipeline: Collective) -> str:
        units = copy.deepcopy(whole)
        ties = find_ties(units, list(units))
        state = state_of(ties[0], 2.0)
        entry = state[ties[0].parameter]
        if pipeline.rank == 3:
            with torch.no_grad():
                ties[0].parameter[4, 2] += 1e-6 if spoiled == "weights" else 0.0
                entry["exp_avg"][0, 0] += 1e-6 if spoiled == "moments" else 0.0
            entry["step"] += spoiled == "step"
        if pipeline.rank == 2:  # it holds nothing, whatever it has
            torch.utils.swap_tensors(ties[0].parameter, nn.Parameter(torch.empty(5, 3, device="meta")))
        try:
            check_ties(ties, stage_map, pipeline, state, device=CPU)
        except TransitionError as error:
            return str(error)
        return ""

    for said in ThreadWorld(4, timeout_s=20.0).run(run):
        assert ("'0.weight'" in said and f"{what} on rank(s) [3] than on rank 0" in said) if spoiled else not said
