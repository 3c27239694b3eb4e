"""Compiled kernels that grow a placement where exchanges matter, one most valuable replica after the other.

Shape legend: R ranks, J experts (all of them), A arcs (one per expert and holder), K = 5 resources of a rank.

`moves.py` does the same for a search that has milliseconds. Here a replica costs a few microseconds at 16 x 32: only
the most valuable one is looked for, experts that cannot hold it are not valued, what Trans moves is counted on, and no
sweep follows. Prices are smooth (a low q): the first replicas must relieve many ranks, not just the busiest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.planner.descent import Flow, attach, detach, norms, set_prices, settle_expert
from prophet.planner.shortest import busiest_of, copies_moved, count_copies
from prophet.planner.timing import OVERHEAD_S, exposed_seconds, hiding, transfers
from prophet.spec import BoolArray, FloatArray, IntArray

SMOOTH = 2  # q of the prices that growth goes by
PATIENCE = 2  # replicas in a row that bring nothing before growth ends: the first copy costs a Trans, others share it
VALUED = 8  # experts looked at for every replica
BARRED = 3  # replicas that growth can be told to leave out


class Room(NamedTuple):
    """Room to work in: free slots, what Trans moves, what replicas of one expert are worth.

    `barred` [2 N] are pairs of an expert and a rank that growth leaves out; -1: none.
    """

    free_R: IntArray
    moved: FloatArray
    busiest: FloatArray
    units: FloatArray
    promise_J: FloatArray
    held_R: BoolArray
    gain_R: FloatArray
    tokens_R: FloatArray
    near_R: FloatArray
    far_R: FloatArray
    barred: IntArray


@compiled
def make_room(experts: int, ranks: int) -> Room:
    """Room for `experts` experts on `ranks` ranks."""
    return Room(
        np.empty(ranks, np.int64), np.zeros((2, 6, ranks)), np.zeros(6), np.zeros(6), np.empty(experts),
        np.zeros(ranks, np.bool_), np.empty(ranks), np.empty(ranks), np.empty(ranks), np.empty(ranks),
        np.full(2 * BARRED, -1, np.int64),
    )  # fmt: skip


@bare
def price_all(flow: Flow, figures: FloatArray, busiest: FloatArray, q: int) -> tuple[float, float]:
    """Set all prices; return the seconds of the step with q-norms for the largest, and with the largest themselves."""
    longest, longest_q, forward_s, forward_q = norms(flow, q)
    trans_s, agg_s = transfers(busiest, figures)
    weight = max(3.0 - hiding(trans_s, agg_s, forward_s, figures), 0.1)
    set_prices(flow, q, 4.0, weight, longest, longest_q, forward_s, forward_q)
    felt_trans_s, felt_agg_s = exposed_seconds(busiest, forward_s, figures)
    felt_s = felt_trans_s + felt_agg_s
    return 4.0 * longest_q + 3.0 * forward_q + felt_s, 4.0 * longest + 3.0 * forward_s + felt_s


@bare
def promises(flow: Flow, promise_J: FloatArray) -> None:
    """What all tokens of every expert pay above the cheapest products: no replica of it can be worth more."""
    price, node_R, rank_A, tokens_AR = flow.price, flow.node_R, flow.rank_A, flow.tokens_AR
    own, out_near, in_near, out_far, in_far = price[0], price[1], price[2], price[3], price[4]
    ranks = node_R.size
    floor = own[0]
    for r in range(ranks):
        floor = min(floor, own[r])
    for j in range(promise_J.size):
        paid = 0.0
        a = j
        while a >= 0:
            d = rank_A[a]
            node = node_R[d]
            above = own[d] - floor
            near_s = above + in_near[d]
            far_s = above + in_far[d]
            for r in range(ranks):
                n = tokens_AR[a, r]
                if n > 0:
                    paid += n * (
                        above if r == d else (near_s + out_near[r] if node_R[r] == node else far_s + out_far[r])
                    )
            a = flow.following_A[a]
        promise_J[j] = paid


@bare
def gains(flow: Flow, j: int, room: Room) -> None:
    """What the tokens of expert j would save on every rank, and how many of them: `gain_R` and `tokens_R`.

    `near_R` and `far_R` are the prices of a token that comes from the holder's node, and from elsewhere.
    """
    price, node_R, rank_A, tokens_AR = flow.price, flow.node_R, flow.rank_A, flow.tokens_AR
    own, out_near, out_far = price[0], price[1], price[3]
    gain_R, tokens_R, near_R, far_R = room.gain_R, room.tokens_R, room.near_R, room.far_R
    ranks = node_R.size
    for d in range(ranks):
        gain_R[d] = 0.0
        tokens_R[d] = 0.0
    a = j
    while a >= 0:
        h = rank_A[a]
        for r in range(ranks):
            n = float(tokens_AR[a, r])
            if n <= 0.0:
                continue
            node = node_R[r]
            if h == r:
                now = own[h]
            elif node_R[h] == node:
                now = out_near[r] + near_R[h]
            else:
                now = out_far[r] + far_R[h]
            gain, tokens = gain_R[r], tokens_R[r]
            near_s, far_s = now - out_near[r], now - out_far[r]
            for d in range(ranks):
                p = near_s - near_R[d] if node_R[d] == node else far_s - far_R[d]
                gain_R[d] += n * p if p > 0.0 else 0.0
                tokens_R[d] += n if p > 0.0 else 0.0
            p = now - own[r]
            gain_R[r] = gain + n * p if p > 0.0 else gain
            tokens_R[r] = tokens + n if p > 0.0 else tokens
        a = flow.following_A[a]


@bare
def is_barred(room: Room, j: int, rank: int) -> bool:
    """Whether growth leaves out this replica."""
    found = False
    for i in range(0, 2 * BARRED, 2):
        found = found or (room.barred[i] == j and room.barred[i + 1] == rank)
    return found


@bare
def most_valuable(flow: Flow, room: Room, figures: FloatArray, q: int) -> tuple[int, int]:
    """The expert and rank of the replica that is worth most at the present prices; (-1, -1): none is worth anything.

    Valued to second order, as prices meet where tokens move, less what it adds to the exposed transfers.
    """
    price, node_R, rank_A, following_A = flow.price, flow.node_R, flow.rank_A, flow.following_A
    busy, rate, base, own = flow.busy[0], flow.rate[0], flow.base[0], flow.price[0]
    sent, received, units, busiest = room.moved[0], room.moved[1], room.units, room.busiest
    promise_J, held_R, gain_R, tokens_R = room.promise_J, room.held_R, room.gain_R, room.tokens_R
    ranks = node_R.size
    forward_s = 0.0
    for r in range(ranks):
        forward_s = max(forward_s, busy[r] * rate[r] + base[r])
        room.near_R[r] = own[r] + price[2, r]
        room.far_R[r] = own[r] + price[4, r]
    trans_s, agg_s = exposed_seconds(busiest, forward_s, figures)
    promises(flow, promise_J)
    expert = -1
    rank = -1
    most = 0.0
    for _ in range(VALUED):
        j = -1
        for e in range(promise_J.size):
            if promise_J[e] > most and (j < 0 or promise_J[e] > promise_J[j]):
                j = e
        if j < 0:
            break
        promise_J[j] = 0.0
        home = rank_A[j]
        copies = -1
        together = True
        steepest = 0.0
        a = j
        while a >= 0:
            d = rank_A[a]
            held_R[d] = True
            copies += 1
            together = together and node_R[d] == node_R[home]
            steepest = max(steepest, q * own[d] * rate[d] / (max(busy[d], 1.0) * rate[d] + base[d]))
            a = following_A[a]
        gains(flow, j, room)
        for d in range(ranks):
            gain = gain_R[d]
            if held_R[d] or room.free_R[d] <= 0 or gain <= most:
                continue
            bend = steepest + q * own[d] * rate[d] / (max(busy[d], 1.0) * rate[d] + base[d])
            bend *= tokens_R[d] * tokens_R[d]
            part = min(1.0, gain / bend) if bend > 0.0 else 1.0
            gain = part * gain - 0.5 * part * part * bend
            if gain <= most or is_barred(room, j, d):
                continue
            for i in range(6):
                units[i] = busiest[i]
            level = 0 if node_R[d] == node_R[home] else 1
            units[level] = max(units[level], sent[level, home] + 1.0, received[level, d] + 1.0)
            share = 1.0 / (copies + 1)
            units[2 + level] = max(units[2 + level], received[2 + level, d] + share)
            if copies == 0:
                units[2 + level] = max(units[2 + level], sent[2 + level, home] + 1.0)
            else:
                level = 0 if together and level == 0 else 1
                units[4 + level] = max(units[4 + level], sent[4 + level, d] + copies * share)
            more_trans_s, more_agg_s = exposed_seconds(units, forward_s, figures)
            value = gain - (more_trans_s - trans_s + more_agg_s - agg_s)
            if value > most:
                expert = j
                rank = d
                most = value
        a = j
        while a >= 0:
            held_R[rank_A[a]] = False
            a = following_A[a]
    return expert, rank


@bare
def count_free(flow: Flow, limit_R: IntArray, free_R: IntArray) -> None:
    """Write the slots of every rank that no replica takes."""
    for r in range(limit_R.size):
        free_R[r] = limit_R[r]
    for a in range(flow.counters[1], flow.counters[0]):
        free_R[flow.rank_A[a]] -= 1


@bare
def grow_on(flow: Flow, room: Room, figures: FloatArray, limit_R: IntArray, q: int) -> float:
    """Add replicas while slots last, until `PATIENCE` of them bring nothing; those are taken away again.

    Returns the seconds of the step with q-norms in place of the largest exchange and product.
    """
    overhead_s = figures[OVERHEAD_S]
    free_R = room.free_R
    count_free(flow, limit_R, free_R)
    copies_moved(flow, room.moved, room.busiest)
    low, _ = price_all(flow, figures, room.busiest, q)
    kept = flow.counters[0]
    while flow.counters[0] - kept < PATIENCE:
        j, d = most_valuable(flow, room, figures, q)
        if j < 0:
            break
        count_copies(flow, j, room.moved, -1.0)
        attach(flow, j, d, overhead_s)
        count_copies(flow, j, room.moved, 1.0)
        busiest_of(room.moved, room.busiest)
        free_R[d] -= 1
        settle_expert(flow, j, q)
        settle_expert(flow, j, q)
        now, _ = price_all(flow, figures, room.busiest, q)
        if now < low * (1.0 - 1e-6):
            low = now
            kept = flow.counters[0]
    while flow.counters[0] > kept:
        detach(flow, flow.counters[0] - 1, overhead_s)
    return low
