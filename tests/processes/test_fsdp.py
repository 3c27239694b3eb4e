"""FSDP2 cuts the dense parameters over all processes and leaves the experts whole, in groups of two and of four."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import prophet
from prophet.parallel import ExpertReplicas, expert_groups, expert_parameters
from prophet.ranks.process_group import figures_of_parts
from prophet.ranks.stretches import sum_of_powers
from tests.helpers.launch import on_processes
from tests.helpers.support import RandomPlanner, dense_parameters, expert_gradients, next_id_loss
from tests.helpers.training import SCALE, Case, Step, compare, expected

# 4 ranks' batches; the oracle knows nothing of groups
CASE = Case(ranks=4, shapes=((4,), (0,), (2,), (5,)), seed=12, microbatches=2)


def whole(x: Tensor) -> Any:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).numpy().copy()


def fsdp_run(ep_size: int, nested: bool) -> tuple[list[Step], list[float], set[str]]:
    ep, replicas = expert_groups(ep_size)
    rank = torch.distributed.get_rank()
    model = CASE.model(ep)
    model.load_state_dict(CASE.state())
    experts = {p for _, p in expert_parameters(model)}
    if nested:
        for module in (*model.mixes, *model.moes):
            fully_shard(module, ignored_params=experts)
    fully_shard(model, ignored_params=experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=CASE.lr)
    averager = ExpertReplicas(model, replicas)
    config = CASE.engine_config(RandomPlanner(5, 0.8))
    engine = prophet.attach(model, optimizer, config=config)
    steps, norms = [], []
    for s in range(CASE.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for m in range(CASE.microbatches):
            if nested:  # only the last backward pass of a step communicates
                averager.enabled = m == CASE.microbatches - 1
                model.set_requires_gradient_sync(averager.enabled)
            ids = CASE.ids(s, m)[rank]
            loss = next_id_loss(model(ids), ids, SCALE)
            loss.backward()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        norms.append(float(engine.clip_grad_norm_(model.parameters(), 1e9)))
        dense = {n: whole(p.grad) for n, p in dense_parameters(model).items() if p.grad is not None}
        steps.append(Step(float(total / 4), dense, {n: g.numpy() for n, g in expert_gradients(model).items()}, None))
        optimizer.step()
    clipped = float(engine.clip_grad_norm_(model.parameters(), norms[-1] / 2))
    norms.append(float(engine.clip_grad_norm_(model.parameters(), 1e9)) / clipped)
    cut = {n for n, p in model.named_parameters() if hasattr(p, "full_tensor")}
    engine.close()
    averager.close()
    return steps, norms, cut


@pytest.mark.parametrize(("ep_size", "nested"), [pytest.param(2, False, marks=pytest.mark.slow), (2, True), (4, True)])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_gradients_equal_the_oracle(ep_size: int, nested: bool) -> None:
    by_rank = on_processes(4, fsdp_run, ep_size, nested, timeout_s=90)
    wanted = expected(CASE)
    compare(wanted, [r[0] for r in by_rank])
    for _, norms, cut in by_rank:
        assert cut == {n for n in wanted[0][1] if ".experts." not in n}
        assert norms[:-1] == pytest.approx([np.sqrt(sum((g**2).sum() for g in grads.values())) for _, grads in wanted])
        assert norms[-1] == pytest.approx(0.5, rel=1e-3)


def forgotten() -> list[str]:
    found = []
    for nested in (False, True):
        ep, replicas = expert_groups(2)
        model = CASE.model(ep)
        if nested:
            fully_shard(model.moes[0])
        fully_shard(model)
        ids = CASE.ids(0, 0)[0]
        tries: list[Any] = [
            lambda m=model, r=replicas: ExpertReplicas(m, r),
            lambda m=model: prophet.attach(m, config=CASE.engine_config()),
            lambda m=model, i=ids: m(i),
        ]
        for attempt in tries:
            with pytest.raises(ValueError, match=r"ignored_params=\{p for _, p in") as caught:
                attempt()
            found.append(str(caught.value))
    return found


def test_experts_that_were_cut_are_refused() -> None:
    """Gathering them would mix the experts of different ranks without a word."""
    assert len(on_processes(2, forgotten, timeout_s=60)[0]) == 6


def reduced_precision() -> list[float]:
    """In bfloat16 by FSDP's policy, and under autocast: the gradients' norms, and that of float32."""
    found = []
    for how in ("policy", "autocast", "float32"):
        ep, _ = expert_groups(2)
        model = CASE.model(ep).float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how == "policy" else MixedPrecisionPolicy()
        experts = {p for _, p in expert_parameters(model)}
        fully_shard(model, mp_policy=policy, ignored_params=experts)
        ids = CASE.ids(0, 0)[torch.distributed.get_rank()]
        if how == "policy":
            with pytest.raises(ValueError, match=r"has torch\.float32 parameters, got torch\.bfloat16"):
                model(ids)
            for moe in model.moes:
                moe.experts.to(torch.bfloat16)
        engine = prophet.attach(model, config=CASE.engine_config(RandomPlanner(5, 0.8)))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            loss = next_id_loss(model(ids).float(), ids, SCALE)
        loss.backward()
        found.append(float(engine.clip_grad_norm_(model.parameters(), 1e9)))
        engine.close()
    return found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_reduced_precision() -> None:
    policy, autocast, exact = on_processes(2, reduced_precision, timeout_s=60)[0]
    assert policy == pytest.approx(exact, rel=0.05)
    assert autocast == pytest.approx(exact, rel=0.05)
    assert exact > 0


def norms_by_type(rows: int, cut: bool) -> list[tuple[float, float, float]]:
    """The norm, torch's of the whole gradient, and the greatest gradient after clipping to half of the norm."""
    found = []
    for kind in (1, 2, 3.5, math.inf):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4), prophet.MoE(4, 6, 3)).double()
        if cut:
            fully_shard(model, ignored_params={p for _, p in expert_parameters(model)})
        engine = prophet.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
        seed = torch.distributed.get_rank() if cut else 0  # nobody averages
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).double()).square().sum().backward()
        every = whole_gradients(model)
        norm = engine.clip_grad_norm_(model.parameters(), 1e9, norm_type=kind)
        engine.clip_grad_norm_(model.parameters(), float(norm) / 2, norm_type=kind)
        left = float(whole_gradients(model).abs().max() / every.abs().max())
        found.append((float(norm), float(torch.linalg.vector_norm(every, kind)), left))
        engine.close()
    return found


