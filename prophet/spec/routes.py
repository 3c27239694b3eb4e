"""Which ranks bring an expert's copies to its replicas, and what each sends to whom; pure.

Parts of one copy go from the home to the receivers of a group, which then exchange them. In the direct form every
replica of an expert is a group, in the two-phase form all of them are one. In the node-once form those of every node
are one, where that is cheaper for the expert: each node then receives it once, and nothing else crosses.

Shape legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prophet.spec.arrays import FloatArray
from prophet.spec.cost import Topology
from prophet.spec.placement import Placement

# of the receivers of one expert, each ascending
Groups = tuple[tuple[int, ...], ...]


def by_node(receivers: Sequence[int], topology: Topology) -> Groups:
    """Return receivers in groups, one for every node that has any."""
    found: dict[int, list[int]] = {}
    for rank in receivers:
        found.setdefault(topology.node_of(rank), []).append(rank)
    return tuple(map(tuple, found.values()))


def crosses_once(home: int, receivers: Sequence[int], topology: Topology) -> bool:
    """Whether groups by node take less time between nodes than one group of all, for this expert alone.

    Links within nodes are left out: whether they are fast enough depends on the layer's other experts, and the layer
    takes this form only where it is the best one in all. Twin of `crosses_once` in `planner/core/cost.cpp`.

    Args:
        home: The expert's home.
        receivers: The ranks of its replicas.
        topology: The machine.
    """
    # With one node a group of all is by node already, and with one rank per node no rank has another to exchange parts
    # with
    if not topology.has_levels:
        return False
    groups = {topology.node_of(group[0]): len(group) for group in by_node(receivers, topology)}
    if len(groups) < 2 or max(groups.values()) < 2:
        return False
    here, copies, port_share = groups.get(topology.node_of(home), 0), len(receivers), topology.port_share
    # One rank sends all of it, which its own link carries or the port
    alone = max(1.0, port_share)
    # Of one group, in parts of which a copy has as many as there are copies
    scatter = (copies - here) * alone
    gather = max((copies - k) * max(1.0, k * port_share) for k in groups.values())
    return copies * (len(groups) - (here > 0)) * alone < scatter + gather


def grouped(placement: Placement, topology: Topology) -> dict[int, Groups]:
    """Return the groups of those experts whose replicas are not one group."""
    if not topology.has_levels:
        return {}
    return {
        expert: by_node(receivers, topology)
        for expert, receivers in placement.receivers().items()
        if crosses_once(int(placement.home[expert]), receivers, topology)
    }


def transfer_pairs(
    placement: Placement, groups: Mapping[int, Groups], n_bytes: float, home_bytes: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the bytes that ranks send to ranks, [R, R] each: directly, in the scatter, and in the gather.

    Args:
        placement: The experts and their replicas.
        groups: Of the experts whose replicas are not one group.
        n_bytes: Bytes of one expert.
        home_bytes: Bytes of one expert on its way from the home.
    """
    ranks = placement.ranks
    direct, scatter, gather = (np.zeros((ranks, ranks)) for _ in range(3))
    for expert, receivers in placement.receivers().items():
        home = placement.home[expert]
        direct[home, receivers] += n_bytes
        for group in groups.get(expert, (receivers,)):
            scatter[home, group] += home_bytes / len(group)
            gather[np.ix_(group, group)] += n_bytes / len(group)
    # What a rank sends itself takes no link
    np.fill_diagonal(gather, 0.0)
    return direct, scatter, gather
