"""Replicas that are dropped after the forward pass and fetched again: exact, within their budget, and printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prophet
from prophet.errors import ReplicaMemoryError
from prophet.experts.replica import ReplicaPool
from prophet.ranks.collective import Channel, Collective, Pending, Rows
from prophet.ranks.forwarding import ForwardingCollective, ForwardingPending
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld
from prophet.scheduler.actions import Window
from prophet.scheduler.budget import at_relay, at_replica, within_budget
from prophet.scheduler.schedules import NAMES, schedule_named
from prophet.scheduler.windows import WindowClock
from prophet.spec import Placement
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected, train, train_in_process

CASE = Case(ranks=2, blocks=3, shapes=((2, 3), (4,)), slots=8, steps=3, seed=3, refetch=True)
ALL = everywhere(4, 2)


VARIANTS: list[dict[str, object]] = [
    {},
    {"microbatches": 2},
    {"microbatches": 2, "announced": False},
    {"uses": 2},
    {"checkpointing": "non-reentrant", "microbatches": 2},
    {"checkpointing": "reentrant"},
]
FORMS = [("block-wise", "direct"), ("look-ahead", "two-phase"), ("blocking", "two-phase")]
# every variant with one schedule, every schedule with two variants; all others are slow
REFETCHED = [
    pytest.param(*form, variant, marks=[] if i == j % 3 else [pytest.mark.slow])
    for i, form in enumerate(FORMS)
    for j, variant in enumerate(VARIANTS)
]


@pytest.mark.parametrize(("schedule", "transfers", "variant"), REFETCHED)
def test_refetched_replicas_give_the_oracles_gradients(
    schedule: str, transfers: str, variant: dict[str, object]
) -> None:
    case = replace(CASE, schedule=schedule, transfers=transfers, **variant)  # type: ignore[arg-type]
    by_rank = on_threads(2, lambda group: train(case, group, FixedPlanner(ALL)))
    compare(expected(case), by_rank)
    kept = replace(case, refetch=False)
    for refetched, plain in zip(by_rank, on_threads(2, lambda g: train(kept, g, FixedPlanner(ALL))), strict=True):
        for a, b in zip(refetched, plain, strict=True):
            assert all(np.array_equal(grad, b.experts[name]) for name, grad in a.experts.items())


@pytest.mark.parametrize("schedule", NAMES)
def test_what_is_launched_is_what_is_scheduled(schedule: str) -> None:
    case = replace(CASE, schedule=schedule, transfers="direct")
    wanted = schedule_named(schedule, 3, refetch=True)
    for steps in on_threads(2, lambda group: train(case, group, FixedPlanner(ALL))):
        reports = [s.report for s in steps]
        assert [r.actions for r in reports if r is not None] == [(), wanted, wanted]


def test_on_processes() -> None:
    compare(expected(CASE), on_processes(2, train_in_process, CASE))


def test_two_backward_passes_through_one_graph() -> None:
    def body(group: Collective) -> list[Step]:
        run = Run(CASE, group, FixedPlanner(ALL))
        steps = [run.step_in_two_passes(s) for s in range(3)]
        run.close()
        return steps

    compare(expected(CASE), on_threads(2, body))


def peak(case: Case, **options: object) -> int:
    """Bytes that the pool held at most during a step, on the fullest rank."""

    def body(group: Collective) -> int:
        run = Run(case, group, FixedPlanner(ALL), **options)  # type: ignore[arg-type]
        pool, most = run.engine.pool, [0]

        class Watched(WindowClock):
            """At the start of a window there is all that the one before has brought."""

            def enter(self, window: Window) -> None:
                most[0] = max(most[0], pool.in_use_bytes)
                super().enter(window)

        run.engine.runtime.windows = Watched(run.engine.stopwatch)
        for s in range(3):
            run.whole_step(s)
        assert pool.in_use_bytes == 0
        run.close()
        return most[0]

    return max(on_threads(2, body))


def test_refetching_holds_the_parameters_of_two_layers_at_a_time() -> None:
    case = replace(CASE, blocks=5)
    layer = 2 * Run(case, ThreadWorld(1).collective(0), balanced=False).model.moe(0).experts.shape().expert_bytes
    assert peak(replace(case, refetch=False)) == 5 * 2 * layer
    assert peak(case) == 5 * layer + 2 * layer
    assert peak(replace(case, schedule="look-ahead")) == 5 * layer + 3 * layer
    # a budget that leaves room for the gradients of all layers and the parameters of two
    assert peak(replace(case, schedule="look-ahead"), replica_memory_bytes=7 * layer) <= 7 * layer


class Full(FixedPlanner):
    """What fits a layer alone."""

    def place(self, load: object, context: prophet.spec.PlanContext) -> Placement:
        limits = context.slot_limits()
        pairs = [
            (e, r) for e, r in self.pairs if sum(q == r for _, q in self.pairs[: self.pairs.index((e, r))]) < limits[r]
        ]
        return Placement.with_replicas(context.home, context.ranks, pairs)


@pytest.mark.parametrize("refetch", [False, True], ids=["keep", "refetch"])
@pytest.mark.parametrize("replicas", [1, 2, 3.5, 5])
def test_any_budget_is_kept_and_exact(refetch: bool, replicas: float) -> None:
    case = replace(CASE, refetch=refetch, steps=3)

    def body(group: Collective) -> list[Step]:
        shape = case.model(ThreadWorld(1).collective(0)).moe(0).experts.shape()
        one = at_replica(
            shape.expert_bytes, shape.expert_grad_bytes, shape.expert_sum_bytes, case.ranks, refetch=refetch
        )
        limit = int(sum(one) * replicas)
        run = Run(case, group, Full(ALL), replica_memory_bytes=limit)  # the pool itself refuses more
        steps = [run.whole_step(s) for s in range(case.steps)]
        assert run.engine.pool.held_bytes <= limit
        run.close()
        return steps

    compare(expected(case), on_threads(2, body))


def test_refetching_leaves_room_for_more_replicas() -> None:
    homes = [0, 1]
    full = [Placement.with_replicas(homes, 2, [(0, 1), (1, 0)])] * 4
    sizes = [10] * 4

    def copies(budget: int, span: int | None) -> list[int]:
        return [len(p.replicas()) for p in within_budget(full, sizes, sizes, sizes, budget, range(4), span=span)]

    # until the end 30 + 16 for rounding, and 10 for that on the other rank; the parameters' 10, or 30 + 10 in `span`
    assert copies(4 * 66, None) == [2, 2, 2, 2]
    assert copies(4 * 66 - 1, None) == [2, 2, 2, 1]
    assert copies(4 * 56 + 2 * 40, 2) == [2, 2, 2, 2]
    assert copies(4 * 56 + 2 * 40 - 1, 2) == [2, 2, 2, 1]
    assert copies(0, 2) == [0, 0, 0, 0]


def test_sums_of_half_precision_have_room() -> None:
    placement = Placement.with_replicas([0, 1, 2], 3, [(0, 1), (0, 2)])

    def copies(budget: int) -> int:
        return len(within_budget([placement], [10], [10], [20], budget, [0])[0].replicas())

    # a replica: its parameters and gradients, what it sends and a sum, and 24 for rounding; one sum at home
    assert copies(10 + 10 + 30 + 24) == 2
    assert copies(10 + 10 + 30 + 24 - 1) == 0
    at_home = [Placement.with_replicas([0, 1], 2, [(0, 1), (1, 0)])]
    assert len(within_budget(at_home, [10], [10], [20], 66 + 20, [0])[0].replicas()) == 2
    assert len(within_budget(at_home, [10], [10], [20], 66 + 20 - 1, [0])[0].replicas()) == 1


def test_every_node_that_has_replicas_sends_a_sum() -> None:
    placement = Placement.with_replicas([0] * 10, 10, [(0, r) for r in range(1, 10)])

    def copies(node: list[int] | None) -> int:
        # a replica takes 10 + 10 + 30 + 80; at home there are 20 for a sum and 10 for each other gradient of its node
        return len(within_budget([placement], [10], [10], [20], 130, [0], node=node)[0].replicas())

    assert copies(None) == copies([0] * 10) == 9
    assert copies([0, 1, 1, 2, 2, 3, 3, 4, 4, 5]) == 8
    assert copies([0, 1, 2, 3, 4, 5, 6, 7, 8, 8]) == 6


def test_parts_that_ranks_pass_on_have_room() -> None:
    """Two nodes of two ranks. The home, its neighbour and rank 2 pass on parts of the copy on rank 3."""
    placement = Placement.with_replicas([0] * 4, 4, [(0, 3)])

    def fits(budget: int, spreads: bool, span: int | None = None) -> bool:
        given = [placement], [10], [10], [20], budget, [0]
        return bool(within_budget(*given, node=[0, 0, 1, 1], spreads=spreads, span=span)[0].replicas())

    # its own rank: parameters, gradients, 30 in flight and 32 for rounding; with two parts of 10 and 8 for rounding
    assert fits(82, False)
    assert not fits(81, False)
    assert fits(82 + 2 * 18, True)
    assert not fits(82 + 2 * 18 - 1, True)
    # twice as much where parameters are sent again, which takes 20 more
    assert fits(82 + 20 + 4 * 18, True, span=1)
    assert not fits(82 + 20 + 4 * 18 - 1, True, span=1)


class _InFlight(ForwardingCollective):
    """Notes the most bytes of replicas, and of what is in flight to and from them, that this rank had at a time."""

    pool: ReplicaPool
    spread = False

    def __init__(self, inner: Collective) -> None:
        super().__init__(inner)
        self.flying, self.most = 0, 0
        # by layer: what has come and is sent on
        self.kept: dict[tuple[str, int | None], int] = {}

    def around(self, inner: Collective) -> Collective:
        return self  # limits of time do not matter here

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        pending = super().all_to_all(x, send_rows, recv_rows, op=op, channel=channel)
        if channel != "weights":
            return pending
        came = sum(recv_rows) * x.element_size()
        self.flying += x.nbytes + came
        self.most = max(self.most, self.pool.in_use_bytes + self.flying)
        return _Landing(pending, self, op, x.nbytes, came)


class _Landing(ForwardingPending):
    def __init__(self, inner: Pending, of: _InFlight, op: Operation, sent: int, came: int) -> None:
        super().__init__(inner)
        self.of, self.op, self.sent, self.came = of, op, sent, came

    def wait(self) -> Tensor:
        of, (kind, phase, *_) = self.of, self.op.name.split()
        # sums lie in what `reduce` has brought, until they have gone home; relays and carriers pass on what they get
        passed_on = {"spread", "scatter", "reduce", "home"} if of.spread else {"reduce"}
        last = {"gather", "hand-over"} if of.spread else {"home"}
        if phase in passed_on:
            of.kept[kind, self.op.layer] = of.kept.get((kind, self.op.layer), 0) + self.came
        else:
            of.flying -= self.came
        if phase in last:
            of.flying -= of.kept.pop((kind, self.op.layer), 0)
        self.of.flying -= self.sent
        self.sent = self.came = 0
        return super().wait()


def _cases() -> Iterator[Any]:
    """What differs most, in the form that has most in flight, and one schedule beside it; all others are slow."""
    variants: list[dict[str, object]] = [{}, {"refetch": False}, {"microbatches": 2}, {"uses": 2}]
    variants += [{"refetch": False, "uses": 2}]
    for transfers, schedule, variant in product(
        ["direct", "two-phase"], ["block-wise", "look-ahead", "operator"], variants
    ):
        most = schedule == "block-wise" and ("uses" in variant or not variant)
        quick = transfers == "two-phase" and (most or (schedule == "look-ahead" and not variant))
        yield pytest.param(transfers, schedule, variant, marks=[] if quick else pytest.mark.slow)
    # a node of two ranks, and one of one
    yield pytest.param("node-once", "block-wise", {"ranks_per_node": 2})
    yield pytest.param("node-once", "look-ahead", {"ranks_per_node": 2, "uses": 2})
    yield pytest.param("spread", "block-wise", {"ranks_per_node": 2, "uses": 2})
    yield pytest.param("spread", "look-ahead", {"ranks_per_node": 2, "refetch": False})


@pytest.mark.parametrize(("transfers", "schedule", "variant"), _cases())
def test_what_is_in_flight_counts(transfers: str, schedule: str, variant: dict[str, object]) -> None:
    """With nothing but the memory of replicas in the budget, it holds here two to three times as much."""
    given: dict[str, Any] = {"ranks": 3, "blocks": 4, "shapes": ((2, 3), (4,), (5,)), "steps": 3, "slots": 8}
    case = replace(CASE, **{**given, "schedule": schedule, "transfers": transfers, **variant})

    def body(group: Collective, limit: int | None) -> tuple[int, int]:
        watched = _InFlight(group)
        watched.spread = transfers == "spread"
        run = Run(case, watched, Full(everywhere(6, 3)), replica_memory_bytes=limit)
        watched.pool = run.engine.pool
        for s in range(case.steps):
            run.whole_step(s)
        copies = int(run.engine.last_step.copies.sum()) if run.engine.last_step is not None else 0
        run.close()
        return watched.most, copies

    shape = case.model(ThreadWorld(1).collective(0)).moe(0).experts.shape()
    sizes = shape.expert_bytes, shape.expert_grad_bytes, shape.expert_sum_bytes
    one = sum(at_replica(*sizes, case.ranks, refetch=case.refetch))
    if transfers == "spread":
        # of a replica beside its home, of which both ranks of the node pass on parts
        one += 5 * at_relay(*sizes, 2, refetch=case.refetch)
    free = max(most for most, _ in on_threads(3, partial(body, limit=None)))
    for limit in (one, 3 * one, 5 * one):
        found = on_threads(3, partial(body, limit=limit))
        assert 0 < max(most for most, _ in found) <= limit
        assert found[0][1] > 0
        assert limit < free, "it has to bind"


@pytest.mark.parametrize("refetch", [False, True])
def test_ranks_without_a_replica_hold_what_is_counted_for_them(refetch: bool) -> None:
    """Nodes of two ranks. The copies of both layers are on rank 3; ranks 1 and 2 pass on halves of them."""
    case = Case(ranks=4, ranks_per_node=2, transfers="spread", shapes=((3,),) * 4, slots=8, steps=2, refetch=refetch)

    def body(group: Collective) -> int:
        watched = _InFlight(group)
        watched.spread = True
        run = Run(case, watched, FixedPlanner([(0, 3)]))
        watched.pool = run.engine.pool
        for s in range(case.steps):
            run.whole_step(s)
        run.close()
        return watched.most

    shape = case.model(ThreadWorld(1).collective(0)).moe(0).experts.shape()
    sizes = shape.expert_bytes, shape.expert_grad_bytes, shape.expert_sum_bytes
    half = at_relay(*sizes, 2, refetch=refetch)
    _, relay, carrier, _ = on_threads(4, body)
    # a relay gets a part and sends it on, and has room for the sum of its node; both layers at a time
    assert shape.expert_bytes // 2 < relay <= case.blocks * 3 * half
    assert shape.expert_bytes // 2 < carrier <= case.blocks * 2 * half


def test_a_pool_frees_and_restores_parameters() -> None:
    pool = ReplicaPool(100)
    params, grads = pool.take(10, torch.float32, torch.device("cpu"))
    view = params[2:4]
    assert (pool.in_use_bytes, pool.held_bytes) == (80, 80)
    pool.release(params)
    assert (pool.in_use_bytes, pool.held_bytes, params.untyped_storage().size()) == (40, 40, 0)
    pool.restore(params)
    params.fill_(3.0)
    assert view.tolist() == [3.0, 3.0]
    pool.release(params)
    other = pool.take(7, torch.float32, torch.device("cpu"))
    with pytest.raises(ReplicaMemoryError, match="a replica needs 40 bytes, but 96"):
        pool.restore(params)
    pool.give(params, grads)
    pool.give(*other)
    assert (pool.in_use_bytes, pool.held_bytes) == (0, 56)
