"""Balancing by moving single layers from overloaded to underloaded ranks, round after round.

Shape legend: L layers, P ranks, M microbatches. After DynMo's diffusion balancer (DynPipe supplement,
Algorithm 2), with its bookkeeping put right: totals are recomputed after every accepted move, and a move is
accepted only if the sum of squared deviations from the mean load falls and the memory of every rank suffices
afterwards. The bound in the paper's Lemma 2 is for load that can be divided at will; whole layers need not
reach the optimum, and none is claimed. Both forms stop after finitely many moves because the sum falls with
each.

`contiguous` moves keep stage k on rank k and shift the boundary of two neighbours by one layer. `free` moves
put any layer on any rank; the result may need several stages per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline_balance.spec import LayerCost, LayerMove, PartitionError, RankLimits, StageMap, fits
from prophet.errors import SpecError

Load = Literal["time", "parameters"]
Moves = Literal["contiguous", "free"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diffusion:
    """Where diffusion ended and how: the accepted moves in order, the sum of squared deviations
    before and after each.
    """

    stage_map: StageMap
    moves: tuple[LayerMove, ...]
    squared_deviations: tuple[float, ...]


def diffuse(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    start: StageMap,
    *,
    microbatches: int,
    load: Load = "time",
    moves: Moves = "contiguous",
    max_moves: int = 10_000,
) -> Diffusion:
    """Improve `start` move by move; each round takes the move that lowers the sum of squared deviations most.

    A rank's load is the sum of its layers' seconds over its speed, or of their parameter bytes (`load`).
    Contiguous moves need stage k on rank k for all P ranks. Raises `PartitionError` if `start` itself does
    not fit.
    """
    if load not in ("time", "parameters") or moves not in ("contiguous", "free"):
        raise SpecError(
            f"load must be 'time' or 'parameters' and moves 'contiguous' or 'free', got {load!r}, {moves!r}"
        )
    if moves == "contiguous" and start.ranks != tuple(range(len(limits))):
        raise SpecError(f"contiguous moves need stage k on rank k for {len(limits)} ranks, got {list(start.ranks)}")
    if not fits(costs, start, limits, microbatches):
        raise PartitionError("the stage map that diffusion starts from does not fit the ranks' memory")
    weight = [c.total_s if load == "time" else float(c.parameter_bytes) for c in costs]
    speed = [r.speed if load == "time" else 1.0 for r in limits]
    current = start
    deviation = _squared_deviations(weight, speed, current)
    accepted: list[LayerMove] = []
    history = [deviation]
    propose = _boundary_moves if moves == "contiguous" else _free_moves
    while len(accepted) < max_moves:
        best: tuple[float, LayerMove, StageMap] | None = None
        for move, moved in propose(current, weight, speed):
            after = _squared_deviations(weight, speed, moved)
            if after >= (best[0] if best else deviation):
                continue
            if fits(costs, moved, limits, microbatches):
                best = (after, move, moved)
        if best is None:
            break
        deviation, move, current = best
        accepted.append(move)
        history.append(deviation)
    return Diffusion(stage_map=current, moves=tuple(accepted), squared_deviations=tuple(history))


def _loads(weight: Sequence[float], speed: Sequence[float], stage_map: StageMap) -> list[float]:
    loads = [0.0] * len(speed)
    for layer, rank in enumerate(stage_map.assignment()):
        loads[rank] += weight[layer]
    return [load / s for load, s in zip(loads, speed, strict=True)]


def _squared_deviations(weight: Sequence[float], speed: Sequence[float], stage_map: StageMap) -> float:
    loads = _loads(weight, speed, stage_map)
    # The mean is of the even split, so that it stays fixed while layers move between ranks of unequal speed.
    mean = sum(weight) / sum(speed)
    return sum((load - mean) ** 2 for load in loads)


def _boundary_moves(
    stage_map: StageMap, weight: Sequence[float], speed: Sequence[float]
) -> Iterator[tuple[LayerMove, StageMap]]:
    """Every shift of one boundary by one layer, away from the more loaded side, that empties no stage."""
    loads = _loads(weight, speed, stage_map)
    bounds = stage_map.boundaries
    for s in range(stage_map.stages - 1):
        left_gives = loads[s] > loads[s + 1]
        giver, taker = (s, s + 1) if left_gives else (s + 1, s)
        if len(stage_map.layers_of(giver)) < 2:
            continue
        cut = bounds[s + 1] + (-1 if left_gives else 1)
        layer = cut if left_gives else bounds[s + 1]
        moved = StageMap.contiguous((*bounds[: s + 1], cut, *bounds[s + 2 :]))
        yield LayerMove(layer=layer, source=giver, destination=taker), moved


def _free_moves(
    stage_map: StageMap, weight: Sequence[float], speed: Sequence[float]
) -> Iterator[tuple[LayerMove, StageMap]]:
    """Every move of one layer from a rank above the mean to one below it that leaves the giver a layer."""
    loads = _loads(weight, speed, stage_map)
    mean = sum(weight) / sum(speed)
    assignment = list(stage_map.assignment())
    for source in range(len(loads)):
        layers = stage_map.layers_on(source)
        if loads[source] <= mean or len(layers) < 2:
            continue
        for layer in layers:
            for destination in range(len(loads)):
                if loads[destination] >= mean:
                    continue
                assignment[layer] = destination
                moved = StageMap.from_assignment(assignment)
                assignment[layer] = source
                yield LayerMove(layer=layer, source=source, destination=destination), moved
