"""Predicted seconds of one MoE layer in one training step: the paper's plain model and a richer one.

Shape legend: R ranks (D of the paper), E experts, D destination ranks (equal to R).

Both models count four all-to-alls (dispatch and combine, forward and backward), one forward and one backward
product of the experts (the backward takes twice the forward), one Trans and one Agg. The paper's form knows
one bandwidth and one throughput; `step_cost` knows the levels of the network, what each rank sends and
receives, each rank's speed, and a fixed cost for every expert that a rank computes. `prophet.spec.TransferSeconds`
defines by how much a transfer lengthens the step, in either form.

This file is the definition; `core/cost.cpp` is the compiled twin, the only place of the core that counts seconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError
from prophet.spec import (
    FloatArray,
    IntArray,
    Link,
    Placement,
    PlanContext,
    Routes,
    Split,
    StepCost,
    Topology,
    TransferSeconds,
    routes_of,
    transfer_pairs,
)

# Dispatch and combine, forward and backward
A2A_PER_STEP = 4
# The backward product of an expert takes twice its forward product (paper, Eq. 3)
FORWARD_AND_BACKWARD = 3

Traffic = npt.NDArray[np.float64]


def mean_bandwidth(topology: Topology) -> float:
    """Return the paper's average bandwidth, bytes/s: that of an even exchange, with one link busy at a time.

    The ranks of a node share its port in an even exchange.
    """
    # The harmonic mean over a rank's peers, because an even exchange sends each peer the same bytes
    peers = topology.ranks - 1
    # A rank alone exchanges nothing, so any rate will do
    if peers == 0:
        return topology.intra.bytes_per_s
    inside = min(topology.ranks_per_node, topology.ranks) - 1
    seconds_per_byte = inside / topology.intra.bytes_per_s + (peers - inside) / topology.even_inter.bytes_per_s
    return peers / seconds_per_byte


def paper_cost(
    rank_load: IntArray,
    received: IntArray,
    *,
    replicated: int,
    excluded: float,
    context: PlanContext,
    overlapped: bool = True,
) -> StepCost:
    """Predict a layer's step by the paper's model: Pro-Prophet, Eq. 1-6 and 8.

    Args:
        rank_load: H of the paper, tokens [R] that each rank computes.
        received: R of the paper, tokens [R] that each rank receives.
        replicated: s of the paper, the experts that are sent out.
        excluded: n of the paper, the ranks to which such an expert is not sent; a mean where experts differ.
        context: The machine and the layer.
        overlapped: Hide transfers under compute, Eq. 8; without it Eq. 6.

    Raises:
        SpecError: Unless both arrays have one entry per rank.
    """
    topology, shape = context.topology, context.shape
    ranks = topology.ranks
    if rank_load.shape != (ranks,) or received.shape != (ranks,):
        raise SpecError(f"rank_load and received need one entry per rank ({ranks})")
    bandwidth = mean_bandwidth(topology)
    tokens_per_s = float(np.mean(topology.flops_per_s)) / shape.forward_flops_per_token
    a2a_s = float(received.max()) * shape.token_bytes / bandwidth  # Eq. 1
    forward_s = float(rank_load.max()) / tokens_per_s  # Eq. 2
    backward_s = 2.0 * forward_s  # Eq. 3
    # s experts, each of which reaches all ranks but n
    reach = replicated * (ranks - excluded) / ranks
    trans_s = reach * shape.expert_bytes / bandwidth  # Eq. 4
    agg_s = reach * shape.expert_grad_bytes / bandwidth  # Eq. 5
    hidden_forward_s = forward_s + context.windows.fnec_s if overlapped else 0.0
    hidden_backward_s = backward_s + context.windows.bnec_s if overlapped else 0.0
    return StepCost(
        a2a_s=A2A_PER_STEP * a2a_s,
        expert_s=forward_s + backward_s,
        exposed_trans_s=max(0.0, trans_s - hidden_forward_s),
        exposed_agg_s=max(0.0, agg_s - hidden_backward_s),
        trans_s=trans_s,
        agg_s=agg_s,
    )


def exchange_seconds(pairs: FloatArray, topology: Topology) -> float:
    """Return the seconds of one all-to-all in which rank r sends `pairs[r, d]` bytes to rank d, [R, D]."""
    # The levels work at the same time (they are separate wires, both ways at once), so the slowest rank of the slowest
    # level decides, or the slowest node's port; a level that moves nothing adds no latency. What stays on a rank is
    # free.
    node = topology.node_ids()
    same_node = node[:, None] == node[None, :]
    off_rank = ~np.eye(topology.ranks, dtype=np.bool_)
    seconds = 0.0
    for link, mask in ((topology.intra, same_node & off_rank), (topology.inter, ~same_node)):
        moved = np.where(mask, pairs, 0)
        sent, received = moved.sum(axis=1), moved.sum(axis=0)
        seconds = max(seconds, link_seconds(link, sent, received))
    # The last level's: what passes between nodes
    return max(seconds, *(float(topology.port_seconds(moved).max()) for moved in (sent, received)))


def link_seconds(link: Link, sent: Traffic, received: Traffic) -> float:
    """Return the seconds until the busiest rank has moved its bytes over one level.

    Args:
        link: The level.
        sent: Bytes [R] that each rank sends.
        received: Bytes [R] that each rank receives, at the same time.
    """
    return link.seconds(float(max(sent.max(), received.max())))


def transfer_seconds(
    placement: Placement, topology: Topology, n_bytes: float, *, sum_bytes: float | None = None
) -> TransferSeconds:
    """Return the seconds of a layer's Trans or Agg in all forms (Eq. 4 and 5, with real messages).

    Direct: the home sends every replica a whole copy. Two-phase: it scatters one copy over its n replicas, which then
    exchange their n-th parts among themselves. Node-once: where that is cheaper for an expert, its replicas in every
    node do so. Spread: the ranks of the home's node send parts in its place, where that is cheaper. A layer takes one
    form as a whole.

    Args:
        placement: The experts and their replicas.
        topology: The machine.
        n_bytes: Bytes of one expert's parameters, or gradients.
        sum_bytes: Of Agg, bytes of a sum of gradients. It mirrors Trans in time: gather first, then sums go home. None
            for Trans.
    """

    def seconds(routes: Routes) -> tuple[float, float, float]:
        direct, exchanges = transfer_pairs(placement, routes, n_bytes, sum_bytes)
        *first_s, second_s = (exchange_seconds(pairs, topology) for pairs in exchanges)
        return exchange_seconds(direct, topology), sum(first_s), second_s

    once, spread = (
        seconds(routes)[1:] if routes else (np.inf, np.inf) for routes in routes_of(placement, topology).values()
    )
    # The direct form is the same
    return TransferSeconds(*seconds({}), *once, *spread)


def compute_seconds(load_ED: IntArray, context: PlanContext) -> float:
    """Return the forward seconds of the slowest rank (Eq. 2); `load_ED[e, d]` tokens of expert e run on rank d."""
    rate = np.asarray(context.topology.flops_per_s) / context.shape.forward_flops_per_token
    groups = np.count_nonzero(load_ED, axis=0)
    slowest_s = float((load_ED.sum(axis=0) / rate + groups * context.topology.expert_overhead_s).max())
    # The search leaves `call_overhead_s` out: whatever the placement, every rank with work pays it once
    return slowest_s + (context.topology.call_overhead_s if groups.any() else 0.0)


def transfers_of(placement: Placement, context: PlanContext) -> tuple[TransferSeconds, TransferSeconds]:
    """Return the seconds of a layer's Trans and of its Agg."""
    trans = transfer_seconds(placement, context.topology, context.trans_bytes)
    return trans, transfer_seconds(placement, context.topology, context.agg_bytes, sum_bytes=context.agg_sum_bytes)


