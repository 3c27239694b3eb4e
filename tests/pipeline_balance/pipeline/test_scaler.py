"""All ranks skip the same updates and hold the same scale as a plain GradScaler in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.run.gradients.scaler import PipelineScaler, check_scaler
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

CPU = torch.device("cpu")
RANKS, STEPS = 3, 9
INFINITE = {(2, 0), (3, 1), (7, 0)}  # (step, parameter)
OPTIONS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}


def gradient(step: int, which: int, scale: float) -> Tensor:
    bad = float("inf") if (step, which) in INFINITE else 1.0
    return torch.full((2,), (step + which + 1.0) * scale * bad)


def optimizer_of(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "fused":
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)
    return torch.optim.SGD(parameters, lr=0.1)


def train(scaler: torch.amp.GradScaler, held: dict[int, nn.Parameter], kind: str) -> tuple[list[float], list[float]]:
    """Scales after every step, and what the parameters are in the end; two parameters, a rank holds some or none."""
    elsewhere = [nn.Parameter(torch.ones(2, device="meta")) for i in range(2) if i not in held]
    optimizer = optimizer_of(kind, [*held.values(), *elsewhere])
    scales = []
    for step in range(STEPS):
        for which, p in held.items():
            p.grad = gradient(step, which, scaler.get_scale())
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [float(p[0].detach()) for p in held.values()]


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_ranks_do_what_one_process_does(kind: str) -> None:
    plain = torch.amp.GradScaler("cpu", **OPTIONS)
    plain.scale(torch.ones(()))
    both = {i: nn.Parameter(torch.ones(2)) for i in range(2)}
    scales, values = train(plain, both, kind)
    assert len(set(scales)) > 2

    def run(world: Collective) -> tuple[list[float], list[float], dict[str, Any]]:
        held = {world.rank: nn.Parameter(torch.ones(2))} if world.rank < 2 else {}
        scaler = PipelineScaler(lambda: world, CPU, **OPTIONS)
        return *train(scaler, held, kind), scaler.state_dict()

    results = ThreadWorld(RANKS).run(run)
    assert [scale for scale, _, _ in results] == [scales] * RANKS
    assert [value for _, rank, _ in results for value in rank] == values
    assert [state for _, _, state in results] == [plain.state_dict()] * RANKS


def test_the_scale_is_there_before_any_loss_and_comes_back() -> None:
    def run(world: Collective) -> tuple[float, dict[str, Any]]:
        scaler = PipelineScaler(lambda: world, CPU, init_scale=8.0)
        assert scaler.get_scale() == 8.0
        before = scaler.state_dict()
        scaler.update(2.0)
        other = PipelineScaler(lambda: world, CPU)
        other.load_state_dict(scaler.state_dict())
        return other.get_scale(), before

    assert [scale for scale, _ in ThreadWorld(2).run(run)] == [2.0, 2.0]


def test_no_gradient_anywhere_is_an_error_on_all_ranks_as_in_torch() -> None:
    def run(world: Collective) -> str:
        p = nn.Parameter(torch.ones(2))
        with pytest.raises(AssertionError, match="No inf checks"):
            PipelineScaler(lambda: world, CPU).step(torch.optim.SGD([p], lr=0.1))
        return "refused"

    assert ThreadWorld(2).run(run) == ["refused"] * 2


def test_scales_that_differ_are_refused_on_all_ranks() -> None:
    def run(world: Collective) -> str:
        p = nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        scaler = PipelineScaler(lambda: world, CPU, init_scale=4.0 + 4.0 * world.rank)
        with pytest.raises(SpecError, match="scale differs: 4 on rank 0, 8 on rank 1; call update"):
            scaler.step(torch.optim.SGD([p], lr=0.1))
        return "refused"

    assert ThreadWorld(2).run(run) == ["refused"] * 2


def test_a_scaler_that_is_off_sends_nothing() -> None:
    world = ThreadWorld(2, timeout_s=0.1).collective(0)  # nobody would answer
    scaler = PipelineScaler(lambda: world, CPU, enabled=False)
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    scaler.step(torch.optim.SGD([p], lr=1.0))
    scaler.update()
    assert scaler.scale(torch.ones(())) == 1.0
    assert p.tolist() == [0.0, 0.0]


def test_others_are_refused_by_name() -> None:
    check_scaler(None)
    check_scaler(PipelineScaler(lambda: ThreadWorld(1).collective(0), CPU))
    with pytest.raises(SpecError, match=r"plain torch\.amp\.grad_scaler\.GradScaler: it would see .* pipe\.scaler\("):
        check_scaler(torch.amp.GradScaler("cpu"))
    with pytest.raises(SpecError, match=r"plain builtins\.float; write"):
        check_scaler(2.0)
