"""DistributedDataParallel averages the dense gradients and leaves the experts' alone; and a run repeats bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner, everywhere, next_id_loss
from tests.helpers.training import SCALE, Case, Step, compare, expected, measure, train_in_process

CASE = Case(ranks=4, shapes=((4,), (0,), (2,), (5,)), seed=21, microbatches=2)
ALL = everywhere(8, 4)


def ddp_run(case: Case) -> tuple[list[Step], list[float]]:
    """The loop of a user who knows nothing of collectives."""
    group = collective_for(None)
    model = case.model(group)
    model.load_state_dict(case.state())
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    engine = prophet.attach(model, optimizer, config=case.engine_config(FixedPlanner(ALL), slots_per_rank=8))
    wrapped = DistributedDataParallel(model)
    steps, norms = [], []
    for s in range(case.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for m in range(case.microbatches):
            ids = case.ids(s, m)[group.rank]
            loss = next_id_loss(wrapped(ids), ids, SCALE)
            loss.backward()
            total += loss.detach()
        group.all_reduce_mean_([total])
        norms.append(float(engine.clip_grad_norm_(model.parameters(), 1e9)))
        steps.append(Step(*measure(model, total), None))
        optimizer.step()
    if [str(a)[:3] for a in (engine.last_step.actions if engine.last_step else ())] != ["TRA"] * 4 + ["AGG"] * 4:
        raise RuntimeError("replicas should have travelled once per step")
    engine.close()
    return steps, norms


def refused() -> None:
    model = CASE.model(collective_for(None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model)
    config = CASE.engine_config(FixedPlanner(()))
    with pytest.raises(ValueError, match="before wrapping the model"):
        prophet.attach(wrapped, optimizer, config=config)
    ids = torch.arange(4)
    with pytest.raises(ValueError, match="averages the experts' parameters, which are others on every rank: call"):
        wrapped(ids)
    late = prophet.attach(model, optimizer, config=config)
    with pytest.raises(ValueError, match="averages the experts' parameters"):
        wrapped(ids)
    late.close()
    # a model that was marked in time may be attached through its wrapper
    again = CASE.model(collective_for(None))
    prophet.attach(again, config=config).close()
    prophet.attach(DistributedDataParallel(again), config=config).close()


def all_checks() -> Any:
    refused()
    first, norms = ddp_run(CASE)
    second, _ = ddp_run(CASE)
    return first, second, norms, train_in_process(replace(CASE, seed=5)), train_in_process(replace(CASE, seed=5))


def test_ddp_and_repeatability() -> None:
    by_rank = on_processes(4, all_checks, timeout_s=120)
    wanted = expected(CASE)
    compare(wanted, [r[0] for r in by_rank])
    for first, second, norms, plain, plain_again in by_rank:
        for a, b in [*zip(first, second, strict=True), *zip(plain, plain_again, strict=True)]:
            assert a.loss == b.loss
            for name, grad in {**a.dense, **a.experts}.items():
                assert np.array_equal(grad, {**b.dense, **b.experts}[name]), name
        for norm, (_, grads) in zip(norms, wanted, strict=True):
            assert abs(norm - np.sqrt(sum((g**2).sum() for g in grads.values()))) < 1e-10
