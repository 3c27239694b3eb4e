"""Re-packing: the whole model onto fewer ranks, so that the rest can be released.

Shape legend: L layers, P ranks, M microbatches. The order of ranks is kept: a rank before another one before
re-packing runs earlier layers afterwards. `repack` fills ranks with consecutive layers and then balances time exactly
over the ranks it kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_balance.maps.compare import ComparedMap, best_map
from pipeline_balance.maps.partition import explain_memory, maps_on, partition_by_time, partition_near
from pipeline_balance.schedules.links import Transfers
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, in_flight
from prophet.errors import SpecError


def fill_contiguously(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], stages: int, microbatches: int
) -> tuple[int, ...] | None:
    """Ranks, ascending, whose memory holds all layers in order.

    Exact: the furthest layer that stages 0 .. k can reach with stage k on rank r, for every k and r. A stage that
    could stay empty would only show that fewer stages suffice.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        stages: How many ranks are to be used.
        microbatches: M.

    Returns:
        One rank per stage; None if no such ranks exist.
    """
    ranks = len(limits)
    # reached[r]: furthest layer with the latest stage on rank r; chain[r]: the ranks that got there
    reached = [0] * ranks
    chain: list[tuple[int, ...]] = [()] * ranks
    for k in range(stages):
        # stage k holds activations of min(M, stages - k) microbatches
        held = in_flight(k, stages, microbatches)
        best = 0 if k == 0 else -1
        best_chain: tuple[int, ...] = ()
        new_reached = [-1] * ranks
        new_chain: list[tuple[int, ...]] = [()] * ranks
        for r in range(ranks):
            if best >= 0:
                new_reached[r] = _extend(costs, limits[r], best, held)
                new_chain[r] = (*best_chain, r)
            # after rank r was extended: ranks must ascend, so r serves stage k - 1 or k, not both
            if k > 0 and reached[r] > best:
                best, best_chain = reached[r], chain[r]
        reached, chain = new_reached, new_chain
    return next((chain[r] for r in range(ranks) if reached[r] == len(costs)), None)


def _extend(costs: Sequence[LayerCost], limit: RankLimits, start: int, held: int) -> int:
    used = 0
    for layer in range(start, len(costs)):
        used += costs[layer].state_bytes + held * costs[layer].activation_bytes
        if used > limit.memory_bytes:
            return layer
    return len(costs)


def repack(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    *,
    microbatches: int,
    target_ranks: int,
    transfer_s: Transfers = 0.0,
) -> ComparedMap:
    """The best map on fewer ranks: by bottleneck, then makespan, then bytes moved from `current`.

    Which ranks stay: the first, the last, those that hold most of the state, the fastest, and those that filling uses
    are tried.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        current: The map in force.
        microbatches: M.
        target_ranks: How many ranks are to be used.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].

    Raises:
        PartitionError: If the model does not fit.
    """
    # no stage may be empty
    most = min(len(limits), len(costs))
    if not 1 <= target_ranks <= most:
        raise SpecError(f"target_ranks must be from 1 to {most}, got {target_ranks}")

    def even_and_near(there: Sequence[RankLimits], before: StageMap, links: Transfers) -> list[StageMap]:
        return [
            partition_by_time(costs, there, microbatches=microbatches, transfer_s=links),
            partition_near(costs, there, before, microbatches=microbatches, transfer_s=links),
        ]

    tried = _kept_ranks(costs, limits, current, target_ranks, microbatches)
    maps = [m for kept in tried for m in maps_on(kept, limits, current, even_and_near, transfer_s)]
    if not maps:
        why = explain_memory(costs, limits, microbatches)
        raise PartitionError(f"the model does not fit on {target_ranks} ranks: {why}")
    return best_map(maps, costs, limits, microbatches=microbatches, current=current, transfer_s=transfer_s)


def _kept_ranks(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], current: StageMap, size: int, microbatches: int
) -> list[tuple[int, ...]]:
    """Sets of `size` ranks worth trying, each ascending."""
    ranks = range(len(limits))
    # what stays where it is does not travel
    state = {r: sum(costs[i].moved_bytes for i in current.layers_on(r)) for r in ranks}
    tried = [
        tuple(ranks[:size]),
        tuple(ranks[len(limits) - size :]),
        tuple(sorted(sorted(ranks, key=lambda r: (-state[r], r))[:size])),
        tuple(sorted(sorted(ranks, key=lambda r: (-limits[r].speed, r))[:size])),
    ]
    filled = fill_contiguously(costs, limits, size, microbatches)
    if filled is not None:
        tried.append(filled)
    return list(dict.fromkeys(tried))
