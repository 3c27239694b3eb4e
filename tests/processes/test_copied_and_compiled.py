"""Averaged copies of a model, and compiled ones: what people put around a model goes on over two processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import prophet
from prophet.convert import original_state_dict
from tests.helpers.hand_written import DIM, FloatSoftmax
from tests.helpers.launch import on_processes
from tests.helpers.support import seeded

DECAY = 0.75


class Net(nn.Module):
    """One hand-written block between two linear layers, in float64; nothing in it is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.first, self.block, self.last = nn.Linear(DIM, DIM), FloatSoftmax(), nn.Linear(DIM, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.block(torch.tanh(self.first(x)))[0])
        return y


def built(kind: str) -> nn.Module:
    if kind == "converted":
        return Net()
    with seeded(3):
        expert = None if kind == "feed-forward" else (lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)))
        layer = prophet.MoE(DIM, None if expert else 12, 8, expert=expert)
        return nn.Sequential(nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 3)).double()


def given(step: int) -> Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())).double()


def averaged(kind: str) -> dict[str, bool]:
    """Averages made before and after `attach`, and copies, beside what their definition says."""
    model = built(kind)
    if kind == "converted":
        prophet.convert(model)
    fresh = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    early: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    engine = prophet.attach(model, optimizer)
    late: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    wrapped = DistributedDataParallel(model)
    mean: dict[str, Tensor] = {}
    same = {}
    for step in range(3):
        wrapped(given(step)).square().mean().backward()
        copied = copy.deepcopy(model)  # in the middle of a step
        optimizer.step()
        optimizer.zero_grad()
        for n, p in model.state_dict().items():
            mean[n] = DECAY * mean[n] + (1 - DECAY) * p.detach() if step else p.detach().clone()
        for average in (early, late):
            average.update_parameters(model)
            average.eval()(given(step))  # beside the training of the model
        copied(given(step)).sum().backward()
    same["the engine follows the model alone"] = engine.step == 3
    fresh.load_state_dict(mean)
    for name, average in (("early", early), ("late", late)):
        found = average.module.state_dict()
        same[name] = all(torch.allclose(found[n], t, rtol=0, atol=1e-12) for n, t in mean.items())
        same[f"{name} answers"] = torch.allclose(average(given(9)), fresh.eval()(given(9)), rtol=0, atol=1e-10)
    if kind == "converted":
        alone = Net()
        alone.load_state_dict(original_state_dict(late.module))
        same["original"] = torch.allclose(alone(given(9)), late(given(9)), rtol=0, atol=1e-10)
    model.load_state_dict(late.module.state_dict())
    same["taken over"] = torch.allclose(model.eval()(given(9)), fresh(given(9)), rtol=0, atol=1e-10)
    engine.close()
    return same


@pytest.mark.parametrize("kind", ["converted", "feed-forward", "modules"])
def test_averages_and_copies(kind: str) -> None:
    for same in on_processes(2, averaged, kind):
        assert all(same.values()), same


def compiled() -> dict[str, list[Tensor]]:
    """Answers of three steps, without torch.compile and with it in its four places."""
    found = {}
    for place in ("nowhere", "before convert", "after attach", "around DDP", "before, DDP inside"):
        model = Net()
        outer: Any = torch.compile(model, backend="eager") if "before" in place else model
        prophet.convert(outer)
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        engine = prophet.attach(outer, optimizer)
        if place == "after attach":
            outer = torch.compile(model, backend="eager")
        outer = DistributedDataParallel(model if place == "before, DDP inside" else outer)
        if place == "around DDP":
            outer = torch.compile(outer, backend="eager")
        answers = found[place] = []
        for step in range(3):
            y = outer(given(step))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            answers.append(y.detach())
        engine.close()
    return found


def test_compiled_before_and_after() -> None:
    for found in on_processes(2, compiled, timeout_s=120):
        for answers in found.values():
            for y, wanted in zip(answers, found["nowhere"], strict=True):
                assert torch.allclose(y, wanted, rtol=0, atol=1e-10)
