"""What one optimizer step did, in counts and seconds.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.scheduler.actions import Action
from prophet.scheduler.pieces import Form
from prophet.spec import IntArray, Placement


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, summed over its microbatches; the counts are those of all ranks.

    counts: [L, R, E] choices by layer, source rank and expert. rank_load: [L, R] rows every rank computed.
    rank_load_static: [L, R] rows it would have computed without replicas. copies: [L, R] replicas it held.
    dropped: [L] choices dropped for lack of capacity. seconds: host seconds on this rank by activity. actions: the
    transfers in the order in which this rank launched them. placements, forms: by layer, those that were in force.
    planned: [L] why each placement was planned, or "kept"; empty in the first step. withdrawn: layers whose replicas
    turned out not to be worth the rest of their transfers; they are not among `placements`.
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
        """Seconds in which this rank waited for Trans, Agg or a plan."""
        return sum(s for name, s in self.seconds.items() if name.startswith("exposed_"))

    @property
    def max_mean(self) -> float:
        """Mean over layers of the largest rank load over the mean rank load."""
        return _max_mean(self.rank_load)

    @property
    def max_mean_static(self) -> float:
        """The same without replicas."""
        return _max_mean(self.rank_load_static)


def _max_mean(load: IntArray) -> float:
    means = load.mean(axis=1)
    return float(np.mean(np.divide(load.max(axis=1), means, out=np.ones_like(means), where=means > 0)))
