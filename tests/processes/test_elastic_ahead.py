"""A switch that was prepared while training went on: what is done ahead, and what may change meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from pipeline_balance.elastic import switching as jobs
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards import job_state
from pipeline_balance.elastic.switching import Switching
from pipeline_balance.pipeline.move.state import Held
from prophet.errors import SpecError, TransitionError
from prophet.ranks.process_group import ProcessGroupCollective, collective_for
from prophet.state import route_schedule
from prophet.state.route import Route
from prophet.state.streams import Streams, Timetable
from tests.helpers.elastic_jobs import check_held, plain_losses, same, start, train, whole
from tests.helpers.launch import run_gloo
from tests.helpers.noted import noted
from tests.helpers.releases import needs_orders

LIMIT_S = 30.0


def _ahead(rank: int, size: int) -> None:
    described = [(Held, "of"), (jobs, "describe"), (jobs, "ordered"), (job_state, "layout_of")]
    routes = [(Route, "digest"), (Streams, "of"), (Timetable, "rounds")]
    job = start("pp2,dp2")
    train(job, 1)
    for text, mode in (("pp4", "safe"), ("dp4,zero1", "in-place"), ("dp2,zero3", "safe"), ("pp2", "safe")):
        with noted(*described, *routes, (route_schedule, "in_place")) as found:
            job.prepare(Parallelism.parse(f"{text},orderfewest-bytes"), mode=mode)  # type: ignore[arg-type]
            job._switching.prepared()
        assert not [name for name, main in found if main]
        assert {"Held.of", "describe", "ordered", "Route.digest", "Streams.of"} <= {name for name, _ in found}
        assert ("in_place" in {name for name, _ in found}) == (mode == "in-place")
        train(job, 1)
        before = whole(job)
        with noted(*routes, (route_schedule, "in_place")) as found:
            job.switch(mode=mode)  # type: ignore[arg-type]
        assert not found, text
        assert same(whole(job), before)
        check_held(job)
    # prepared for another mode, it finds the rest itself
    job.prepare(Parallelism(pp=4))
    before = whole(job)
    job.switch(mode="in-place")
    assert same(whole(job), before)
    job.close()


@needs_orders
def test_what_follows_from_a_route_is_found_by_the_thread_that_prepares() -> None:
    run_gloo(_ahead, 4, timeout_s=120.0)


def _before_the_first_step(rank: int, size: int) -> list[float]:
    job = start("pp2")
    job.prepare(Parallelism.parse("dp2,zero1"))
    losses = train(job, 2)  # moments come into being
    before = whole(job)
    job.switch()
    assert same(whole(job), before)
    check_held(job)
    return losses + train(job, 2)


def test_state_that_came_after_the_preparation_goes_along() -> None:
    for losses in run_gloo(_before_the_first_step, 2):
        assert losses == pytest.approx(plain_losses(4), abs=1e-9)


def _frozen(rank: int, size: int, back: bool) -> tuple[list[float], list[float]]:
    """A block is frozen, or trained again, when rank 0 has arranged the new layout and rank 1 has not yet."""
    still = start("pp2")
    still.model[2].requires_grad_(not back)
    expected = train(still, 1)
    still.model[2].requires_grad_(back)
    expected += train(still, 3)
    still.close()

    job = start("pp2")
    job.model[2].requires_grad_(not back)
    losses = train(job, 1)
    arranged, flipped, inner = threading.Event(), threading.Event(), Switching.training_layout

    def arrange(*given: Any) -> Any:
        if rank == 1:
            assert flipped.wait(LIMIT_S)
        found = inner(*given)
        arranged.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Switching, "training_layout", arrange)
        job.prepare(Parallelism.parse("dp2,zero1"))
        if rank == 0:
            assert arranged.wait(LIMIT_S)
        job.model[2].requires_grad_(back)
        flipped.set()
        losses += train(job, 1)
        before = whole(job)
        job.switch()
    assert same(whole(job), before)
    assert {p.requires_grad for p in job.model[2].parameters()} == {back}
    losses += train(job, 1)
    job.switch(Parallelism(pp=2))
    losses += train(job, 1)
    job.close()
    return losses, expected


@pytest.mark.parametrize("back", [False, True])
def test_what_trains_may_change_during_a_preparation(back: bool) -> None:
    for losses, expected in run_gloo(_frozen, 2, back, timeout_s=120.0):
        assert losses == pytest.approx(expected, abs=1e-9)


def _hooked(rank: int, size: int) -> str:
    job = start("dp2")
    train(job, 1)
    job.prepare(Parallelism.parse("dp2,zero3"))
    job._switching.prepared()
    handle = job.model[2].up.weight.register_hook(lambda g: g) if rank == 1 else None
    before = whole(job)
    with pytest.raises(TransitionError) as caught:
        job.switch()
    assert same(whole(job), before)
    if handle is not None:
        handle.remove()
    job.prepare(Parallelism.parse("dp2,zero3"))
    graph = job.model[2].up.weight.sum() if rank == 0 else None
    with pytest.raises(SpecError, match=r"rank 0: 2\.up\.weight is held by an autograd graph"):
        job.switch()
    del graph
    job.switch(Parallelism.parse("dp2,zero3"))
    train(job, 1)
    job.close()
    return str(caught.value)


def test_what_cannot_go_over_is_seen_though_it_came_after_the_preparation() -> None:
    for words in run_gloo(_hooked, 2):
        assert words.startswith("rank 1: 2.up.weight has a hook on the tensor")
        assert words.endswith("the state from before the move is whole")


def groups(rank: int, size: int) -> dict[str, int]:
    made: list[list[int]] = []
    inner, asked = dist.new_group, [0]

    def new_group(ranks: Any, *given: Any, **options: Any) -> Any:
        made.append(list(ranks))
        return inner(ranks, *given, **options)

    found = {}
    job = start("pp2")
    gather = ProcessGroupCollective.all_gather

    def counted(self: Any, x: Any, *, op: Any, **options: Any) -> Any:
        asked[0] += str(op) == "where ranks are"
        return gather(self, x, op=op, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(ProcessGroupCollective, "all_gather", counted)
        for text in ("dp4,zero3", "pp2,dp2", "dp4"):
            made.clear()
            job.prepare(Parallelism.parse(text))
            job._switching.prepared()
            found[text] = len(made)
        assert asked == [0]
        group = dist.new_group([0, 1])
        if rank < 2:
            collective_for(group)  # of some of the processes
    assert asked == [0]
    job.close()
    return found


def test_a_layout_makes_no_group_that_it_does_not_use() -> None:
    for made in run_gloo(groups, 4):
        # a mesh's group has one channel, any other two
        assert made == {"dp4,zero3": 1, "pp2,dp2": 8, "dp4": 2}
