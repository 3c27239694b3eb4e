"""What is launched when, what replicas cost, and that a run repeats bit by bit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prophet
from prophet.errors import ReplicaMemoryError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.replica import ReplicaPool
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld
from prophet.scheduler.actions import Window
from prophet.scheduler.budget import at_home, at_replica
from prophet.scheduler.runtime import Runtime
from prophet.scheduler.schedules import block_wise, blocking
from prophet.spec import Placement
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import FixedPlanner, HomesPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected, train

MAKE = {"block-wise": block_wise, "blocking": blocking}


# --- windows (Algorithm 2) ---


@pytest.mark.parametrize("schedule", ["block-wise", "blocking"])
@pytest.mark.parametrize(
    ("ranks", "blocks"),
    [(2, 1), (2, 4), (4, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (4, 1), (4, 4)))],
)
def test_every_rank_launches_the_schedule_in_its_order(ranks: int, blocks: int, schedule: str) -> None:
    case = Case(ranks=ranks, blocks=blocks, schedule=schedule, shapes=((3,),) * ranks, experts_per_rank=1, top_k=1)
    planner = FixedPlanner(everywhere(ranks, ranks))
    wanted = MAKE[schedule](blocks)
    for steps in on_threads(ranks, lambda group: train(replace(case, slots=ranks), group, planner)):
        reports = [s.report for s in steps]
        assert [r.actions for r in reports if r is not None] == [(), wanted, wanted]


@pytest.mark.parametrize("schedule", ["block-wise", "blocking"])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_calls_on_the_weight_channel_follow_the_schedule(blocks: int, schedule: str) -> None:
    """Seen from outside: one message per window that has actions, in order, between the right token messages."""
    case = Case(ranks=4, blocks=blocks, schedule=schedule, shapes=((5,),) * 4, slots=8, transfers="direct")
    fake = RecordingCollective(1, 4)
    run = Run(case, fake, FixedPlanner(everywhere(8, 4)))
    run.whole_step(0)
    fake.calls.clear()
    run.whole_step(1)
    weights = [c.op for c in fake.calls if c.channel == "weights" and c.op != Operation("comparison of placements")]
    names = {"TRANS": "Trans chunk", "AGG": "Agg chunk"}
    actions = {(a.kind, a.block, a.window): a for a in reversed(MAKE[schedule](blocks))}  # the first of each window
    assert weights == [Operation(f"{names[a.kind]} {a.chunk}", a.block) for a in reversed(actions.values())]
    assert all(c.kind == "all_to_all" for c in fake.calls if c.op in weights)
    if schedule == "block-wise" and blocks == 2:
        order = [str(c.op) for c in fake.calls if c.kind == "all_to_all"]
        assert order == [
            "Trans chunk 0 of layer 0",
            "dispatch of layer 0",
            "Trans chunk 0 of layer 1",
            "combine of layer 0",
            "Trans chunk 1 of layer 1",
            "dispatch of layer 1",
            "combine of layer 1",
            "combine backward of layer 1",
            "dispatch backward of layer 1",
            "Agg chunk 0 of layer 1",
            "combine backward of layer 0",
            "Agg chunk 1 of layer 1",
            "dispatch backward of layer 0",
            "Agg chunk 0 of layer 0",
        ]
    run.engine.close()


def test_nothing_travels_for_blocks_without_replicas() -> None:
    case = Case(ranks=4, shapes=((5,),) * 4)
    fake = RecordingCollective(0, 4)
    run = Run(case, fake, HomesPlanner())
    for s in range(3):
        run.whole_step(s)
    assert not [c for c in fake.calls if c.channel == "weights"]
    run.close()


def test_trans_and_agg_move_each_replica_once() -> None:
    case = Case(ranks=4, blocks=1, shapes=((5,),) * 4, experts_per_rank=1, slots=3, transfers="direct")
    fake = RecordingCollective(2, 4)
    run = Run(case, fake, FixedPlanner([(2, 0), (2, 3), (1, 2)]))
    run.whole_step(0)
    fake.calls.clear()
    run.whole_step(1)
    one = run.engine.layers[0].experts.expert_numel * 8

    def sent(name: str) -> list[int]:
        rows = [c.sent_bytes for c in fake.calls if c.op.name.startswith(name)]
        return np.sum(rows, axis=0).tolist()  # type: ignore[no-any-return]

    assert sent("Trans") == [one, 0, 0, one]
    assert sent("Agg") == [0, one, 0, 0]
    run.close()


# --- memory ---


def test_replicas_vanish_and_memory_does_not_grow() -> None:
    case = Case(ranks=2, shapes=((2, 3), (4,)), density=0.7, steps=50)

    def body(group: Collective) -> list[int]:
        run = Run(case, group)
        held = []
        for s in range(case.steps):
            run.zero_grad()
            run.backward(s)
            lent = run.engine.pool.in_use_bytes
            run.step()
            copies = run.engine.last_step.copies[:, group.rank].sum() if run.engine.last_step else 0
            assert lent == copies * run.engine.contexts[0].shape.replica_bytes
            assert run.engine.pool.in_use_bytes == 0
            held.append(run.engine.pool.held_bytes)
        most = 2 * 2 * run.engine.contexts[0].shape.replica_bytes  # two layers, two foreign experts
        assert 0 < max(held) <= most
        run.close()
        return held

    for held in on_threads(2, body):
        assert held[-1] == max(held) == held[25]


def taken(case: Case) -> tuple[int, int]:
    """By one replica on its rank, and on its expert's home."""
    shape = case.model(ThreadWorld(1).collective(0)).moe(0).experts.shape()
    sizes = shape.expert_bytes, shape.expert_grad_bytes
    return sum(at_replica(*sizes, sizes[-1], case.ranks, refetch=False)), sum(at_home(*sizes, refetch=False))


