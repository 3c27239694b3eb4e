"""Layers move while each tensor's optimizer state has one owner: the state goes to its owner in the new column."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import pipeline_balance
from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError, TransitionError
from prophet.state.transition import empty
from tests.helpers.launch import run_gloo
from tests.helpers.move_faults import digests
from tests.helpers.pipeline_owners import UNITS, batch, pipeline
from tests.helpers.pipeline_replicas import Outcome, compare_with_one_process, replicated

UPDATES = 12


def _pipeline(size: int, zero: int, stage_map: StageMap | None = None, **options: Any) -> ElasticPipeline:
    return pipeline(stage_map or _maps(0, size // 2), zero=zero, **options)


def _maps(move: int, ranks: int) -> StageMap:
    """Layers go to and fro; every column stands idle once."""
    return (
        StageMap((0, 3, UNITS), (0, 1)),
        StageMap((0, 1, UNITS), (1, 0)),
        StageMap((0, UNITS), (1,)),
        StageMap((0, 2, 3, UNITS), (0, 1, 0)),
        StageMap((0, UNITS), (0,)),
    )[move % 5 if ranks > 1 else 4]


def _batch(call: int, replica: int) -> tuple[Tensor, Tensor]:
    x, y = batch(call)
    return x.chunk(2)[replica], y.chunk(2)[replica]


class _Run(NamedTuple):
    """Losses, what this process holds in the end, whose moments it should hold, replica, gradients in mid-update."""

    losses: list[float]
    held: dict[str, str]
    owns: list[str]
    replica: int
    midway: list[set[str]]


def _train(rank: int, size: int, zero: int, moves: bool) -> _Run:
    """Every update is of two batches; layers move between updates, and in the middle of some."""
    pipe = _pipeline(size, zero)
    losses, midway = [], []
    for update in range(UPDATES):
        # what thaws later is shared out anew when layers move
        pipe.module[1].requires_grad_(update >= 2)  # type: ignore[index]
        if moves and update in (3, 4, 6, 10):
            pipe.rebuild(_maps(update, pipe.ranks))
        pipe.step(*_batch(2 * update, pipe.replica), update=False)
        midway.append({n for n, p in pipe.owned.parameters.items() if p.grad is not None})
        if moves and update in (3, 7, 8):
            pipe.rebuild(_maps(update + 1, pipe.ranks))
        losses.append(pipe.step(*_batch(2 * update + 1, pipe.replica), max_norm=0.5))
    here = pipe.owned.of(pipe.stage_map.layers_on(pipe.rank))
    owns = [n for n in here if pipe.collective.rank in pipe.owners.updaters(n, pipe.rank)]
    return _Run(losses, _held(pipe), owns, pipe.replica, midway)


def _held(pipe: ElasticPipeline) -> dict[str, str]:
    return digests(pipe.module, *pipe.optimizer)


@functools.cache
def _runs(zero: int, moves: bool) -> list[_Run]:
    found: list[_Run] = run_gloo(_train, 4, zero, moves)
    return found


def _whole(runs: list[_Run]) -> dict[str, str]:
    """All that the ranks hold: moments by name, what every replica has for itself with its number."""
    whole: dict[str, str] = {}
    for run in runs:
        for name, digest in run.held.items():
            key = name if "@" in name else f"{name} of {run.replica}"
            assert whole.setdefault(key, digest) == digest, f"copies of {key} differ"
    return whole


def test_moves_change_no_bit_where_optimizer_state_has_owners() -> None:
    expected = _runs(0, False)
    for runs in (_runs(1, False), _runs(1, True), _runs(0, True)):
        assert all(got.losses == expected[0].losses for got in runs)
        assert _whole(runs) == _whole(expected)
    whole = _whole(expected)
    # the running means of replicas are not the same, so copies of one would have been seen
    assert whole["0.norm.running_mean of 0"] != whole["0.norm.running_mean of 1"]
    # before a move in mid-update one replica has gradients that the other has not, which so must come from nowhere
    by_replica = [set().union(*(run.midway[u] for run in expected if run.replica == r)) for u in (3, 7) for r in (0, 1)]
    assert by_replica[0] != by_replica[1]
    assert by_replica[2] != by_replica[3]


def test_after_moves_each_owner_alone_keeps_its_state() -> None:
    # a layer that has not run has no state yet
    kept = {n.partition("@")[0] for got in _runs(0, False) for n in got.held if n.endswith(("@exp_avg", "@sum"))}
    for got in _runs(1, True):
        mine = {n.partition("@")[0] for n in got.held if n.endswith(("@exp_avg", "@sum"))}
        assert mine == kept & set(got.owns)
    # both replicas have a part of it
    assert all(got.owns for got in _runs(1, True) if any(n.endswith("weight") for n in got.held))


def test_tied_layers_move_with_owners_as_one_process_trains(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    with_owners: list[Outcome] = run_gloo(replicated, 4, 2, 0, 10, folder, {"zero": 1})
    compare_with_one_process(with_owners, 0, 10)
    # what was saved after moves is what the run goes on with
    compare_with_one_process(run_gloo(replicated, 2, 2, 10, 14, folder, {"zero": 1}), 10, 14)


def _ahead(rank: int, size: int) -> tuple[list[str], list[float]]:
    """Moves by routes that were found ahead; before the second one a layer thaws, and others own its column's state."""
    pipe = _pipeline(size, 1)
    pipe.module[0].requires_grad_(False)  # type: ignore[index]
    losses, found = [pipe.step(*_batch(0, pipe.replica))], []
    route_schedule = pipe.mover.route_schedule
    for move in (1, 3):
        prepared = pipe.prepare(_maps(move, pipe.ranks), pipe.side_collective())
        pipe.module[0].requires_grad_(move == 3)  # type: ignore[index]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipe.mover, "route_schedule", lambda *a: found.append("anew") or route_schedule(*a))
            pipe.rebuild(_maps(move, pipe.ranks), prepared=prepared)
        found.append("moved")
        losses.append(pipe.step(*_batch(move, pipe.replica)))
    return found, losses


