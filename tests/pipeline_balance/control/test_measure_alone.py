"""Measuring layers one at a time, without a pipeline."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.pipeline.measure.meter_alone import measure_alone
from pipeline_balance.spec import RankLimits
from prophet.errors import SpecError

DIM = 6


class _Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def test_slow_layers_are_found_and_cut_apart() -> None:
    layers: list[nn.Module] = [_Slow(s) for s in (0.0, 0.0, 0.0, 0.02, 0.02)]
    costs = measure_alone(layers, torch.randn(3, DIM), repeats=3)
    assert [c.forward_s > 0.015 for c in costs] == [False] * 3 + [True] * 2
    assert partition_by_time(costs, RankLimits.uniform(2), microbatches=4).boundaries == (0, 4, 5)
    assert {c.name for c in costs} == {"_Slow"}


def test_bytes_and_backward_parts() -> None:
    frozen = nn.Linear(DIM, DIM).requires_grad_(False)
    layers = [nn.Embedding(11, DIM), frozen, lambda: nn.Linear(DIM, DIM), nn.Tanh()]
    costs = measure_alone(
        layers,
        torch.arange(4),
        target=torch.zeros(4, DIM),
        loss_fn=nn.functional.mse_loss,
        make_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        repeats=2,
    )
    size = (DIM * DIM + DIM) * 4
    assert [c.parameter_bytes for c in costs] == [11 * DIM * 4, size, size, 0]
    assert [c.gradient_bytes for c in costs] == [11 * DIM * 4, 0, size, 0]
    # two moments, and a counter of four bytes per parameter
    assert costs[2].optimizer_bytes == 2 * size + 8
    assert costs[1].optimizer_bytes == 0
    # nothing below the first layer wants a gradient, the frozen one only hands it on
    assert costs[0].backward_input_s == 0.0 < costs[0].backward_weight_s
    assert costs[1].backward_weight_s == 0.0 < costs[1].backward_input_s
    assert all(c.activation_bytes > 0 for c in costs[2:])


def test_a_frozen_prefix_has_no_backward() -> None:
    layers = [nn.Linear(DIM, DIM).requires_grad_(False), nn.Linear(DIM, DIM)]
    costs = measure_alone(layers, torch.randn(2, DIM), repeats=1)
    assert costs[0].backward_s == 0.0 < costs[0].forward_s
    assert costs[1].backward_input_s == 0.0


def test_what_is_measured_stays_as_it_is() -> None:
    layer = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.5))
    before, stream = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    measure_alone([layer], torch.randn(4, DIM), make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0), repeats=1)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())
    assert layer[0].weight.grad is None
    # only the inputs have drawn numbers
    torch.set_rng_state(stream)
    torch.randn(4, DIM)
    after = torch.get_rng_state()
    torch.set_rng_state(stream)
    measure_alone([layer], torch.randn(4, DIM), repeats=1)
    assert torch.equal(torch.get_rng_state(), after)


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_bad_input_is_named() -> None:
    with pytest.raises(SpecError, match="layer 1 returns a tuple, expected one tensor"):
        measure_alone([nn.Identity(), _Pair()], torch.zeros(2, DIM))
    with pytest.raises(SpecError, match="at least one layer"):
        measure_alone([], torch.zeros(2, DIM))
    with pytest.raises(SpecError, match="both loss_fn and target"):
        measure_alone([nn.Identity()], torch.zeros(2, DIM), target=torch.zeros(2, DIM))