def budget(case: Case, replicas: float) -> int:
    """For so many replicas on a rank that is the home of as many others."""
    return int(sum(taken(case)) * replicas)


class Greedy(FixedPlanner):
    """Would fill every slot, whatever fits."""

    def place(self, load: prophet.spec.IntArray, context: prophet.spec.PlanContext) -> Placement:
        limits = context.slot_limits()
        pairs = [(e, r) for r in range(context.ranks) for e in range(context.experts) if context.home[e] != r]
        kept = [p for i, p in enumerate(pairs) if sum(q[1] == p[1] for q in pairs[:i]) < limits[p[1]]]
        return Placement.with_replicas(context.home, context.ranks, kept)


@pytest.mark.parametrize("replicas", [1, 2, 3.5])
def test_layers_share_a_budget_and_stay_exact(replicas: float) -> None:
    case = Case(ranks=2, blocks=3, shapes=((2, 3), (4,)), steps=4, slots=4)
    limit = budget(case, replicas)

    def body(group: Collective) -> list[Step]:
        run = Run(case, group, Greedy(()), replica_memory_bytes=limit)
        steps = []
        for s in range(case.steps):
            run.zero_grad()
            run.backward(s)
            assert run.engine.pool.in_use_bytes <= limit
            steps.append(run.step())
            assert run.engine.pool.held_bytes <= limit
            report = steps[-1].report
            assert report is not None
            wanted = 0 if s == 0 else min(int(replicas), 6)
            assert (report.copies.sum(axis=0) <= int(replicas)).all()
            assert report.copies.sum(axis=0).max() == wanted
        run.close()
        return steps

    compare(expected(case), on_threads(2, body))


def test_the_least_balanced_layer_gets_the_memory() -> None:
    case = Case(ranks=2, blocks=2, shapes=((30,), (30,)), steps=3, top_k=1)

    def body(group: Collective) -> list[list[int]]:
        run = Run(case, group, Greedy(()), replica_memory_bytes=budget(case, 1))
        for bias_on in (0, 1):  # all of layer 1's tokens want an expert of rank 0
            run.model.moe(bias_on).gate.bias = torch.tensor([10.0 * bias_on, 0, 0, 0], dtype=torch.float64)
        copies = []
        for s in range(3):
            step = run.whole_step(s)
            assert step.report is not None
            copies.append(step.report.copies.sum(axis=1).tolist())
        run.close()
        return copies

    for copies in on_threads(2, body):
        assert copies[2] == [0, 2]


