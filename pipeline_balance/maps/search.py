"""The search under `partition`: exact min-max contiguous partition under memory, speed and activation limits.

Shape legend: L layers, P stages (stage k on rank k). Stage k that runs layers i .. j-1 takes (units[j] - units[i]) /
speed[k] + links[k] and needs (state[j] - state[i]) + held[k] * (active[j] - active[i]) bytes; `units`, `state` and
`active` are prefix sums [L + 1] of integers, so equal layers give exactly equal stage times and nothing depends on a
tolerance.

The planner's compiled core does the work (`partition.cpp` there): `CoreError` where it was not built.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner import core
from prophet.spec import FloatArray, IntArray

# the core's answer where the memory does not suffice
NO_PARTITION = -1.0


class Problem(NamedTuple):
    """What is partitioned, over which stages; in the order of the core's arguments.

    Attributes:
        units: Integer weights of layers, as prefix sums [L + 1].
        state: Bytes of state, likewise.
        active: Bytes of activations of one microbatch, likewise.
        held: Microbatches that every stage holds [P].
        speed: Of every stage's rank [P].
        capacity: Bytes of every stage's rank [P].
        links: What every stage takes for messages besides, in units [P].
    """

    units: IntArray
    state: IntArray
    active: IntArray
    held: IntArray
    speed: FloatArray
    capacity: IntArray
    links: FloatArray


def minimal_bottleneck(p: Problem) -> float:
    """The least possible bottleneck in units, or `NO_PARTITION`."""
    return core.native.minimal_bottleneck(*p)


def best_boundaries(beta: float, p: Problem, square_weight: float, penalty: FloatArray) -> IntArray:
    """Boundaries that minimise an additive cost under a bound on the bottleneck. Ties go to the earlier boundary.

    The cost of stage k over layers i .. j-1 is penalty[k, j] - penalty[k, i] plus `square_weight` times its squared
    time.

    Args:
        beta: The largest bottleneck allowed, in units over speed.
        p: The problem.
        square_weight: Of squared times.
        penalty: Prefix sums [P, L + 1].

    Returns:
        Boundaries [P + 1]; empty if there are none.
    """
    # the core writes into memory that numpy owns, and returns whether it found any
    boundaries = np.empty(p.speed.size + 1, dtype=np.int64)
    if core.native.best_boundaries(*p, beta, square_weight, penalty, boundaries):
        return boundaries
    return boundaries[:0]
