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
    """One measured size: `size` bytes or tokens, `count` experts (1 where there are none), and its `seconds`.

    spread: how far the samples' median lies above their lower quartile, as a fraction: what other work added.
    """

    size: float
    count: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed_s + count_s · count + unit_s · size."""

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
    """One operation's line, the points it was fitted to, and those that it has not seen."""

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
    wanted = [0, 2] if np.ptp(design[:, 1]) == 0 else [0, 1, 2]
    chosen = list(wanted)
    while True:
        weights = least_relative(design[:, chosen], seconds)
        negative = [c for c, w in zip(chosen, weights, strict=True) if w < 0]
        if not negative or len(chosen) == 1:
            break
        chosen.remove(negative[0])
    found = dict(zip(chosen, np.maximum(weights, 0.0).tolist(), strict=True))
    return Line(fixed_s=found.get(0, 0.0), unit_s=found.get(2, 0.0), count_s=found.get(1, 0.0))


def rate_of(points: Sequence[Point], link: Link) -> float:
    """The rate of transfers over the link's at which `link.latency_s + size / (rate * bytes_per_s)` has the least mean
    relative error.
    """
    size = np.array([p.size for p in points]) / link.bytes_per_s
    seconds = np.array([p.seconds for p in points])
    slowness = np.maximum(seconds - link.latency_s, 1e-3 * seconds) / size
    order = np.argsort(slowness)
    weight = np.cumsum((size / seconds)[order])
    return float(1.0 / slowness[order][np.searchsorted(weight, 0.5 * weight[-1])])


def least_relative(design: FloatArray, seconds: FloatArray, rounds: int = 50) -> FloatArray:
    """Least mean of |design · w / seconds - 1| over w, by re-weighted least squares."""
    relative = design / seconds[:, None]
    weight = np.ones(len(seconds))
    solution: FloatArray = np.zeros(design.shape[1])
    for _ in range(rounds):
        root = np.sqrt(weight)
        solution = np.asarray(np.linalg.lstsq(relative * root[:, None], root, rcond=None)[0], dtype=np.float64)
        weight = 1.0 / np.maximum(np.abs(relative @ solution - 1.0), 1e-4)
    return solution
