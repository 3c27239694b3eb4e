"""Step times of alternating runs: the interval against its definition, and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from prophet.errors import ReportError
from prophet.report import Interval, Pairs, median_interval
from prophet.report.gain import draw_gain


def pairs(ratios: object) -> Pairs:
    """Pairs with these ratios, [S][P], of unbalanced steps of half a second."""
    after_s = 0.5 * np.asarray(ratios, dtype=float)
    return Pairs(
        names=[f"seed {i}" for i in range(len(after_s))], before_s=np.full(after_s.shape, 0.5), after_s=after_s
    )


def covered(n: int, low: int, high: int) -> float:
    """How often the median lies from the `low`-th to the `high`-th of n values, over all ways to fall beside it."""
    ways = [sum(way) for way in product((0, 1), repeat=n)]  # how many of the n fall below the median
    return float(np.mean([low < below <= high for below in ways]))


@pytest.mark.parametrize("n", [5, 6, 7, 8, 11, 12])
def test_the_interval_covers_the_median_and_no_narrower_one_does(n: int) -> None:
    values = np.random.default_rng(n).permutation(n).astype(float)
    found = median_interval(values)
    assert found is not None
    low, high = int(found.low), int(found.high)
    assert low == n - 1 - high
    assert covered(n, low, high) >= 0.9
    assert covered(n, low + 1, high - 1) < 0.9


@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_too_few_values_have_no_interval(n: int) -> None:
    assert median_interval(np.arange(n, dtype=float)) is None


def test_twenty_one_values_by_the_table() -> None:
    assert median_interval(np.arange(1.0, 22.0)) == (7.0, 15.0)  # tables of the sign test, 92 %


def test_the_first_pair_of_every_seed_does_not_count() -> None:
    found = pairs([[9.0, 0.8, 0.9, 0.7], [0.01, 0.85, 0.95, 0.75]])
    assert sorted(found.counted) == pytest.approx([0.7, 0.75, 0.8, 0.85, 0.9, 0.95])
    assert found.median == pytest.approx(0.825)
    assert found.interval == pytest.approx((0.7, 0.95))
    assert found.measurable
    assert found.steps_s == pytest.approx((0.5, 0.4125))


@pytest.mark.parametrize(
    ("ratios", "measurable"),
    [
        ([[1, 0.8, 0.9, 0.9, 0.9, 0.9]], True),
        ([[1, 0.8, 0.9, 0.9, 0.9, 1.1]], False),  # spans 1
        ([[1, 1.2, 1.2, 1.1, 1.3, 1.1]], True),  # longer is a difference, too
        ([[1, 0.8, 0.8, 0.8]], False),  # three pairs say nothing
    ],
)
def test_a_difference_is_measurable_unless_its_interval_spans_one(ratios: object, measurable: bool) -> None:
    assert pairs(ratios).measurable is measurable


def test_what_does_not_fit_is_refused() -> None:
    good = pairs([[1.0, 0.9], [1.0, 0.8]])
    with pytest.raises(ReportError, match="more pairs than the 1 of the warm-up, got 1"):
        pairs([[1.0]])
    with pytest.raises(ReportError, match=r"\[S, P\] for 2 seeds"):
        replace(good, after_s=np.ones((2, 3)))
    with pytest.raises(ReportError, match="for 1 seeds"):
        replace(good, names=["seed 0"])
    with pytest.raises(ReportError, match="above zero"):
        replace(good, before_s=np.zeros((2, 2)))


def test_the_picture_says_what_is_left_out() -> None:
    svg = draw_gain(pairs([[2.0, 0.8, 0.9, 0.9], [2.0, 0.8, 0.7, 0.9]]), ("off", "on"))
    ET.fromstring(svg)
    words = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
    assert {"median 0.850", "90% interval", "warm-up, left out", "seed 0", "seed 1", "off", "on"} <= set(words)
    assert isinstance(pairs([[1.0] * 6]).interval, Interval)
    few = draw_gain(pairs([[1.0, 0.8]]), ("off", "on"))
    assert "interval" not in few
