"""Bytes beside the gradients: means over replicas of experts take less than the gradients, the norm an eighth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import prophet
from benchmarks.gradient_memory.peak import Metered, PeakBytes
from prophet.parallel import ExpertReplicas, clip_grad_norm_
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.support import on_threads


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_means_of_experts(ranks: int) -> None:
    def body(group: Collective) -> tuple[int, int, bool]:
        layer = prophet.MoE(32, 128, 16, bias=False, group=ThreadWorld(1).collective(0))
        peak = PeakBytes()
        averager = ExpertReplicas(layer, Metered(group, peak))
        parameters = list(layer.experts.parameters())
        for p in parameters:
            p.grad = torch.full_like(p, float(group.rank))
        with peak:
            averager.average()
        grads = [p.grad for p in parameters if p.grad is not None]
        right = len(grads) == 2 and all(bool((g == (ranks - 1) / 2).all()) for g in grads)
        return peak.peak_bytes, sum(g.nbytes for g in grads), right

    for found, gradients, right in on_threads(ranks, body):
        assert right
        assert 0 < found <= gradients


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm(norm_type: float) -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 11, 1 << 11, dtype=torch.bfloat16)) for _ in range(2)]
    for p in parameters:
        p.grad = torch.randn(p.shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(4))
    with (peak := PeakBytes()):
        found = clip_grad_norm_(parameters, math.inf, ThreadWorld(1).collective(0), torch.device("cpu"), norm_type)
    every: Tensor = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    assert float(found) == pytest.approx(float(torch.linalg.vector_norm(every, norm_type)), rel=1e-13)
    few = 64 * 16 + 256
    assert 0 < peak.peak_bytes <= parameters[0].nbytes / 8 + few
