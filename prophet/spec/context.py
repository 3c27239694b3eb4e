"""What a planner is told besides the load, and what a step is predicted to cost.

Shape legend: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prophet.errors import SpecError
from prophet.spec.arrays import IntArray
from prophet.spec.layer import LayerShape, Windows
from prophet.spec.machine import Topology
from prophet.spec.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Predicted seconds of one MoE layer in one training step, forward and backward (paper, Eq. 6 and 8)."""

    a2a_s: float
    expert_s: float
    exposed_trans_s: float
    exposed_agg_s: float
    trans_s: float = 0.0
    agg_s: float = 0.0

    @property
    def total_s(self) -> float:
        """What the step waits for; `trans_s` and `agg_s` count only where they are exposed."""
        return self.a2a_s + self.expert_s + self.exposed_trans_s + self.exposed_agg_s

    def as_dict(self) -> dict[str, float]:
        return {
            "a2a_s": self.a2a_s,
            "expert_s": self.expert_s,
            "exposed_trans_s": self.exposed_trans_s,
            "exposed_agg_s": self.exposed_agg_s,
            "trans_s": self.trans_s,
            "agg_s": self.agg_s,
            "total_s": self.total_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanContext:
    """All that a planner may know besides the load.

    `slots_per_rank` bounds the replicas of this layer on one rank; `budget_bytes[r]`, when given, bounds their
    memory on rank r more tightly than the topology's `free_bytes`. `previous` is the placement in force, for planners
    that go on from it or keep it; None before the first plan.
    """

    topology: Topology
    shape: LayerShape
    home: tuple[int, ...]
    windows: Windows = field(default_factory=Windows)
    slots_per_rank: int = 4
    budget_bytes: tuple[int, ...] | None = None
    previous: Placement | None = None

    def __post_init__(self) -> None:
        if not self.home or min(self.home) < 0 or max(self.home) >= self.topology.ranks:
            raise SpecError(f"PlanContext.home must name ranks 0..{self.topology.ranks - 1} for every expert")
        if self.slots_per_rank < 0:
            raise SpecError(f"PlanContext.slots_per_rank must not be negative, got {self.slots_per_rank}")
        if self.budget_bytes is not None and len(self.budget_bytes) != self.topology.ranks:
            raise SpecError(f"PlanContext.budget_bytes needs one entry per rank ({self.topology.ranks})")
        if self.budget_bytes is not None and min(self.budget_bytes) < 0:
            raise SpecError("PlanContext.budget_bytes must not be negative on any rank")

    @property
    def experts(self) -> int:
        return len(self.home)

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def trans_bytes(self) -> float:
        """An expert's parameters in bytes of the all-to-all that take as long."""
        return self.shape.expert_bytes / self.topology.trans_rate

    @property
    def agg_bytes(self) -> float:
        """An expert's gradients in bytes of the all-to-all that take as long."""
        return self.shape.expert_grad_bytes / self.topology.agg_rate

    def slot_limits(self) -> IntArray:
        """Replicas that fit on every rank under all limits, [R]."""
        limits = np.empty(self.ranks, dtype=np.int64)
        for r in range(self.ranks):
            free = self.topology.free_bytes[r]
            if self.budget_bytes is not None:
                free = min(free, self.budget_bytes[r])
            limits[r] = min(self.slots_per_rank, free // self.shape.replica_bytes)
        return limits

    def homes_only(self) -> Placement:
        """The placement without replicas."""
        return Placement.with_replicas(self.home, self.ranks, ())
