"""Spare replicas that let any rank's unforeseen load drain to any other: what makes a stale placement good.

Shape legend: R ranks, E experts, M experts with replicas, A arcs (holders of those experts).

Under a split, rank a can hand load to rank b if an expert of which a computes tokens is held by b, too. If
these links connect all ranks both ways, an exact split levels every drift that is smaller than the tokens on
the links. The point optimum of a prediction leaves ranks that cannot drain, and pairs of ranks closed in
themselves; a replica for each of them is enough.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import compiled
from prophet.spec import BoolArray, IntArray


@compiled
def choose_target(
    expert: int,
    giver: int,
    allowed: BoolArray,
    held: BoolArray,
    free: IntArray,
    load_RE: IntArray,
    node_R: IntArray,
) -> int:
    """The allowed rank with most free slots, then in the giver's node, then with most local tokens; -1: none."""
    target = -1
    for r in range(free.size):
        if not allowed[r] or free[r] <= 0 or held[expert, r]:
            continue
        if target < 0:
            better = True
        elif free[r] != free[target]:
            better = free[r] > free[target]
        elif (node_R[r] == node_R[giver]) != (node_R[target] == node_R[giver]):
            better = node_R[r] == node_R[giver]
        else:
            better = load_RE[r, expert] > load_RE[target, expert]
        if better:
            target = r
    return target


@compiled
def add_outlets(
    load_RE: IntArray,
    total_E: IntArray,
    home_E: IntArray,
    node_R: IntArray,
    limit_R: IntArray,
    multi: IntArray,
    start: IntArray,
    arc_rank: IntArray,
    x: IntArray,
    floor: int,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
) -> tuple[int, bool]:
    """Append the replicas that connect all ranks by links of at least `floor` tokens; (replicas, slots
    short).

    `multi`, `start`, `arc_rank` index the replicas given and `x` [A] are their tokens under the exact split.
    """
    ranks, experts = load_RE.shape
    short = False
    if multi.size == 0:
        return used, short
    # Arcs, with room for those to come: every expert is listed, the ones with one holder as a single arc at
    # home.
    held = np.zeros((experts, ranks), np.bool_)
    tokens = np.zeros((experts, ranks), np.int64)
    for e in range(experts):
        held[e, home_E[e]] = True
        tokens[e, home_E[e]] = total_E[e]
    for j in range(multi.size):
        e = multi[j]
        tokens[e, home_E[e]] = 0
        for k in range(start[j], start[j + 1]):
            held[e, arc_rank[k]] = True
            tokens[e, arc_rank[k]] = x[k]
    free = limit_R.copy()
    for i in range(used):
        free[rep_rank[i]] -= 1
    hottest = multi[0]
    for j in range(multi.size):
        if total_E[multi[j]] > total_E[hottest]:
            hottest = multi[j]
    root = home_E[hottest]
    stuck = np.zeros(ranks, np.bool_)
    for inward in range(2):  # first every rank must drain to the root, then the root to every rank
        stuck[:] = False
        while used < rep_expert.size:
            core = np.zeros(ranks, np.bool_)
            core[root] = True
            grow(core, inward == 1, floor, held, tokens)
            lost = -1
            for r in range(ranks):
                if not core[r] and not stuck[r]:
                    lost = r
                    break
            if lost < 0:
                break
            region = np.zeros(ranks, np.bool_)
            region[lost] = True
            grow(region, inward == 0, floor, held, tokens)
            givers = core if inward == 1 else region
            takers = region if inward == 1 else core
            best = -1
            giver = -1
            target = -1
            for r in range(ranks):
                if givers[r]:
                    for e in range(experts):
                        if tokens[e, r] >= floor and (best < 0 or tokens[e, r] > tokens[best, giver]):
                            to = choose_target(e, r, takers, held, free, load_RE, node_R)
                            if to >= 0:
                                best = e
                                giver = r
                                target = to
            if best < 0:
                stuck[lost] = True
                for r in range(ranks):
                    if takers[r] and free[r] <= 0:
                        short = True
                continue
            held[best, target] = True
            free[target] -= 1
            rep_expert[used] = best
            rep_rank[used] = target
            used += 1
    return used, short


@compiled
def grow(seen: BoolArray, forward: bool, floor: int, held: BoolArray, tokens: IntArray) -> None:
    """Grow `seen` [R] by all ranks its members can drain to (`forward`), or that can drain to its members."""
    experts, ranks = held.shape
    changed = True
    used = np.zeros(experts, np.bool_)
    while changed:
        changed = False
        for e in range(experts):
            if used[e]:
                continue
            touches = False
            for r in range(ranks):
                if seen[r] and (tokens[e, r] >= floor if forward else held[e, r]):
                    touches = True
                    break
            if not touches:
                continue
            used[e] = True
            for r in range(ranks):
                if not seen[r] and (held[e, r] if forward else tokens[e, r] >= floor):
                    seen[r] = True
                    changed = True
