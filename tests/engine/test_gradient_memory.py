"""Bytes beside the gradients: their norm takes an eighth of the largest one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gradient_memory.peak import PeakBytes
from prophet.parallel import clip_grad_norm_
from prophet.ranks.threads import ThreadWorld


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