def _stays(rank: int, size: int, frozen: bool = False) -> list[float]:
    pipe = _pipeline(size, 0)
    losses = []
    for move in (0, 1, 3):
        pipe.module[0].requires_grad_(move == 3 or not frozen)  # type: ignore[index]
        losses.append(pipe.step(*_batch(move, pipe.replica)))
    return losses


def test_a_route_found_ahead_is_used_as_long_as_the_same_parameters_train() -> None:
    expected = run_gloo(_stays, 4, True)[0]
    for found, losses in run_gloo(_ahead, 4):
        assert found == ["moved", "anew", "moved"]
        assert losses == expected


def _without_room(rank: int, size: int) -> list[float]:
    pipe = _pipeline(size, 1)
    losses = [pipe.step(*_batch(0, pipe.replica))]
    before, owners = _held(pipe), pipe.owners
    if rank == 2:
        pipe.mover.allocate = _no_memory  # type: ignore[assignment]
    with pytest.raises(TransitionError, match=r"rank 2.*the state from before the move is whole"):
        pipe.rebuild(_maps(1, pipe.ranks))
    assert _held(pipe) == before
    assert pipe.owners is owners
    pipe.mover.allocate = empty
    losses.append(pipe.step(*_batch(1, pipe.replica)))
    pipe.rebuild(_maps(1, pipe.ranks))
    return [*losses, pipe.step(*_batch(3, pipe.replica))]


def _no_memory(*_: object) -> Tensor:
    raise MemoryError("none left")


def test_a_move_that_fails_leaves_all_owners_as_they_were() -> None:
    expected = run_gloo(_stays, 4)[0]
    for losses in run_gloo(_without_room, 4):
        assert losses == expected


def _refused(rank: int, size: int) -> list[str]:
    pipe = _pipeline(size, 1)
    pipe.step(*_batch(0, pipe.replica))
    if rank == 3:
        pipe.module[0].requires_grad_(False)  # type: ignore[index]
    before = _held(pipe)
    with pytest.raises(SpecError) as caught:
        pipe.rebuild(_maps(1, pipe.ranks))
    assert _held(pipe) == before
    pipe.module[0].requires_grad_(True)  # type: ignore[index]
    pipe.rebuild(_maps(1, pipe.ranks))
    pipe.step(*_batch(1, pipe.replica))
    return [str(caught.value)]


def test_ranks_that_would_share_out_the_state_differently_are_named_before_it_moves() -> None:
    for (text,) in run_gloo(_refused, 4):
        assert text == "ranks [3] would update other parameters than rank 0"


def _controlled(rank: int, size: int, moves: bool, ahead: bool) -> tuple[list[float], dict[str, str], int, int, bool]:
    """A controller decides where layers go, by costs that are given; what owners keep goes along."""
    pipe = _pipeline(size, 1)

    def costs() -> dict[int, LayerCost]:
        # what is slow wanders from the last layers to the first
        slow = (UNITS - 2, UNITS - 1) if pipe.progress.updates // 4 % 2 == 0 else (0, 1)
        return {unit: LayerCost(forward_s=1.0 if unit in slow else 0.1, parameter_bytes=1) for unit in pipe.layers}

    pipe.local_costs = costs  # type: ignore[method-assign]
    config = ControllerConfig(
        every_steps=2,
        measure_steps=1,
        min_gain=0.1,
        move_cost=MoveCost(fixed_s=0.0 if moves else 1e9),
        prepare_in_backward=ahead,
    )
    balanced = pipeline_balance.attach(pipe, config=config)
    losses = [balanced.step(*_batch(update, pipe.replica), max_norm=0.5) for update in range(UPDATES)]
    early = all(move.early > 0 for move in balanced.report.moves)
    return losses, _held(pipe), pipe.replica, balanced.overhead().moves, early


@pytest.mark.parametrize("ahead", [False, True])
def test_a_controller_moves_layers_whose_optimizer_state_has_owners(ahead: bool) -> None:
    moved, still = run_gloo(_controlled, 4, True, ahead), run_gloo(_controlled, 4, False, ahead)
    assert [losses for losses, *_ in moved] == [losses for losses, *_ in still]
    assert all(moves >= 3 for *_, moves, _ in moved)
    assert all(moves == 0 for *_, moves, _ in still)
    assert all(early == ahead for *_, early in moved)

    def whole(runs: list[Any]) -> dict[str, str]:
        return _whole([_Run([], held, [], replica, []) for _, held, replica, *_ in runs])

    assert whole(moved) == whole(still)
