"""Compiled kernels of the placement search: candidates, and the moves that improve them.

Shape legend: R ranks, E experts, M experts with replicas, A arcs (holders of those experts), C replicas.

A candidate is a list of replicas (expert, rank). Its cost is that of its split under the predicted load.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import BOOL, BOOLS_2D, FLOAT, FLOATS, INT, INTS, INTS_2D, compiled, entry
from prophet.planner.outlets import add_outlets
from prophet.planner.timing import Problem, best_flows, index_replicas, make_problem, placement_cost
from prophet.spec import BoolArray, FloatArray, IntArray


@compiled
def consider(
    problem: Problem,
    timed: bool,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
    now_expert: IntArray,
    now_rank: IntArray,
    now_used: int,
    now: FloatArray,
) -> int:
    """Move on to the candidate, in place, if its guide is lower; return how many replicas are held now."""
    cost = placement_cost(problem, rep_expert, rep_rank, used, timed)
    if cost[5] >= now[5]:
        return now_used
    now[:] = cost
    now_expert[:used] = rep_expert[:used]
    now_rank[:used] = rep_rank[:used]
    return used


@compiled
def pick_taker(
    problem: Problem,
    room: IntArray,
    ask: int,
    giver: int,
    expert: int,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
    free: IntArray,
    regardless: bool,
    only_near: bool,
) -> int:
    """The rank to take `ask` tokens of `expert`, among those with a free slot (or `regardless` of slots); -1: none.

    One that can take all of it (in the giver's node first, then with most local tokens), or else the roomiest.
    """
    load_RE, node_R = problem.load_RE, problem.node_R
    taker = -1
    fits = False
    near = False
    for r in range(room.size):
        if room[r] <= 0 or r == giver or (free[r] <= 0 and not regardless):
            continue
        held = False
        for i in range(used):
            if rep_expert[i] == expert and rep_rank[i] == r:
                held = True
                break
        if held:
            continue
        r_fits = room[r] >= ask
        r_near = node_R[r] == node_R[giver]
        if only_near and not r_near:
            continue
        if taker < 0:
            better = True
        elif r_fits != fits:
            better = r_fits
        elif not fits:
            better = room[r] > room[taker]
        elif r_near != near:
            better = r_near
        else:
            better = load_RE[r, expert] > load_RE[taker, expert]
        if better:
            taker = r
            fits = r_fits
            near = r_near
    return taker


@compiled
def export_excess(
    problem: Problem,
    slack: float,
    near: bool,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
) -> tuple[int, bool]:
    """Bring loads down to (1 + slack) of the even level by few, large exports; return (replicas, slots short).

    The most overloaded rank gives its heaviest expert to one rank that can take all of its excess (nearest first,
    then most local tokens), or else to the roomiest one. With `near`, nodes keep their load and level it among their
    own ranks.
    """
    home_E = problem.home_E
    ranks, experts = problem.load_RE.shape
    left = problem.total_E.copy()
    room = np.empty(ranks, np.int64)
    free = limit_R.copy()
    stuck = np.zeros(ranks, np.bool_)
    first = np.full(ranks, -1, np.int64)  # experts of a home as a linked list
    following = np.full(experts, -1, np.int64)
    for e in range(experts - 1, -1, -1):
        following[e] = first[home_E[e]]
        first[home_E[e]] = e
    node_R = problem.node_R
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
    capacity = rep_expert.size
    while used < capacity:
        giver = -1
        for r in range(ranks):
            if room[r] < 0 and not stuck[r] and (giver < 0 or room[r] < room[giver]):
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
            stuck[giver] = True
            continue
        ask = min(-room[giver], left[heaviest])
        taker = pick_taker(problem, room, ask, giver, heaviest, rep_expert, rep_rank, used, free, True, near)
        if taker < 0 or free[taker] <= 0:
            short = True
            taker = pick_taker(problem, room, ask, giver, heaviest, rep_expert, rep_rank, used, free, False, near)
        if taker < 0:
            stuck[giver] = True
            continue
        part = min(ask, room[taker])
        left[heaviest] -= part
        room[giver] += part
        room[taker] -= part
        free[taker] -= 1
        rep_expert[used] = heaviest
        rep_rank[used] = taker
        used += 1
    return used, short


@compiled
def add_local_layer(
    problem: Problem,
    near: bool,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
) -> tuple[int, bool]:
    """Give every rank with a free slot the expert it lacks and routes to most; return (replicas, slots short).

    With `near`, only experts whose home is in its node.
    """
    load_RE, home_E, node_R = problem.load_RE, problem.home_E, problem.node_R
    ranks, experts = load_RE.shape
    held = np.zeros((ranks, experts), np.bool_)
    free = limit_R.copy()
    for e in range(experts):
        held[home_E[e], e] = True
    for i in range(used):
        held[rep_rank[i], rep_expert[i]] = True
        free[rep_rank[i]] -= 1
    short = False
    for r in range(ranks):
        if free[r] <= 0:
            short = True
            continue
        best = -1
        for e in range(experts):
            if held[r, e] or load_RE[r, e] == 0 or (near and node_R[home_E[e]] != node_R[r]):
                continue
            if best < 0 or load_RE[r, e] > load_RE[r, best]:
                best = e
        if best >= 0 and used < rep_expert.size:
            rep_expert[used] = best
            rep_rank[used] = r
            used += 1
    return used, short


@compiled
def polish(
    problem: Problem,
    timed: bool,
    limit_R: IntArray,
    tries: int,
    rep_expert: IntArray,
    rep_rank: IntArray,
    now_expert: IntArray,
    now_rank: IntArray,
    now_used: int,
    now: FloatArray,
) -> tuple[int, bool]:
    """Improve a candidate in place by at most `tries` trial moves; return (replicas, slots were short).

    Moves: a layer of local replicas, dropping one, adding one, replacing one's rank or one's expert.
    """
    load_RE, home_E = problem.load_RE, problem.home_E
    ranks, experts = load_RE.shape
    short = False
    improved = True
    while improved and tries > 0:
        improved = False
        for near in (True, False):
            while tries > 0:
                rep_expert[:now_used] = now_expert[:now_used]
                rep_rank[:now_used] = now_rank[:now_used]
                used, lacking = add_local_layer(problem, near, limit_R, rep_expert, rep_rank, now_used)
                short = short or lacking
                if used == now_used:
                    break
                tries -= 1
                before = now[5]
                now_used = consider(problem, timed, rep_expert, rep_rank, used, now_expert, now_rank, now_used, now)
                if now[5] >= before:
                    break
                improved = True
        i = now_used - 1
        while i >= 0 and tries > 0:
            before = now[5]
            used = 0
            for k in range(now_used):
                if k != i:
                    rep_expert[used] = now_expert[k]
                    rep_rank[used] = now_rank[k]
                    used += 1
            tries -= 1
            now_used = consider(problem, timed, rep_expert, rep_rank, used, now_expert, now_rank, now_used, now)
            improved = improved or now[5] < before
            i -= 1
        for d in range(ranks):
            if tries <= 0:
                break
            held = np.zeros(experts, np.bool_)
            count = 0
            for e in range(experts):
                held[e] = home_E[e] == d
            for k in range(now_used):
                if now_rank[k] == d:
                    held[now_expert[k]] = True
                    count += 1
            wanted = -1
            for e in range(experts):
                if not held[e] and load_RE[d, e] > 0 and (wanted < 0 or load_RE[d, e] > load_RE[d, wanted]):
                    wanted = e
            if wanted < 0:
                continue
            before = now[5]
            if count < limit_R[d]:
                rep_expert[:now_used] = now_expert[:now_used]
                rep_rank[:now_used] = now_rank[:now_used]
                rep_expert[now_used] = wanted
                rep_rank[now_used] = d
                tries -= 1
                now_used = consider(
                    problem, timed, rep_expert, rep_rank, now_used + 1, now_expert, now_rank, now_used, now
                )
            else:
                short = True
            if now[5] < before:
                improved = True
                continue
            for k in range(now_used):
                if now_rank[k] == d and tries > 0:
                    rep_expert[:now_used] = now_expert[:now_used]
                    rep_rank[:now_used] = now_rank[:now_used]
                    rep_expert[k] = wanted
                    tries -= 1
                    now_used = consider(
                        problem, timed, rep_expert, rep_rank, now_used, now_expert, now_rank, now_used, now
                    )
                    if now[5] < before:
                        improved = True
                        break
        count_R = np.zeros(ranks, np.int64)
        for k in range(now_used):
            count_R[now_rank[k]] += 1
        i = 0
        while i < now_used and tries > 0:
            e = now_expert[i]
            for t in range(ranks):
                taken = t == home_E[e]
                for k in range(now_used):
                    taken = taken or (now_expert[k] == e and now_rank[k] == t)
                if taken:
                    continue
                if count_R[t] >= limit_R[t]:
                    short = True
                    continue
                if tries <= 0:
                    break
                rep_expert[:now_used] = now_expert[:now_used]
                rep_rank[:now_used] = now_rank[:now_used]
                source = rep_rank[i]
                rep_rank[i] = t
                tries -= 1
                before = now[5]
                now_used = consider(problem, timed, rep_expert, rep_rank, now_used, now_expert, now_rank, now_used, now)
                if now[5] < before:
                    count_R[source] -= 1
                    count_R[t] += 1
                    improved = True
            i += 1
    return now_used, short


@compiled
def try_exports(
    problem: Problem,
    timed: bool,
    near: bool,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    best_expert: IntArray,
    best_rank: IntArray,
    best_used: int,
    best: FloatArray,
) -> tuple[int, bool]:
    """Exports down to a ladder of levels: all the way where transfers are free, less far where they are not.

    Improves the best candidate in place; returns (its replicas, slots were short).
    """
    slack = 0.0
    misses = 0
    used, short = export_excess(problem, slack, near, limit_R, rep_expert, rep_rank)
    while used > 0:
        cost = placement_cost(problem, rep_expert, rep_rank, used, timed)
        misses += 1
        if cost[0] < best[0]:
            misses = 0
            best[:] = cost
            best_used = used
            best_expert[:used] = rep_expert[:used]
            best_rank[:used] = rep_rank[:used]
        if cost[3] + cost[4] <= 0.0 or slack > 8.0 or misses > 2:
            break
        slack = 0.05 if slack == 0.0 else slack * 2.0
        used, lacking = export_excess(problem, slack, near, limit_R, rep_expert, rep_rank)
        short = short or lacking
    return best_used, short


@entry(INTS_2D, INTS, INTS, FLOATS, FLOATS, FLOATS, INTS, BOOLS_2D, BOOL, FLOAT, FLOAT, INT, FLOAT, FLOAT, BOOL)
def search(
    load_RE: IntArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
    limit_R: IntArray,
    previous_EH: BoolArray,
    previous_given: bool,
    keep_margin: float,
    gain_margin: float,
    evaluations: int,
    spare: float,
    spare_margin: float,
    timed: bool,
) -> tuple[BoolArray, float, float]:
    """Search replicas for the predicted `load_RE`; return (holds [E, R], their cost, the cost of homes only).

    Slot limits grow step by step up to `limit_R`; the best candidate so far goes along, so that a further slot
    never makes the prediction worse. `evaluations` bounds the trial moves per step.
    """
    ranks, experts = load_RE.shape
    problem = make_problem(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures)
    most = 0
    slots = 0
    for r in range(ranks):
        most = max(most, limit_R[r])
        slots += limit_R[r]
    slots = min(slots, experts * ranks)
    rep_expert = np.empty(slots, np.int64)
    rep_rank = np.empty(slots, np.int64)
    best_expert = np.empty(slots, np.int64)
    best_rank = np.empty(slots, np.int64)
    best_used = 0
    now_expert = np.empty(slots, np.int64)
    now_rank = np.empty(slots, np.int64)
    kept_expert = np.empty(slots, np.int64)
    kept_rank = np.empty(slots, np.int64)
    kept_used = 0
    base = placement_cost(problem, rep_expert, rep_rank, 0, False)
    best = base.copy()
    kept = base.copy()
    tokens = 0
    total_rate = 0.0
    for r in range(ranks):
        tokens += problem.home_load[r]
        total_rate += 1.0 / seconds_per_token_R[r]
    limit = np.empty(ranks, np.int64)
    slot = 1
    while slot <= most:
        for r in range(ranks):
            limit[r] = min(limit_R[r], slot)
        best_used, short = try_exports(
            problem, timed, False, limit, rep_expert, rep_rank, best_expert, best_rank, best_used, best
        )
        # Where more than the products themselves is left to gain: other starts, and single moves from each.
        if evaluations > 0 and best[0] > 1.05 * 3.0 * tokens / total_rate:
            for start_kind in range(4):
                now = base.copy()
                now_used = 0
                if start_kind == 0:
                    now = best.copy()
                    now_used = best_used
                    now_expert[:best_used] = best_expert[:best_used]
                    now_rank[:best_used] = best_rank[:best_used]
                elif start_kind == 1:
                    if node_R[ranks - 1] == 0:
                        continue
                    now_used, lacking = try_exports(
                        problem, timed, True, limit, rep_expert, rep_rank, now_expert, now_rank, 0, now
                    )
                    short = short or lacking
                else:
                    if start_kind == 2 and node_R[ranks - 1] == 0:
                        continue
                    used = 0
                    while True:
                        grown, lacking = add_local_layer(problem, start_kind == 2, limit, rep_expert, rep_rank, used)
                        short = short or lacking
                        if grown == used:
                            break
                        used = grown
                        cost = placement_cost(problem, rep_expert, rep_rank, used, timed)
                        if cost[0] < now[0]:
                            now = cost
                            now_used = used
                            now_expert[:used] = rep_expert[:used]
                            now_rank[:used] = rep_rank[:used]
                now_used, lacking = polish(
                    problem, timed, limit, evaluations, rep_expert, rep_rank, now_expert, now_rank, now_used, now
                )
                short = short or lacking
                if now[0] < best[0]:
                    best[:] = now
                    best_used = now_used
                    best_expert[:now_used] = now_expert[:now_used]
                    best_rank[:now_used] = now_rank[:now_used]
        even = best[2] <= 1.005 * 3.0 * tokens / total_rate and best[3] + best[4] <= 0.0
        if not short or (even and best[1] <= 0.05 * best[0]):
            break
        slot += max(1, slot // 2)
    # Spare replicas against drift, as long as they cost next to nothing.
    spared = False
    if best_used > 0 and spare > 0.0:
        multi, start, arc_rank = index_replicas(best_expert, best_rank, best_used, home_E)
        x = best_flows(problem, multi, start, arc_rank, timed)[1]
        rep_expert[:best_used] = best_expert[:best_used]
        rep_rank[:best_used] = best_rank[:best_used]
        used, _ = add_outlets(
            load_RE,
            problem.total_E,
            home_E,
            node_R,
            limit_R,
            multi,
            start,
            arc_rank,
            x,
            max(1, int(spare * tokens / ranks)),
            rep_expert,
            rep_rank,
            best_used,
        )
        if used > best_used:
            cost = placement_cost(problem, rep_expert, rep_rank, used, timed)
            spared = cost[0] <= best[0] * (1.0 + spare_margin)
            if spared:
                kept[:] = cost
                kept_used = used
                kept_expert[:used] = rep_expert[:used]
                kept_rank[:used] = rep_rank[:used]
    if not spared:
        kept[:] = best
        kept_used = best_used
        kept_expert[:best_used] = best_expert[:best_used]
        kept_rank[:best_used] = best_rank[:best_used]
    if kept[0] > base[0] * (1.0 - gain_margin):
        kept_used = 0
        kept[:] = base
    if previous_given:
        fits = True
        used = 0
        free = limit_R.copy()
        for e in range(experts):
            for r in range(ranks):
                if previous_EH[e, r] and home_E[e] != r:
                    if free[r] <= 0:
                        fits = False
                    else:
                        free[r] -= 1
                        rep_expert[used] = e
                        rep_rank[used] = r
                        used += 1
        if fits and used > 0:
            cost = placement_cost(problem, rep_expert, rep_rank, used, timed)
            if cost[0] <= kept[0] * (1.0 + keep_margin) and cost[0] <= base[0] * (1.0 - gain_margin):
                kept[:] = cost
                kept_used = used
                kept_expert[:used] = rep_expert[:used]
                kept_rank[:used] = rep_rank[:used]
    holds = np.zeros((experts, ranks), np.bool_)
    for e in range(experts):
        holds[e, home_E[e]] = True
    for i in range(kept_used):
        holds[kept_expert[i], kept_rank[i]] = True
    return holds, kept[0], base[0]
