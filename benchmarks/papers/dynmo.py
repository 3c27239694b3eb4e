"""DynMo's figures, and those of its supplement, by moving whole layers under the pipeline simulator.

Neither paper prints the loads of its layers, so each case assumes some.

Shape legend: L layers, S stages, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

import numpy as np

from benchmarks.papers.rows import Assumption, Number, Value
from benchmarks.planner.walks import geomean
from pipeline_balance.control.decide import MoveCost
from pipeline_balance.maps.compare import predicted_makespan_s
from pipeline_balance.maps.diffusion import Load, diffuse
from pipeline_balance.maps.partition import partition_by_parameters, partition_by_time, partition_uniform
from pipeline_balance.schedules.classic import one_f_one_b
from pipeline_balance.schedules.closed_forms import chimera_bubble_ratio
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.traces.npz import RoutingTrace

ASSUMPTIONS: Mapping[str, Assumption] = {
    "baseline": Assumption(assumed="the same dynamic model", instead="a model without dynamism"),
    "loads": Assumption(assumed="the case's usual loads", instead="its other loads"),
    "stages": Assumption(assumed="the stated stages", instead="half as many"),
    "interval": Assumption(assumed="decisions as often as measured", instead="as often as printed, of 10,000 steps"),
}
PAPERS = ("DynMo", "DynPipe supplement")
# Stages, and microbatches at four for every card of a pipeline
STAGES, FEW_STAGES = 24, 16
PER_STAGE = 4
# A forward, and both parts of a backward, take as long each
DENSE = LayerCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
# The supplement's node: 64 sequences in microbatches of two
NODE_MICROBATCHES = 32
# Assumed, of a layer of width 1,024 in float32 with both moments, on a card at 45 % of 989 TFLOP/s
LAYER_PARAMETERS, SEQUENCE, FLOPS_PER_S = 12 * 1024**2, 2048, 445e12
# Of the hidden work of a layer with experts, what does not depend on the busiest rank
FIXED = 0.3
# What Figure 4 prints below: iterations from which 6, 4 and 2 cards are in use, of 10,000
REPACKED = {24: (2300, 6700, 8500), 32: (3000, 6900, 8500), 40: (3600, 6900, 9000), 48: (4400, 7700), 56: (5800,)}
RUN_STEPS = 10_000
# Measured on four emulated hosts (benchmarks/results/2026-11-22-pipeline-four-hosts.md): per cent of the time for
# measuring and deciding, per cent for moves, steps of the run, steps between decisions
OVERHEAD = {
    "pruning": (0.11, 0.0, 80, 13),
    "freezing": (0.20, 0.34, 200, 33),
    "sparse-attention": (0.15, 0.0, 80, 13),
    "early-exit": (0.16, 0.0, 80, 13),
    "mixture-of-depths": (0.13, 0.0, 80, 1),
    "moe": (0.08, 0.0, 80, 1),
}
# Iterations between decisions, as printed; every iteration where it says nothing here
PRINTED_INTERVAL = {"pruning": 2300, "freezing": 300, "early-exit": 100}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Loads of a dynamic model: factors of a dense layer's time by layer, and others that are as likely."""

    stages: int
    usual: Callable[[int], list[LayerCost]]
    other: Callable[[int], list[LayerCost]]


def scaled(factors: Sequence[float]) -> list[LayerCost]:
    """Layers whose times are these multiples of a dense layer's."""
    return [replace(DENSE, forward_s=float(f), backward_input_s=float(f), backward_weight_s=float(f)) for f in factors]


def pruned(kept: Sequence[float], break_even: float = 0.25) -> list[LayerCost]:
    """Layers of which these shares of weights are left; sparse products pay below the supplement's Figure 2."""
    return scaled([min(1.0, share / break_even) for share in kept])


def frozen(layers: int, prefix: float) -> list[LayerCost]:
    """A frozen prefix keeps its forward; what it feeds keeps all, but the first of them needs no input gradient."""
    n = round(prefix * layers)
    still = replace(DENSE, backward_input_s=0.0, backward_weight_s=0.0)
    return [still] * n + [replace(DENSE, backward_input_s=0.0)] * (n < layers) + [DENSE] * (layers - n - 1)


def _by_depth(layers: int) -> list[float]:
    """Shares that are kept, 10 % in all: the last layers keep 17 times as much as the first."""
    return [float(share) for share in np.linspace(0.01, 0.19, layers)]


def _alike(layers: int) -> list[LayerCost]:
    return pruned([0.1] * layers)


def _kept_by_depth(layers: int) -> list[LayerCost]:
    return pruned(_by_depth(layers))


