"""Which ranks bring an expert's copies to its replicas, and what each sends to whom; pure.

Parts of one copy go from the home to the receivers of a group, which then exchange them. In the direct form every
replica of an expert is a group, in the two-phase form all of them are one. In the node-once form those of every node
are one, where that is cheaper for the expert: each node then receives it once, and nothing else crosses.

In the spread form *relays* send parts to the groups in the home's place: the ranks of its node, among which it spreads
a copy first. So all network cards of the node carry what crosses. In every other node as many *carriers* receive it,
with a replica or without.

Shape legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from prophet.spec.arrays import FloatArray
from prophet.spec.cost import FormName, Topology
from prophet.spec.placement import Placement

# of ranks, each ascending
Groups = tuple[tuple[int, ...], ...]


class Route(NamedTuple):
    """How an expert travels to its replicas.

    Attributes:
        groups: The receivers of each copy that the home sends.
        relays: The ranks of the home's node that send each a part of every copy; empty where the home sends all parts.
        carriers: By group and relay, who gets the relay's part and passes it on to the group; in the home's node that
            is the relay. Empty without relays: then every receiver carries a part.
    """

    groups: Groups
    relays: tuple[int, ...] = ()
    carriers: Groups = ()

    def copies(self, home: int) -> Iterator[tuple[tuple[int, ...], Sequence[tuple[int, int]]]]:
        """Yield the receivers of every copy, and of each of its parts who sends it and who passes it on.

        Args:
            home: The expert's home.
        """
        if not self.relays:
            for group in self.groups:
                yield group, [(home, rank) for rank in group]
            return
        for group, carriers in zip(self.groups, self.carriers, strict=True):
            yield group, list(zip(self.relays, carriers, strict=True))


Routes = Mapping[int, Route]


def by_node(receivers: Sequence[int], topology: Topology) -> Groups:
    """Return receivers in groups, one for every node that has any."""
    found: dict[int, list[int]] = {}
    for rank in receivers:
        found.setdefault(topology.node_of(rank), []).append(rank)
    return tuple(map(tuple, found.values()))


def relayed(home: int, receivers: Sequence[int], topology: Topology) -> Route:
    """Return the route over all ranks of the home's node, and as many of every other node that has receivers.

    Args:
        home: The expert's home.
        receivers: The ranks of its replicas.
        topology: The machine.
    """
    groups, relays = by_node(receivers, topology), topology.ranks_of(topology.node_of(home))
    # A smaller node's ranks carry several parts each
    nodes = (topology.ranks_of(topology.node_of(group[0])) for group in groups)
    return Route(groups, tuple(relays), tuple(tuple(node[j % len(node)] for j in range(len(relays))) for node in nodes))


def _crossings(home: int, receivers: Sequence[int], topology: Topology) -> tuple[float, float]:
    """Return what takes a link between nodes, or a port, longest: one group of all, and groups by node.

    In parts of which a copy has as many as there are receivers.
    """
    groups = {topology.node_of(group[0]): len(group) for group in by_node(receivers, topology)}
    here, copies, port_share = groups.get(topology.node_of(home), 0), len(receivers), topology.port_share
    # One rank sends all of it, which its own link carries or the port
    alone = max(1.0, port_share)
    scatter = (copies - here) * alone
    gather = max((copies - k) * max(1.0, k * port_share) for k in groups.values())
    return scatter + gather, copies * (len(groups) - (here > 0)) * alone


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
    groups = by_node(receivers, topology)
    if len(groups) < 2 or max(map(len, groups)) < 2:
        return False
    together, apart = _crossings(home, receivers, topology)
    return apart < together


def crosses_by_relays(home: int, receivers: Sequence[int], topology: Topology) -> bool:
    """Whether relays take less time between nodes than the home alone does in any groups, for this expert alone.

    Links within nodes are left out, as in `crosses_once`. Twin of `crosses_by_relays` in `planner/core/cost.cpp`.

    Args:
        home: The expert's home.
        receivers: The ranks of its replicas.
        topology: The machine.
    """
    # One rank fills its node's port, so others cannot help
    if not topology.has_levels or topology.port_share >= 1.0:
        return False
    relays = len(topology.ranks_of(topology.node_of(home)))
    nodes = {topology.node_of(rank) for rank in receivers} - {topology.node_of(home)}
    if relays < 2 or not nodes:
        return False
    # In parts of which a copy has as many as there are relays. A smaller node's ranks receive several
    most = max(-(-relays // len(topology.ranks_of(node))) for node in nodes)
    crossing = max(float(max(len(nodes), most)), len(nodes) * relays * topology.port_share)
    return len(receivers) * crossing < relays * min(_crossings(home, receivers, topology))


def routes_of(placement: Placement, topology: Topology) -> dict[FormName, dict[int, Route]]:
    """Return the routes of the node-once and of the spread form; of experts whose replicas are not one group."""
    found: dict[FormName, dict[int, Route]] = {"node-once": {}, "spread": {}}
    if not topology.has_levels:
        return found
    for expert, receivers in placement.receivers().items():
        home = int(placement.home[expert])
        if crosses_once(home, receivers, topology):
            found["node-once"][expert] = Route(by_node(receivers, topology))
        if crosses_by_relays(home, receivers, topology):
            found["spread"][expert] = relayed(home, receivers, topology)
    # The spread form is the node-once form wherever relays do not help
    if found["spread"]:
        found["spread"] = found["node-once"] | found["spread"]
    return found


def transfer_pairs(
    placement: Placement, routes: Routes, n_bytes: float, sum_bytes: float | None = None
) -> tuple[FloatArray, list[FloatArray]]:
    """Return the bytes that ranks send to ranks, [R, R] each: directly, and in every exchange of the other forms.

    Trans has two exchanges: parts go out, and are gathered. Where there are relays, parts are spread over them first.
    Agg is the mirror image: the same in reverse order, and every pair the other way round. The last exchange is the
    second phase, all others are the first.

    Args:
        placement: The experts and their replicas.
        routes: Of the experts whose replicas are not one group.
        n_bytes: Bytes of one expert.
        sum_bytes: Of Agg, bytes of a sum of gradients; its pairs are those that Trans would move. None for Trans.
    """
    ranks = placement.ranks
    home_bytes = n_bytes if sum_bytes is None else sum_bytes
    direct, spread, scatter, gather = (np.zeros((ranks, ranks)) for _ in range(4))
    has_relays = False
    for expert, receivers in placement.receivers().items():
        home = placement.home[expert]
        direct[home, receivers] += n_bytes
        route = routes.get(expert)
        if route is None or not route.relays:
            for group in (receivers,) if route is None else route.groups:
                scatter[home, group] += home_bytes / len(group)
                gather[np.ix_(group, group)] += n_bytes / len(group)
            continue
        has_relays = True
        parts = len(route.relays)
        spread[home, route.relays] += home_bytes / parts
        for group, carried in route.copies(home):
            for relay, carrier in carried:
                scatter[relay, carrier] += home_bytes / parts
                gather[carrier, group] += n_bytes / parts
    # What a rank sends itself takes no link
    for pairs in (spread, scatter, gather):
        np.fill_diagonal(pairs, 0.0)
    exchanges = [spread, scatter, gather] if has_relays else [scatter, gather]
    return direct, exchanges if sum_bytes is None else exchanges[::-1]
