"""Contiguous partitions of layers into stages: uniform, by parameters, by regular expression, by time.

Shape legend: L layers, P ranks, M microbatches. The order of ranks is fixed: stage k runs on rank k, with
that rank's speed and memory; every function is exact for this order and does not search over permutations of
unequal ranks. Stage k needs the state of its layers and their activations of min(M, P - k) microbatches. No
stage is ever empty.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from pipeline_balance.maps.search import NO_PARTITION, Problem, best_boundaries, minimal_bottleneck
from pipeline_balance.spec import (
    MAX_BYTES,
    LayerCost,
    PartitionError,
    RankLimits,
    StageMap,
    fits,
    in_flight,
    rank_loads_s,
)
from prophet.errors import SpecError
from prophet.spec import FloatArray, IntArray


def _too_few_layers(layers: int, stages: int) -> str:
    return f"{layers} layers cannot fill {stages} stages: every stage needs at least one layer"


def _prefix(values: Sequence[int]) -> IntArray:
    prefix = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(np.asarray(values, dtype=np.int64), out=prefix[1:])
    return prefix


def _whole_units(weights: Sequence[float]) -> IntArray:
    """Weights as integers whose sum stays below 2**53.

    Sums of integers do not depend on their order, so two stages of equal layers tie exactly; a weight is off
    by at most 2**-52 of the total.
    """
    total = math.fsum(weights)
    if total <= 0:
        return np.ones(len(weights), dtype=np.int64)
    exponent = 52 - math.frexp(total)[1]
    return np.array([round(math.ldexp(w, exponent)) for w in weights], dtype=np.int64)


def _problem(
    weights: Sequence[float],
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    microbatches: int,
    *,
    use_speed: bool,
) -> Problem:
    layers, stages = len(costs), len(limits)
    if microbatches < 1:
        raise SpecError(f"microbatches must be at least 1, got {microbatches}")
    if stages < 1:
        raise SpecError("a partition needs the limits of at least one rank")
    if layers < stages:
        raise PartitionError(_too_few_layers(layers, stages))
    held = [in_flight(k, stages, microbatches) for k in range(stages)]
    state = [c.state_bytes for c in costs]
    active = [c.activation_bytes for c in costs]
    if sum(state) + held[0] * sum(active) > MAX_BYTES:
        raise SpecError("the layers' bytes add up to more than 2**62")
    return Problem(
        units=_prefix(_whole_units(weights).tolist()),
        state=_prefix(state),
        active=_prefix(active),
        held=np.array(held, dtype=np.int64),
        speed=np.array([r.speed if use_speed else 1.0 for r in limits], dtype=np.float64),
        capacity=np.array([r.memory_bytes for r in limits], dtype=np.int64),
    )


def _best_map(problem: Problem, beta: float, square_weight: float, penalty: FloatArray) -> StageMap:
    return StageMap.contiguous(best_boundaries(beta, problem, square_weight, penalty).tolist())


def explain_memory(costs: Sequence[LayerCost], limits: Sequence[RankLimits], microbatches: int) -> str:
    """Why no contiguous partition fits: the first layer that is too large for every rank, or the totals."""
    stages = len(limits)
    for layer, cost in enumerate(costs):
        if all(
            cost.state_bytes + in_flight(k, stages, microbatches) * cost.activation_bytes > limit.memory_bytes
            for k, limit in enumerate(limits)
        ):
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


def partition_by_weights(
    weights: Sequence[float],
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    *,
    microbatches: int,
    use_speed: bool = True,
) -> StageMap:
    """The contiguous partition with the least maximum of weight per speed, under every rank's memory.

    `weights` are L non-negative figures. Among partitions with that maximum, the least sum of squared stage
    weights is returned (then the earlier boundaries). Raises `PartitionError` if there are fewer layers than
    ranks or the memory does not suffice. Method: Pinar and Aykanat (2004), extended to memory and unequal
    ranks.
    """
    if len(weights) != len(costs):
        raise SpecError(f"{len(weights)} weights were given for {len(costs)} layers")
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise SpecError("weights must be finite and not negative")
    problem = _problem(weights, costs, limits, microbatches, use_speed=use_speed)
    beta = minimal_bottleneck(problem)
    if beta == NO_PARTITION:
        raise PartitionError(explain_memory(costs, limits, microbatches))
    flat = np.zeros((len(limits), len(costs) + 1), dtype=np.float64)
    return _best_map(problem, beta, 1.0, flat)


def partition_by_time(costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> StageMap:
    """Balance measured seconds (forward and backward) over ranks of the given speeds; exact."""
    return partition_by_weights([c.total_s for c in costs], costs, limits, microbatches=microbatches)


def partition_by_parameters(costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> StageMap:
    """Balance parameter bytes, whatever the ranks' speeds (DeepSpeed's `parameters`)."""
    weights = [float(c.parameter_bytes) for c in costs]
    return partition_by_weights(weights, costs, limits, microbatches=microbatches, use_speed=False)


def partition_by_regex(
    pattern: str, costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int
) -> StageMap:
    """Balance the count of layers whose name matches `pattern` (DeepSpeed's `type:regex`; case is
    ignored).
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise SpecError(f"{pattern!r} is not a regular expression: {error}") from error
    weights = [1.0 if compiled.search(c.name) else 0.0 for c in costs]
    if not any(weights):
        raise PartitionError(f"no layer name matches {pattern!r}: {[c.name for c in costs][:8]}")
    return partition_by_weights(weights, costs, limits, microbatches=microbatches, use_speed=False)


