"""Compiled kernels that change a placement by one or two replicas at a time, each state judged by its own descent.

Shape legend: J experts (all of them), A arcs (one per expert and holder).
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import compiled
from prophet.planner.descent import Flow, attach, copy_flow, detach, plain, sweep
from prophet.planner.moves import Search, appraise, free_slots, holds, least_missed, take_best
from prophet.planner.shortest import LEVELS, copies_moved, guide_of, reprice, shorten
from prophet.planner.timing import OVERHEAD_S
from prophet.spec import IntArray

NEARLY = 0.1  # a step this far above the best after a few sweeps is not descended from further
SWEEPS_PER_TRY = 6  # sweeps that take as long as a trial move


@compiled
def judge(flow: Flow, search: Search, sweeps: int) -> float:
    """Seconds of the step after a descent of at most so many sweeps; counts as so many tries as they take."""
    copies_moved(flow, search.moved, search.busiest)
    seconds, made = shorten(flow, search.figures, search.busiest, sweeps, sweeps < LEVELS)
    search.tries[0] -= 1 + made // SWEEPS_PER_TRY
    return seconds


@compiled
def polish(flow: Flow, best: Flow, spare: Flow, search: Search, q: int, width: int) -> float:
    """Put other replicas in the stead of one or two, or let two exchange their ranks; `flow` ends as the best state.

    Slower than `swap` and surer: every state is judged by its own descent. Where slots are scarce, only two moves at
    once lead on. First every expert is tried on all ranks, where need be in another's stead: sent in two phases, many
    copies can cost less than a few.
    """
    first = flow.counters[1]
    experts = np.empty(min(8, first), np.int64)
    overhead_s = search.figures[OVERHEAD_S]
    low = judge(flow, search, plain(2 * LEVELS))
    copy_flow(flow, best)
    for j in range(first):
        if search.tries[0] <= 0:
            break
        copy_flow(best, flow)
        copies_moved(flow, search.moved, search.busiest)
        reprice(flow, search.figures, search.busiest, q)
        free = free_slots(flow, search.limit_R)
        more = 0
        for r in range(free.size):
            if search.limit_R[r] <= 0 or holds(flow, j, r):
                continue
            if free[r] <= 0:
                detach(flow, least_missed(flow, r), overhead_s)
            attach(flow, j, r, overhead_s)
            more += 1
        if more > 0:
            low = judged(flow, best, search, low)
    gap = 0
    while gap < best.counters[0] - first and search.tries[0] > 0:
        a = first
        while a + gap < best.counters[0] and search.tries[0] > 0:
            copy_flow(best, flow)
            copies_moved(flow, search.moved, search.busiest)
            reprice(flow, search.figures, search.busiest, q)
            free = free_slots(flow, search.limit_R)
            j, d = flow.expert_A[a], flow.rank_A[a]
            i, r = flow.expert_A[a + gap], flow.rank_A[a + gap]
            detach(flow, a + gap, overhead_s)  # the later one first: it leaves the other where it is
            if gap > 0:
                detach(flow, a, overhead_s)
                free[d] += 1
            free[r] += 1
            copy_flow(flow, spare)
            before = low
            if gap > 0 and j != i and not holds(flow, j, r) and not holds(flow, i, d):
                attach(flow, j, r, overhead_s)
                attach(flow, i, d, overhead_s)
                low = judged(flow, best, search, low)
                copy_flow(spare, flow)
            elif gap == 0:
                low = judged(flow, best, search, low)
                copy_flow(spare, flow)
            search.barred_JR[j, d] = True
            search.barred_JR[i, r] = True
            for n in range(width if gap == 0 else 3):  # one of several, or several together
                if n == 0 or gap > 0:
                    copies_moved(flow, search.moved, search.busiest)
                    reprice(flow, search.figures, search.busiest, q)
                    used = appraise(flow, search, q, free, 1.0, experts)
                other, rank = take_best(search.value_JR, experts, used)
                if other < 0:
                    break
                attach(flow, other, rank, overhead_s)
                low = judged(flow, best, search, low)
                if gap == 0:
                    free[rank] -= 1
                    low = one_more(flow, best, search, q, free, low)
                    free[rank] += 1
                    copy_flow(spare, flow)
                else:
                    free[rank] -= 1
            search.barred_JR[j, d] = False
            search.barred_JR[i, r] = False
            if low >= before:
                a += 1
        gap += 1
    copy_flow(best, flow)
    return low


@compiled
def one_more(flow: Flow, best: Flow, search: Search, q: int, free: IntArray, low: float) -> float:
    """`judged` with the most valuable further replica; the values in `search` stay those of before."""
    experts = np.empty(min(8, flow.counters[1]), np.int64)
    values = search.value_JR.copy()
    copies_moved(flow, search.moved, search.busiest)
    reprice(flow, search.figures, search.busiest, q)
    used = appraise(flow, search, q, free, 1.0, experts)
    other, rank = take_best(search.value_JR, experts, used)
    search.value_JR[:] = values
    if other >= 0:
        attach(flow, other, rank, search.figures[OVERHEAD_S])
        low = judged(flow, best, search, low)
    return low


@compiled
def judged(flow: Flow, best: Flow, search: Search, low: float) -> float:
    """`judge`, and the state becomes `best` where it is below `low`; returns the lower of the two.

    A few sweeps, which go on from the state that was changed, rule out most.
    """
    copies_moved(flow, search.moved, search.busiest)
    search.tries[0] -= 1
    now = np.inf
    for i in range(3):
        q = plain(8) << (2 * i)
        for _ in range(2):
            reprice(flow, search.figures, search.busiest, q)
            sweep(flow, q)
        now = min(now, guide_of(flow, search.figures, search.busiest, plain(0)))
    if now > low * (1.0 + NEARLY):
        return low
    now = judge(flow, search, plain(2 * LEVELS))
    if now < low * (1.0 - 1e-5):
        copy_flow(flow, best)
        return now
    return low
