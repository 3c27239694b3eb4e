"""A recorded routing on another number of ranks, or with another number of tokens. Nothing is drawn: all is exact.

Shape legend: T steps, L layers, R ranks, E experts, K steps that become one.
"""

from __future__ import annotations

import math

import numpy as np

from prophet.errors import TraceError
from prophet.spec import IntArray
from prophet.traces.npz import MAX_COUNT, RoutingTrace


def regrouped(counts: IntArray, iteration: IntArray, ranks: int) -> tuple[IntArray, IntArray]:
    """Turn counts of recorded ranks into those of another number of would-be ranks.

    Fewer ranks: consecutive ones are merged. More: K consecutive steps become one, with the ranks of all side by side.
    These are microbatches of one iteration where every iteration has a multiple of K of them, else whole iterations.
    Steps that are left over at the end are left out.

    Args:
        counts: [T, L, R, E].
        iteration: [T].
        ranks: Would-be ranks.

    Returns:
        Counts with so many ranks, and the iteration of every step that there is then.

    Raises:
        TraceError: Where the steps do not allow it.
    """
    steps, layers, recorded, experts = counts.shape
    # Merging goes down to the common divisor, joining steps from there up: nothing is ever split.
    common = math.gcd(recorded, ranks)
    merged = counts.reshape(steps, layers, common, recorded // common, experts).sum(axis=3, dtype=np.int64)
    together = ranks // common
    whole = steps // together * together
    if not whole:
        raise TraceError(
            f"ranks: {ranks} of {recorded} recorded ones take {together} steps each, there are {steps}: record more "
            f"steps, or ask for fewer ranks"
        )
    # Steps of each iteration, from where its number changes
    lengths = np.diff(np.flatnonzero(np.diff(iteration, prepend=iteration[0] - 1, append=iteration[-1] + 1)))
    # A step from two iterations that are not joined whole would have no iteration.
    if (lengths % together).any() and (np.ptp(lengths) or together % lengths[0]):
        raise TraceError(
            f"ranks: {ranks} of {recorded} recorded ones take {together} steps each, and iterations have "
            f"{lengths.min()} to {lengths.max()} of them: expected a multiple of {together}, or one divisor in all"
        )
    beside = merged[:whole].reshape(-1, together, layers, common, experts).swapaxes(1, 2)
    return beside.reshape(-1, layers, ranks, experts), iteration[:whole:together]


def scaled(trace: RoutingTrace, routed: int) -> RoutingTrace:
    """Scale a routing to `routed` choices of every rank in every step and layer, [T, L, R, E] exact integers.

    A rank's counts keep their proportions. What division leaves over goes to the largest remainders, and of equal ones
    to the lower expert. A rank that routed nothing goes on routing nothing.
    """
    if not 1 <= routed <= MAX_COUNT:
        raise TraceError(f"tokens: expected 1 to {MAX_COUNT} choices of a rank, tokens x top_k are {routed}")
    counts = np.empty(trace.counts.shape, dtype=np.int64)
    for t, step in enumerate(trace.counts):
        total = np.maximum(step.sum(axis=2, keepdims=True, dtype=np.int64), 1)
        counts[t], rest = np.divmod(step.astype(np.int64) * routed, total)
        over = rest.sum(axis=2, keepdims=True) // total
        # The rank of each remainder: argsort twice; stable, so that ties go to the lower expert.
        place = np.argsort(np.argsort(-rest, axis=2, kind="stable"), axis=2, kind="stable")
        counts[t] += place < over
    return RoutingTrace(counts, trace.iteration, trace.meta)
