"""The naive twin of the exact split: plain Python, one token at a time. For tests; slow by design."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from prophet.spec import IntArray, Placement, Split, Topology

# One token between nodes outweighs all tokens between ranks of a node
_CROSS = 1 << 24


def naive_bottleneck(load: IntArray, placement: Placement, topology: Topology) -> Fraction:
    """Return the smallest T for which loads of at most floor(T * speed) on every rank can carry all tokens.

    Args:
        load: The exact load, [R, E].
        placement: Which ranks hold which experts.
        topology: Speeds of the ranks; a handful, since all sets of ranks are tried.
    """
    # Hall's condition for a transport problem: for every set of ranks, the tokens that have nowhere else to go must fit
    # in the set
    total = load.sum(axis=0)
    speed = [Fraction(s) for s in topology.relative_speed()]
    best = Fraction(0)
    for subset in range(1, 1 << placement.ranks):
        inside = np.array([subset >> r & 1 for r in range(placement.ranks)], dtype=np.bool_)
        bound = int(total[~placement.holds[:, ~inside].any(axis=1)].sum())
        chosen = [speed[r] for r in np.flatnonzero(inside)]
        level = max(best, bound / sum(chosen, Fraction(0)))
        # Whole tokens: raise the level to the next one at which a rank of the set takes one token more
        while sum(math.floor(level * s) for s in chosen) < bound:
            level = min((math.floor(level * s) + 1) / s for s in chosen)
        best = max(best, level)
    return best


def naive_split(load: IntArray, placement: Placement, topology: Topology) -> Split:
    """Return a split with the smallest bottleneck, then fewest tokens between nodes, then fewest between ranks.

    Args:
        load: The exact load, [R, E].
        placement: Which ranks hold which experts.
        topology: Nodes and speeds of the ranks.
    """
    # Every token is a unit of flow from (source, expert) to a holder. A token that finds its rank full takes the
    # cheapest chain of evictions (Bellman-Ford over ranks).
    ranks = placement.ranks
    node = topology.node_ids()
    level = naive_bottleneck(load, placement, topology)
    cap = [math.floor(level * Fraction(s)) for s in topology.relative_speed()]
    tokens = np.zeros((ranks, placement.experts, ranks), dtype=np.int64)
    free = list(cap)

    def price(source: int, target: int) -> int:
        return 0 if source == target else 1 + _CROSS * int(node[source] != node[target])

    for source, expert in np.argwhere(load > 0):
        for _ in range(int(load[source, expert])):
            holders = np.flatnonzero(placement.holds[expert])
            cost: dict[int, int] = {int(d): price(int(source), int(d)) for d in holders}
            origin: dict[int, tuple[int, int, int]] = {}
            changed = True
            while changed:
                changed = False
                for a in list(cost):
                    for s, e in np.argwhere(tokens[:, :, a] > 0):
                        for b in np.flatnonzero(placement.holds[e]):
                            new = cost[a] + price(int(s), int(b)) - price(int(s), a)
                            if b != a and new < cost.get(int(b), 1 << 62):
                                cost[int(b)] = new
                                origin[int(b)] = (a, int(s), int(e))
                                changed = True
            end = min((d for d in cost if free[d] > 0), key=lambda d: (cost[d], d))
            free[end] -= 1
            while end in origin:
                a, s, e = origin[end]
                tokens[s, e, a] -= 1
                tokens[s, e, end] += 1
                end = a
            tokens[source, expert, end] += 1
    return Split(tokens)