def whole_gradients(model: nn.Module) -> Tensor:
    """Everybody's, each of them once."""
    parts = []
    for p in model.parameters():
        grad: Any = p.grad
        if getattr(p, "prophet_expert", False):
            own = [torch.empty_like(grad) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(own, grad.contiguous())
            parts += own
        else:
            parts.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize(("rows", "cut"), [(5, True), (2, True), (5, False)])
def test_norms_of_other_types(rows: int, cut: bool) -> None:
    """Of two rows over three ranks, one rank has none."""
    by_rank = on_processes(3, norms_by_type, rows, cut)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    for norm, wanted, left in by_rank[0]:
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert left == pytest.approx(0.5, rel=1e-5)


def cut_in_several_ways() -> list[tuple[float, float]]:
    """The sum of squares and the greatest number: cut by rows, whole on all ranks, and with terms still to be added."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(6.0).view(3, 2)
    bad = torch.where(whole == 5.0, math.nan, whole)
    cut = [distribute_tensor(x, mesh, [placement]) for x in (whole, bad) for placement in (Shard(0), Replicate())]
    added = DTensor.from_local(whole / mesh.size(), mesh, [Partial()])
    return [tuple(_figures(x)) for x in (*cut, added)]  # type: ignore[misc]


def _figures(x: Tensor) -> list[float]:
    return [
        float(figures_of_parts(x, lambda part: sum_of_powers(part, 2)).sum()),
        float(figures_of_parts(x, lambda part: sum_of_powers(part, math.inf)).amax()),
    ]


def test_each_part_of_a_gradient_counts_once() -> None:
    """Of three rows over four ranks, one rank has none."""
    for found in on_processes(4, cut_in_several_ways, timeout_s=60):
        by_rows, everywhere, bad, bad_everywhere, added = found
        assert by_rows == everywhere == added == (55.0, 5.0)
        assert all(math.isnan(figure) for figure in (*bad, *bad_everywhere))