def step_cost(
    split: Split,
    placement: Placement,
    context: PlanContext,
    transfers: tuple[TransferSeconds, TransferSeconds] | None = None,
) -> StepCost:
    """Predict the seconds of one layer in one step (Eq. 8, with the machine's levels and fixed costs).

    Args:
        split: Where the tokens are computed.
        placement: The experts and their replicas.
        context: The machine and the layer.
        transfers: The result of `transfers_of`, where it is known.

    Raises:
        SpecError: Where these are for different numbers of ranks.
    """
    topology, shape = context.topology, context.shape
    if split.ranks != topology.ranks or placement.ranks != topology.ranks:
        raise SpecError(
            f"topology has {topology.ranks} ranks, split {split.ranks}, placement {placement.ranks}: all must agree"
        )
    pairs = split.pairs().astype(np.float64) * shape.token_bytes
    forward_s = compute_seconds(split.by_expert(), context)
    trans, agg = transfers_of(placement, context) if transfers is None else transfers
    over_trans, over_agg = context.windows.over_trans(forward_s), context.windows.over_agg(forward_s)
    taken = topology.overlap_cost
    return StepCost(
        a2a_s=A2A_PER_STEP * exchange_seconds(pairs, topology),
        expert_s=FORWARD_AND_BACKWARD * forward_s,
        exposed_trans_s=trans.exposed_seconds(over_trans, taken),
        exposed_agg_s=agg.exposed_seconds(over_agg, taken),
        trans_s=trans.seconds(trans.form(over_trans, taken)),
        agg_s=agg.seconds(agg.form(over_agg, taken)),
    )
