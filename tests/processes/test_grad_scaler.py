"""torch's GradScaler in a script that knows nothing of ranks: a gradient that is infinite on one, all ranks skip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.parallel import ExpertReplicas, expert_groups, expert_parameters
from tests.helpers.launch import on_processes, process_outcomes
from tests.helpers.support import FixedPlanner, everywhere, next_id_loss
from tests.helpers.training import SCALE, Case

OVERFLOWS = 2  # the step in which a gradient is infinite
STEPS = OVERFLOWS + 11
SCALE_AT_FIRST = 1024.0
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def case_of(ranks: int) -> Case:
    shapes = ((4,), (0,), (2,), (5,)) if ranks == 4 else ((2, 3), (4,))
    return Case(ranks=ranks, shapes=shapes, seed=3)


@dataclass(frozen=True)
class End:
    """What a rank has at its run's end: the loss scale, the engine's steps, replicas in the last one, parameters."""

    scale: float
    steps: int
    copies: int
    shared: dict[str, Any]
    experts: dict[str, Any]


def run(case: Case, ep_size: int, how: str, where: str | None) -> End:
    """Train with a GradScaler; where is the gradient of one expert of rank 1 infinite, "in backward" or "after" it?

    None: without a scaler, and the optimizer's step is left out on all ranks.
    """
    group, replicas = expert_groups(ep_size)
    rank = torch.distributed.get_rank()
    model = case.model(group)
    model.load_state_dict(case.state())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **OPTIMIZERS[how])
    averager = ExpertReplicas(model, replicas) if replicas.size > 1 else None
    planner = FixedPlanner(everywhere(group.size * 2, group.size))
    config = prophet.EngineConfig(planner=planner, slots_per_rank=8, timeout_s=40.0)
    engine = prophet.attach(model, optimizer, config=config)
    wrapped = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE_AT_FIRST, enabled=where is not None)
    weight = dict(model.moe(0).experts.named_parameters())["w_in"]
    step = 0

    def overflow(p: torch.Tensor) -> None:
        if step == OVERFLOWS and rank == 1:
            assert p.grad is not None
            p.grad[0, 0, 0] = torch.inf

    if where == "in backward":
        weight.register_post_accumulate_grad_hook(overflow)
    for step in range(STEPS):
        ids = case.ids(step, 0)[rank]
        scaler.scale(next_id_loss(wrapped(ids), ids, SCALE)).backward()
        if where == "after":
            overflow(weight)
        if where is not None or step != OVERFLOWS:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    report = engine.last_step
    copies = 0 if report is None else int(report.copies.sum())
    experts = {n: p.detach().numpy() for n, p in model.named_parameters() if ".experts." in n}
    shared = {n: p.detach().numpy() for n, p in model.named_parameters() if ".experts." not in n}
    engine.close()
    if averager is not None:
        averager.close()
    return End(scaler.get_scale(), engine.step, copies, shared, experts)


def runs(case: Case, ep_size: int) -> dict[tuple[str, str | None], End]:
    cases: list[tuple[str, str | None]] = [(how, where) for how in OPTIMIZERS for where in ("in backward", "after")]
    return {(how, where): run(case, ep_size, how, where) for how, where in [*cases, ("plain", None)]}


@pytest.mark.parametrize(
    ("ranks", "ep_size"),
    [pytest.param(2, 2, marks=pytest.mark.slow), (4, 2), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_all_ranks_skip_the_step(ranks: int, ep_size: int) -> None:
    """Ten steps later: equal scales, equal shared parameters, and those of a run that skips the step by hand."""
    by_rank = on_processes(ranks, runs, case_of(ranks), ep_size, timeout_s=150)
    for rank, found in enumerate(by_rank):
        wanted = found.pop(("plain", None))
        for what, end in found.items():
            first = by_rank[0][what]
            assert end.copies > 0
            assert (end.scale, end.steps) == (SCALE_AT_FIRST / 2, STEPS), (what, rank)
            for name, value in end.shared.items():
                assert np.array_equal(value, first.shared[name]), (what, rank, name)
            for name, value in (end.shared | end.experts).items():
                other = (wanted.shared | wanted.experts)[name]
                np.testing.assert_allclose(value, other, rtol=0, atol=1e-10, err_msg=f"{what} {rank} {name}")


def cut_by_fsdp() -> list[tuple[float, bool]]:
    """FSDP2 leaves every rank a part of the shared gradients; GradScaler takes those and the experts' in one call."""
    case = case_of(2)
    found = []
    for where in ("expert", "shared", None):
        group, _ = expert_groups(2)
        model = case.model(group)
        model.load_state_dict(case.state())
        fully_shard(model, ignored_params={p for _, p in expert_parameters(model)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner="static"))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE_AT_FIRST)
        ids = case.ids(0, 0)[group.rank]
        scaler.scale(next_id_loss(model(ids), ids, SCALE)).backward()
        weight: Any = model.moe(0).experts.w_in if where == "expert" else model.mix(0)
        if where is not None and group.rank == 1:
            getattr(weight.grad, "_local_tensor", weight.grad)[0, 0] = torch.inf
        before = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        after = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        found.append((scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(after, before, strict=True))))
        engine.close()
    return found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_parameters_that_fsdp_has_cut() -> None:
    skipped, taken = (SCALE_AT_FIRST / 2, True), (SCALE_AT_FIRST, False)
    for found in on_processes(2, cut_by_fsdp, timeout_s=60):
        assert found == [skipped, skipped, taken]


def one_rank_goes_on() -> None:
    case = case_of(2)
    group, _ = expert_groups(2)
    model = case.model(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = prophet.EngineConfig(planner="static")
    prophet.attach(model, optimizer, config=config)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        ids = case.ids(step, 0)[group.rank]
        scaler.scale(next_id_loss(model(ids), ids, SCALE)).backward()
        if group.rank == 1 and step == 0:
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_rank_that_leaves_the_scaler_out() -> None:
    """Both ranks hear at once where they are; nobody is aborted."""
    for rank, found in enumerate(process_outcomes(2, one_rank_goes_on, timeout_s=60)):
        assert f"OutOfStep: rank {rank}: the ranks are out of step: " in str(found.error)
        assert "rank(s) [0] at GradScaler's check for infinite gradients, after forward pass 1" in str(found.error)
        assert "rank(s) [1] at MoE layer 0 of forward pass 2 (training)" in str(found.error)
        assert found.exit_code == 3
