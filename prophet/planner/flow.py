"""Compiled kernels of the exact split: how many tokens of each expert every holder computes, and which they
are.

Shape legend: R ranks, E experts, M experts held by more than one rank, A arcs (one per holder of those
experts).

An expert with one holder leaves no choice. The others form a transport problem: arcs (expert, holder) carry
integer tokens, rank d takes at most cap[d] = floor(T * speed[d]). Start from the cheapest assignment without
caps (local tokens stay; the rest stays in the node; the rest goes where there is room), then move excess
along shortest augmenting paths, where a token that must leave its node costs far more than one that must
leave its rank. Shortest paths keep the flow cheapest for the loads it has. If the excess cannot leave the set
of ranks it reaches, no assignment at this T exists, the set itself says how far T must rise (Newton's method
on the cut), and the answer at the final T is exact.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.arcs import experts_at, fewest_first, index_holders
from prophet.planner.compiled import BOOLS_2D, FLOATS, INTS, INTS_2D, OUT_INTS_3D, bare, compiled, entry
from prophet.spec import BoolArray, FloatArray, IntArray

FAR = np.int64(1) << 60
EPSILON = 2.0**-52
CROSS = np.int64(1) << 24  # cost of one token between nodes; one between ranks of a node costs 1


@compiled
def expert_totals(load_RE: IntArray) -> IntArray:
    """Tokens of every expert, [E]."""
    ranks, experts = load_RE.shape
    total = np.zeros(experts, np.int64)
    for r in range(ranks):
        for e in range(experts):
            total[e] += load_RE[r, e]
    return total


@compiled
def fixed_load(total_E: IntArray, home_E: IntArray, multi: IntArray, ranks: int) -> IntArray:
    """Tokens that every rank computes whatever the split: those of experts with one holder, [R]."""
    load = np.zeros(ranks, np.int64)
    for e in range(total_E.size):
        load[home_E[e]] += total_E[e]
    for j in range(multi.size):
        load[home_E[multi[j]]] -= total_E[multi[j]]
    return load


@bare
def raised_level(need: int, chosen: IntArray, speed: FloatArray, everyone: bool) -> float:
    """Smallest T at which floor(T * speed) summed over the chosen ranks reaches `need`."""
    ranks = speed.size
    total_speed = 0.0
    for r in range(ranks):
        if everyone or chosen[r] > 0:
            total_speed += speed[r]
    level = need / total_speed
    while True:
        room = 0
        following = np.inf
        for r in range(ranks):
            if everyone or chosen[r] > 0:
                cap = int(np.floor(level * speed[r] + 1e-6))
                room += cap
                following = min(following, (cap + 1) / speed[r])
        if room >= need:
            return level
        level = max(following, level * (1.0 + EPSILON))  # of many tokens the next level rounds to this one


@bare
def _pour(amount: int, first: int, last: int, arc_rank: IntArray, x: IntArray, load: IntArray, cap: IntArray) -> None:
    """Give `amount` tokens to the arcs first..last-1, each time to the roomiest rank, lower rank on ties."""
    while amount > 0:
        best = first
        best_room = np.int64(-1) << 60
        for k in range(first, last):
            room = cap[arc_rank[k]] - load[arc_rank[k]]
            if room > best_room:
                best_room = room
                best = k
        part = amount
        if 0 < best_room < amount:
            part = int(best_room)
        x[best] += part
        load[arc_rank[best]] += part
        amount -= part


@bare
def relax_within_node(
    first: int,
    last: int,
    arc_rank: IntArray,
    x: IntArray,
    have: IntArray,
    dist: IntArray,
    came_from: IntArray,
    came_by: IntArray,
    at_first: IntArray,
    at_expert: IntArray,
    stale: IntArray,
) -> bool:
    """Shorten the ways that lead through one expert, arcs first..last-1, where all ranks are in one node.

    Returns whether any got shorter.
    """
    best = FAR
    by = -1
    for k in range(first, last):
        d = dist[arc_rank[k]]
        if d < FAR and x[k] > 0:
            if x[k] <= have[k]:
                d += 1
            if d < best:
                best = d
                by = k
    if by < 0:
        return False
    changed = False
    for k in range(first, last):
        r = arc_rank[k]
        d = best - 1 if x[k] < have[k] else best
        if d < dist[r] and k != by:
            dist[r] = d
            came_from[r] = by
            came_by[r] = k
            changed = True
            for i in range(at_first[r], at_first[r + 1]):
                stale[at_expert[i]] = 1
    return changed


@compiled
def solve_totals(
    load_RE: IntArray,
    total_E: IntArray,
    fixed_R: IntArray,
    multi: IntArray,
    start: IntArray,
    arc_rank: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    x: IntArray,
    rank_load: IntArray,
    at_least: float,
) -> float:
    """Fill `x` [A] (tokens per arc) and `rank_load` [R]; return T, the speed-weighted bottleneck.

    `fixed_R` are the tokens of experts with one holder. The result minimises T, but not below `at_least`, then
    tokens between nodes, then tokens between ranks.
    """
    return solve_in(
        load_RE, total_E, fixed_R, multi, start, arc_rank, node_R, speed_R, x, rank_load, at_least,
        np.empty((9, arc_rank.size + 1), np.int64), np.empty((7, rank_load.size + 2), np.int64),
        np.empty((2, multi.size), np.int64),
    )  # fmt: skip


@bare
def solve_in(
    load_RE: IntArray,
    total_E: IntArray,
    fixed_R: IntArray,
    multi: IntArray,
    start: IntArray,
    arc_rank: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    x: IntArray,
    rank_load: IntArray,
    at_least: float,
    by_arc: IntArray,
    by_rank: IntArray,
    by_expert: IntArray,
) -> float:
    """`solve_totals` in given room: nine arrays [A + 1], seven [R + 2] and two [M]."""
    group, have, group_first, supply, held = by_arc[0], by_arc[1], by_arc[2], by_arc[3], by_arc[4]
    group_best, group_arc, group_order, at_expert = by_arc[5], by_arc[6], by_arc[7], by_arc[8]
    nobody, cap, dist, came_from, came_by = by_rank[0], by_rank[1], by_rank[2], by_rank[3], by_rank[4]
    at_first, place = by_rank[5], by_rank[6]
    expert_order = by_expert[0]
    stale = by_expert[1]  # experts with a holder whose distance fell since they were looked at
    ranks = rank_load.size
    many = multi.size
    arcs = arc_rank.size
    need = 0
    level = 0.0
    for r in range(ranks):
        need += fixed_R[r]
        level = max(level, fixed_R[r] / speed_R[r])
    for j in range(many):
        need += total_E[multi[j]]
    level = max(level, at_least, raised_level(need, nobody, speed_R, True))

    # Groups: the holders of one expert in one node.
    groups = 0
    nodes = node_R[ranks - 1] + 1
    for j in range(many):
        e = multi[j]
        before = -1
        for k in range(start[j], start[j + 1]):
            r = arc_rank[k]
            have[k] = load_RE[r, e]
            if node_R[r] != before:
                before = node_R[r]
                group_first[groups] = k
                groups += 1
                supply[groups - 1] = total_E[e] if nodes == 1 else 0
                if nodes > 1:
                    low = r
                    while low > 0 and node_R[low - 1] == before:
                        low -= 1
                    while low < ranks and node_R[low] == before:
                        supply[groups - 1] += load_RE[low, e]
                        low += 1
            group[k] = groups - 1
    group_first[groups] = arcs

    experts_at(start, arc_rank, ranks, at_first, at_expert)
    fewest_first(group_first, groups, place, group_order)
    fewest_first(start, many, place, expert_order)
    final = False
    while True:
        # Cheapest assignment without caps; whoever has few holders to choose from chooses first.
        for r in range(ranks):
            cap[r] = int(np.floor(level * speed_R[r] + 1e-6))
            rank_load[r] = fixed_R[r]
        for k in range(arcs):
            x[k] = have[k]
            rank_load[arc_rank[k]] += have[k]
        for i in range(groups):
            g = group_order[i]
            rest = supply[g]
            for k in range(group_first[g], group_first[g + 1]):
                rest -= x[k]
            _pour(rest, group_first[g], group_first[g + 1], arc_rank, x, rank_load, cap)
        if nodes > 1:
            for i in range(many):
                j = expert_order[i]
                rest = total_E[multi[j]]
                for k in range(start[j], start[j + 1]):
                    rest -= x[k]
                _pour(rest, start[j], start[j + 1], arc_rank, x, rank_load, cap)
        for g in range(groups):
            held[g] = 0
        for k in range(arcs):
            held[group[k]] += x[k]
        raised = False
        while True:
            excess = False
            for j in range(many):
                stale[j] = 0
            for r in range(ranks):
                came_by[r] = -1
                came_from[r] = -1
                dist[r] = FAR
                if rank_load[r] > cap[r]:
                    dist[r] = 0
                    excess = True
                    for i in range(at_first[r], at_first[r + 1]):
                        stale[at_expert[i]] = 1
            if not excess:
                break
            # Shortest paths from all overloaded ranks (Bellman-Ford: arcs have negative costs).
            for _ in range(ranks + 1):
                changed = False
                for j in range(many):
                    if stale[j] == 0:
                        continue
                    stale[j] = 0
                    if nodes == 1:
                        changed |= relax_within_node(
                            start[j],
                            start[j + 1],
                            arc_rank,
                            x,
                            have,
                            dist,
                            came_from,
                            came_by,
                            at_first,
                            at_expert,
                            stale,
                        )
                        continue
                    out_best = FAR
                    out_arc = -1
                    for k in range(start[j], start[j + 1]):
                        g = group[k]
                        if k == group_first[g]:
                            group_best[g] = FAR
                            group_arc[g] = -1
                        d = dist[arc_rank[k]]
                        if d < FAR and x[k] > 0:
                            if x[k] <= have[k]:
                                d += 1
                            if d < group_best[g]:
                                group_best[g] = d
                                group_arc[g] = k
                            if held[g] <= supply[g]:
                                d += CROSS
                            if d < out_best:
                                out_best = d
                                out_arc = k
                    if out_arc < 0:
                        continue
                    for k in range(start[j], start[j + 1]):
                        g = group[k]
                        d = out_best
                        by = out_arc
                        if held[g] < supply[g]:
                            d -= CROSS
                        if group_best[g] <= d:
                            d = group_best[g]
                            by = group_arc[g]
                        if x[k] < have[k]:
                            d -= 1
                        r = arc_rank[k]
                        if by != k and d < dist[r]:
                            dist[r] = d
                            came_from[r] = by
                            came_by[r] = k
                            changed = True
                            for i in range(at_first[r], at_first[r + 1]):
                                stale[at_expert[i]] = 1
                if not changed:
                    break
            nearest = FAR
            for r in range(ranks):
                if rank_load[r] < cap[r] and dist[r] < nearest:
                    nearest = dist[r]
            if nearest == FAR:
                # The reached ranks are closed: none of their tokens has a holder elsewhere.
                need = 0
                for r in range(ranks):
                    nobody[r] = 1 if dist[r] < FAR else 0
                    if nobody[r] > 0:
                        need += rank_load[r]
                level = raised_level(need, nobody, speed_R, False)
                for r in range(ranks):
                    cap[r] = int(np.floor(level * speed_R[r] + 1e-6))
                raised = True
                continue
            progress = False
            for sink in range(ranks):
                if dist[sink] != nearest or rank_load[sink] >= cap[sink]:
                    continue
                amount = cap[sink] - rank_load[sink]
                cost = np.int64(0)
                r = sink
                hops = 0
                while came_by[r] >= 0 and hops <= ranks:
                    to = came_by[r]
                    by = came_from[r]
                    if x[by] > have[by]:
                        amount = min(amount, x[by] - have[by])
                    else:
                        amount = min(amount, x[by])
                        cost += 1
                    if x[to] < have[to]:
                        amount = min(amount, have[to] - x[to])
                        cost -= 1
                    if group[by] != group[to]:
                        if held[group[by]] > supply[group[by]]:
                            amount = min(amount, held[group[by]] - supply[group[by]])
                        else:
                            cost += CROSS
                        if held[group[to]] < supply[group[to]]:
                            amount = min(amount, supply[group[to]] - held[group[to]])
                            cost -= CROSS
                    r = arc_rank[by]
                    hops += 1
                amount = min(amount, rank_load[r] - cap[r])
                if amount <= 0 or (cost != nearest and progress):
                    continue  # an earlier path of this round used it up; the next round finds another
                progress = True
                rank_load[r] -= amount
                rank_load[sink] += amount
                r = sink
                while came_by[r] >= 0:
                    to = came_by[r]
                    by = came_from[r]
                    x[by] -= amount
                    x[to] += amount
                    held[group[by]] -= amount
                    held[group[to]] += amount
                    r = arc_rank[by]
        if final or not raised:
            return level
        final = True  # once more from the cheapest assignment, now that the caps are known


@compiled
def expand(
    load_RE: IntArray,
    multi: IntArray,
    start: IntArray,
    arc_rank: IntArray,
    node_R: IntArray,
    x: IntArray,
) -> tuple[IntArray, int]:
    """Turn tokens per arc into flows: rows (source rank, expert, destination, tokens) and how many rows are
        used.

    Within an expert local tokens stay, then sources meet holders of their own node in rank order, then all
    others do.
    """
    ranks = load_RE.shape[0]
    many = multi.size
    # a row uses up a source or a holder, but for the local ones
    flows = np.empty((many * ranks + 2 * arc_rank.size, 4), np.int64)
    used = 0
    room = np.empty((2, ranks), np.int64)
    left, want = room[0], room[1]
    for j in range(many):
        e = multi[j]
        rest = 0
        for r in range(ranks):
            left[r] = load_RE[r, e]
            rest += left[r]
        for k in range(start[j], start[j + 1]):
            d = arc_rank[k]
            part = min(left[d], x[k])
            want[d] = x[k] - part
            left[d] -= part
            rest -= part
            if part > 0:
                flows[used, 0] = d
                flows[used, 1] = e
                flows[used, 2] = d
                flows[used, 3] = part
                used += 1
        for inside in range(2):  # first within nodes, then across
            k = start[j]
            r = 0
            while rest > 0 and k < start[j + 1]:
                d = arc_rank[k]
                if want[d] == 0:
                    k += 1
                    continue
                if inside == 0:
                    while r < ranks and (node_R[r] < node_R[d] or left[r] == 0):
                        r += 1
                    if r == ranks or node_R[r] > node_R[d]:
                        k += 1
                        continue
                else:
                    while left[r] == 0:
                        r += 1
                part = min(left[r], want[d])
                left[r] -= part
                want[d] -= part
                rest -= part
                flows[used, 0] = r
                flows[used, 1] = e
                flows[used, 2] = d
                flows[used, 3] = part
                used += 1
    return flows, used


@entry(INTS_2D, INTS, INTS, INTS_2D, OUT_INTS_3D)
def scatter_dense(load_RE: IntArray, home_E: IntArray, multi: IntArray, flows: IntArray, tokens: IntArray) -> None:
    """Write the split into the zeroed `tokens` [R, E, D]: experts with one holder go home, the others by
    `flows`.
    """
    ranks, experts = load_RE.shape
    shared = np.zeros(experts, np.bool_)
    for j in range(multi.size):
        shared[multi[j]] = True
    for r in range(ranks):
        for e in range(experts):
            if not shared[e]:
                tokens[r, e, home_E[e]] = load_RE[r, e]
    for i in range(flows.shape[0]):
        tokens[flows[i, 0], flows[i, 1], flows[i, 2]] += flows[i, 3]


@entry(INTS_2D, BOOLS_2D, INTS, INTS, FLOATS)
def split_flows(
    load_RE: IntArray, holds_ER: BoolArray, home_E: IntArray, node_R: IntArray, speed_R: FloatArray
) -> tuple[IntArray, IntArray, IntArray, float]:
    """The exact split: shared experts [M], their flows [F, 4], rank loads [R], the bottleneck T."""
    ranks = load_RE.shape[0]
    multi, start, arc_rank = index_holders(holds_ER, home_E)
    total_E = expert_totals(load_RE)
    fixed_R = fixed_load(total_E, home_E, multi, ranks)
    rank_load = np.empty(ranks, np.int64)
    x = np.empty(arc_rank.size, np.int64)
    level = solve_totals(load_RE, total_E, fixed_R, multi, start, arc_rank, node_R, speed_R, x, rank_load, 0.0)
    flows, used = expand(load_RE, multi, start, arc_rank, node_R, x)
    return multi, flows[:used], rank_load, level
