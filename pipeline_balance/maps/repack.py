"""Re-packing: the whole model onto fewer ranks, so that the rest can be released.

Shape legend: L layers, P ranks, M microbatches. The order of ranks is kept: a rank before another one before
re-packing runs earlier layers afterwards. `repack` fills ranks with consecutive layers and then balances time
exactly over the ranks it kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline_balance.maps.compare import ComparedMap, best_map
from pipeline_balance.maps.partition import explain_memory, partition_by_time, partition_near
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, in_flight
from prophet.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class RepackedMap:
    """The best map after re-packing, with its expected figures, and the ranks that are left without work."""

    best: ComparedMap
    released_ranks: tuple[int, ...]

    @property
    def stage_map(self) -> StageMap:
        """The stage map on the ranks that are kept."""
        return self.best.stage_map


def fill_contiguously(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], stages: int, microbatches: int
) -> tuple[int, ...] | None:
    """Ranks, ascending, whose memory holds all layers in order as `stages` stages; None if no such ranks
    exist.

    Exact: the furthest layer that stages 0 .. k can reach with stage k on rank r, for every k and r. A stage
    that could stay empty would only show that fewer stages suffice, so `fewest_ranks` may ask for 1, 2, .. in
    turn.
    """
    ranks = len(limits)
    # reached[r]: furthest layer with the latest stage on rank r; chain[r]: the ranks that got there
    reached = [0] * ranks
    chain: list[tuple[int, ...]] = [()] * ranks
    for k in range(stages):
        held = in_flight(k, stages, microbatches)
        best = 0 if k == 0 else -1
        best_chain: tuple[int, ...] = ()
        new_reached = [-1] * ranks
        new_chain: list[tuple[int, ...]] = [()] * ranks
        for r in range(ranks):
            if best >= 0:
                new_reached[r] = _extend(costs, limits[r], best, held)
                new_chain[r] = (*best_chain, r)
            if k > 0 and reached[r] > best:
                best, best_chain = reached[r], chain[r]
        reached, chain = new_reached, new_chain
    for r in range(ranks):
        if reached[r] == len(costs):
            return chain[r]
    return None


def _extend(costs: Sequence[LayerCost], limit: RankLimits, start: int, held: int) -> int:
    used = 0
    for layer in range(start, len(costs)):
        used += costs[layer].state_bytes + held * costs[layer].activation_bytes
        if used > limit.memory_bytes:
            return layer
    return len(costs)


def fewest_ranks(costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> int:
    """The least number of ranks whose memory holds the model as contiguous stages; `PartitionError`
    if none does.
    """
    for stages in range(1, min(len(limits), len(costs)) + 1):
        if fill_contiguously(costs, limits, stages, microbatches) is not None:
            return stages
    raise PartitionError(explain_memory(costs, limits, microbatches))


def repack(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    *,
    microbatches: int,
    target_ranks: int | None = None,
    max_bottleneck_s: float | None = None,
    transfer_s: float = 0.0,
) -> RepackedMap:
    """Re-pack onto `target_ranks`, or, without a target, onto the fewest ranks that memory and time allow.

    `max_bottleneck_s` bounds the slowest rank's seconds per microbatch. Which ranks stay: those that filling
    uses, the first, the last, and those that hold most of the state are tried; the best map by bottleneck,
    then makespan, then bytes moved wins. `current` is the map in force. Raises `PartitionError` if the target
    cannot be met.
    """
    ranks = len(limits)
    most = min(ranks, len(costs))
    if target_ranks is not None and not 1 <= target_ranks <= most:
        raise SpecError(f"target_ranks must be from 1 to {most}, got {target_ranks}")
    sizes = [target_ranks] if target_ranks is not None else range(1, most + 1)
    slowest: float | None = None
    for size in sizes:
        maps: list[StageMap] = []
        for kept in _kept_ranks(costs, limits, current, size, microbatches):
            maps += _balanced(costs, limits, current, kept, microbatches)
        if not maps:
            continue
        best = best_map(maps, costs, limits, microbatches=microbatches, current=current, transfer_s=transfer_s)
        if max_bottleneck_s is None or best.bottleneck_s <= max_bottleneck_s:
            used = best.stage_map.used_ranks
            return RepackedMap(best=best, released_ranks=tuple(r for r in range(ranks) if r not in used))
        slowest = best.bottleneck_s
    if slowest is not None:
        raise PartitionError(f"the slowest rank would take {slowest:.6g} s per microbatch, above {max_bottleneck_s}")
    aim = f"{target_ranks} ranks" if target_ranks is not None else f"at most {most} ranks"
    raise PartitionError(f"the model does not fit on {aim}: {explain_memory(costs, limits, microbatches)}")


def _kept_ranks(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], current: StageMap, size: int, microbatches: int
) -> list[tuple[int, ...]]:
    """Sets of `size` ranks worth trying, each ascending."""
    ranks = range(len(limits))
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


def _balanced(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    kept: tuple[int, ...],
    microbatches: int,
) -> list[StageMap]:
    """Optimal maps on the kept ranks: the evenest one and the one that moves least; none if memory
    does not suffice.
    """
    there = [limits[r] for r in kept]
    number = {rank: i for i, rank in enumerate(kept)}
    # a layer whose rank is not kept must move anyway: any number that is no kept rank says so
    before = StageMap.from_assignment(number.get(r, len(kept)) for r in current.assignment())
    try:
        even = partition_by_time(costs, there, microbatches=microbatches)
        near = partition_near(costs, there, before, microbatches=microbatches)
    except PartitionError:
        return []
    return [StageMap(m.boundaries, tuple(kept[r] for r in m.ranks)) for m in (even, near)]
