"""The exact split: this step's counts, in integers, over the ranks that hold each expert.

Shape legend: R ranks, E experts.

`exact_split` minimises the speed-weighted bottleneck, then tokens between nodes, then tokens between ranks.
Equal arguments give equal results on every machine: all decisions compare integers, and ties go to the lower
index.
"""

from __future__ import annotations

import numpy as np

from prophet.errors import SpecError
from prophet.planner import core
from prophet.spec import FloatArray, Flows, IntArray, Placement, Topology, check_load

# In the place of the dense result: the core writes none where the array has no rows
NOT_DENSE = np.empty((0, 0, 0), dtype=np.int64)
# As many as the core's `Figures`
# Without ports: the last one
_ANY_MACHINE = np.array([1.0] * 13 + [0.0])


def _check(load: IntArray, placement: Placement, topology: Topology) -> IntArray:
    load = check_load(load)
    if load.shape != (placement.ranks, placement.experts) or topology.ranks != placement.ranks:
        raise SpecError(
            f"load is {list(load.shape)}, placement is for {placement.ranks} ranks x {placement.experts} "
            f"experts, the topology has {topology.ranks} ranks: load must be [ranks, experts] of both"
        )
    return load


def exact_flows(
    load: IntArray, placement: Placement, *, node: IntArray, speed: FloatArray, check: bool = True
) -> Flows:
    """Return the exact split of a load whose sizes are known to fit.

    Args:
        load: The exact load, [R, E].
        placement: Which ranks hold which experts.
        node: Node [R] of every rank, as of `Topology.node_ids`.
        speed: Speed [R] relative to the fastest rank, as of `Topology.relative_speed`.
        check: Whether to check `load`; False where the caller has.
    """
    if check:
        load = check_load(load)
    # With an effort of 0 the core uses nothing of the machine but its speeds
    given = (load, placement.holds, placement.home, node, speed, 1.0 / speed, _ANY_MACHINE)
    shared, rows, rank_load, level, _ = core.native.split(*given, 0.0, NOT_DENSE)
    return Flows(load, placement.home, shared, rows, rank_load, level)


def exact_split(load: IntArray, placement: Placement, topology: Topology) -> Flows:
    """Return the exact split of a load.

    Args:
        load: The exact load, [R, E].
        placement: Which ranks hold which experts.
        topology: Nodes and speeds of the ranks.

    Raises:
        SpecError: Where sizes disagree.
    """
    load = _check(load, placement, topology)
    return exact_flows(load, placement, node=topology.node_ids(), speed=topology.relative_speed(), check=False)