def _densities(layers: int, least: float) -> list[float]:
    rng = np.random.default_rng(0)
    share = 0.8  # of a layer's time is attention
    return [1.0 - share + share * float(density) for density in rng.uniform(least, 1.0, layers)]


def _alive(layers: int, last: float) -> list[float]:
    """Shares of tokens: all up to the middle, then falling."""
    half = layers // 2
    return [*[1.0] * half, *np.linspace(1.0, last, layers - half)]


CASES: Mapping[str, Case] = {
    "pruning": Case(stages=STAGES, usual=lambda n: pruned(_by_depth(n)), other=lambda n: pruned([0.1] * n)),
    "freezing": Case(stages=STAGES, usual=lambda n: frozen(n, 0.5), other=lambda n: frozen(n, 0.75)),
    "sparse-attention": Case(
        stages=STAGES, usual=lambda n: scaled(_densities(n, 0.05)), other=lambda n: scaled(_densities(n, 0.5))
    ),
    "early-exit": Case(stages=STAGES, usual=lambda n: scaled(_alive(n, 0.1)), other=lambda n: scaled(_alive(n, 0.02))),
    "mixture-of-depths": Case(
        stages=FEW_STAGES,
        usual=lambda n: scaled([1.0, 0.125] * (n // 2) + [1.0] * (n % 2)),
        other=lambda n: scaled([1.0, 1.0, 0.125, 0.125] * (n // 4) + [1.0] * (n % 4)),
    ),
}


def bubble(costs: Sequence[LayerCost], stage_map: StageMap, microbatches: int) -> float:
    """Share of all ranks' time that they idle under 1F1B."""
    durations = Durations.of_stages(costs, stage_map)
    return simulate(one_f_one_b(stage_map.stages, microbatches), durations).bubble_ratio


def maps(costs: Sequence[LayerCost], stages: int, microbatches: int) -> tuple[StageMap, StageMap]:
    """The map of equal numbers of layers, and the best one: never a longer step."""
    limits = RankLimits.uniform(stages)
    even = partition_uniform(costs, limits, microbatches=microbatches)
    by_time = partition_by_time(costs, limits, microbatches=microbatches)
    return even, min((even, by_time), key=lambda m: _step_s(tuple(costs), m, microbatches))


@cache
def _step_s(costs: tuple[LayerCost, ...], stage_map: StageMap, microbatches: int) -> float:
    return predicted_makespan_s(costs, stage_map, RankLimits.uniform(stage_map.stages), microbatches=microbatches)


def gain(
    costs: Sequence[LayerCost], stages: int, microbatches: int, before: Sequence[LayerCost] | None = None
) -> float:
    """A step of even numbers of layers over one of the best map; before: of a baseline that has other costs."""
    even, best = maps(costs, stages, microbatches)
    return _step_s(tuple(before or costs), even, microbatches) / _step_s(tuple(costs), best, microbatches)


class DynMo:
    """Ours for every number of both papers.

    Args:
        trace: Real routing, for layers with experts.
        iterations: How many of its iterations are simulated.
    """

    def __init__(self, trace: RoutingTrace, iterations: int = 3) -> None:
        self._experts = [_waiting_for_experts(trace, n) for n in np.linspace(0, 1, iterations)]
        self._of: dict[tuple[str, str], Callable[[dict[str, str], str | None], Value]] = {
            ("DynMo", "Figure 1"): self.bubbles,
            ("DynMo", "Figure 3"): self.throughput,
            ("DynMo", "Figure 4"): self.packing,
            ("DynPipe supplement", "Equation 1"): self.chimera,
            ("DynPipe supplement", "Table 1"): self.balancing,
            ("DynPipe supplement", "Table 2"): self.vertical,
        }

    def __call__(self, number: Number, changed: str | None) -> Value:
        """Return ours for a number, with one assumption changed where a name is given."""
        return self._of[number.paper, number.table](number.at, changed)

    def _costs(self, case: str, layers: int, changed: str | None) -> tuple[int, list[list[LayerCost]]]:
        """Stages, and costs of the layers by simulated iteration."""
        if case == "moe":
            stages, found = FEW_STAGES, [pick(layers, changed == "loads") for pick in self._experts]
        else:
            known = CASES[case]
            stages, found = known.stages, [(known.other if changed == "loads" else known.usual)(layers)]
        return (stages // 2 if changed == "stages" else stages), found

    def bubbles(self, at: dict[str, str], changed: str | None) -> float:
        """Idle share of 32 layers, in per cent, or in multiples of a dense model's."""
        stages, found = self._costs(at["case"], 32 if at["case"] in ("moe", "mixture-of-depths") else 48, changed)
        m = PER_STAGE * stages
        idle = float(np.mean([bubble(costs, maps(costs, stages, m)[0], m) for costs in found]))
        if at["bubble"] == "percent":
            return 100.0 * idle
        dense = [DENSE] * len(found[0])
        return idle / bubble(dense, maps(dense, stages, m)[0], m)

    def throughput(self, at: dict[str, str], changed: str | None) -> float:
        """Figure 3: the best map over equal numbers of layers."""
        stages, found = self._costs(at["case"], int(at.get("layers", 32)), changed)
        m = PER_STAGE * stages
        if "bubble" in at:
            before = at["bubble"] == "before"
            idle = [bubble(c, maps(c, stages, m)[0 if before else 1], m) for c in found]
            return 100.0 * float(np.mean(idle))
        dense = [DENSE] * len(found[0]) if changed == "baseline" else None
        return geomean([gain(costs, stages, m, dense) for costs in found])

    def packing(self, at: dict[str, str], changed: str | None) -> float:
        """Figure 4: cards in use, a mean over iterations; and what balancing takes, which was measured."""
        if at["what"] == "overhead":
            deciding, moving, steps, every = OVERHEAD[at["case"]]
            if changed == "interval":
                return deciding * every / PRINTED_INTERVAL.get(at["case"], every) + moving * steps / RUN_STEPS
            return deciding + moving
        ends = [*REPACKED[int(at["layers"])], RUN_STEPS]
        return (
            sum(cards * (end - start) for cards, start, end in zip((8, 6, 4, 2), [0, *ends], ends, strict=False))
            / RUN_STEPS
        )

    def chimera(self, at: dict[str, str], changed: str | None) -> float:
        """Equation 1, without transfers."""
        del changed
        return chimera_bubble_ratio(int(at["ranks"]), 1.0, float(at["backward"]))

    def vertical(self, at: dict[str, str], changed: str | None) -> Value:
        """Table 2: from layers that keep alike to layers that keep by depth; 90 % pruned."""
        layers, stages = int(at["layers"]), int(at["gpus"])
        stages = max(2, stages // 2) if changed == "stages" else stages
        dense = [DENSE] * layers if changed == "baseline" else None
        alike, by_depth = (gain(c(layers), stages, NODE_MICROBATCHES, dense) for c in (_alike, _kept_by_depth))
        return (by_depth, by_depth) if changed == "loads" else (min(alike, by_depth), max(alike, by_depth))

    def balancing(self, at: dict[str, str], changed: str | None) -> float:
        """Table 1: seconds of deciding and moving after pruning, in iterations of eight cards."""
        layers, limits = int(at["layers"]), RankLimits.uniform(8)
        flops = 6.0 * LAYER_PARAMETERS * 2 * SEQUENCE
        unit = flops / FLOPS_PER_S / 3.0
        costs = [
            replace(
                cost,
                forward_s=unit * cost.forward_s,
                backward_input_s=unit * cost.backward_input_s,
                backward_weight_s=unit * cost.backward_weight_s,
                # A sparse value of 4 bytes has an index of 8
                parameter_bytes=round(12 * kept * LAYER_PARAMETERS),
                optimizer_bytes=round(8 * kept * LAYER_PARAMETERS),
            )
            for kept, cost in zip(_by_depth(layers), _kept_by_depth(layers), strict=True)
        ]
        even = partition_uniform(costs, limits, microbatches=NODE_MICROBATCHES)
        policy, began = at["policy"], perf_counter()
        if policy.startswith("diffusion"):
            load: Load = "parameters" if policy.endswith("parameters") else "time"
            after = diffuse(costs, limits, even, microbatches=NODE_MICROBATCHES, load=load)[-1]
        else:
            make = partition_by_parameters if policy.endswith("parameters") else partition_by_time
            after = make(costs, limits, microbatches=NODE_MICROBATCHES)
        decided_s = perf_counter() - began
        moved_s = MoveCost().seconds(costs, even, after, 8)
        step_s = predicted_makespan_s(costs, even, limits, microbatches=NODE_MICROBATCHES)
        return (decided_s + moved_s) / step_s


def _waiting_for_experts(trace: RoutingTrace, part: float) -> Callable[[int, bool], list[LayerCost]]:
    """Layers that wait for the busiest expert-parallel rank, of the iteration at this part of a trace."""
    step = round(part * (trace.steps - 1))

    def costs(layers: int, all_of_it: bool) -> list[LayerCost]:
        factors = []
        for layer in range(layers):
            load = trace.load(step, layer % trace.layers).sum(axis=0).reshape(trace.ranks, -1).sum(axis=1)
            fixed = 0.0 if all_of_it else FIXED
            factors.append(fixed + (1.0 - fixed) * float(load.max() / load.mean()))
        return scaled(factors)

    return costs
