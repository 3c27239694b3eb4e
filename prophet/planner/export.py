"""Compiled kernels of the fast plan: what overloaded ranks hand over to others, in few and large pieces.

Shape legend: R ranks, E experts.

Where products dominate this is all there is to do: loads come down to the even level, and the tokens that a replica
takes are known at once. Linear in ranks for every replica.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.planner.timing import Problem
from prophet.spec import IntArray

TAKES_ALL, NEAR = np.int64(1) << 62, np.int64(1) << 61  # above any number of tokens


@bare
def pick_taker(
    room: IntArray,
    ask: int,
    giver: int,
    local_RE: IntArray,
    expert: int,
    node_R: IntArray,
    held: IntArray,
    free: IntArray,
    only_near: bool,
) -> tuple[int, bool]:
    """The rank to take `ask` tokens of `expert`, and whether a rank without a free slot would be better; -1: none.

    One that can take all of it (in the giver's node first, then with most local tokens), or else the roomiest.
    """
    taker = -1
    wanted = -1
    taker_worth = np.int64(0)
    wanted_worth = np.int64(0)
    for r in range(room.size):
        near = node_R[r] == node_R[giver]
        if room[r] <= 0 or held[r] > 0 or (only_near and not near):
            continue
        worth = room[r]
        if worth >= ask:
            worth = TAKES_ALL + (NEAR if near else 0) + local_RE[r, expert]
        if worth > wanted_worth:
            wanted = r
            wanted_worth = worth
        if worth > taker_worth and free[r] > 0:
            taker = r
            taker_worth = worth
    return taker, wanted != taker


@compiled
def export_excess(
    problem: Problem,
    slack: float,
    near: bool,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    rep_tokens: IntArray,
) -> tuple[int, bool]:
    """Bring loads down to (1 + slack) of the even level; return (replicas, slots short).

    The most overloaded rank gives its heaviest expert to one rank that can take all of its excess (nearest first,
    then most local tokens), or else to the roomiest one. With `near`, nodes keep their load and level it among their
    own ranks. `rep_tokens` are the tokens that each replica takes over.
    """
    home_E, node_R = problem.home_E, problem.node_R
    ranks, experts = problem.load_RE.shape
    by_rank = np.empty((5, ranks), np.int64)
    room, free, stuck, held = by_rank[0], by_rank[1], by_rank[2], by_rank[3]
    first = by_rank[4]  # experts of a home as a linked list
    by_expert = np.empty((3, experts), np.int64)
    left, following = by_expert[0], by_expert[1]
    last = by_expert[2]  # replicas of an expert as a linked list
    for r in range(ranks):
        free[r] = limit_R[r]
        stuck[r] = 0
        held[r] = 0
        first[r] = -1
    for e in range(experts - 1, -1, -1):
        left[e] = problem.total_E[e]
        last[e] = -1
        following[e] = first[home_E[e]]
        first[home_E[e]] = e
    before = np.empty(rep_expert.size, np.int64)
    nodes = node_R[ranks - 1] + 1 if near else 1
    load_of = np.zeros(nodes)
    speed_of = np.zeros(nodes)
    for r in range(ranks):
        n = node_R[r] if near else 0
        load_of[n] += problem.home_load[r]
        speed_of[n] += problem.speed_R[r]
    for r in range(ranks):
        n = node_R[r] if near else 0
        level = load_of[n] / speed_of[n] * (1.0 + slack)
        room[r] = int(np.floor(level * problem.speed_R[r] + 1e-6)) - problem.home_load[r]
    used = 0
    short = False
    while used < rep_expert.size:
        giver = -1
        for r in range(ranks):
            if room[r] < 0 and stuck[r] == 0 and (giver < 0 or room[r] < room[giver]):
                giver = r
        if giver < 0:
            break
        heaviest = -1
        e = first[giver]
        while e >= 0:
            if left[e] > 0 and (heaviest < 0 or left[e] > left[heaviest]):
                heaviest = e
            e = following[e]
        if heaviest < 0:
            stuck[giver] = 1
            continue
        ask = min(-room[giver], left[heaviest])
        held[giver] = 1
        i = last[heaviest]
        while i >= 0:
            held[rep_rank[i]] = 1
            i = before[i]
        taker, lacking = pick_taker(room, ask, giver, problem.load_RE, heaviest, node_R, held, free, near)
        held[giver] = 0
        i = last[heaviest]
        while i >= 0:
            held[rep_rank[i]] = 0
            i = before[i]
        short = short or lacking
        if taker < 0:
            stuck[giver] = 1
            continue
        part = min(ask, room[taker])
        left[heaviest] -= part
        room[giver] += part
        room[taker] -= part
        free[taker] -= 1
        rep_expert[used] = heaviest
        rep_rank[used] = taker
        rep_tokens[used] = part
        before[used] = last[heaviest]
        last[heaviest] = used
        used += 1
    return used, short
