"""What balancing gains in time: step times of two runs that took turns, their ratio, and the picture of both.

Shape legend: S seeds, P pairs of turns, a few steps each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, NamedTuple

import numpy as np

from prophet.errors import ReportError
from prophet.report.page import AFTER, BEFORE, INK, THIRD, draw_figure
from prophet.spec import FloatArray

CONFIDENCE = 0.9


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float


def median_interval(values: FloatArray, confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the median from order statistics, for any distribution; None where there are too few values.

    The median lies below the k-th smallest of n values where less than k of them fall below it, which has the chances
    of n tosses of a coin. The narrowest interval between the k-th smallest and the k-th largest that holds it with at
    least `confidence` is taken.
    """
    found, ordered, below = None, np.sort(values), 0
    for k in range(len(values) // 2):
        # Python's whole numbers: the sum is exact for any number of values
        below += comb(len(values), k)
        if 1 - 2 * below / 2 ** len(values) < confidence:
            break
        found = Interval(float(ordered[k]), float(ordered[-1 - k]))
    return found


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Pairs:
    """Step times of two runs that took turns.

    Attributes:
        names: Names of the S seeds.
        before_s: Seconds of a turn's median step without balancing, [S, P].
        after_s: The same with balancing, [S, P].
        warm_up: Pairs at the beginning of each seed that do not count.

    Raises:
        ReportError: Shapes do not match, a time is not above zero, or no pair counts.
    """

    names: Sequence[str]
    before_s: FloatArray
    after_s: FloatArray
    warm_up: int = 1

    def __post_init__(self) -> None:
        shape = self.before_s.shape
        if self.before_s.ndim != 2 or self.after_s.shape != shape or len(self.names) != len(self.before_s):
            raise ReportError(
                f"expected before_s and after_s [S, P] for {len(self.names)} seeds, got {list(shape)} and "
                f"{list(self.after_s.shape)}"
            )
        if shape[1] <= self.warm_up:
            raise ReportError(f"expected more pairs than the {self.warm_up} of the warm-up, got {shape[1]}")
        if not (self.before_s > 0).all() or not (self.after_s > 0).all():
            raise ReportError("expected step times above zero")

    @property
    def ratios(self) -> FloatArray:
        """A balanced step's share of an unbalanced one, [S, P]; below 1 balancing gains time."""
        ratios: FloatArray = self.after_s / self.before_s
        return ratios

    @property
    def counted(self) -> FloatArray:
        """The ratios of all pairs after the warm-up, in one row."""
        return self.ratios[:, self.warm_up :].ravel()

    @property
    def median(self) -> float:
        """The median of the counted ratios."""
        return float(np.median(self.counted))

    @property
    def interval(self) -> Interval | None:
        """The confidence interval of the median; None where there are too few pairs."""
        return median_interval(self.counted)

    @property
    def measurable(self) -> bool:
        """Whether there is a difference: there is an interval, and it does not span 1."""
        # An interval that holds 1 allows for no difference
        found = self.interval
        return found is not None and not found.low <= 1 <= found.high

    @property
    def steps_s(self) -> tuple[float, float]:
        """The median counted turn of each run."""
        before, after = (float(np.median(t[:, self.warm_up :])) for t in (self.before_s, self.after_s))
        return before, after


def draw_gain(pairs: Pairs, names: tuple[str, str]) -> str:
    """Draw the ratio of every pair with the median and its interval, and the step times below; as themed SVG."""
    seeds, count = pairs.ratios.shape
    # A gap between seeds
    at = np.arange(count)[None, :] + (count + 1.0) * np.arange(seeds)[:, None]

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _draw_ratios(top, pairs, at)
        for times, colour, name in ((pairs.before_s, BEFORE, names[0]), (pairs.after_s, AFTER, names[1])):
            for seed in range(seeds):
                label = name if seed == 0 else None
                bottom.plot(at[seed], 1e3 * times[seed], color=colour, marker=".", markersize=4, label=label)
        # From zero, so that a small difference does not look large
        bottom.set(ylabel="step, ms", ylim=(0, None))
        for axes in (top, bottom):
            axes.grid(visible=False, axis="x")
        bottom.set_xticks(at.mean(axis=1), pairs.names)
        bottom.tick_params(axis="x", length=0)
        bottom.set_xlabel("pairs of turns, in the order of time")
        # One legend for both panels
        parts = [axes.get_legend_handles_labels() for axes in (top, bottom)]
        handles, labels = ([*above, *below] for above, below in zip(*parts, strict=True))
        figure.legend(handles, labels, loc="outside upper center", ncols=2)

    return draw_figure(draw, height_in=3.9, label="Step time with balancing over step time without, by pair")


def _draw_ratios(axes: Any, pairs: Pairs, at: FloatArray) -> None:
    ratios, warm_up, interval = pairs.ratios, pairs.warm_up, pairs.interval
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    if interval is not None:
        axes.axhspan(*interval, color=THIRD, alpha=0.2, linewidth=0, label=f"{CONFIDENCE:.0%} interval")
    axes.axhline(pairs.median, color=THIRD, linewidth=1.2, label=f"median {pairs.median:.3f}")
    # Warm-up pairs are drawn hollow instead of being left away: a reader sees what was not counted
    shown = {"linestyle": "none", "marker": "o", "markersize": 4, "color": THIRD}
    axes.plot(at[:, warm_up:].ravel(), ratios[:, warm_up:].ravel(), **shown, label="a pair")
    axes.plot(
        at[:, :warm_up].ravel(), ratios[:, :warm_up].ravel(), **shown, markerfacecolor="none", label="warm-up, left out"
    )
    axes.set(ylabel="with / without")
    axes.margins(y=0.15)
