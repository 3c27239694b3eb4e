"""Random topologies, loads and placements for the planner's property tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from prophet.spec import IntArray, LayerShape, Link, Placement, PlanContext, Topology, Windows

# Rates of a node's port over that of a rank's link
PORTS = (1.0, 0.5, 1.5, 3.0, 8.0)


@dataclass(frozen=True)
class Case:
    load: IntArray
    placement: Placement
    context: PlanContext


@st.composite
def cases(draw: st.DrawFn, *, max_ranks: int = 6, max_tokens: int = 200, even_speed: bool = False) -> Case:
    ranks = draw(st.integers(1, max_ranks))
    experts = ranks * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = rng.pareto(draw(st.sampled_from([0.7, 1.5, 5.0])), experts) + 0.01
    mean = draw(st.integers(0, max_tokens)) * skew / skew.max()
    load = rng.poisson(mean * rng.uniform(0.2, 1.8, (ranks, experts))).astype(np.int64)
    load[rng.random(ranks) < 0.1] = 0
    per_node = draw(st.integers(1, ranks))
    speed = np.ones(ranks) if even_speed or draw(st.booleans()) else rng.choice([0.25, 0.5, 0.8, 1.0], ranks)
    shape = LayerShape.feed_forward(
        dim=draw(st.sampled_from([8, 64])),
        hidden=draw(st.sampled_from([8, 512])),
        grad_bytes=draw(st.sampled_from([2, 4])),
    )
    inter_bytes_per_s = draw(st.sampled_from([1e7, 1e9]))
    topology = Topology(
        ranks=ranks,
        ranks_per_node=per_node,
        intra=Link(bytes_per_s=draw(st.sampled_from([1e8, 1e10])), latency_s=draw(st.sampled_from([0.0, 1e-5]))),
        inter=Link(bytes_per_s=inter_bytes_per_s, latency_s=2e-5),
        port_bytes_per_s=draw(st.sampled_from([None, *(inter_bytes_per_s * share for share in PORTS)])),
        flops_per_s=tuple(float(s) * draw(st.sampled_from([1e9, 1e11])) for s in speed),
        free_bytes=tuple(int(b) * shape.replica_bytes for b in rng.integers(0, 6, ranks)),
        expert_overhead_s=draw(st.sampled_from([0.0, 1e-6])),
        trans_rate=draw(st.sampled_from([1.0, 0.5])),
        agg_rate=draw(st.sampled_from([1.0, 0.25])),
        overlap_cost=draw(st.sampled_from([0.0, 0.3])),
    )
    home = rng.permutation(np.arange(experts) // (experts // ranks))
    count = draw(st.integers(0, 3 * ranks))
    replicas = zip(rng.integers(0, experts, count).tolist(), rng.integers(0, ranks, count).tolist(), strict=True)
    context = PlanContext(
        topology=topology,
        shape=shape,
        home=tuple(home.tolist()),
        windows=Windows(
            fnec_s=draw(st.sampled_from([0.0, 1e-4])),
            bnec_s=draw(st.sampled_from([0.0, 1e-3])),
            experts=draw(st.booleans()),
        ),
        slots_per_rank=draw(st.integers(0, 4)),
    )
    return Case(load, Placement.with_replicas(home, ranks, replicas), context)
