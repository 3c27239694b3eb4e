"""Process groups of layouts that a job has left: destroyed, on all processes alike, once nobody uses them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

import prophet
from pipeline_balance.elastic.balance import Balance
from pipeline_balance.elastic.groups import Groups
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.schedules.simulate import Durations
from prophet.errors import SpecError, TransitionError
from prophet.ranks.process_group import presence
from tests.helpers.elastic_jobs import plain_losses, same, start, train, whole
from tests.helpers.launch import run_gloo

TOUR = ("pp4", "dp4,zero1", "pp2,dp2", "dp4,zero3", "pp2,dp2,zero1", "pp4")
LATE_S = 1.0


def count() -> int:
    """The process groups of this process, the world's among them."""
    return len(dist.distributed_c10d._world.pg_map)


def _tour(rank: int, size: int) -> tuple[list[int], list[float]]:
    job = start(TOUR[0])
    counts, losses = [count()], train(job, 1)
    for text in TOUR[1:]:
        before = whole(job)
        job.switch(Parallelism.parse(text))
        assert same(whole(job), before), text
        losses += train(job, 1)
        counts.append(count())
    named = {group.group_name for group in dist.distributed_c10d._world.pg_map}
    assert set(presence().counters) <= named, "what ranks tell of a group goes with it"
    assert job.pipeline.groups.collective in job.pipeline.groups._included
    # the world's, this layout's, a mesh's, and until the next switch those of the one before that were destroyed
    assert len(job.pipeline.groups._included) == 5
    job.close()
    return counts, losses


def test_as_many_groups_as_the_layout_in_force_uses() -> None:
    """The world's, and two each for the pipeline, a switch's state, a preparation, and what this process is in."""
    for counts, losses in run_gloo(_tour, 4, timeout_s=120.0):
        # from the fourth layout on the group of its mesh is there
        assert counts == [9, 9, 11, 8, 12, 10]
        assert losses == pytest.approx(plain_losses(len(TOUR)), abs=1e-9)


def _closed(rank: int, size: int) -> list[float]:
    job = start("dp2")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Groups, "give_back")  # a job that has left no layout waits for nobody
        losses = train(job, 1)
    job.switch(Parallelism(pp=2))
    job.close()
    return losses + train(job, 2)


def test_a_job_that_was_closed_after_a_switch_trains_on() -> None:
    for losses in run_gloo(_closed, 2, timeout_s=60.0):
        assert losses == pytest.approx(plain_losses(3), abs=1e-9)


def test_experts_of_a_job_have_its_time_limit() -> None:
    """A limit of their own would need groups that only some processes make, under names that come again."""
    with pytest.raises(SpecError, match=r"expected timeout_s=None, got 20: .*give it as Job\(timeout_s=20\)"):
        Balance(prophet.EngineConfig(timeout_s=20)).check(Parallelism(dp=2, ep=2))


def _failing(rank: int, size: int) -> list[int]:
    job = start("dp2")
    train(job, 1)
    counts = [count()]
    handle = dict(job.model.named_parameters())["2.up.weight"].register_hook(lambda g: g) if rank == 1 else None
    with pytest.raises(TransitionError, match="has a hook on the tensor"):
        job.switch(Parallelism.parse("dp2,zero3"))
    if handle is not None:
        handle.remove()
    train(job, 1)
    counts.append(count())
    job.switch(Parallelism(pp=2))
    train(job, 1)
    counts.append(count())
    job.close()
    return counts


def test_a_switch_that_fails_keeps_the_old_groups() -> None:
    for counts in run_gloo(_failing, 2):
        # the mesh's came. The state's is given up, as it may be stuck, and another one takes its place
        assert counts == [9, 10, 12]


def _prepared_meanwhile(rank: int, size: int) -> tuple[list[int], list[float]]:
    job = start("pp2")
    losses = train(job, 1)
    job.prepare(Parallelism.parse("dp2,zero1"))
    job._switching.prepared()
    counts = [count()]
    job._switching.change_stages(Parallelism(pp=2, stages=(2, 4)), Durations.uniform(2))
    losses += train(job, 1)
    job.switch()
    losses += train(job, 1)
    counts.append(count())
    job.close()
    return counts, losses


def test_what_is_prepared_has_its_groups_still_after_layers_have_moved() -> None:
    for counts, losses in run_gloo(_prepared_meanwhile, 2):
        assert counts == [11, 9]
        assert losses == pytest.approx(plain_losses(3), abs=1e-9)


def _late(rank: int, size: int) -> None:
    """Rank 1 trains late in the new layout, and the other must not destroy the old one's groups before."""
    store: Any = dist.distributed_c10d._get_default_store()
    give_back, job, destroyed = Groups.give_back, start("pp2"), list[Any]()

    def checked(self: Any, *given: Any) -> None:
        assert store.check([f"left by {r}" for r in range(size)])
        give_back(self, *given)
        destroyed.append(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "give_back", checked)
        job.switch(Parallelism(dp=2))
        if rank == 1:
            time.sleep(LATE_S)
        store.set(f"left by {rank}", "")
        train(job, 2)
    assert len(destroyed) == 1
    job.close()


def test_groups_are_destroyed_once_all_have_left_them() -> None:
    run_gloo(_late, 2)


def _after_shards(rank: int, size: int) -> int:
    job = start("dp2,zero3")
    train(job, 1)
    job.model.state_dict()
    job.switch(Parallelism(dp=2))
    left = sum(len(m._state_dict_pre_hooks) + len(m._load_state_dict_pre_hooks) for m in job.model.modules())
    job.close()
    return left


def test_no_hook_of_fsdp_stays_on_modules_that_are_whole_again() -> None:
    """FSDP2 adds some when it first runs. They would keep its shards and its group, and run at every state_dict."""
    assert run_gloo(_after_shards, 2) == [0, 0]
