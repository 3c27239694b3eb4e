"""Contiguous partitions of layers into stages: uniform, by parameters, by time.

Shape legend: L layers, P ranks, M microbatches. The order of ranks is fixed: stage k runs on rank k, with that rank's
speed and memory; every function is exact for this order and does not search over permutations of unequal ranks. Stage k
needs the state of its layers and their activations of min(M, P - k) microbatches. No stage is ever empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pipeline_balance.maps.search import NO_PARTITION, Problem, best_boundaries, minimal_bottleneck
from pipeline_balance.schedules.links import Transfers, among, message_s
from pipeline_balance.spec import MAX_BYTES, LayerCost, PartitionError, RankLimits, StageMap, fits, in_flight
from prophet.errors import SpecError
from prophet.spec import FloatArray, IntArray


def _too_few_layers(layers: int, stages: int) -> str:
    return f"{layers} layers cannot fill {stages} stages: every stage needs at least one layer"


def _prefix(values: Sequence[int]) -> IntArray:
    return np.cumsum([0, *values], dtype=np.int64)


def _whole_units(weights: Sequence[float]) -> tuple[list[int], int]:
    """Weights as integers whose sum stays below 2**53, and the exponent of two that they were multiplied by.

    Sums of integers do not depend on their order, so two stages of equal layers tie exactly; a weight is off
    by at most 2**-52 of the total.
    """
    total = math.fsum(weights)
    if total <= 0:
        return [1] * len(weights), 0
    # frexp: total < 2**e, so the scaled sum stays below 2**52, with room for rounding
    exponent = 52 - math.frexp(total)[1]
    return [round(math.ldexp(w, exponent)) for w in weights], exponent


def _problem(
    weights: Sequence[float],
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    microbatches: int,
    *,
    use_speed: bool,
    transfer_s: Transfers = 0.0,
) -> Problem:
    layers, stages = len(costs), len(limits)
    if microbatches < 1:
        raise SpecError(f"microbatches must be at least 1, got {microbatches}")
    if stages < 1:
        raise SpecError("a partition needs the limits of at least one rank")
    if layers < stages:
        raise PartitionError(_too_few_layers(layers, stages))
    # stage k of P holds the activations of min(M, P - k) microbatches, as 1F1B does
    held = [in_flight(k, stages, microbatches) for k in range(stages)]
    state = [c.state_bytes for c in costs]
    active = [c.activation_bytes for c in costs]
    # the core computes in int64
    if sum(state) + held[0] * sum(active) > MAX_BYTES:
        raise SpecError("the layers' bytes add up to more than 2**62")
    units, exponent = _whole_units(weights)
    return Problem(
        units=_prefix(units),
        state=_prefix(state),
        active=_prefix(active),
        held=np.array(held, dtype=np.int64),
        speed=np.array([r.speed if use_speed else 1.0 for r in limits], dtype=np.float64),
        capacity=np.array([r.memory_bytes for r in limits], dtype=np.int64),
        links=np.ldexp(message_s(transfer_s, stages), exponent),
    )


def _best_map(problem: Problem, beta: float, square_weight: float, penalty: FloatArray) -> StageMap:
    return StageMap.contiguous(best_boundaries(beta, problem, square_weight, penalty).tolist())


def explain_memory(costs: Sequence[LayerCost], limits: Sequence[RankLimits], microbatches: int) -> str:
    """Why no contiguous partition fits: the first layer that is too large for every rank, or the totals.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        microbatches: M.
    """
    stages = len(limits)
    for layer, cost in enumerate(costs):
        if all(
            cost.state_bytes + in_flight(k, stages, microbatches) * cost.activation_bytes > limit.memory_bytes
            for k, limit in enumerate(limits)
        ):
            # the last stage holds one microbatch alone: no stage needs less
            least = cost.state_bytes + cost.activation_bytes
            largest = max(r.memory_bytes for r in limits)
            label = f"layer {layer} ({cost.name})" if cost.name else f"layer {layer}"
            need = f"needs at least {least} bytes, more than any rank has (largest {largest} bytes)"
            return f"{label} {need}"
    state = sum(c.state_bytes for c in costs)
    active = sum(c.activation_bytes for c in costs)
    return (
        f"no contiguous partition of {len(costs)} layers over {stages} ranks fits: "
        f"{state} bytes of state and {active} bytes of activations per microbatch, "
        f"against {sum(r.memory_bytes for r in limits)} bytes in all"
    )


def _partition(
    weights: Sequence[float],
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    microbatches: int,
    *,
    use_speed: bool = True,
    transfer_s: Transfers = 0.0,
) -> StageMap:
    """The contiguous partition with the least maximum of weight per speed and messages, under every rank's memory.

    Among partitions with that maximum, the least sum of squared stage weights is returned (then the earlier
    boundaries). Raises `PartitionError` if there are fewer layers than ranks or the memory does not suffice. Method:
    Pinar and Aykanat (2004), extended to memory and unequal ranks.
    """
    problem = _problem(weights, costs, limits, microbatches, use_speed=use_speed, transfer_s=transfer_s)
    beta = minimal_bottleneck(problem)
    if beta == NO_PARTITION:
        raise PartitionError(explain_memory(costs, limits, microbatches))
    # no layer has a preferred rank: the square term alone decides
    flat = np.zeros((len(limits), len(costs) + 1), dtype=np.float64)
    return _best_map(problem, beta, 1.0, flat)


def partition_by_time(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int, transfer_s: Transfers = 0.0
) -> StageMap:
    """Balance measured seconds (forward, backward and messages) over ranks of the given speeds; exact.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        microbatches: M.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P]: see `message_s`.

    Raises:
        PartitionError: If there are fewer layers than ranks, or the memory does not suffice.
    """
    return _partition([c.total_s for c in costs], costs, limits, microbatches, transfer_s=transfer_s)


def partition_by_parameters(costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> StageMap:
    """Balance parameter bytes, whatever the ranks' speeds (DeepSpeed's `parameters`).

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        microbatches: M.

    Raises:
        PartitionError: If there are fewer layers than ranks, or the memory does not suffice.
    """
    # bytes balance memory, which does not depend on speed
    weights = [float(c.parameter_bytes) for c in costs]
    return _partition(weights, costs, limits, microbatches, use_speed=False)


def partition_uniform(costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> StageMap:
    """Give stages equal numbers of layers; the first L mod P stages take one more.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        microbatches: M.

    Raises:
        PartitionError: If there are fewer layers than ranks, or the memory does not suffice.
    """
    layers, stages = len(costs), len(limits)
    if layers < stages or stages < 1:
        raise PartitionError(_too_few_layers(layers, stages))
    size, more = divmod(layers, stages)
    stage_map = StageMap.contiguous([k * size + min(k, more) for k in range(stages + 1)])
    if not fits(costs, stage_map, limits, microbatches):
        raise PartitionError(f"equal numbers of layers do not fit: {explain_memory(costs, limits, microbatches)}")
    return stage_map


def partition_near(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    previous: StageMap,
    *,
    microbatches: int,
    slack: float = 0.0,
    transfer_s: Transfers = 0.0,
) -> StageMap:
    """The partition that moves the fewest bytes from `previous` with a bottleneck within (1 + slack) of the best.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        previous: The map in force.
        microbatches: M.
        slack: How much worse than the best the bottleneck may be, relative.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].

    Raises:
        PartitionError: If there are fewer layers than ranks, or the memory does not suffice.
    """
    if not slack >= 0:
        raise SpecError(f"slack must not be negative, got {slack!r}")
    previous.check_layers(len(costs))
    weights = [c.total_s for c in costs]
    problem = _problem(weights, costs, limits, microbatches, use_speed=True, transfer_s=transfer_s)
    best = minimal_bottleneck(problem)
    if best == NO_PARTITION:
        raise PartitionError(explain_memory(costs, limits, microbatches))
    home = np.asarray(previous.assignment(), dtype=np.int64)
    size = np.asarray([c.moved_bytes for c in costs], dtype=np.float64)
    penalty = np.zeros((len(limits), len(costs) + 1), dtype=np.float64)
    for k in range(len(limits)):
        # what stage k would have to receive, as prefix sums over layers
        np.cumsum(np.where(home == k, 0.0, size), out=penalty[k, 1:])
    # a square term far below one byte settles ties in favour of even stages
    return _best_map(problem, best * (1.0 + slack), 1e-3, penalty)


def maps_on(
    ranks: Sequence[int],
    limits: Sequence[RankLimits],
    current: StageMap,
    make: Callable[[Sequence[RankLimits], StageMap, Transfers], list[StageMap]],
    transfer_s: Transfers = 0.0,
) -> list[StageMap]:
    """What `make` finds for some ranks alone, in the numbers of all ranks; empty if none fits.

    Args:
        ranks: Which, in this order.
        limits: Of all ranks [P].
        current: The map in force. A layer that runs on none of `ranks` is given number len(ranks): it must move
            anyway.
        make: From these ranks' limits, `current` and the links in their numbers, to maps.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].
    """
    number = {rank: i for i, rank in enumerate(ranks)}
    local = StageMap.from_assignment(number.get(r, len(ranks)) for r in current.assignment())
    try:
        found = make([limits[r] for r in ranks], local, among(transfer_s, ranks))
    except PartitionError:
        return []
    return [StageMap(m.boundaries, tuple(ranks[r] for r in m.ranks)) for m in found]
