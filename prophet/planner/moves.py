"""Compiled kernels that change a placement, guided by the prices of `descent.py`.

Shape legend: R ranks, J experts (all of them), A arcs (one per expert and holder).

A replica is worth what its tokens would save at the present prices, less what it adds to the exposed part of Trans and
Agg. `grow` adds the most valuable one again and again, past moves that do not pay by themselves (the first copy costs a
Trans, the next ones share it), and keeps the best state on the way; `shrink` drops the least valuable one in the same
manner; `swap` exchanges single replicas. Every move counts against `Search.tries`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.planner.descent import Flow, attach, copy_flow, detach, plain, settle_expert, sweep, token_price
from prophet.planner.shortest import copies_moved, guide_of, reprice
from prophet.planner.timing import OVERHEAD_S, exposed_seconds
from prophet.spec import BoolArray, FloatArray, IntArray

NOTHING = -1e300


class Search(NamedTuple):
    """What the moves share: limits, room to work in, and `tries[0]`, the moves that are left."""

    figures: FloatArray
    limit_R: IntArray
    moved: FloatArray
    busiest: FloatArray
    units: FloatArray
    value_JR: FloatArray
    barred_JR: BoolArray
    promise_J: FloatArray
    held_R: BoolArray
    gain_R: FloatArray
    tokens_R: FloatArray
    tries: IntArray


@compiled
def make_search(figures: FloatArray, limit_R: IntArray, experts: int, tries: int) -> Search:
    """Room for searches over `experts` experts."""
    ranks = limit_R.size
    left = np.empty(1, np.int64)
    left[0] = tries
    return Search(
        figures, limit_R, np.zeros((2, 6, ranks)), np.zeros(6), np.zeros(6), np.empty((experts, ranks)),
        np.zeros((experts, ranks), np.bool_), np.empty(experts), np.empty(ranks, np.bool_), np.empty(ranks),
        np.empty(ranks), left,
    )  # fmt: skip


@compiled
def free_slots(flow: Flow, limit_R: IntArray) -> IntArray:
    """Slots of every rank that no replica takes."""
    free = limit_R.copy()
    for a in range(flow.counters[1], flow.counters[0]):
        free[flow.rank_A[a]] -= 1
    return free


@bare
def appraise(flow: Flow, search: Search, q: int, free: IntArray, weight: float, experts: IntArray) -> int:
    """Value every possible replica of the most promising experts; return how many experts `experts` names.

    Fills rows of `search.value_JR`. A value is second order: the prices meet as tokens move. `weight` scales what the
    replica adds to the exposed transfers.
    """
    price, node_R, rank_A = flow.price, flow.node_R, flow.rank_A
    following_A, tokens_AR = flow.following_A, flow.tokens_AR
    ranks = node_R.size
    value, figures, units, busiest = search.value_JR, search.figures, search.units, search.busiest
    sent, received, barred_JR = search.moved[0], search.moved[1], search.barred_JR
    own, out_near, in_near, out_far, in_far = price[0], price[1], price[2], price[3], price[4]
    busy, rate, base = flow.busy[0], flow.rate[0], flow.base[0]
    floor = own[0]
    forward_s = 0.0
    for r in range(ranks):
        floor = min(floor, own[r])
        forward_s = max(forward_s, busy[r] * rate[r] + base[r])
    trans_s, agg_s = exposed_seconds(busiest, forward_s, figures)
    promise, held, gain_R, tokens_R = search.promise_J, search.held_R, search.gain_R, search.tokens_R
    for j in range(promise.size):
        promise[j] = 0.0
        a = j
        while a >= 0:
            d = rank_A[a]
            for r in range(ranks):
                n = tokens_AR[a, r]
                if n > 0:
                    near_s, far_s = out_near[r] + in_near[d], out_far[r] + in_far[d]
                    promise[j] += n * (token_price(d == r, node_R[d] == node_R[r], own[d], near_s, far_s) - floor)
            a = following_A[a]
    for r in range(ranks):
        held[r] = False
    for c in range(experts.size):
        j = -1
        for e in range(promise.size):
            if promise[e] > 0.0 and (j < 0 or promise[e] > promise[j]):
                j = e
        if j < 0:
            return c
        promise[j] = 0.0
        experts[c] = j
        home = rank_A[j]
        copies = -1
        together = True
        steepest = 0.0
        a = j
        while a >= 0:
            d = rank_A[a]
            held[d] = True
            copies += 1
            together = together and node_R[d] == node_R[home]
            steepest = max(steepest, q * own[d] * rate[d] / (max(busy[d], 1.0) * rate[d] + base[d]))
            a = following_A[a]
        for d in range(ranks):
            gain_R[d] = 0.0
            tokens_R[d] = 0.0
        a = j
        while a >= 0:
            h = rank_A[a]
            for r in range(ranks):
                n = tokens_AR[a, r]
                if n > 0:
                    near_s, far_s = out_near[r] + in_near[h], out_far[r] + in_far[h]
                    now = token_price(h == r, node_R[h] == node_R[r], own[h], near_s, far_s)
                    for d in range(ranks):
                        if free[d] > 0:
                            near_s, far_s = out_near[r] + in_near[d], out_far[r] + in_far[d]
                            p = now - token_price(d == r, node_R[d] == node_R[r], own[d], near_s, far_s)
                            if p > 0.0:
                                gain_R[d] += p * n
                                tokens_R[d] += n
            a = following_A[a]
        for d in range(ranks):
            value[j, d] = NOTHING
            if held[d] or free[d] <= 0 or barred_JR[j, d]:
                continue
            gain, tokens = gain_R[d], tokens_R[d]
            if gain <= 0.0:
                continue
            bend = steepest + q * own[d] * rate[d] / (max(busy[d], 1.0) * rate[d] + base[d])
            bend *= tokens * tokens
            part = min(1.0, gain / bend) if bend > 0.0 else 1.0
            gain = part * gain - 0.5 * part * part * bend
            # What this copy adds to the busiest rank's transfers.
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
            value[j, d] = gain - weight * (more_trans_s - trans_s + more_agg_s - agg_s)
        a = j
        while a >= 0:
            held[rank_A[a]] = False
            a = following_A[a]
    return experts.size


@bare
def take_best(value_JR: FloatArray, experts: IntArray, used: int) -> tuple[int, int]:
    """The expert and rank of highest value, which is struck out; (-1, -1): none is left."""
    expert = -1
    rank = -1
    for c in range(used):
        j = experts[c]
        for d in range(value_JR.shape[1]):
            v = value_JR[j, d]
            if v > NOTHING and (expert < 0 or v > value_JR[expert, rank]):
                expert = j
                rank = d
    if expert >= 0:
        value_JR[expert, rank] = NOTHING
    return expert, rank


@bare
def add(flow: Flow, search: Search, j: int, rank: int, q: int, sweeps: int) -> float:
    """Add a replica and let tokens settle; return the guide."""
    figures = search.figures
    attach(flow, j, rank, figures[OVERHEAD_S])
    copies_moved(flow, search.moved, search.busiest)
    reprice(flow, figures, search.busiest, q)
    settle_expert(flow, j, q)
    settle_expert(flow, j, q)
    for _ in range(sweeps):
        if sweep(flow, q) == 0:
            break
    search.tries[0] -= 1
    return guide_of(flow, figures, search.busiest, q)


@bare
def drop(flow: Flow, search: Search, a: int, q: int, sweeps: int) -> float:
    """Take a replica away and let tokens settle; return the guide. Prices must be set."""
    figures = search.figures
    detach(flow, a, figures[OVERHEAD_S])
    copies_moved(flow, search.moved, search.busiest)
    for _ in range(sweeps):
        reprice(flow, figures, search.busiest, q)
        if sweep(flow, q) == 0:
            break
    search.tries[0] -= 1
    return guide_of(flow, figures, search.busiest, q)


@bare
def look(flow: Flow, search: Search, q: int, sweeps: int) -> float:
    """Let tokens settle as they are; return the guide."""
    copies_moved(flow, search.moved, search.busiest)
    for _ in range(sweeps):
        reprice(flow, search.figures, search.busiest, q)
        if sweep(flow, q) == 0:
            break
    return guide_of(flow, search.figures, search.busiest, q)


@compiled
def grow(flow: Flow, best: Flow, search: Search, q: int, weight: float, sweeps: int) -> float:
    """Add replicas while tries and slots last, or until R of them brought nothing; `best` is the best state met."""
    ranks = flow.node_R.size
    free = free_slots(flow, search.limit_R)
    experts = np.empty(min(8, flow.counters[1]), np.int64)
    low = look(flow, search, q, sweeps)
    copy_flow(flow, best)
    since = 0
    while since < ranks and search.tries[0] > 0:
        reprice(flow, search.figures, search.busiest, q)
        used = appraise(flow, search, q, free, weight, experts)
        j, d = take_best(search.value_JR, experts, used)
        if j < 0:
            break
        now = add(flow, search, j, d, q, sweeps)
        free[d] -= 1
        since += 1
        if now < low * (1.0 - 1e-6):
            low = now
            since = 0
            copy_flow(flow, best)
    return low


@bare
def least_missed(flow: Flow, rank: int) -> int:
    """The replica, on `rank` or anywhere (-1), whose tokens would pay least to go elsewhere; -1: there is none.

    Prices must be set.
    """
    price, node_R, rank_A = flow.price, flow.node_R, flow.rank_A
    tokens_AR, expert_A, following_A = flow.tokens_AR, flow.expert_A, flow.following_A
    own, out_near, in_near, out_far, in_far = price[0], price[1], price[2], price[3], price[4]
    chosen = -1
    low = 0.0
    for a in range(flow.counters[1], flow.counters[0]):
        if rank >= 0 and rank_A[a] != rank:
            continue
        loss = 0.0
        for r in range(node_R.size):
            n = tokens_AR[a, r]
            if n == 0:
                continue
            here = 0.0
            other = 1e300
            k = expert_A[a]
            while k >= 0:
                d = rank_A[k]
                near_s, far_s = out_near[r] + in_near[d], out_far[r] + in_far[d]
                p = token_price(d == r, node_R[d] == node_R[r], own[d], near_s, far_s)
                if k == a:
                    here = p
                else:
                    other = min(other, p)
                k = following_A[k]
            loss += n * (other - here)
        if chosen < 0 or loss < low:
            chosen = a
            low = loss
    return chosen


@compiled
def shrink(flow: Flow, best: Flow, search: Search, q: int, low: float, sweeps: int) -> float:
    """Drop replicas while tries last, or until R of them only cost; `best` (with guide `low`) keeps the best state."""
    since = 0
    copies_moved(flow, search.moved, search.busiest)
    while since < flow.node_R.size and search.tries[0] > 0:
        reprice(flow, search.figures, search.busiest, q)
        a = least_missed(flow, plain(-1))
        if a < 0:
            break
        now = drop(flow, search, a, q, sweeps)
        since += 1
        if now <= low:
            low = now
            since = 0
            copy_flow(flow, best)
    return low


@compiled
def swap(flow: Flow, best: Flow, spare: Flow, search: Search, q: int, rounds: int, sweeps: int) -> float:
    """Drop each replica, alone or for another one in its stead, where that is better; `flow` ends as the best state."""
    first = flow.counters[1]
    experts = np.empty(min(8, first), np.int64)
    low = look(flow, search, q, sweeps)
    copy_flow(flow, best)
    free = free_slots(flow, search.limit_R)
    for _ in range(rounds):
        improved = False
        a = flow.counters[0] - 1
        while a >= first and search.tries[0] > 0:
            if a >= flow.counters[0]:
                a -= 1
                continue
            j = flow.expert_A[a]
            d = flow.rank_A[a]
            copies_moved(flow, search.moved, search.busiest)
            reprice(flow, search.figures, search.busiest, q)
            now = drop(flow, search, a, q, sweeps)
            free[d] += 1
            if now <= low:
                low = now
                copy_flow(flow, best)
                improved = True
                a -= 1
                continue
            search.barred_JR[j, d] = True
            reprice(flow, search.figures, search.busiest, q)
            used = appraise(flow, search, q, free, 1.0, experts)
            search.barred_JR[j, d] = False
            copy_flow(flow, spare)
            better = False
            for _ in range(3):
                other, rank = take_best(search.value_JR, experts, used)
                if other < 0 or search.tries[0] <= 0:
                    break
                now = add(flow, search, other, rank, q, sweeps)
                if now < low * (1.0 - 1e-5):
                    low = now
                    copy_flow(flow, best)
                    free[rank] -= 1
                    better = True
                    break
                copy_flow(spare, flow)
            if better:
                improved = True
            else:
                copy_flow(best, flow)
                free[d] -= 1
            a -= 1
        if not improved:
            break
    copy_flow(best, flow)
    return low


@bare
def holds(flow: Flow, j: int, rank: int) -> bool:
    """Whether `rank` holds expert j."""
    a = j
    while a >= 0:
        if flow.rank_A[a] == rank:
            return True
        a = flow.following_A[a]
    return False
