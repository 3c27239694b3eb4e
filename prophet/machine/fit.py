"""Straight lines through measured seconds: what calibration fits, and how far off it is.

A line is fitted to the least mean relative error: sizes span decades, and a size that was measured while something else
ran must not bend it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prophet.spec import FloatArray, Link


@dataclass(frozen=True, slots=True)
class Point:
    """One measured size.

    Attributes:
        size: Bytes or tokens.
        count: Experts; 1 where there are none.
        seconds: The time that counts.
        spread: How far the samples' median lies above their lower quartile, as a fraction: what other work added.
    """

    size: float
    count: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """The line seconds = fixed_s + count_s · count + unit_s · size."""

    fixed_s: float
    unit_s: float
    count_s: float = 0.0

    def seconds(self, point: Point) -> float:
        """Predicted seconds of a point's size and count."""
        return self.fixed_s + self.count_s * point.count + self.unit_s * point.size

    def errors(self, points: Sequence[Point]) -> list[float]:
        """|predicted - measured| / measured of every point."""
        return [abs(self.seconds(p) - p.seconds) / p.seconds for p in points]


@dataclass(frozen=True, slots=True)
class Fit:
    """One operation's line, the points it was fitted to, and those that it has not seen.

    Attributes:
        operation: What was timed.
        unit: "byte" or "token", of the points' sizes.
        line: The fit.
        fitted: Points that it was fitted to.
        held_out: Points that it was not fitted to.
    """

    operation: str
    unit: str
    line: Line
    fitted: tuple[Point, ...]
    held_out: tuple[Point, ...]

    @property
    def mean_error(self) -> float:
        """Mean relative error on the held-out points; 0 where there are none."""
        return float(np.mean(self.line.errors(self.held_out))) if self.held_out else 0.0

    @property
    def max_error(self) -> float:
        """Largest relative error on the held-out points; 0 where there are none."""
        return max(self.line.errors(self.held_out), default=0.0)


def fit_line(points: Sequence[Point]) -> Line:
    """The line with the least mean relative error; no part of it is negative.

    Relative, because sizes span decades; least absolute instead of squared, because a size that was measured while
    something else ran must not bend the line. The cost per count is left out where all points have one count.
    """
    design = np.array([(1.0, p.count, p.size) for p in points])
    seconds = np.array([p.seconds for p in points])
    # With one count for all points its cost and the fixed cost cannot be told apart.
    wanted = [0, 2] if np.ptp(design[:, 1]) == 0 else [0, 1, 2]
    chosen = list(wanted)
    while True:
        weights = least_relative(design[:, chosen], seconds)
        negative = [c for c, w in zip(chosen, weights, strict=True) if w < 0]
        if not negative or len(chosen) == 1:
            break
        # A negative part is noise; without it the others are fitted anew
        chosen.remove(negative[0])
    found = dict(zip(chosen, np.maximum(weights, 0.0).tolist(), strict=True))
    return Line(fixed_s=found.get(0, 0.0), unit_s=found.get(2, 0.0), count_s=found.get(1, 0.0))


def rate_of(points: Sequence[Point], link: Link) -> float:
    """The rate of transfers over the link's, fitted to the least mean relative error.

    The model is `link.latency_s + size / (rate * bytes_per_s)`.
    """
    size = np.array([p.size for p in points]) / link.bytes_per_s
    seconds = np.array([p.seconds for p in points])
    # A point below the latency still gets a slowness above zero
    slowness = np.maximum(seconds - link.latency_s, 1e-3 * seconds) / size
    order = np.argsort(slowness)
    # The least absolute error has the weighted median as its solution.
    weight = np.cumsum((size / seconds)[order])
    return float(1.0 / slowness[order][np.searchsorted(weight, 0.5 * weight[-1])])


def noise_of(seconds: FloatArray) -> float:
    """By which share of its mean a rank's time varies while the other ranks' does not: the standard deviation.

    A slow moment of all ranks is no noise, nor is a rank that is always slower. Half of the observations may have been
    disturbed: the median over them counts, as of a normal distribution.

    Args:
        seconds: Of the same work on every rank, [n, R]; observations may be of different work.
    """
    if seconds.shape[1] < 2 or not (seconds > 0).all():
        return 0.0
    relative = seconds / seconds.mean(axis=1, keepdims=True)
    relative /= np.median(relative, axis=0)
    relative /= relative.mean(axis=1, keepdims=True)
    return min(1.0, _usual_deviation(relative))


def noise_seconds_of(seconds: FloatArray) -> float:
    """By how many seconds a rank's time varies while the other ranks' does not: the standard deviation.

    As `noise_of`, where the noise is no share of what is done.

    Args:
        seconds: Of the same work on every rank, [n, R]; observations may be of different work.
    """
    if seconds.shape[1] < 2:
        return 0.0
    apart = seconds - seconds.mean(axis=1, keepdims=True)
    return _usual_deviation(apart - np.median(apart, axis=0))


def _usual_deviation(seconds: FloatArray) -> float:
    # A sample's deviation has as median that of a chi-squared distribution (Wilson and Hilferty)
    freedom = seconds.shape[1] - 1
    usual = (1.0 - 2.0 / (9.0 * freedom)) ** 1.5
    return float(np.median(seconds.std(axis=1, ddof=1)) / usual)


def least_relative(design: FloatArray, seconds: FloatArray, rounds: int = 50) -> FloatArray:
    """Minimise the mean of |design · w / seconds - 1| over w, by re-weighted least squares.

    Args:
        design: [points, parts].
        seconds: [points].
        rounds: Of re-weighting.

    Returns:
        w, [parts].
    """
    relative = design / seconds[:, None]
    weight = np.ones(len(seconds))
    solution: FloatArray = np.zeros(design.shape[1])
    for _ in range(rounds):
        root = np.sqrt(weight)
        solution = np.asarray(np.linalg.lstsq(relative * root[:, None], root, rcond=None)[0], dtype=np.float64)
        # Weights of 1 / |error| turn squares into absolute values; the bound keeps exact points finite.
        weight = 1.0 / np.maximum(np.abs(relative @ solution - 1.0), 1e-4)
    return solution
