"""Balancing by moving single layers from overloaded to underloaded ranks, round after round.

Shape legend: L layers, P ranks, M microbatches. After DynMo's diffusion balancer (DynPipe supplement, Algorithm 2),
with its bookkeeping put right: totals are recomputed after every accepted move, and a move is accepted only if the sum
of squared deviations from the mean load falls and the memory of every rank suffices afterwards. The bound in the
paper's Lemma 2 is for load that can be divided at will; whole layers need not reach the optimum, and none is claimed.
It stops after finitely many moves because the sum falls with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pipeline_balance.schedules.links import Transfers, message_s
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, fits
from prophet.errors import SpecError

Load = Literal["time", "parameters"]


def diffuse(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    start: StageMap,
    *,
    microbatches: int,
    load: Load = "time",
    transfer_s: Transfers = 0.0,
) -> list[StageMap]:
    """`start` and the map after every move; each round shifts a boundary of neighbours by one layer.

    The shift that lowers the sum of squared deviations most is taken.

    Args:
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        start: Has stage k on rank k for all P ranks.
        microbatches: M.
        load: A rank's load is the sum of its layers' seconds over its speed, or of their parameter bytes.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P]. A rank's share of its links'
            counts as its load (supplement, Section D.2): work leaves both ends of a slow link.

    Raises:
        PartitionError: If `start` does not fit.
    """
    if load not in get_args(Load):
        raise SpecError(f"load must be one of {list(get_args(Load))}, got {load!r}")
    if start.ranks != tuple(range(len(limits))):
        raise SpecError(f"diffusion needs stage k on rank k for {len(limits)} ranks, got {list(start.ranks)}")
    if not fits(costs, start, limits, microbatches):
        raise PartitionError("the stage map that diffusion starts from does not fit the ranks' memory")
    weight = [c.total_s if load == "time" else float(c.parameter_bytes) for c in costs]
    speed = [r.speed if load == "time" else 1.0 for r in limits]
    added: list[float] = message_s(transfer_s if load == "time" else 0.0, len(limits)).tolist()
    # The mean is of the even split, so that it stays fixed while layers move between ranks of unequal speed.
    mean = (sum(weight) + sum(a * s for a, s in zip(added, speed, strict=True))) / sum(speed)

    def loads(stage_map: StageMap) -> list[float]:
        return [sum(weight[i] for i in stage_map.layers_of(k)) / s + added[k] for k, s in enumerate(speed)]

    def deviation(stage_map: StageMap) -> float:
        return sum((load - mean) ** 2 for load in loads(stage_map))

    maps = [start]
    while True:
        now = deviation(maps[-1])
        better = [m for m in _shifted(maps[-1], loads(maps[-1])) if deviation(m) < now]
        # memory is checked last: it is asked of the few maps that are better
        better = [m for m in better if fits(costs, m, limits, microbatches)]
        if not better:
            return maps
        # min takes the first of equals, the lowest boundary: every rank finds the same
        maps.append(min(better, key=deviation))


def _shifted(stage_map: StageMap, loads: Sequence[float]) -> Iterator[StageMap]:
    """Every shift of one boundary by one layer, away from the more loaded side, that empties no stage."""
    bounds = stage_map.boundaries
    for s in range(stage_map.stages - 1):
        # a shift towards the more loaded side cannot lower the deviation
        left_gives = loads[s] > loads[s + 1]
        if len(stage_map.layers_of(s if left_gives else s + 1)) > 1:
            cut = bounds[s + 1] + (-1 if left_gives else 1)
            yield StageMap.contiguous((*bounds[: s + 1], cut, *bounds[s + 2 :]))
