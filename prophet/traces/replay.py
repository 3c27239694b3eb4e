"""Replaying a routing trace: what a planner would have done with it, and what the performance model makes of that.

Shape legend: T steps, I judged iterations, L layers, R ranks, E experts.

An iteration's placement is planned from the iteration before it, as nothing else would have been known in time. It
holds for all of the iteration's microbatches; each microbatch is split by its own counts. Only iterations that have a
predecessor are judged, for every planner alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.planner.model.withdraw import settled_cost
from prophet.spec import FloatArray, IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Replay:
    """What one planner made of a trace.

    Attributes:
        planner: Its name.
        max_mean: [n] largest rank load over the mean, one entry per judged step and layer.
        a2a_s: Part of `layer_s`, the mean predicted seconds of one layer in one step.
        expert_s: Part of `layer_s`.
        exposed_trans_s: Part of `layer_s`: what nothing hides of Trans.
        exposed_agg_s: Part of `layer_s`: what nothing hides of Agg.
        layers_s: [I, L] predicted seconds of every layer and judged iteration, over all of its microbatches.
        rank_load: [L, R] mean tokens that a rank computes in a step.
        copies: [I, L, E] replicas of every expert in the judged iterations.
        rank_copies: [I, L, R] replicas on every rank.
        place_s: Measured seconds of this process for the plans of one iteration, all layers together.
        split_s: Measured seconds of this process for the splits in one iteration, all layers together.
    """

    planner: str
    max_mean: FloatArray
    a2a_s: float
    expert_s: float
    exposed_trans_s: float
    exposed_agg_s: float
    layers_s: FloatArray
    rank_load: FloatArray
    copies: IntArray
    rank_copies: IntArray
    place_s: float
    split_s: float

    @property
    def copies_per_rank(self) -> float:
        """Mean replicas of a layer on a rank."""
        return float(self.rank_copies.mean())

    @property
    def copies_on_fullest_rank(self) -> int:
        """The most replicas of one layer that any rank ever held."""
        return int(self.rank_copies.max())

    @property
    def exposed_s(self) -> float:
        """Seconds of Trans and Agg that nothing hides."""
        return self.exposed_trans_s + self.exposed_agg_s

    @property
    def layer_s(self) -> float:
        """Mean predicted seconds of one layer in one step: what is not hidden of it."""
        return self.a2a_s + self.expert_s + self.exposed_s

    @property
    def max_mean_median(self) -> float:
        return float(np.median(self.max_mean))

    @property
    def max_mean_p95(self) -> float:
        return float(np.percentile(self.max_mean, 95))


def choose_iterations(trace: RoutingTrace, at_most: int) -> list[tuple[slice, slice]]:
    """Pairs (iteration before, iteration) of steps, at most `at_most`, spread evenly over the trace.

    Raises `SpecError` when the trace has no two iterations.
    """
    if at_most < 1:
        raise SpecError(f"at least one iteration must be replayed, got {at_most}")
    slices = list(trace.iteration_slices())
    if len(slices) < 2:
        raise SpecError(
            f"the trace has {len(slices)} iteration(s); planning from the last one and judging the next needs two"
        )
    # From 1: the first iteration has none before it to plan from
    chosen = np.unique(np.linspace(1, len(slices) - 1, num=min(at_most, len(slices) - 1)).astype(int))
    return [(slices[i - 1], slices[i]) for i in chosen]


def predicted_load(trace: RoutingTrace, steps: slice, layer: int) -> IntArray:
    """Predict an iteration's load by the mean of the microbatches before it.

    Args:
        trace: The recorded routing.
        steps: Those of the iteration before.
        layer: Its number.

    Returns:
        [R, E], rounded to whole tokens.
    """
    window = trace.counts[steps, layer].astype(np.int64)
    # Half a divisor added first, so that division rounds to the nearest.
    load: IntArray = (window.sum(axis=0) + len(window) // 2) // len(window)
    return load


def replay(trace: RoutingTrace, planner: Planner, context: PlanContext, pairs: Iterable[tuple[slice, slice]]) -> Replay:
    """Run a planner on the chosen iterations of all layers.

    Trans and Agg happen once per iteration: Trans is hidden under its first microbatch, Agg under its last.

    Args:
        trace: The recorded routing.
        planner: Plans and splits.
        context: Of the trace's ranks and experts.
        pairs: From `choose_iterations`.

    Raises:
        SpecError: Where trace and context have different ranks or experts.
    """
    if (context.ranks, context.experts) != (trace.ranks, trace.experts):
        raise SpecError(
            f"the trace has {trace.ranks} ranks and {trace.experts} experts, the context {context.ranks} and "
            f"{context.experts}"
        )
    max_mean: list[float] = []
    placements: list[list[Placement]] = []
    # [L, parts] of every iteration
    seconds: list[FloatArray] = []
    rank_load = np.zeros((trace.layers, trace.ranks))
    previous: list[Placement | None] = [None] * trace.layers
    place_s = split_s = 0.0
    for before, now in pairs:
        placements.append([])
        seconds.append(np.zeros((trace.layers, 4)))
        for layer in range(trace.layers):
            # A planner that improves its last plan gets that, as in training
            here = replace(context, previous=previous[layer])
            load = predicted_load(trace, before, layer)
            began = perf_counter()
            placement = planner.place(load, here)
            place_s += perf_counter() - began
            previous[layer] = placement
            placements[-1].append(placement)
            for step in range(now.start, now.stop):
                load = trace.load(step, layer)
                began = perf_counter()
                split = planner.split(load, placement, here)
                split_s += perf_counter() - began
                # As the engine: once the first microbatch's counts are known, replicas that do not pay are dropped.
                if planner.withdraws and step == now.start:
                    microbatches = now.stop - now.start
                    settled, cost = settled_cost(load, split, placement, here, microbatches=microbatches)
                    if settled is not split:
                        split, placement = settled, here.homes_only()
                else:
                    cost = step_cost(split, placement, here)
                max_mean.append(split.max_mean())
                rank_load[layer] += split.rank_load()
                seconds[-1][layer] += (
                    cost.a2a_s,
                    cost.expert_s,
                    # Replicas stay for all microbatches: they come before the first and their gradients leave after the
                    # last.
                    cost.exposed_trans_s if step == now.start else 0.0,
                    cost.exposed_agg_s if step == now.stop - 1 else 0.0,
                )
    by_part = np.stack(seconds)
    a2a_s, expert_s, exposed_trans_s, exposed_agg_s = (by_part.sum(axis=(0, 1)) / len(max_mean)).tolist()
    return Replay(
        planner=planner.name,
        max_mean=np.asarray(max_mean),
        a2a_s=a2a_s,
        expert_s=expert_s,
        exposed_trans_s=exposed_trans_s,
        exposed_agg_s=exposed_agg_s,
        layers_s=by_part.sum(axis=2),
        # Summed over judged steps of each layer, and max_mean has an entry per step and layer.
        rank_load=rank_load * (trace.layers / len(max_mean)),
        # Every expert is held once by its home
        copies=np.stack([[p.holds.sum(axis=1) - 1 for p in layers] for layers in placements]),
        rank_copies=np.stack([[p.copies_per_rank() for p in layers] for layers in placements]),
        place_s=place_s / len(placements),
        split_s=split_s / len(placements),
    )


def routed_per_rank(trace: RoutingTrace) -> float:
    """Mean choices (a token counts once per chosen expert) that a rank routes in one layer of one step."""
    if not trace.steps:
        raise SpecError("the trace has no steps")
    return float(trace.counts.sum(dtype=np.int64)) / (trace.steps * trace.layers * trace.ranks)
