"""A machine and a layer, as arrays for the core.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.spec import FloatArray, IntArray, LayerShape, PlanContext, Topology, Windows


@dataclass(frozen=True, eq=False, slots=True)
class Machine:
    """A `PlanContext` as the arrays that the core takes; all read-only.

    Attributes:
        topology: That of the context; here and below, kept to compare contexts.
        shape: Sizes of the layer's experts.
        windows: Compute that hides transfers.
        home_tuple: The homes as the context has them.
        budget_bytes: Memory for replicas, by rank; None for no limit.
        slots_per_rank: Replicas that a rank may hold.
        home: Homes [E].
        node: Node [R] of every rank.
        speed: Speed [R] relative to the fastest rank.
        seconds_per_token: Forward seconds [R] of one token.
        figures: Scalars of the machine and the layer, in the order of `core/problem.h`.
        limit: Replicas [R] that fit on every rank.
    """

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
        """Convert a context."""
        topology, shape = context.topology, context.shape
        # In the order of `core/problem.h`, which reads them by their places
        figures = np.array(
            [
                shape.token_bytes,
                topology.intra.bytes_per_s,
                topology.intra.latency_s,
                topology.inter.bytes_per_s,
                topology.inter.latency_s,
                context.trans_bytes,
                context.agg_bytes,
                context.agg_sum_bytes,
                context.windows.fnec_s,
                context.windows.bnec_s,
                topology.expert_overhead_s,
                topology.overlap_cost,
                # Negated: the core stores 1 minus this
                not context.windows.experts,
                topology.port_share,
            ],
            dtype=np.float64,
        )
        # A rank cannot hold more replicas than there are experts
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
        """The arrays that every entry of the core takes, in their order."""
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
    # Mostly the same object, and then no tuple of all ranks is compared
    return a is b or a == b
