"""Replicas of a pipeline that share experts, on real processes: what they train is what one process trains."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import pipeline_balance
import prophet
import prophet.parallel
from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo
from tests.helpers.move_faults import digests
from tests.helpers.pipeline_experts import (
    MAX_NORM,
    PARTS,
    TOLERANCE,
    UNITS,
    batch,
    layers,
    one_process,
    pipeline,
    random_placements,
    shared_experts,
)
from tests.helpers.pipeline_replicas import Decaying, largest_difference


# with owners, a replica's part of the experts is nobody else's to update
@pytest.mark.parametrize(
    ("balanced", "split", "zero"),
    [(False, True, 0), (True, False, 1), pytest.param(True, False, 0, marks=pytest.mark.slow)],
)
def test_two_replicas_of_two_stages_train_as_one_process(balanced: bool, split: bool, zero: int) -> None:
    expected = one_process(8)
    for got in run_gloo(shared_experts, 4, 2, 8, balanced, split, zero):
        assert largest_difference(got.losses, expected.losses) < TOLERANCE
        assert largest_difference(got.norms, expected.norms) < TOLERANCE
        assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
        assert (got.copies > 0) == balanced


def _refuse(rank: int, size: int, folder: str) -> list[str]:
    """What a pipeline that shares experts says to what it cannot do, on this rank."""
    pipe = pipeline(size, 2)
    x, y = (t.chunk(2)[pipe.replica] for t in batch(0))
    pipe.step(x, y)
    told: list[str] = []

    def refused(call: Any) -> None:
        with pytest.raises(SpecError) as caught:
            call()
        told.append(str(caught.value))

    refused(pipe.state_dict)
    refused(lambda: pipe.save(folder, step=1))
    rows = 10 if pipe.replica else 5
    refused(lambda: pipe.evaluate(x[:rows], y[:rows]))
    pipe.step(x, y)
    moe = layers(pipe.collective)  # shared by all processes, not by those of a stage
    refused(
        lambda: type(pipe).from_modules(moe, nn.functional.mse_loss, make_optimizer=_sgd, microbatches=2, replicas=2)
    )
    return told


def _sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_what_cannot_be_done_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for state, saved, evaluate, group in run_gloo(_refuse, 4, str(tmp_path)):
        assert "cannot gather or save a model while the replicas of layers [1, 4] share" in state
        assert "cannot save or load a checkpoint while the replicas of layers [1, 4] share" in saved
        assert not list(tmp_path.iterdir())
        assert (
            evaluate == "ranks [2, 3] would run the stages that share experts in another order, or on other "
            "microbatches, than rank 0"
        )
        assert "layer 1 () shares its experts over processes [0, 1, 2, 3], but the replicas of its stage are" in group


# --- moves ------------------------------------------------------------------------------------------------------

MOVES = {
    2: StageMap((0, 1, UNITS), (0, 1)),  # both layers of experts with one column, which goes on with one's memory
    4: StageMap((0, UNITS), (0,)),
    5: StageMap((0, 1, 2, 4, 5, UNITS), (0, 1, 0, 1, 0)),
    8: StageMap((0, 3, UNITS), (1, 0)),
    9: StageMap((0, 4, UNITS), (1, 0)),  # no layer of experts moves
}
BALANCED_UPDATES = 12


class _Run(NamedTuple):
    """Losses and norms, what this process holds in the end, placements by step and unit, and its replica."""

    losses: list[float]
    norms: list[float]
    held: dict[str, str]
    placements: dict[tuple[int, int], list[list[bool]]]
    replica: int


def _two(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """One of them keeps plain numbers, also of experts."""
    adam = torch.optim.AdamW([p for n, p in named if n.endswith(("w_in", "bias"))], lr=1e-2)
    return [adam, Decaying([p for n, p in named if not n.endswith(("w_in", "bias"))])]


def _wander(rank: int, size: int, moves: bool, balanced: bool, zero: int) -> _Run:
    pipe = pipeline(size, 2, make_optimizer=_two, zero=zero)
    if balanced:
        pipe.balance_experts(lambda part: prophet.attach(part, config=random_placements()))
    memory, asked = pipe.experts.memory, list[int]()
    pipe.experts.memory = lambda: asked.append(pipe.rank) or memory()  # type: ignore[method-assign,func-returns-value]
    losses, norms, placements = [], [], dict[tuple[int, int], Any]()
    for update in range(BALANCED_UPDATES):
        if moves and update in MOVES:
            before, had = pipe.experts.shared(pipe.stage_map.layers_on(pipe.rank)), pipe.balancer
            asked.clear()
            pipe.rebuild(MOVES[update])
            same = before == pipe.experts.shared(pipe.stage_map.layers_on(pipe.rank))
            # histories are long: one replica tells them, and only of where layers come or go
            assert len(asked) == (pipe.replica == 0 and not same)
            assert (pipe.balancer is had) == same or had is None
            assert had is None or had._closed != same  # type: ignore[attr-defined]
        x, y = (t.chunk(2)[pipe.replica] for t in batch(update))
        losses.append(pipe.step(x, y, max_norm=MAX_NORM))
        norms.append(pipe.grad_norm or 0.0)
        engine: Any = pipe.balancer
        units = pipe.experts.shared(pipe.stage_map.layers_on(pipe.rank))
        if balanced:
            assert (engine is None) == (not units)
        if engine is not None:
            report = engine.last_step
            assert report.step == update
            placements |= {(update, u): p.holds.tolist() for u, p in zip(units, report.placements, strict=True)}
    return _Run(losses, norms, _held(pipe), placements, pipe.replica)


def _held(pipe: ElasticPipeline) -> dict[str, str]:
    return digests(pipe.module, *pipe.optimizer)


@functools.cache
def _wandered(moves: bool, balanced: bool, zero: int) -> list[_Run]:
    found: list[_Run] = run_gloo(_wander, 4, moves, balanced, zero)
    return found


def _whole(runs: list[_Run], zero: int) -> dict[str, str]:
    """All that the ranks hold: what a replica has for itself, as its part of the experts, has its number."""
    whole: dict[str, str] = {}
    for run in runs:
        for name, digest in run.held.items():
            moments_of_all = zero and "@" in name and ".experts." not in name
            key = name if moments_of_all else f"{name} of {run.replica}"
            assert whole.setdefault(key, digest) == digest
    return whole


@pytest.mark.parametrize(("balanced", "zero"), [pytest.param(False, 0, marks=pytest.mark.slow), (True, 0), (True, 1)])
def test_layers_that_share_experts_move_and_no_bit_changes(balanced: bool, zero: int) -> None:
    moved, stayed = _wandered(True, balanced, zero), _wandered(False, balanced, zero)
    expected = one_process(BALANCED_UPDATES, _two)
    for got in moved:
        assert largest_difference(got.losses, expected.losses) < TOLERANCE
        assert largest_difference(got.norms, expected.norms) < TOLERANCE
        assert got.losses == stayed[0].losses
    assert _whole(moved, zero) == _whole(stayed, zero)
    # the experts of the two replicas are others
    whole = _whole(moved, zero)
    experts = [name for name in whole if ".experts." in name and name.endswith(" of 0")]
    assert experts
    assert all(
        whole[name] != whole[name[:-1] + "1"] for name in experts if "@step" not in name and "@count" not in name
    )


def test_balancing_goes_on_in_another_column_with_what_was_remembered() -> None:
    moved, stayed = ({k: v for run in _wandered(m, True, 0) for k, v in run.placements.items()} for m in (True, False))
    assert moved.keys() == stayed.keys() == {(u, unit) for u in range(BALANCED_UPDATES) for unit in (1, 4)}
    assert moved == stayed
    # there is something to remember: placements change, and have replicas
    assert len({str(holds) for holds in moved.values()}) > 4


def _midway(rank: int, size: int, balanced: bool) -> tuple[list[float], str]:
    pipe = pipeline(size, 2, make_optimizer=_two)
    if balanced:
        pipe.balance_experts(lambda part: prophet.attach(part, config=random_placements()))
    losses, told = [], ""
    for update in range(4):
        x, y = (t.chunk(2)[pipe.replica] for t in batch(update))
        pipe.step(x, y, update=False)
        if balanced and update in (1, 2):
            before = _held(pipe)
            with pytest.raises(SpecError) as caught:
                pipe.rebuild(MOVES[2])
            told = str(caught.value)
            assert _held(pipe) == before
            # a move of other layers is exact
            pipe.rebuild(StageMap((0, 2 if update == 1 else 3, UNITS), (0, 1)))
        elif update in (1, 2):
            pipe.rebuild(MOVES[2 * update])
        losses.append(pipe.step(x, y, max_norm=MAX_NORM))
    if balanced:
        # an update that is given up leaves its balancer in the middle
        pipe.step(x, y, update=False)
        pipe.drop_gradients()
        with pytest.raises(SpecError, match="move after update=True"):
            pipe.rebuild(MOVES[2])
    return losses, told


def test_a_move_in_mid_update_is_exact_or_refused_where_gradients_of_experts_are_away() -> None:
    model_losses = one_process(4, _two, calls=2).losses
    for balanced in (False, True):
        for losses, told in run_gloo(_midway, 4, balanced):
            assert largest_difference(losses, model_losses) < TOLERANCE
            assert told == (
                "gradients of balanced experts come home at the end of an update: move after update=True; the state "
                "from before the move is whole"
                if balanced
                else ""
            )


def _follow(rank: int, size: int, ahead: bool) -> tuple[list[float], list[int], int]:
    """A controller moves layers by costs that are given: both layers of experts come to one column, then to another."""
    pipe = pipeline(size, 2, make_optimizer=_two)
    pipe.balance_experts(lambda part: prophet.attach(part, config=random_placements()))

    def costs() -> dict[int, LayerCost]:
        seconds = (0.01, 0.01, 0.01, 0.5, 0.5, 1.0) if pipe.progress.updates < 4 else (1.0, 0.5, 0.5, 0.01, 0.01, 0.01)
        return {unit: LayerCost(forward_s=seconds[unit], parameter_bytes=1) for unit in pipe.layers}

    pipe.local_costs = costs  # type: ignore[method-assign]
    config = ControllerConfig(
        every_steps=2, measure_steps=1, min_gain=0.1, move_cost=MoveCost(fixed_s=0.0), prepare_in_backward=ahead
    )
    controller = pipeline_balance.attach(pipe, config=config)
    losses, columns = [], []
    for update in range(9):
        losses.append(controller.step(*(t.chunk(2)[pipe.replica] for t in batch(update)), max_norm=MAX_NORM))
        columns.append(len({pipe.stage_map.assignment()[unit] for unit in (1, 4)}))
    return losses, columns, controller.overhead().moves


@pytest.mark.parametrize("ahead", [False, True])
def test_a_controller_moves_layers_whose_experts_are_balanced(ahead: bool) -> None:
    expected = one_process(9, _two).losses
    for losses, columns, moves in run_gloo(_follow, 4, ahead):
        assert largest_difference(losses, expected) < TOLERANCE
        assert moves >= 2
        assert set(columns) == {1, 2}


def _closed(rank: int, size: int) -> list[float]:
    pipe = pipeline(size, 2, make_optimizer=_two)
    engine = pipe.balance_experts(lambda part: prophet.attach(part, config=random_placements()))
    losses = []
    for update in range(4):
        if update == 2:
            assert engine is not None
            engine.close()
            pipe.rebuild(MOVES[2])
            assert pipe.balancer is None
        losses.append(pipe.step(*(t.chunk(2)[pipe.replica] for t in batch(update)), max_norm=MAX_NORM))
    return losses


def test_balancing_that_was_ended_does_not_begin_again_with_a_move() -> None:
    expected = one_process(4, _two).losses
    for losses in run_gloo(_closed, 4):
        assert largest_difference(losses, expected) < TOLERANCE


def _no_balancer(rank: int, size: int) -> tuple[list[float], str]:
    pipe = pipeline(size, 2, make_optimizer=_two)
    calls = 0

    def attach(part: nn.Module) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ArithmeticError("no engine today")
        return prophet.attach(part, config=random_placements())

    pipe.balance_experts(attach)
    losses = []
    for update in range(4):
        if update == 1:
            with pytest.raises(SpecError) as caught:
                pipe.rebuild(MOVES[2])
            assert pipe.stage_map == MOVES[2]
            assert pipe.balancer is None
        if update == 2:
            pipe.rebuild(MOVES[5])
        losses.append(pipe.step(*(t.chunk(2)[pipe.replica] for t in batch(update)), max_norm=MAX_NORM))
    return losses, str(caught.value)


def test_layers_whose_balancing_cannot_go_on_train_without_it() -> None:
    expected = one_process(4, _two).losses
    for losses, told in run_gloo(_no_balancer, 4):
        assert largest_difference(losses, expected) < TOLERANCE
        assert told.startswith("the layers have moved, but their experts are not balanced: ")
        assert "no engine today" in told


def _begin_again(rank: int, size: int) -> tuple[list[float], list[str]]:
    pipe, told = pipeline(size, 2, make_optimizer=_two), []

    def first_fails(part: nn.Module) -> Any:
        if pipe.rank == 0:
            raise ArithmeticError("no engine today")
        return prophet.attach(part, config=random_placements())

    def counts_wrong(part: nn.Module) -> Any:
        return prophet.attach(part, config=random_placements(PARTS // 2 + 1))

    for attach in (first_fails, counts_wrong):
        with pytest.raises(SpecError) as caught:
            pipe.balance_experts(attach)
        assert pipe.balancer is None
        told.append(str(caught.value))
    assert pipe.balance_experts(lambda part: prophet.attach(part, config=random_placements())) is not None
    losses = [pipe.step(*(t.chunk(2)[pipe.replica] for t in batch(update)), max_norm=MAX_NORM) for update in range(2)]
    return losses, told


def test_balancing_that_cannot_begin_is_an_error_on_all_ranks_and_may_begin_later() -> None:
    """The first error is one column's alone."""
    expected = one_process(2, _two).losses
    for losses, (failed, wrong) in run_gloo(_begin_again, 4):
        assert largest_difference(losses, expected) < TOLERANCE
        assert failed.startswith("experts are not balanced: ")
        assert "no engine today" in failed
        assert "give that number, or leave 1" in wrong


def _tied(rank: int, size: int) -> str:
    group = prophet.parallel.expert_groups(size)[0]
    units = list(layers(group))
    units[4] = units[1]
    with pytest.raises(SpecError) as caught:
        ElasticPipeline.from_modules(
            nn.Sequential(*units), nn.functional.mse_loss, StageMap((0, UNITS), (0,)), make_optimizer=_sgd,
            microbatches=2, replicas=size, timeout_s=40.0,
        )  # fmt: skip
    return str(caught.value)


def test_layers_that_are_one_module_cannot_share_experts() -> None:
    for told in run_gloo(_tied, 2):
        assert told.startswith("layer 4 () is the same module as one of layer 1, and shares experts with other ranks")
