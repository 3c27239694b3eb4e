"""Decides, once the load is known, whether replicas are worth the part of their transfers that is still to come.

A placement is planned from the steps before, and routing may have changed since. By the time the exact counts are
there, the part of Trans that compute hides has been sent, and costs nothing any more. The rest is still to come: the
parts of Trans and Agg that no window covers. If the split saves less than that, the step goes on without these
replicas. By the model, a step is then never slower than one without replicas, however wrong the prediction was.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.model.cost import (
    A2A_PER_STEP,
    FORWARD_AND_BACKWARD,
    compute_seconds,
    exchange_seconds,
    step_cost,
    transfers_of,
)
from prophet.spec import Cover, IntArray, Placement, PlanContext, Split, StepCost, TransferSeconds


def split_seconds(split: Split, context: PlanContext) -> float:
    """Return the seconds of the exchanges and products of one layer and microbatch under `split` (Eq. 1 to 3)."""
    pairs = split.pairs().astype(np.float64) * context.shape.token_bytes
    exchange_s = exchange_seconds(pairs, context.topology)
    return A2A_PER_STEP * exchange_s + FORWARD_AND_BACKWARD * compute_seconds(split.by_expert(), context)


def unhidden_seconds(
    split: Split, context: PlanContext, trans: TransferSeconds, agg: TransferSeconds, *, ahead: bool = True
) -> float:
    """Return the seconds still to pay for replicas once the counts are known.

    Args:
        split: The split that uses them.
        context: The machine and the layer.
        trans: Seconds of the layer's Trans.
        agg: Seconds of its Agg.
        ahead: Whether Trans has started by then, so that the part hidden by its windows is paid.
    """
    # Nothing was sent and nothing can hide it: the experts wait for all of it
    if not ahead:
        return trans.exposed_seconds(Cover(), 0.0) + agg.exposed_seconds(Cover(), 0.0)
    windows, taken = context.windows, context.topology.overlap_cost
    forward_s = compute_seconds(split.by_expert(), context)
    over_trans = windows.over_trans(forward_s)
    exposed_s = trans.exposed(over_trans, trans.form(over_trans, taken))
    return exposed_s + agg.exposed_seconds(windows.over_agg(forward_s), taken)


def all_hidden(load: IntArray, context: PlanContext, trans: TransferSeconds, agg: TransferSeconds) -> bool:
    """Whether windows hide transfers whole even under evenly shared products; the same on all ranks, without a clock.

    Args:
        load: The exact load, [R, E].
        context: The machine and the layer.
        trans: Seconds of the layer's Trans.
        agg: Seconds of its Agg.
    """
    # Products take at least this long
    even_s = float(load.sum()) * context.shape.forward_flops_per_token / sum(context.topology.flops_per_s)
    trans_s = trans.exposed_seconds(context.windows.over_trans(even_s), 0.0)
    return trans_s <= 0.0 and agg.exposed_seconds(context.windows.over_agg(even_s), 0.0) <= 0.0


def pays(
    load: IntArray,
    split: Split,
    context: PlanContext,
    trans: TransferSeconds,
    agg: TransferSeconds,
    *,
    ahead: bool = True,
    microbatches: int = 1,
) -> bool:
    """Whether a split saves more than its replicas still cost; the same on all ranks, without a clock.

    Args:
        load: The exact load, [R, E].
        split: The split of it that uses replicas.
        context: The machine and the layer.
        trans: Seconds of the layer's Trans.
        agg: Seconds of its Agg.
        ahead: Whether Trans has started; see `unhidden_seconds`.
        microbatches: How many a step has; the others are assumed to be like this one.
    """
    # Most layers are decided by that alone, without a pass over the split
    if ahead and context.topology.overlap_cost == 0.0 and all_hidden(load, context, trans, agg):
        return True
    unhidden_s = unhidden_seconds(split, context, trans, agg, ahead=ahead)
    if unhidden_s <= 0.0:
        return True
    # Transfers are paid once per step, exchanges and products with each of its microbatches
    homes = Split.to_homes(load, context.homes_only())
    return microbatches * (split_seconds(homes, context) - split_seconds(split, context)) >= unhidden_s


def settled_cost(
    load: IntArray, split: Split, placement: Placement, context: PlanContext, *, microbatches: int = 1
) -> tuple[Split, StepCost]:
    """Return the split that a step ends up with and its predicted cost: with replicas where they pay, else without.

    Args:
        load: The exact load [R, E] of the step's first microbatch.
        split: The split of it that uses replicas.
        placement: The replicas.
        context: The machine and the layer.
        microbatches: How many a step has.
    """
    topology = context.topology
    trans, agg = transfers_of(placement, context)
    cost = step_cost(split, placement, context, (trans, agg))
    if pays(load, split, context, trans, agg, microbatches=microbatches):
        return split, cost
    # The hidden part of Trans has been sent for nothing, which lengthens the step by what hiding costs
    cover = context.windows.over_trans(cost.expert_s / FORWARD_AND_BACKWARD)
    sent_s = trans.hidden(cover, trans.form(cover, topology.overlap_cost))
    homes = context.homes_only()
    alone = Split.to_homes(load, homes)
    without = step_cost(alone, homes, context)
    return alone, StepCost(
        a2a_s=without.a2a_s,
        expert_s=without.expert_s,
        exposed_trans_s=topology.overlap_cost * sent_s,
        exposed_agg_s=0.0,
        trans_s=sent_s,
        agg_s=0.0,
    )
