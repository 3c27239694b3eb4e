"""Stretches of a tensor are views in logical order; sums of powers are those of a float64 copy, without one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.gradient_memory.peak import PeakBytes
from prophet.ranks.stretches import in_parts, stretches, sum_of_powers


def numbered(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize(
    "x",
    [
        numbered(12),
        numbered(24)[::2],
        numbered(3, 4),
        numbered(3, 4).t(),
        numbered(2, 3, 4).permute(2, 0, 1),
        numbered(4, 6)[:, ::3],
        torch.tensor(5.0),
        numbered(0, 3),
    ],
)
def test_stretches_are_views_in_order(x: Tensor) -> None:
    flat = x.reshape(-1)
    for start in range(x.numel() + 1):
        for stop in range(start, x.numel() + 1):
            found = list(stretches(x, start, stop))
            assert torch.equal(torch.cat([flat[:0], *(part.reshape(-1) for part in found)]), flat[start:stop])
            assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("power", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("numel", [1, 1000, (1 << 18) + 5])
def test_sums_of_powers_are_those_of_a_float64_copy(numel: int, power: float, dtype: torch.dtype) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    before, wide = x.clone(), x.double().abs()
    found = sum_of_powers(x, power)
    assert found.dtype == torch.float64
    assert found.shape == ()
    wanted = wide.amax() if power == math.inf else wide.square().sum() if power == 2 else wide.pow(power).sum()
    torch.testing.assert_close(found, wanted, rtol=0 if power == math.inf or numel <= 1000 else 1e-14, atol=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("power", [1.0, 2.0, math.inf])
def test_what_is_no_number_stays_so(power: float) -> None:
    x = torch.zeros(1 << 18)
    x[5] = math.nan
    assert sum_of_powers(x, power).isnan()
    x[5] = -math.inf
    assert sum_of_powers(x, power) == math.inf
    assert sum_of_powers(x[:0], power) == 0.0


@pytest.mark.parametrize("power", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_of_a_sum_is_an_eighth_of_the_gradient(power: float, transposed: bool) -> None:
    x = torch.ones(1 << 11, 1 << 11, dtype=torch.bfloat16)
    x = x.t() if transposed else x
    with (peak := PeakBytes()):
        sum_of_powers(x, power)
    few = 64 * 16  # a figure of each part, and all of them in one tensor
    assert x.nbytes / 16 < peak.peak_bytes <= x.nbytes / 8 + few


def test_parts_of_few_elements_are_not_cut() -> None:
    assert [part.shape for part in in_parts(torch.zeros(300, 400))] == [(120000,)]
    assert len(list(in_parts(torch.zeros(1 << 22)))) == 32


def test_the_peak_counts_what_is_alive() -> None:
    kept = torch.zeros(4)
    with (peak := PeakBytes()):
        a = kept + 1
        a.view(2, 2).add_(kept.view(2, 2))
        assert peak.peak_bytes == 16
        del a
        b = torch.zeros(2)
        assert peak.peak_bytes == 16
        c = b.double() + torch.ones(2, dtype=torch.float64)
        with peak.paused():
            torch.zeros(100)
    assert c.numel() == 2
    assert peak.peak_bytes == 8 + 16 + 16 + 16


def test_a_sparse_gradient_counts_by_its_values() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0], [2.0, 2.0]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), values, (5, 2), check_invariants=True)
    assert sum_of_powers(sparse, 2).item() == sparse.to_dense().double().square().sum().item()