def partition_uniform(costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> StageMap:
    """Equal numbers of layers; the first L mod P stages take one more. Raises if a rank's memory
    does not suffice.
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
) -> StageMap:
    """The partition that moves the fewest bytes from `previous` with a bottleneck within (1 +
    slack) of the best.
    """
    if not slack >= 0:
        raise SpecError(f"slack must not be negative, got {slack!r}")
    previous.check_layers(len(costs))
    problem = _problem([c.total_s for c in costs], costs, limits, microbatches, use_speed=True)
    best = minimal_bottleneck(problem)
    if best == NO_PARTITION:
        raise PartitionError(explain_memory(costs, limits, microbatches))
    home = np.asarray(previous.assignment(), dtype=np.int64)
    size = np.asarray([c.moved_bytes for c in costs], dtype=np.float64)
    penalty = np.zeros((len(limits), len(costs) + 1), dtype=np.float64)
    for k in range(len(limits)):
        np.cumsum(np.where(home == k, 0.0, size), out=penalty[k, 1:])
    # a square term far below one byte settles ties in favour of even stages
    return _best_map(problem, best * (1.0 + slack), 1e-3, penalty)


def partition(method: str, costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int) -> StageMap:
    """Partition by name, as DeepSpeed's `partition_method`: `uniform`, `parameters`, `type:REGEX`
    or `time`.
    """
    if method.lower().startswith("type:"):
        return partition_by_regex(method[len("type:") :], costs, limits, microbatches=microbatches)
    named = {
        "uniform": partition_uniform,
        "parameters": partition_by_parameters,
        "time": partition_by_time,
    }
    if method.lower() not in named:
        raise SpecError(f"method must be one of {sorted(named)} or 'type:REGEX', got {method!r}")
    return named[method.lower()](costs, limits, microbatches=microbatches)


def partition_by_time_naive(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int
) -> tuple[float, StageMap]:
    """The naive twin of `partition_by_time`: tries every set of boundaries. Returns (bottleneck_s,
    one best map).
    """
    layers, stages = len(costs), len(limits)
    best: tuple[float, StageMap] | None = None
    for inner in itertools.combinations(range(1, layers), stages - 1):
        stage_map = StageMap.contiguous((0, *inner, layers))
        if fits(costs, stage_map, limits, microbatches):
            bottleneck = max(rank_loads_s(costs, stage_map, limits))
            if best is None or bottleneck < best[0]:
                best = (bottleneck, stage_map)
    if best is None:
        raise PartitionError(f"none of the partitions of {layers} layers over {stages} ranks fits")
    return best
