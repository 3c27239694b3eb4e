"""The report of one optimizer step, in counts and seconds.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.scheduler.actions import Action
from prophet.scheduler.pieces import Form
from prophet.spec import IntArray, Placement, PlanContext


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, summed over its microbatches; the counts are those of all ranks.

    Attributes:
        step: Its number, from 0 on.
        counts: Choices [L, R, E] by layer, source rank and expert.
        rank_load: Rows [L, R] that every rank computed.
        rank_load_static: Rows [L, R] that it would have computed without replicas.
        copies: Replicas [L, R] that it held.
        dropped: Choices [L] dropped for lack of capacity.
        seconds: Seconds on this rank by activity: the host's, or on a device its own, of the step before.
        actions: The transfers in the order in which this rank launched them.
        placements: The placement in force, by layer.
        forms: How its Trans and Agg travelled, by layer.
        planned: Why each placement [L] was planned, or "kept"; empty in the first step.
        withdrawn: Layers whose replicas turned out not to be worth the rest of their transfers; in `placements` these
            have homes only.
    """

    step: int
    counts: IntArray
    rank_load: IntArray
    rank_load_static: IntArray
    copies: IntArray
    dropped: IntArray
    seconds: dict[str, float]
    actions: tuple[Action, ...]
    placements: tuple[Placement, ...] = ()
    forms: tuple[Form, ...] = ()
    planned: tuple[str, ...] = ()
    withdrawn: tuple[int, ...] = ()

    def __repr__(self) -> str:
        copies = int(self.copies.sum())
        return (
            f"step {self.step}: max/mean {self.max_mean:.2f} ({self.max_mean_static:.2f} without), "
            f"{copies} cop{'y' if copies == 1 else 'ies'}, {1e3 * self.exposed_s:.1f} ms exposed"
        )

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank waited for Trans, Agg or a plan."""
        return sum(s for name, s in self.seconds.items() if name.startswith("exposed_"))

    @property
    def max_mean(self) -> float:
        """The largest rank load over the mean rank load, averaged over layers."""
        return _max_mean(self.rank_load)

    @property
    def max_mean_static(self) -> float:
        """The value of `max_mean` without replicas."""
        return _max_mean(self.rank_load_static)


def _max_mean(load: IntArray) -> float:
    means = load.mean(axis=1)
    # A layer without rows is balanced, and not a division by zero
    return float(np.mean(np.divide(load.max(axis=1), means, out=np.ones_like(means), where=means > 0)))


def predicted_seconds(report: StepReport, planner: Planner, contexts: Sequence[PlanContext]) -> float:
    """Predict the seconds of a step's MoE layers by the performance model, from its counts and placements.

    Args:
        report: Of the step.
        planner: The planner, which splits the tokens.
        contexts: Machine and sizes of every layer.
    """
    total_s = 0.0
    for load, placement, context in zip(report.counts, report.placements, contexts, strict=True):
        # layers may have fewer experts than the widest one, and what moves homes is no part of a step
        counts, own = load[:, : context.experts], replace(context, previous=None)
        total_s += step_cost(planner.split(counts, placement, own), placement, own).total_s
    return total_s