def test_a_budget_too_small_for_one_replica() -> None:
    case = Case(ranks=2)
    need = taken(case)[0]

    def body(group: Collective) -> None:
        with pytest.raises(ReplicaMemoryError, match=rf"is {need - 1}, but one replica takes {need} bytes"):
            Run(case, group, FixedPlanner(()), replica_memory_bytes=need - 1)
        Run(case, group, HomesPlanner(), replica_memory_bytes=need - 1).close()
        Run(case, group, FixedPlanner(()), replica_memory_bytes=need).close()

    on_threads(2, body)


def test_layers_of_different_sizes_share_a_budget() -> None:
    """Free buffers of one size make room for another."""
    pool = ReplicaPool(1000)
    small = [pool.take(20, torch.float64, torch.device("cpu")) for _ in range(3)]  # 320 bytes each
    for pair in small:
        pool.give(*pair)
    large = pool.take(60, torch.float64, torch.device("cpu"))  # 960 bytes
    assert pool.in_use_bytes == pool.held_bytes == 960
    pool.give(*large)
    assert pool.in_use_bytes == 0


# --- repeatability ---


def test_two_runs_are_bitwise_equal() -> None:
    case = Case(ranks=4, shapes=((2, 3), (4,), (0,), (7,)), density=0.8, gate={"aux_loss": "switch"})

    def once() -> list[list[Step]]:
        return on_threads(4, lambda group: train(case, group))

    for first, second in zip(once(), once(), strict=True):
        for a, b in zip(first, second, strict=True):
            assert a.loss == b.loss
            for name, grad in {**a.dense, **a.experts}.items():
                assert np.array_equal(grad, {**b.dense, **b.experts}[name]), name
            assert a.report is not None
            assert b.report is not None
            assert a.report.actions == b.report.actions
            assert np.array_equal(a.report.rank_load, b.report.rank_load)


def test_agg_adds_in_rank_order() -> None:
    """Three replicas' gradients whose float32 sum depends on the order: 1e8 - 1e8 + 1 is 1 in rank order only."""
    parts = {1: 1e8, 2: -1e8, 3: 1.0}
    placement = Placement.with_replicas([0, 1, 2, 3], 4, [(0, 1), (0, 2), (0, 3)])

    class Layer:
        def __init__(self, rank: int) -> None:
            self.experts = FeedForwardBank(2, 2, 1, first_expert=rank, total_experts=4, ep_size=1)

    def body(group: Collective) -> torch.Tensor | None:
        layer = Layer(group.rank)
        runtime = Runtime([layer], group, ReplicaPool(), block_wise(1))
        runtime.begin([placement])
        step = runtime.step
        assert step is not None
        for replica in step.blocks[0].arrived():
            replica.grads.fill_(parts[group.rank])
        probe = torch.ones((), requires_grad=True)
        probe.register_hook(lambda _: step.enter(Window("BEC", 0)))
        probe.backward()
        runtime.end()
        return layer.experts.w_in.grad

    for _ in range(3):
        grad = on_threads(4, body)[0]
        assert grad is not None
        assert torch.equal(grad, torch.ones_like(grad))


class SlowTrans(RecordingCollective):
    """Takes its time over launching Trans, and over nothing else."""

    def all_to_all(self, x: Tensor, send_rows: Any, recv_rows: Any, *, op: Operation, channel: Any = "tokens") -> Any:
        if str(op).startswith("Trans"):
            time.sleep(0.1)
        return super().all_to_all(x, send_rows, recv_rows, op=op, channel=channel)


@pytest.mark.parametrize("schedule", ["block-wise", "blocking"])
def test_exposed_seconds_are_counted_once(schedule: str) -> None:
    case = Case(ranks=4, blocks=2, schedule=schedule, shapes=((5,),) * 4, slots=8, transfers="direct")
    run = Run(case, SlowTrans(1, 4), FixedPlanner(everywhere(8, 4)))
    run.whole_step(0)
    began = time.perf_counter()
    run.whole_step(1)
    whole_s = time.perf_counter() - began
    report = run.engine.last_step
    assert report is not None
    assert 0.2 <= report.seconds["exposed_trans"] <= whole_s
    run.engine.close()
