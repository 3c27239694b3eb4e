"""Spare replicas that let any rank's unforeseen load drain to any other: what makes a stale placement good.

Shape legend: R ranks, E experts, M experts with replicas, A arcs (holders of those experts).

Under a split, rank a can hand load to rank b if an expert of which a computes tokens is held by b, too. If
these links connect all ranks both ways, an exact split levels every drift that is smaller than the tokens on
the links. The point optimum of a prediction leaves ranks that cannot drain, and pairs of ranks closed in
themselves; a replica for each of them is enough.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.spec import BoolArray, IntArray


@bare
def spread(
    seen: BoolArray,
    origin: int,
    forward: bool,
    floor: int,
    item_expert: IntArray,
    item_rank: IntArray,
    item_tokens: IntArray,
    next_of_rank: IntArray,
    next_of_expert: IntArray,
    first_of_rank: IntArray,
    first_of_expert: IntArray,
    queue: IntArray,
    met: BoolArray,
) -> None:
    """Add `origin` to `seen` [R], and all ranks that it can drain to (`forward`) or that can drain to it.

    `queue` [R] and `met` [E] are overwritten.
    """
    for e in range(met.size):
        met[e] = False
    seen[origin] = True
    queue[0] = origin
    head = 0
    tail = 1
    while head < tail:
        i = first_of_rank[queue[head]]
        head += 1
        while i >= 0:
            e = item_expert[i]
            if not met[e] and (not forward or item_tokens[i] >= floor):
                met[e] = True
                k = first_of_expert[e]
                while k >= 0:
                    r = item_rank[k]
                    if not seen[r] and (forward or item_tokens[k] >= floor):
                        seen[r] = True
                        queue[tail] = r
                        tail += 1
                    k = next_of_expert[k]
            i = next_of_rank[i]


@bare
def choose_target(
    holds: BoolArray, giver: int, allowed: BoolArray, free: IntArray, local: IntArray, node_R: IntArray
) -> int:
    """The allowed rank with most free slots, then in the giver's node, then with most `local` tokens; -1: none."""
    target = -1
    for r in range(free.size):
        if not allowed[r] or free[r] <= 0 or holds[r]:
            continue
        if target < 0:
            better = True
        elif free[r] != free[target]:
            better = free[r] > free[target]
        elif (node_R[r] == node_R[giver]) != (node_R[target] == node_R[giver]):
            better = node_R[r] == node_R[giver]
        else:
            better = local[r] > local[target]
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
    """Append the replicas that connect all ranks by links of at least `floor` tokens; (replicas, slots short).

    `multi`, `start`, `arc_rank` index the replicas given and `x` [A] are their tokens under the exact split.
    """
    ranks, experts = load_RE.shape
    short = False
    if multi.size == 0:
        return used, short
    # One item per holder of an expert, in a list by rank and in a list by expert; new replicas are items, too.
    most = experts + arc_rank.size + rep_expert.size - used
    by_item = np.empty((5, most), np.int64)
    item_expert, item_rank, item_tokens = by_item[0], by_item[1], by_item[2]
    next_of_rank, next_of_expert = by_item[3], by_item[4]
    by_rank = np.full((3, ranks), -1, np.int64)
    first_of_rank, free, queue = by_rank[0], by_rank[1], by_rank[2]
    first_of_expert = np.full(experts, -1, np.int64)
    items = 0
    hottest = multi[0]
    for j in range(multi.size):
        e = multi[j]
        if total_E[e] > total_E[hottest]:
            hottest = e
        for k in range(start[j], start[j + 1]):
            item_expert[items] = e
            item_rank[items] = arc_rank[k]
            item_tokens[items] = x[k]
            next_of_expert[items] = first_of_expert[e]
            first_of_expert[e] = items
            items += 1
    for e in range(experts):
        if first_of_expert[e] < 0:
            item_expert[items] = e
            item_rank[items] = home_E[e]
            item_tokens[items] = total_E[e]
            next_of_expert[items] = -1
            first_of_expert[e] = items
            items += 1
    for i in range(items):
        next_of_rank[i] = first_of_rank[item_rank[i]]
        first_of_rank[item_rank[i]] = i
    free[:] = limit_R
    for i in range(used):
        free[rep_rank[i]] -= 1
    root = home_E[hottest]
    marks = np.zeros((3, ranks), np.bool_)
    holds, core, region = marks[0], marks[1], marks[2]
    met = np.empty(experts, np.bool_)
    for inward in range(2):  # first every rank must drain to the root, then the root to every rank
        core[:] = False
        spread(
            core, root, inward == 1, floor, item_expert, item_rank, item_tokens, next_of_rank, next_of_expert,
            first_of_rank, first_of_expert, queue, met,
        )  # fmt: skip
        for lost in range(ranks):
            if core[lost] or used == rep_expert.size:
                continue
            region[:] = False
            spread(
                region, lost, inward == 0, floor, item_expert, item_rank, item_tokens, next_of_rank, next_of_expert,
                first_of_rank, first_of_expert, queue, met,
            )  # fmt: skip
            givers = core if inward == 1 else region
            takers = region if inward == 1 else core
            below = np.int64(1) << 60
            giver = -1
            target = -1
            expert = -1
            for _ in range(8):  # the largest links first; a few may have no rank left to go to
                link = -1
                for i in range(items):
                    n = item_tokens[i]
                    if floor <= n < below and givers[item_rank[i]] and (link < 0 or n > item_tokens[link]):
                        link = i
                if link < 0:
                    break
                below = item_tokens[link]
                expert = item_expert[link]
                giver = item_rank[link]
                k = first_of_expert[expert]
                while k >= 0:
                    holds[item_rank[k]] = True
                    k = next_of_expert[k]
                target = choose_target(holds, giver, takers, free, load_RE[:, expert], node_R)
                k = first_of_expert[expert]
                while k >= 0:
                    holds[item_rank[k]] = False
                    k = next_of_expert[k]
                if target >= 0:
                    break
            if target < 0:
                for r in range(ranks):
                    short = short or (takers[r] and free[r] <= 0)
                continue
            item_expert[items] = expert
            item_rank[items] = target
            item_tokens[items] = 0
            next_of_expert[items] = first_of_expert[expert]
            first_of_expert[expert] = items
            next_of_rank[items] = first_of_rank[target]
            first_of_rank[target] = items
            items += 1
            free[target] -= 1
            rep_expert[used] = expert
            rep_rank[used] = target
            used += 1
            spread(
                core, giver if inward == 0 else target, inward == 1, floor, item_expert, item_rank, item_tokens,
                next_of_rank, next_of_expert, first_of_rank, first_of_expert, queue, met,
            )  # fmt: skip
    return used, short
