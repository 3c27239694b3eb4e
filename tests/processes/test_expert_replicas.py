"""Data parallelism around expert parallelism: 2 x 2 processes against one process without parallelism."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.engine.config import Experiment
from prophet.parallel import ExpertReplicas, expert_groups
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import on_processes
from tests.helpers.support import RandomPlanner, next_id_loss, seeded
from tests.helpers.training import SCALE, Case, Step, compare, expected, measure

# 4 ranks' batches; the oracle knows nothing of groups, so experts_per_rank counts as if there were one group
CASE = Case(ranks=4, shapes=((4,), (0,), (2,), (5,)), seed=11, microbatches=2, gate={"capacity_factor": 0.7})


def two_by_two(balanced: bool) -> list[Step]:
    ep, replicas = expert_groups(2)
    rank = torch.distributed.get_rank()
    model = CASE.model(ep)
    model.load_state_dict(CASE.state())
    if rank >= 2:  # replicas are made equal at the start
        with torch.no_grad():
            for p in model.parameters():
                if getattr(p, "prophet_expert", False):
                    p.add_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=CASE.lr)
    averager = ExpertReplicas(model, replicas)
    engine = None
    if balanced:
        config = prophet.EngineConfig(
            planner=RandomPlanner(5, 0.8), slots_per_rank=4, accumulation_steps=CASE.microbatches
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is left to warn of
            engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    wrapped = DistributedDataParallel(model)
    steps = []
    for s in range(CASE.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for m in range(CASE.microbatches):
            ids = CASE.ids(s, m)[rank]
            loss = next_id_loss(wrapped(ids), ids, SCALE)
            loss.backward()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        steps.append(Step(*measure(model, total / 4), None))
        optimizer.step()
    if engine is not None:
        engine.close()
    averager.close()
    return steps


def skipped_layers() -> Any:
    """The second group leaves one layer out: its experts have no gradient there, and get half of the others'."""
    ep, replicas = expert_groups(2)
    rank = torch.distributed.get_rank()
    with seeded(1):
        moes = torch.nn.ModuleList(prophet.MoE(4, 6, 4, group=ep) for _ in range(3))
    ExpertReplicas(moes, replicas)
    x = torch.ones(3, 4, requires_grad=True)
    y = moes[0](x)
    if rank < 2:
        y = y + moes[1](x)
    y.sum().backward()
    found = []
    for layer in moes:
        grads = [p.grad for _, p in layer.experts.named_parameters()]
        found.append([None if g is None else float(g.double().square().sum()) for g in grads])
    return found


def wrong() -> list[str]:
    found = []
    for size in (3, 0, 8):
        with pytest.raises(ValueError, match="processes cannot be divided") as caught:
            expert_groups(size)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("balanced", [False, True])
def test_gradients_equal_the_oracle(balanced: bool) -> None:
    compare(expected(CASE), on_processes(4, two_by_two, balanced, timeout_s=90))


def test_layers_that_run_on_some_replicas_only() -> None:
    by_rank = on_processes(4, skipped_layers, timeout_s=60)
    for rank in range(2):
        first, second, third = by_rank[rank]
        assert by_rank[rank + 2][1] == second
        assert all(g is not None for g in first + second)
        assert third == [None] * 4
    assert any(g for rank in by_rank[:2] for g in rank[1])


def test_groups_that_do_not_fit() -> None:
    assert on_processes(4, wrong)[0][0] == "4 processes cannot be divided into expert-parallel groups of 3"


def test_on_threads_the_mean_of_a_mean_changes_nothing() -> None:
    """Two groups of one rank: after any number of backward passes a gradient is the mean over both."""
    grads = []
    for repeat in (1, 3):

        def body(replicas: Any, repeat: int = repeat) -> Any:
            with seeded(2):
                layer = prophet.MoE(4, 6, 2, group=ThreadWorld(1).collective(0))
            averager = ExpertReplicas(layer, replicas)
            x = torch.linspace(-1, 1, 12).view(3, 4) * (1 + replicas.rank)
            for _ in range(repeat):
                layer(x).square().sum().backward()
            averager.average()  # again is harmless
            assert layer.experts.w_in.grad is not None
            return layer.experts.w_in.grad.clone()

        from tests.helpers.support import on_threads

        one, two = on_threads(2, body)
        assert torch.equal(one, two)
        grads.append(one)
    np.testing.assert_allclose(grads[1], 3 * grads[0], rtol=1e-5, atol=1e-6)


def test_balancing_biases_follow_the_choices_of_all_groups() -> None:
    """Two groups of one rank that route differently: their gates stay copies of each other."""

    def body(replicas: Any) -> Any:
        group = ThreadWorld(1).collective(0)
        model = torch.nn.ModuleList(
            prophet.MoE(4, 6, experts, group=group, gate=prophet.GateConfig(bias_update_rate=rate))
            for experts, rate in ((2, 0.5), (4, 0.0), (4, 0.5))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averager = ExpertReplicas(model, replicas)
        engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner="static"))
        for layer in model:
            layer.gate.weight.data.zero_()[replicas.rank] = 1.0  # expert 0 in the first group, 1 in the second
            layer.top_k = layer.gate.top_k = 1
        engine.ensure_step()
        x = torch.ones(3 + replicas.rank, 4)
        sum(layer(x).sum() for layer in model).backward()
        optimizer.step()
        engine.close()
        averager.close()
        return [None if m.gate.bias is None else m.gate.bias.tolist() for m in model]

    from tests.helpers.support import on_threads

    one, two = on_threads(2, body)
    # of 7 choices the second group made 4
    assert one == two == [[0.5, -0.5], None, [-0.5, -0.5, 0.5, 0.5]]


def test_a_model_without_experts() -> None:
    with pytest.raises(ValueError, match=r"has no prophet\.MoE layer"):
        ExpertReplicas(torch.nn.Linear(2, 2), ThreadWorld(1).collective(0))


def test_experts_without_rows_keep_no_process_waiting() -> None:
    """Two copies of a layer of modules: one has no tokens at all, and one expert is visited by neither."""

    def body(replicas: Any) -> Any:
        with seeded(3):
            layer = prophet.MoE(4, num_experts=3, top_k=1, expert=lambda: torch.nn.Linear(4, 4), group=alone)
            with torch.no_grad():
                layer.gate.weight.zero_()
                layer.gate.weight[0, 0], layer.gate.weight[1, 0] = 1.0, -1.0
        averager = ExpertReplicas(layer, replicas)
        x = torch.tensor([[1.0, 2, 3, 4], [-1.0, 2, 3, 4]])[: 2 * (1 - replicas.rank)]
        layer(x.requires_grad_()).sum().backward()
        averager.close()
        return [[None if p.grad is None else p.grad.clone() for p in e.parameters()] for e in layer.experts.children()]

    from tests.helpers.support import on_threads

    alone = ThreadWorld(1).collective(0)
    one, two = on_threads(2, body, timeout_s=10)
    assert one[2] == two[2] == [None, None]
    for a, b in zip(one[:2], two[:2], strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
        assert torch.equal(a[1], torch.full((4,), 0.5))  # the mean of one row's gradient and of none
