"""When the last rank is expected, against drawn times and against the exact integral."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prophet.spec import expected_last, last_of_alike


def exact(means: list[float], deviations: list[float]) -> float:
    """The integral of 1 - P(all are there), from a time before which nobody comes."""
    first = min(m - 9 * d for m, d in zip(means, deviations, strict=True))
    last = max(m + 9 * d for m, d in zip(means, deviations, strict=True))
    x = np.linspace(first, last, 20001)
    there = np.ones_like(x)
    for m, d in zip(means, deviations, strict=True):
        there *= np.array([0.5 * math.erfc((m - v) / d / math.sqrt(2)) for v in x])
    return float(last - np.trapezoid(there, x))


def test_without_noise_the_last_one_is_the_largest() -> None:
    times = np.array([0.1, 0.3, 0.3, 0.2])
    assert expected_last(times, np.zeros(4)) == 0.3  # to the last bit
    assert last_of_alike(1) == 0.0


def test_two_are_exact() -> None:
    """Clark's first formula; alike ones come 1 / sqrt(pi) deviations after their mean."""
    assert last_of_alike(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12)
    for means, deviations in (([1.0, 1.3], [0.2, 0.5]), ([5.0, 1.0], [0.1, 0.1]), ([1.0, 2.0], [0.4, 0.05])):
        assert expected_last(np.array(means), np.array(deviations)) == pytest.approx(exact(means, deviations), abs=1e-6)
    assert expected_last(np.array([1.0, 2.0]), np.array([0.0, 0.0])) == 2.0
    # one of them is always there
    assert expected_last(np.array([1.0, 1.0]), np.array([0.0, 0.5])) == pytest.approx(1 + 0.5 / math.sqrt(2 * math.pi))


@pytest.mark.parametrize(("ranks", "off"), [(3, 0.01), (4, 0.01), (8, 0.01), (16, 0.04), (64, 0.15)])
def test_alike_ranks(ranks: int, off: float) -> None:
    assert last_of_alike(ranks) == pytest.approx(exact([0.0] * ranks, [1.0] * ranks), abs=off)


def test_ranks_that_differ_against_drawn_times() -> None:
    rng = np.random.default_rng(3)
    for _ in range(12):
        ranks = int(rng.integers(2, 9))
        means, deviations = rng.exponential(size=ranks), rng.uniform(0.05, 0.4, size=ranks)
        drawn = (means + deviations * rng.normal(size=(200_000, ranks))).max(axis=1).mean()
        found = expected_last(means, deviations)
        assert found == pytest.approx(drawn, abs=0.05 * deviations.max())
        assert found >= means.max()


def test_one_late_rank_leaves_no_noise() -> None:
    """As with `static`, where one rank has most of the work: the others are there before it in any case."""
    assert expected_last(np.array([1.0, 1.0, 1.0, 9.0]), np.full(4, 0.1)) == pytest.approx(9.0, abs=1e-9)
