"""The values that flow through pipeline_balance: frozen, validated when built, free of torch and of any process group.

Shape legend: L layers, S stages, P ranks, M microbatches. Times are seconds of one microbatch on a rank of speed 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.spec import FloatArray

MAX_BYTES = 1 << 62
"""Stands for "no limit": large enough for any machine, small enough that sums stay within 64 bits."""


class PartitionError(SpecError):
    """No stage map meets the limits; the message names what does not fit."""


def _check_seconds(name: str, value: float) -> None:
    # not-a-number compares as false with any limit, so a search would take it for a cost that fits
    if not (math.isfinite(value) and value >= 0):
        raise SpecError(f"{name} must be finite seconds, not negative, got {value!r}")


def _check_bytes(name: str, value: int) -> None:
    # a float would lose single bytes from 2^53 on, and sums must be exact
    if not (isinstance(value, int | np.integer) and 0 <= value <= MAX_BYTES):
        raise SpecError(f"{name} must be whole bytes from 0 to 2**62, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What one layer takes: seconds and activation bytes per microbatch, state bytes once.

    A frozen layer is not free: it keeps `forward_s`, and `backward_input_s` too while any trainable parameter lies
    upstream of it; only `backward_weight_s` vanishes.

    Attributes:
        forward_s: Seconds of the forward.
        backward_input_s: Seconds of the gradient of its input.
        backward_weight_s: Seconds of the gradients of its weights.
        all_reduce_s: Seconds of averaging its gradients over replicas, once in an update.
        activation_bytes: What autograd keeps from forward to backward.
        parameter_bytes: Its parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: What optimizers keep for them.
        name: For people.
    """

    forward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    all_reduce_s: float = 0.0
    activation_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_input_s", "backward_weight_s", "all_reduce_s"):
            _check_seconds(f"LayerCost.{field}", getattr(self, field))
        for field in ("activation_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            _check_bytes(f"LayerCost.{field}", getattr(self, field))

    @property
    def backward_s(self) -> float:
        """Seconds of a whole backward pass of one microbatch."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def total_s(self) -> float:
        """Seconds of one microbatch, forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    @property
    def state_bytes(self) -> int:
        """Memory the layer takes whatever the schedule: parameters, gradients, optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel when the layer changes rank between steps, when gradients are already consumed."""
        # gradients were used by the update before the move
        return self.parameter_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLimits:
    """What one rank offers.

    Attributes:
        memory_bytes: Memory for state and activations.
        speed: Speed relative to that of the rank which the times are of.
    """

    memory_bytes: int = MAX_BYTES
    speed: float = 1.0

    def __post_init__(self) -> None:
        _check_bytes("RankLimits.memory_bytes", self.memory_bytes)
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise SpecError(f"RankLimits.speed must be positive and finite, got {self.speed!r}")

    @classmethod
    def uniform(cls, ranks: int, *, memory_bytes: int = MAX_BYTES, speed: float = 1.0) -> tuple[RankLimits, ...]:
        """Make limits that are all alike.

        Args:
            ranks: P, at least 1.
            memory_bytes: Memory of each.
            speed: Speed of each.
        """
        if ranks < 1:
            raise SpecError(f"ranks must be at least 1, got {ranks}")
        return (cls(memory_bytes=memory_bytes, speed=speed),) * ranks


@dataclass(frozen=True, slots=True)
class StageMap:
    """Which layers form which stage, and which rank runs it.

    A rank may run several stages and adjacent stages may share a rank; a rank that is not named runs nothing. No stage
    is empty.

    Attributes:
        boundaries: [S + 1] stage s runs layers boundaries[s] .. boundaries[s+1]-1.
        ranks: [S] the rank of every stage.
    """

    boundaries: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        # plain integers: solvers return numpy's, which JSON refuses
        boundaries = tuple(int(b) for b in self.boundaries)
        ranks = tuple(int(r) for r in self.ranks)
        if len(boundaries) != len(ranks) + 1 or len(ranks) < 1:
            got = f"{len(boundaries)} boundaries for {len(ranks)} stages"
            raise SpecError(f"StageMap needs one boundary more than stages, got {got}")
        # boundaries list the first layer of every stage, and then L
        if boundaries[0] != 0:
            raise SpecError(f"StageMap.boundaries must start at layer 0, got {boundaries[0]}")
        for s in range(len(ranks)):
            if boundaries[s + 1] <= boundaries[s]:
                raise SpecError(f"stage {s} is empty: boundaries must rise strictly, got {list(boundaries)}")
        if min(ranks) < 0:
            raise SpecError(f"StageMap.ranks must not be negative, got {list(ranks)}")
        # the dataclass is frozen, and `__setattr__` refuses
        object.__setattr__(self, "boundaries", boundaries)
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def contiguous(cls, boundaries: Sequence[int]) -> StageMap:
        """Put stage k on rank k."""
        return cls(tuple(boundaries), tuple(range(len(boundaries) - 1)))

    @classmethod
    def even(cls, layers: int, ranks: int) -> StageMap:
        """Spread layers evenly, those left over on the first ranks; use no more ranks than layers."""
        used = min(layers, ranks)
        # without layers there are no ranks either, and `__post_init__` refuses the map
        size, more = divmod(layers, max(used, 1))
        return cls.contiguous([k * size + min(k, more) for k in range(used + 1)])

    @classmethod
    def from_assignment(cls, rank_of_layer: Iterable[int]) -> StageMap:
        """Make every maximal run of layers on one rank a stage; `rank_of_layer` is [L]."""
        assignment = [int(r) for r in rank_of_layer]
        if not assignment:
            raise SpecError("an assignment needs at least one layer")
        # a stage is contiguous, so a rank with layers apart gets several stages
        cuts = [0] + [i for i in range(1, len(assignment)) if assignment[i] != assignment[i - 1]]
        return cls((*cuts, len(assignment)), tuple(assignment[c] for c in cuts))

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.boundaries[-1]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.ranks)

    @property
    def used_ranks(self) -> tuple[int, ...]:
        """Ranks that run something, ascending."""
        return tuple(sorted(set(self.ranks)))

    def layers_of(self, stage: int) -> range:
        """Return the layers of one stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def assignment(self) -> tuple[int, ...]:
        """Return the rank of every layer, [L]."""
        return tuple(r for s, r in enumerate(self.ranks) for _ in self.layers_of(s))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` runs, ascending."""
        return tuple(s for s, r in enumerate(self.ranks) if r == rank)

    def layers_on(self, rank: int) -> tuple[int, ...]:
        """Return the layers that `rank` runs, ascending."""
        return tuple(layer for s in self.stages_on(rank) for layer in self.layers_of(s))

    def moves_to(self, other: StageMap) -> tuple[LayerMove, ...]:
        """Return the layers whose rank differs in `other`, ascending."""
        if other.layers != self.layers:
            raise SpecError(f"stage maps are of {self.layers} and {other.layers} layers")
        return tuple(
            LayerMove(layer=layer, source=a, destination=b)
            for layer, (a, b) in enumerate(zip(self.assignment(), other.assignment(), strict=True))
            if a != b
        )

    def check_layers(self, layers: int) -> None:
        """Raise `SpecError` unless the map is of as many layers."""
        if self.layers != layers:
            raise SpecError(f"the stage map is of {self.layers} layers, {layers} layer costs were given")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMove:
    """One layer changes rank.

    Attributes:
        layer: Its number.
        source: The rank that it leaves.
        destination: The rank that it goes to.
    """

    layer: int
    source: int
    destination: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """Two measures of unequal load, of which throughput follows the first.

    Attributes:
        max_mean: The largest load over the mean.
        max_minus_min_over_mean: The difference of the largest and the smallest over the mean (DynMo, Eq. 2).
    """

    max_mean: float
    max_minus_min_over_mean: float

    @classmethod
    def of(cls, loads: Sequence[float] | FloatArray) -> Imbalance:
        """Measure `loads`, one non-negative figure per rank; equal or all-zero loads give 1.0 and 0.0."""
        values = np.asarray(loads, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise SpecError(f"loads must be one figure per rank, got shape {list(values.shape)}")
        mean = float(values.mean())
        # nobody has any load, and both ratios would be 0 / 0
        if mean <= 0:
            return cls(max_mean=1.0, max_minus_min_over_mean=0.0)
        return cls(
            max_mean=float(values.max()) / mean, max_minus_min_over_mean=float(values.max() - values.min()) / mean
        )


def in_flight(stage: int, stages: int, microbatches: int, slices: int = 1) -> int:
    """Count the units whose activations a stage holds at once under 1F1B: min(M N, N - 1 + S - stage).

    A unit is one of the N slices of a microbatch, and without slices a microbatch: then it is min(M, S - stage).

    Args:
        stage: The stage, from 0.
        stages: S.
        microbatches: M.
        slices: N.
    """
    # A microbatch's slices go backward in reverse, so all N are held before the first one is done (SlimPipe, Section
    # 4). The stages behind add as many as a unit passes until its gradient comes back.
    return min(microbatches * slices, slices - 1 + stages - stage)


def rank_loads_s(costs: Sequence[LayerCost], stage_map: StageMap, limits: Sequence[RankLimits]) -> tuple[float, ...]:
    """Sum the seconds of one microbatch on every rank at its own speed, [P]; 0.0 on a rank that runs nothing.

    Args:
        costs: [L] the layers.
        stage_map: Which rank runs which layers.
        limits: [P] the ranks.
    """
    _check(costs, stage_map, limits)
    return tuple(
        # exact whatever the order, so equal sums compare equal on all ranks
        math.fsum(costs[i].total_s for i in stage_map.layers_on(r)) / limits[r].speed
        for r in range(len(limits))
    )


def rank_memory_bytes(
    costs: Sequence[LayerCost],
    stage_map: StageMap,
    limits: Sequence[RankLimits],
    microbatches: int,
    slices: int = 1,
) -> tuple[int, ...]:
    """Sum the bytes every rank needs, [P]: state, and activations of `in_flight` units for every stage that it runs.

    Args:
        costs: [L] the layers; `activation_bytes` is a microbatch's.
        stage_map: Which rank runs which layers.
        limits: [P] the ranks.
        microbatches: M.
        slices: N; a unit has the N-th part of a microbatch's activations, rounded up.
    """
    _check(costs, stage_map, limits)
    needed = [0] * len(limits)
    for s, rank in enumerate(stage_map.ranks):
        held = in_flight(s, stage_map.stages, microbatches, slices)
        for i in stage_map.layers_of(s):
            # rounded up, so that memory is never underestimated
            needed[rank] += costs[i].state_bytes + held * -(-costs[i].activation_bytes // slices)
    return tuple(needed)


def fits(costs: Sequence[LayerCost], stage_map: StageMap, limits: Sequence[RankLimits], microbatches: int) -> bool:
    """Return whether every rank's memory suffices.

    Args:
        costs: [L] the layers.
        stage_map: Which rank runs which layers.
        limits: [P] the ranks.
        microbatches: M.
    """
    needed = rank_memory_bytes(costs, stage_map, limits, microbatches)
    return all(n <= limit.memory_bytes for n, limit in zip(needed, limits, strict=True))


def moved_bytes(costs: Sequence[LayerCost], before: StageMap, after: StageMap) -> int:
    """Sum the bytes of parameters and optimizer state that change rank.

    Args:
        costs: [L] the layers.
        before: The map to come from.
        after: The map to go to.
    """
    before.check_layers(len(costs))
    return sum(costs[move.layer].moved_bytes for move in before.moves_to(after))


def _check(costs: Sequence[LayerCost], stage_map: StageMap, limits: Sequence[RankLimits]) -> None:
    stage_map.check_layers(len(costs))
    if max(stage_map.ranks) >= len(limits):
        raise SpecError(f"the stage map names rank {max(stage_map.ranks)}, but limits are of {len(limits)} ranks")
