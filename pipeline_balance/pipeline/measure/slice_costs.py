"""What slices of a sequence cost: seconds that rise with the slice's number, fitted to what was measured.

Attention of slice s reads s slices before it, so its time is affine in s. A median over slices would be that of the
middle one, and would take the last ones for disturbed. Maps are balanced by whole microbatches, sums of slices.

Shape legend: N slices of a microbatch, T tokens of a slice.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline_balance.spec import LayerCost


class OfSlice(float):
    """Seconds that were measured of slice number `slice` of `slices`.

    A float, so it goes wherever samples do.
    """

    __slots__ = ("slice", "slices")

    def __new__(cls, seconds: float, number: int, slices: int) -> OfSlice:
        made = super().__new__(cls, seconds)
        made.slice, made.slices = number, slices
        return made

    slice: int
    slices: int

    # pickling would call `__new__` without the slice
    def __reduce__(self) -> tuple[Any, ...]:
        return OfSlice, (float(self), self.slice, self.slices)


@dataclass(frozen=True, slots=True)
class SliceFit:
    """A line over slices: slice s of N takes `first_s` + s `more_s` seconds.

    Attributes:
        first_s: Seconds of slice 0.
        more_s: How many seconds each slice takes more than the one before it.
        slices: N.
    """

    first_s: float
    more_s: float
    slices: int

    @classmethod
    def of(cls, samples: Sequence[OfSlice]) -> SliceFit:
        """Fit by least squares, without samples above twice a first fit through every slice's median."""
        if not samples:
            return cls(0.0, 0.0, 1)
        slices = samples[0].slices
        by_slice: dict[int, list[float]] = defaultdict(list)
        for x in samples:
            by_slice[x.slice].append(x)
        # medians first: one disturbed sample would tilt a fit through all of them
        rough = _line([(s, statistics.median(found)) for s, found in by_slice.items()])
        kept = [(x.slice, float(x)) for x in samples if x <= 2 * (rough[0] + rough[1] * x.slice)]
        first, more = _line(kept) if kept else rough
        return cls(first, more, slices)

    @property
    def microbatch_s(self) -> float:
        """Seconds of all slices."""
        # the sum over s = 0 .. N - 1; noise may tilt the line below zero
        return max(self.slices * self.first_s + self.more_s * self.slices * (self.slices - 1) / 2, 0.0)

    def __add__(self, other: SliceFit) -> SliceFit:
        return SliceFit(self.first_s + other.first_s, self.more_s + other.more_s, max(self.slices, other.slices))

    def crossover_tokens(self, slice_tokens: int) -> int | None:
        """Find the tokens before one where attention takes as long as all else, from slices of T tokens each.

        It is what `SliceOptions` is given for slices of equal cost. None where later slices take no longer.
        """
        if self.more_s * self.slices <= 1e-9 * self.first_s:
            return None
        # slice 0 attends to T / 2 tokens on average, so half a `more_s` of its seconds is attention
        return max(round(slice_tokens * (self.first_s / self.more_s - 0.5)), 0)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Value at slice 0 and rise per slice, by least squares."""
    at, value = np.array(points, dtype=np.float64).T
    if len(set(at.tolist())) < 2:
        return float(value.mean()), 0.0
    more, first = np.polyfit(at, value, 1)
    return float(first), float(more)


def unit_costs(costs: Iterable[LayerCost], slices: int) -> list[LayerCost]:
    """Turn costs of a microbatch into those of a slice, of which the ranks run N times as many.

    Searches count activations of the units in flight that microbatches would have. With slices N - 1 more are held,
    which are counted with the gradients: they take memory, and do not move.
    """
    found = []
    for cost in costs:
        # rounded up, so that memory is never underestimated
        each = -(-cost.activation_bytes // slices)
        found.append(
            replace(
                cost,
                forward_s=cost.forward_s / slices,
                backward_input_s=cost.backward_input_s / slices,
                backward_weight_s=cost.backward_weight_s / slices,
                activation_bytes=each,
                gradient_bytes=cost.gradient_bytes + (slices - 1) * each,
            )
        )
    return found
