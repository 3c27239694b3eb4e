"""How long planning and splitting take at several sizes."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.planner.walks import plan_times, timed
from prophet.machine.presets import get_preset
from prophet.planner import Planner, get_planner
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import IntArray, PlanContext

ROUTING_CALLS = 60  # steps of the same routing that ours is timed in
COLD_BYTES = 1 << 27  # more than a processor's caches hold
SCALES = ((16, 32), (64, 64), (64, 256), (256, 256), (1024, 1024))


def skewed_load(ranks: int, experts: int, seed: int, draw: int = 0) -> IntArray:
    """Routing of 8192 tokens per rank with a few hot experts, drawn from a fixed seed; others of the same experts'
    popularity by `draw`.
    """
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.5, experts) + 0.05
    noisy = weight * rng.uniform(0.7, 1.3, (ranks, experts))
    if draw > 0:
        rng = np.random.default_rng((seed, draw))
    return rng.poisson(8192 * noisy / noisy.sum(axis=1, keepdims=True)).astype(np.int64)


def scale_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time to plan and to split at several sizes; large sizes repeat less and leave out what takes minutes."""
    for (ranks, experts), preset in itertools.product(SCALES, arguments.preset):
        context = get_preset(preset).context(ranks, experts, routed_per_rank=8192, slots_per_rank=arguments.slots)
        repeats = max(3, min(60, 400_000 // (ranks * experts)))
        for policy in arguments.policy:
            if policy == "forced-balance" or (policy not in ("prophet", "static", "top2", "top3") and ranks > 64):
                continue
            planner = get_planner(policy)
            plan_us, split_us = times(planner, context, repeats, ranks, experts, cold=arguments.cold)
            yield {
                "preset": preset,
                "ranks": ranks,
                "experts": experts,
                "policy": policy,
                "cases": len(plan_us),
                **plan_times(plan_us),
                "split_us_median": float(np.median(split_us)) if split_us else None,
            }


def times(
    planner: Planner, context: PlanContext, repeats: int, ranks: int, experts: int, *, cold: bool = False
) -> tuple[list[float], list[float]]:
    """Microseconds of planning and splitting, as in a run: on counts drawn anew, with a placement in force.

    A planner that goes on from step to step is led through steps of a few routings, and the first calls of every one
    are not timed. cold: other data fills the processor's caches before every timed call.
    """
    plan_us, split_us = [], []
    other = np.ones(COLD_BYTES // 8 if cold else 0)
    goes_on = planner.name == "prophet"
    for seed in range(max(1, repeats // 2) if goes_on else repeats):
        load = skewed_load(ranks, experts, seed)
        placement = planner.place(load, context)
        for draw in range(1, ROUTING_CALLS if goes_on else 2):
            here = dataclasses.replace(context, previous=placement)
            load = skewed_load(ranks, experts, seed, draw)
            other += 1.0
            placement, us = timed(lambda at=load, c=here: planner.place(at, c))
            if goes_on and draw < ROUTING_CALLS // 4:
                continue
            plan_us.append(us)
            present = load.copy()
            other += 1.0
            if isinstance(planner, ProphetPlanner) or ranks <= 64:
                split_us.append(timed(lambda c=present, at=placement: planner.split(c, at, context))[1])
    return plan_us, split_us
