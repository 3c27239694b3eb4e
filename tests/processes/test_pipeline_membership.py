"""Ranks leave, wait, and come back while training goes on: 4 -> 3 -> 2 -> 4, with a loss that does not notice."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipeline_balance
from pipeline_balance.release.membership import Membership, MembershipError, released
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import LAYERS, TOLERANCE, batch, pipeline, plain_losses

STEPS = 40


def _spread(ranks: int) -> StageMap:
    return StageMap.contiguous([k * LAYERS // ranks for k in range(ranks + 1)])


def _leave_first_group() -> None:
    """The one that the test's processes met in; whoever leaves while another is still connecting cuts it off."""
    dist.barrier()
    dist.destroy_process_group()


def _elastic(rank: int, size: int, path: str) -> dict[str, Any]:
    _leave_first_group()
    membership = Membership(dist.FileStore(path, -1), 10 + rank, timeout_s=40.0)
    membership.start([10 + r for r in range(size)])
    run = pipeline(_spread(size))
    losses: dict[int, float] = {}
    sizes: list[tuple[int, int]] = []
    gone: list[list[int]] = []
    step = 0
    while step < STEPS:
        if step in (10, 20) and run.ranks > size - step // 10:
            run.rebuild(_spread(size - step // 10))
            if not released(membership, run, lambda members: gone.append(list(members))):
                if not membership.wait_for_call():
                    return {"losses": losses, "sizes": sizes, "gone": gone, "ended": "while waiting"}
                run.change_group(None, None)
                step = 30
                run.rebuild(_spread(size))
        if step == 30 and run.ranks < size:
            assert membership.switch(run, [10 + r for r in range(size)])
            run.rebuild(_spread(size))
        losses[step] = run.step(*batch(step))
        sizes.append((step, dist.get_world_size()))
        step += 1
    membership.end()
    return {"losses": losses, "sizes": sizes, "gone": gone, "ended": "trained to the end"}


def test_four_three_two_four() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_gloo(_elastic, 4, str(Path(folder) / "members"))
    losses = {step: loss for r in results for step, loss in r["losses"].items()}
    assert [losses[s] for s in range(STEPS)] == pytest.approx(plain_losses(STEPS)[0], rel=TOLERANCE)
    world = dict(results[0]["sizes"])
    assert [world[s] for s in (9, 10, 20, 30)] == [4, 3, 2, 4]
    assert results[0]["gone"] == [[13], [12]]
    assert [s for s, _ in results[3]["sizes"]] == [*range(10), *range(30, 40)]
    assert {r["ended"] for r in results} == {"trained to the end"}


def _down_to_one(rank: int, size: int, path: str) -> str:
    _leave_first_group()
    membership = Membership(dist.FileStore(path, -1), rank, timeout_s=40.0)
    membership.start(range(size))
    run = pipeline(_spread(size))
    balanced = pipeline_balance.attach(run)
    losses = [balanced.step(*batch(0))]
    with pytest.raises(SpecError, match="still run stages"):
        membership.switch(run, [0])
    run.rebuild(StageMap((0, LAYERS), (1,)))
    if not released(membership, run):
        with pytest.raises(MembershipError, match=r"not called within 0\.2 s"):
            membership.wait_for_call(timeout_s=0.2)
        return "ended" if not membership.wait_for_call() else "called"
    with pytest.raises(SpecError, match=r"the group has 1 ranks now.*attach again"):
        balanced.step(*batch(1))
    balanced = pipeline_balance.attach(run)
    losses += [balanced.step(*batch(step)) for step in range(1, 4)]
    time.sleep(1.0)  # so that the other one's short wait runs out first
    membership.end()
    assert losses == pytest.approx(plain_losses(4)[0], rel=TOLERANCE)
    return "alone"


def test_down_to_one_rank_that_is_not_the_first() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_gloo(_down_to_one, 2, str(Path(folder) / "members")) == ["ended", "alone"]


def _newcomer(rank: int, size: int, path: str) -> list[float]:
    """Member 2 is a process that was never there before."""
    _leave_first_group()
    membership = Membership(dist.FileStore(path, -1), rank, timeout_s=40.0)
    if rank == 2:
        assert membership.wait_for_call()
        torch.manual_seed(99)
        run = pipeline(joins=True)
        assert (run.optimizer.param_groups[0]["warm"], run.progress.updates) == (0.5, 2)
        losses: list[float] = []
    else:
        membership.start([0, 1])
        run = pipeline(_spread(2))
        losses = [run.step(*batch(step)) for step in range(2)]
        run.optimizer.param_groups[0]["warm"] = 0.5  # an option that the loop has set since the start
        assert membership.switch(run, [0, 1, 2])
    run.rebuild(_spread(3))
    losses += [run.step(*batch(step)) for step in range(2, 5)]
    membership.end()
    return losses


def test_a_newcomer_joins() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = run_gloo(_newcomer, 3, str(Path(folder) / "members"))
    assert rows[2] == rows[0][2:]
    assert rows[0] == rows[1]
    assert rows[0] == pytest.approx(plain_losses(5)[0], rel=TOLERANCE)


def _renumbered(rank: int, size: int, members: str, saved: str) -> list[float]:
    """A newcomer gets the lowest number; one of those that were there gets a number that the old group had not."""
    _leave_first_group()
    membership = Membership(dist.FileStore(members, -1), rank, timeout_s=40.0)
    if rank == 2:
        assert membership.wait_for_call()
        run = pipeline(joins=True)
    else:
        membership.start([0, 1])
        run = pipeline(_spread(2))
        for step in range(2):
            run.step(*batch(step))
        assert membership.switch(run, [2, 0, 1])
    run.rebuild(_spread(3))
    losses = [run.step(*batch(step)) for step in range(2, 4)]
    run.save(saved)
    membership.end()
    return losses


def _loaded(rank: int, size: int, saved: str) -> list[float]:
    run = pipeline(_spread(size))
    run.load(saved)
    return [run.step(*batch(step)) for step in range(4, 8)]


def test_what_is_saved_after_ranks_were_renumbered_is_whole() -> None:
    with tempfile.TemporaryDirectory() as folder:
        members, saved = str(Path(folder) / "members"), str(Path(folder) / "saved")
        first = run_gloo(_renumbered, 3, members, saved)[0]
        losses = first + run_gloo(_loaded, 1, saved)[0]
    assert losses == pytest.approx(plain_losses(8)[0][2:], rel=TOLERANCE)


TWO, ONE = StageMap.contiguous((0, 3, LAYERS)), StageMap((0, LAYERS), (1,))


def _replicas(rank: int, size: int, path: str, zero: int, changes: bool) -> dict[int, float]:
    """Two replicas of two ranks give up one rank each, and take it back."""
    _leave_first_group()
    membership = Membership(dist.FileStore(path, -1), 10 + rank, timeout_s=40.0)
    membership.start(range(10, 14))
    run = pipeline(TWO, replicas=2, zero=zero)
    losses: dict[int, float] = {}
    step = 0
    while step < 9:
        if changes and step == 3 and run.ranks == 2:
            run.rebuild(ONE)
            with pytest.raises(SpecError, match="3 processes cannot be divided into 2 replicas"):
                membership.switch(run, [11, 12, 13])
            # each would be in the other's replica, whose part of the data and of the optimizer state is another
            with pytest.raises(SpecError, match="same place of all replicas"):
                membership.switch(run, [13, 11])
            if not released(membership, run):
                assert membership.wait_for_call()
                run.change_group(None, None)
                step = 6
                run.rebuild(TWO)
        if changes and step == 6 and run.ranks == 1:
            assert (run.collective.size, run.replica) == (2, rank // 2)
            # the first of each replica comes back, with another place in it
            assert membership.switch(run, [11, 10, 13, 12])
            run.rebuild(TWO)
        losses[step] = run.step(*batch(step), max_norm=0.05)
        step += 1
    membership.end()
    return losses


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_give_ranks_back_and_take_them_again(tmp_path: Path, zero: int) -> None:
    changed = run_gloo(_replicas, 4, str(tmp_path / "changed"), zero, True)
    still = run_gloo(_replicas, 4, str(tmp_path / "still"), zero, False)[0]
    assert [sorted(losses) for losses in changed] == [[0, 1, 2, 6, 7, 8], [*range(9)]] * 2
    for losses in changed:
        assert losses == {step: still[step] for step in losses}


def test_members_are_checked() -> None:
    membership = Membership(dist.HashStore(), 3)
    with pytest.raises(SpecError, match="not among"):
        membership.start([0, 1])
    with pytest.raises(SpecError, match="different members"):
        membership.start([3, 3])
    with pytest.raises(SpecError, match="negative"):
        Membership(dist.HashStore(), -1)
