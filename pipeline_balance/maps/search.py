"""The compiled search under `partition`: exact min-max contiguous partition under memory, speed and activation limits.

Shape legend: L layers, P stages (stage k on rank k). Stage k that runs layers i .. j-1 takes (units[j] - units[i]) /
speed[k] and needs (state[j] - state[i]) + held[k] * (active[j] - active[i]) bytes; `units`, `state` and `active` are
prefix sums [L + 1] of integers, so equal layers give exactly equal stage times and nothing depends on a tolerance.

With unequal speeds, or with memory that shrinks towards the first stage, filling every stage as far as possible is not
exact when no stage may be empty: a later stage may need a layer that the greedy start took away from a rank able to
hold it. The probe therefore follows the set of reachable boundaries, stage by stage, in O(P L).
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from prophet.spec import BoolArray, FloatArray, IntArray

NO_PARTITION = -1.0


class Problem(NamedTuple):
    """What the compiled search knows; a NamedTuple because numba takes one as an argument."""

    units: IntArray
    state: IntArray
    active: IntArray
    held: IntArray
    speed: FloatArray
    capacity: IntArray


@numba.njit(cache=True)
def _load(p: Problem, k: int, i: int, j: int) -> float:
    return float((p.units[j] - p.units[i]) / p.speed[k])


@numba.njit(cache=True)
def _needed(p: Problem, k: int, i: int, j: int) -> int:
    return int((p.state[j] - p.state[i]) + p.held[k] * (p.active[j] - p.active[i]))


@numba.njit(cache=True)
def probe(beta: float, p: Problem, reach: BoolArray) -> float:
    """Fill `reach` [P + 1, L + 1] with the boundaries reachable under bottleneck `beta`.

    Returns the smallest stage time above `beta` that blocked an extension (inf if none did): no bottleneck
    below it reaches anything that `beta` does not.
    """
    stages = p.speed.size
    layers = p.units.size - 1
    reach[:] = False
    reach[0, 0] = True
    next_beta = np.inf
    for k in range(stages):
        last_end = layers - (stages - 1 - k)
        far = k
        marked = k
        for i in range(k, last_end):
            if not reach[k, i]:
                continue
            far = max(far, i)
            while far < last_end and _needed(p, k, i, far + 1) <= p.capacity[k]:
                load = _load(p, k, i, far + 1)
                if load > beta:
                    next_beta = min(next_beta, load)
                    break
                far += 1
            for j in range(max(i, marked) + 1, far + 1):
                reach[k + 1, j] = True
            marked = max(marked, far)
    return next_beta


@numba.njit(cache=True)
def _realised(beta: float, p: Problem, reach: BoolArray) -> float:
    """Bottleneck of one partition that `reach` proves possible under `beta`."""
    j = p.units.size - 1
    worst = 0.0
    for k in range(p.speed.size - 1, -1, -1):
        for i in range(j - 1, k - 1, -1):
            load = _load(p, k, i, j)
            # take the longest last stages first, but never one that cannot be reached
            if reach[k, i] and load <= beta and _needed(p, k, i, j) <= p.capacity[k]:
                worst = max(worst, load)
                j = i
                break
    return worst


@numba.njit(cache=True)
def minimal_bottleneck(p: Problem) -> float:
    """The least possible bottleneck in units, or `NO_PARTITION`.

    Bisection whose two ends always are stage times that occur (after Pinar and Aykanat, 2004): a feasible
    probe lowers the upper end to the bottleneck it found, an infeasible one raises the lower end to the next
    stage time that could change its answer. It stops when the ends meet, so the result is exact.
    """
    stages = p.speed.size
    layers = p.units.size - 1
    reach = np.zeros((stages + 1, layers + 1), dtype=np.bool_)
    probe(np.inf, p, reach)
    if not reach[stages, layers]:
        return NO_PARTITION
    high = _realised(np.inf, p, reach)
    low = min(p.units[layers] / p.speed.sum(), high)
    step = p.units[layers] / (p.speed.sum() * stages)
    while low < high:
        # from below in growing strides first: the optimum lies near the ideal, the first upper end far away
        beta = low + min(step, (high - low) / 2)
        step *= 2
        next_beta = probe(beta, p, reach)
        if reach[stages, layers]:
            high = _realised(beta, p, reach)
        else:
            low = min(next_beta, high)
    return float(high)


@numba.njit(cache=True)
def best_boundaries(beta: float, p: Problem, square_weight: float, penalty: FloatArray) -> IntArray:
    """Boundaries [P + 1] with bottleneck at most `beta` that minimise an additive cost; empty if there are none.

    The cost of stage k over layers i .. j-1 is penalty[k, j] - penalty[k, i] plus `square_weight` times its
    squared time; `penalty` [P, L + 1] holds prefix sums. Ties go to the earlier boundary.
    """
    stages = p.speed.size
    layers = p.units.size - 1
    cost = np.full((stages + 1, layers + 1), np.inf)
    start = np.zeros((stages + 1, layers + 1), dtype=np.int64)
    cost[0, 0] = 0.0
    scale = max(1.0, float(p.units[layers]))
    for k in range(stages):
        last_end = layers - (stages - 1 - k)
        for i in range(k, last_end):
            if cost[k, i] == np.inf:
                continue
            for j in range(i + 1, last_end + 1):
                load = _load(p, k, i, j)
                if load > beta or _needed(p, k, i, j) > p.capacity[k]:
                    break
                part = load / scale
                total = cost[k, i] + (penalty[k, j] - penalty[k, i]) + square_weight * part * part
                if total < cost[k + 1, j]:
                    cost[k + 1, j] = total
                    start[k + 1, j] = i
    if cost[stages, layers] == np.inf:
        return np.zeros(0, dtype=np.int64)
    boundaries = np.zeros(stages + 1, dtype=np.int64)
    j = layers
    for k in range(stages, 0, -1):
        boundaries[k] = j
        j = start[k, j]
    return boundaries
