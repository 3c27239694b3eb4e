"""A machine and a layer as the arrays that the core takes.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.spec import FloatArray, IntArray, LayerShape, PlanContext, Topology, Windows


@dataclass(frozen=True, eq=False, slots=True)
class Machine:
    """A `PlanContext` as the arrays that the core takes; all read-only."""

    topology: Topology
    shape: LayerShape
    windows: Windows
    home_tuple: tuple[int, ...]
    budget_bytes: tuple[int, ...] | None
    slots_per_rank: int
    home: IntArray
    node: IntArray
    speed: FloatArray
    seconds_per_token: FloatArray
    figures: FloatArray
    limit: IntArray

    @classmethod
    def of(cls, context: PlanContext) -> Machine:
        topology, shape = context.topology, context.shape
        figures = np.array(  # in the order of `core/problem.h`
            [
                shape.token_bytes,
                topology.intra.bytes_per_s,
                topology.intra.latency_s,
                topology.inter.bytes_per_s,
                topology.inter.latency_s,
                context.trans_bytes,
                context.agg_bytes,
                context.windows.fnec_s,
                context.windows.bnec_s,
                topology.expert_overhead_s,
                topology.overlap_cost,
                not context.windows.experts,
            ],
            dtype=np.float64,
        )
        limit = np.minimum(context.slot_limits(), context.experts)
        return cls(
            topology=topology,
            shape=shape,
            windows=context.windows,
            home_tuple=context.home,
            budget_bytes=context.budget_bytes,
            slots_per_rank=context.slots_per_rank,
            home=np.asarray(context.home, dtype=np.int64),
            node=topology.node_ids(),
            speed=topology.relative_speed(),
            seconds_per_token=shape.forward_flops_per_token / np.asarray(topology.flops_per_s),
            figures=figures,
            limit=limit,
        )

    @property
    def arrays(self) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
        """What every entry of the core takes of it, in their order."""
        return self.node, self.speed, self.seconds_per_token, self.figures

    def matches(self, context: PlanContext) -> bool:
        """Whether `context` (apart from `previous`) is the one these arrays were made from."""
        return (
            self.slots_per_rank == context.slots_per_rank
            and _same(self.topology, context.topology)
            and _same(self.shape, context.shape)
            and _same(self.windows, context.windows)
            and _same(self.home_tuple, context.home)
            and _same(self.budget_bytes, context.budget_bytes)
        )


def _same(a: object, b: object) -> bool:
    return a is b or a == b
