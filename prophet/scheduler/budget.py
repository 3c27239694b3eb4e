"""Which of the planned replicas fit into memory: planned layer by layer, they share one budget; pure.

Shape legend: L layers, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from prophet.spec import IntArray, Placement

# of the largest dtype
_ITEM_BYTES = 8


class Taken(NamedTuple):
    """The most bytes that one replica takes on a rank.

    Attributes:
        there: While its layer's parameters are there; with a second Trans for the backward pass until they are dropped.
        until_end: Until the step ends.
    """

    there: int
    until_end: int


def at_replica(param_bytes: int, grad_bytes: int, sum_bytes: int, ranks: int, *, refetch: bool) -> Taken:
    """Return what a replica takes on its own rank, with what is in flight to it or from it.

    A layer's Trans or Agg may be in flight whole: what arrives is put in place when it is needed. In the two-phase form
    a rank sends as much as an expert has, and gets as much at the same time, with parts rounded up to whole elements.

    Args:
        param_bytes: Bytes of its parameters.
        grad_bytes: Bytes of its gradients.
        sum_bytes: Bytes of a sum of such gradients. A sole replica's is as long as its gradients.
        ranks: R.
        refetch: Whether parameters are sent again for the backward pass. Of a layer used twice that may be while
            gradients of its first use are in flight.
    """
    flying = max(2 * param_bytes, grad_bytes + sum_bytes)
    return Taken(param_bytes + 2 * param_bytes * refetch, grad_bytes + flying + _ITEM_BYTES * ranks)


def at_home(param_bytes: int, grad_bytes: int, *, refetch: bool) -> Taken:
    """Return what a replica takes in flight on its expert's home.

    Args:
        param_bytes: Bytes of its parameters.
        grad_bytes: Bytes of its gradients; of an expert's first replica, or its first in a node, those of their sum,
            which is one for all of them.
        refetch: Whether parameters are sent again for the backward pass.
    """
    return Taken(param_bytes * refetch, max(param_bytes, grad_bytes))


def at_relay(param_bytes: int, grad_bytes: int, sum_bytes: int, parts: int, *, refetch: bool) -> int:
    """Return the most bytes of a part that takes an expert's way over ranks of a node, until the step ends.

    Args:
        param_bytes: Bytes of the expert's parameters.
        grad_bytes: Bytes of its gradients.
        sum_bytes: Bytes of a sum of such gradients.
        parts: How many there are: ranks of the home's node.
        refetch: Whether parameters are sent again for the backward pass.
    """
    longest = max(param_bytes, grad_bytes, sum_bytes)
    return (-(-longest // parts) + _ITEM_BYTES) * (1 + refetch)


def _parts_passed_on(node: IntArray, home: int, rank: int, nodes: Collection[int]) -> IntArray:
    """Return how many parts more are in flight on every rank, [R], where an expert gets a replica on `rank`.

    A relay gets its part, and sends it to a carrier in every node, which sends it to every receiver there. Of Agg it is
    the other way round, and a relay whose node has replicas sends itself its own sum.

    Args:
        node: Node of every rank, [R].
        home: The expert's home.
        rank: Where the replica is.
        nodes: Those in which the expert has replicas already.
    """
    relays, carriers = node == node[home], node == node[rank]
    # a smaller node's ranks carry several parts
    several = -(-np.count_nonzero(relays) // np.count_nonzero(carriers))
    first, very_first = node[rank] not in nodes, not nodes
    parts: IntArray = several * (1 + first) * carriers + (2 * first + very_first) * relays
    return parts


def within_budget(
    placements: Sequence[Placement],
    param_bytes: Sequence[int],
    grad_bytes: Sequence[int],
    sum_bytes: Sequence[int],
    budget_bytes: int,
    order: Sequence[int],
    *,
    node: Sequence[int] | None = None,
    spreads: bool = False,
    span: int | None = None,
) -> list[Placement]:
    """Drop replicas until every rank is within the budget.

    Gradients stay until they have gone home, so those of all layers count. So does what is in flight, of all layers:
    Agg is waited for when the backward pass has ended, and Trans of withdrawn replicas when the step ends.

    Args:
        placements: By layer, [L].
        param_bytes: Bytes of the parameters of one replica, by layer, [L].
        grad_bytes: Bytes of the gradients of one replica, by layer, [L].
        sum_bytes: Bytes of a sum of such gradients, by layer, [L].
        budget_bytes: Bytes of replicas that a rank may hold at a time, with what is in flight.
        order: The layers; those that come first keep theirs.
        node: Node of every rank, [R], where a sum may come home from every node that has replicas; None where all are
            summed together.
        spreads: Whether ranks of these nodes may pass on parts of experts that they have no replica of.
        span: How many layers in a row have their parameters there at a time; None is all of them (nothing is dropped
            before the step ends).

    Returns:
        Placements by layer; those that lost nothing are the given objects.
    """
    layers, ranks = len(placements), placements[0].ranks
    there = np.zeros((layers, ranks), dtype=np.int64)
    until_end = np.zeros(ranks, dtype=np.int64)
    found = list(placements)
    by_rank = np.zeros(ranks, dtype=np.int64) if node is None else np.array(node)

    def peak(rank: int) -> int:
        if span is None:
            return int(there[:, rank].sum() + until_end[rank])
        # the fullest stretch of `span` layers decides
        together = [int(there[i : i + span, rank].sum()) for i in range(max(1, layers - span + 1))]
        return max(together) + int(until_end[rank])

    for i in order:
        kept = []
        refetch = span is not None
        own = at_replica(param_bytes[i], grad_bytes[i], sum_bytes[i], ranks, refetch=refetch)
        summed: set[tuple[int, int]] = set()
        # one by one in a fixed order, so that every rank drops the same ones
        for expert, rank in placements[i].replicas():
            home = int(placements[i].home[expert])
            group = expert, 0 if node is None else node[rank]
            home_bytes = grad_bytes[i] if group in summed else max(grad_bytes[i], sum_bytes[i])
            away = at_home(param_bytes[i], home_bytes, refetch=refetch)
            added, passed = np.zeros((2, ranks), dtype=np.int64)
            for where, taken in ((rank, own), (home, away)):
                added[where], passed[where] = taken
            if spreads:
                parts = int(np.count_nonzero(by_rank == by_rank[home]))
                part = at_relay(param_bytes[i], grad_bytes[i], sum_bytes[i], parts, refetch=refetch)
                passed += part * _parts_passed_on(by_rank, home, rank, {of for e, of in summed if e == expert})
            there[i] += added
            until_end += passed
            if max(map(peak, np.flatnonzero(added + passed).tolist())) <= budget_bytes:
                kept.append((expert, rank))
                summed.add(group)
            else:
                there[i] -= added
                until_end -= passed
        # the same object where nothing was dropped: caches, as of `FormChooser`, know placements by identity
        if len(kept) < len(placements[i].replicas()):
            found[i] = Placement.with_replicas(placements[i].home, ranks, kept)
    return found
