"""Compiled kernels of the placement search: the compiled twin of `cost.step_cost`, and the moves that lower
it.

Shape legend: R ranks, E experts, M experts with replicas, A arcs (holders of those experts), C replicas.

A candidate is a list of replicas (expert, rank). Its cost is that of its exact split. Machine figures travel
as one float array, indexed by the constants below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.compiled import BOOL, BOOLS_2D, FLOAT, FLOATS, INT, INTS, INTS_2D, compiled, entry
from prophet.planner.flow import expand, expert_totals, solve_totals
from prophet.spec import BoolArray, FloatArray, IntArray

TOKEN_BYTES, INTRA_BYTES_PER_S, INTRA_LATENCY_S, INTER_BYTES_PER_S, INTER_LATENCY_S = 0, 1, 2, 3, 4
PARAM_BYTES, GRAD_BYTES, FNEC_S, BNEC_S, OVERHEAD_S = 5, 6, 7, 8, 9
FIGURES = 10


class Problem(NamedTuple):
    """What stays fixed during one search; `home_*` is what `home_traffic` returns."""

    load_RE: IntArray
    total_E: IntArray
    home_E: IntArray
    node_R: IntArray
    speed_R: FloatArray
    seconds_per_token_R: FloatArray
    figures: FloatArray
    home_load: IntArray
    home_groups: IntArray
    home_moved: IntArray


@compiled
def index_replicas(
    rep_expert: IntArray, rep_rank: IntArray, used: int, home_E: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Like `flow.index_holders`, from a list of replicas in any order."""
    experts = home_E.size
    count = np.zeros(experts, np.int64)
    for i in range(used):
        count[rep_expert[i]] += 1
    many = 0
    for e in range(experts):
        if count[e] > 0:
            many += 1
    multi = np.empty(many, np.int64)
    start = np.empty(many + 1, np.int64)
    arc_rank = np.empty(used + many, np.int64)
    a = 0
    j = 0
    for e in range(experts):
        n = count[e]
        if n > 0:
            multi[j] = e
            start[j] = a
            arc_rank[a] = home_E[e]
            count[e] = a + 1
            a += n + 1
            j += 1
    start[many] = a
    for i in range(used):
        e = rep_expert[i]
        k = count[e]
        arc_rank[k] = rep_rank[i]
        count[e] += 1
    for j in range(many):
        for k in range(start[j] + 1, start[j + 1]):
            r = arc_rank[k]
            q = k
            while q > start[j] and arc_rank[q - 1] > r:
                arc_rank[q] = arc_rank[q - 1]
                q -= 1
            arc_rank[q] = r
    return multi, start, arc_rank


@compiled
def home_traffic(
    load_RE: IntArray, total_E: IntArray, home_E: IntArray, node_R: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """What holds when all tokens go home: rank loads [R], expert groups [R], tokens moved [4, R].

    The rows of the last are: sent within nodes, received within nodes, sent between nodes, received between
    nodes.
    """
    ranks, experts = load_RE.shape
    rank_load = np.zeros(ranks, np.int64)
    groups = np.zeros(ranks, np.int64)
    moved = np.zeros((4, ranks), np.int64)
    for e in range(experts):
        rank_load[home_E[e]] += total_E[e]
        if total_E[e] > 0:
            groups[home_E[e]] += 1
    for r in range(ranks):
        for e in range(experts):
            d = home_E[e]
            if d != r:
                n = load_RE[r, e]
                if node_R[d] == node_R[r]:
                    moved[0, r] += n
                    moved[1, d] += n
                else:
                    moved[2, r] += n
                    moved[3, d] += n
    return rank_load, groups, moved


@compiled
def level_seconds(units: float, n_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Seconds to move `units` pieces of `n_bytes` over a link; nothing to move takes no time."""
    if units <= 0:
        return 0.0
    return latency_s + units * n_bytes / bytes_per_s


@compiled
def exchange_seconds(intra_units: float, inter_units: float, n_bytes: float, figures: FloatArray) -> float:
    """Seconds of an exchange whose busiest rank moves so many pieces over each level; levels work at once."""
    intra_s = level_seconds(intra_units, n_bytes, figures[INTRA_BYTES_PER_S], figures[INTRA_LATENCY_S])
    inter_s = level_seconds(inter_units, n_bytes, figures[INTER_BYTES_PER_S], figures[INTER_LATENCY_S])
    return max(intra_s, inter_s)


@compiled
def transfer_units(
    home_E: IntArray, multi: IntArray, start: IntArray, arc_rank: IntArray, node_R: IntArray
) -> FloatArray:
    """Copies of an expert that the busiest rank moves, [6]: direct, scatter, gather, each within and between
    nodes.
    """
    ranks = node_R.size
    sent = np.zeros((6, ranks))
    received = np.zeros((6, ranks))
    per_node = np.zeros(node_R[ranks - 1] + 1)
    for j in range(multi.size):
        home = home_E[multi[j]]
        n = start[j + 1] - start[j] - 1
        part = 1.0 / n
        for k in range(start[j], start[j + 1]):
            if arc_rank[k] != home:
                per_node[node_R[arc_rank[k]]] += 1
        for k in range(start[j], start[j + 1]):
            d = arc_rank[k]
            if d == home:
                continue
            level = 0 if node_R[d] == node_R[home] else 1
            sent[level, home] += 1.0
            received[level, d] += 1.0
            sent[2 + level, home] += part
            received[2 + level, d] += part
            near = per_node[node_R[d]]
            sent[4, d] += (near - 1) * part
            sent[5, d] += (n - near) * part
        for k in range(start[j], start[j + 1]):
            per_node[node_R[arc_rank[k]]] = 0
    busiest = np.zeros(6)
    for i in range(6):
        for r in range(ranks):
            busiest[i] = max(busiest[i], sent[i, r], received[i, r])
    return busiest


@compiled
def transfer_seconds(units: FloatArray, n_bytes: float, figures: FloatArray) -> float:
    """Seconds of Trans or Agg in its cheaper form."""
    direct_s = exchange_seconds(units[0], units[1], n_bytes, figures)
    scatter_s = exchange_seconds(units[2], units[3], n_bytes, figures)
    return min(direct_s, scatter_s + exchange_seconds(units[4], units[5], n_bytes, figures))


@compiled
def placement_cost(problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int) -> FloatArray:
    """Cost of a list of replicas under its exact split, [5] seconds: total, a2a, expert, exposed Trans,
    exposed Agg.
    """
    load_RE, total_E, home_E, node_R = problem.load_RE, problem.total_E, problem.home_E, problem.node_R
    figures = problem.figures
    ranks = load_RE.shape[0]
    rank_load = problem.home_load.copy()
    groups = problem.home_groups.copy()
    moved = problem.home_moved.copy()
    trans_s = 0.0
    agg_s = 0.0
    if used > 0:
        multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, home_E)
        for j in range(multi.size):
            e = multi[j]
            h = home_E[e]
            rank_load[h] -= total_E[e]
            if total_E[e] > 0:
                groups[h] -= 1
            for r in range(ranks):
                n = load_RE[r, e]
                if r != h and n > 0:
                    level = 0 if node_R[r] == node_R[h] else 2
                    moved[level, r] -= n
                    moved[level + 1, h] -= n
        x = np.empty(arc_rank.size, np.int64)
        result = np.empty(ranks, np.int64)
        solve_totals(load_RE, total_E, rank_load, multi, start, arc_rank, node_R, problem.speed_R, x, result)
        rank_load = result
        flows, rows = expand(load_RE, multi, start, arc_rank, node_R, x)
        for i in range(rows):
            r = flows[i, 0]
            d = flows[i, 2]
            if r != d:
                level = 0 if node_R[r] == node_R[d] else 2
                moved[level, r] += flows[i, 3]
                moved[level + 1, d] += flows[i, 3]
        for k in range(arc_rank.size):
            if x[k] > 0:
                groups[arc_rank[k]] += 1
        units = transfer_units(home_E, multi, start, arc_rank, node_R)
        trans_s = transfer_seconds(units, figures[PARAM_BYTES], figures)
        agg_s = transfer_seconds(units, figures[GRAD_BYTES], figures)
    forward_s = 0.0
    intra = 0
    inter = 0
    for r in range(ranks):
        forward_s = max(forward_s, rank_load[r] * problem.seconds_per_token_R[r] + groups[r] * figures[OVERHEAD_S])
        intra = max(intra, moved[0, r], moved[1, r])
        inter = max(inter, moved[2, r], moved[3, r])
    cost = np.empty(5)
    cost[1] = 4.0 * exchange_seconds(float(intra), float(inter), figures[TOKEN_BYTES], figures)
    cost[2] = 3.0 * forward_s
    cost[3] = max(0.0, trans_s - forward_s - figures[FNEC_S])
    cost[4] = max(0.0, agg_s - 2.0 * forward_s - figures[BNEC_S])
    cost[0] = cost[1] + cost[2] + cost[3] + cost[4]
    return cost


@compiled
def export_excess(
    problem: Problem,
    level: float,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
) -> tuple[int, bool]:
    """Bring every rank's load to at most level * speed by few, large exports; return (replicas, slots were
        short).

    The most overloaded rank gives its heaviest expert to one rank that can take all of its excess (nearest
    first, then most local tokens), or else to the roomiest one.
    """
    load_RE, home_E, node_R = problem.load_RE, problem.home_E, problem.node_R
    ranks, experts = load_RE.shape
    left = problem.total_E.copy()
    room = np.empty(ranks, np.int64)
    free = limit_R.copy()
    stuck = np.zeros(ranks, np.bool_)
    first = np.full(ranks, -1, np.int64)  # experts of a home as a linked list
    following = np.full(experts, -1, np.int64)
    for e in range(experts - 1, -1, -1):
        following[e] = first[home_E[e]]
        first[home_E[e]] = e
    for r in range(ranks):
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
        taker = -1
        fits = False
        near = False
        for r in range(ranks):
            if room[r] <= 0 or r == giver:
                continue
            if free[r] <= 0:
                short = True
                continue
            held = False
            for i in range(used):
                if rep_expert[i] == heaviest and rep_rank[i] == r:
                    held = True
                    break
            if held:
                continue
            r_fits = room[r] >= ask
            r_near = node_R[r] == node_R[giver]
            if taker < 0:
                better = True
            elif r_fits != fits:
                better = r_fits
            elif not fits:
                better = room[r] > room[taker]
            elif r_near != near:
                better = r_near
            else:
                better = load_RE[r, heaviest] > load_RE[taker, heaviest]
            if better:
                taker = r
                fits = r_fits
                near = r_near
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
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
) -> tuple[int, bool]:
    """Give every rank with a free slot the expert, not yet held, to which it routes most; return (replicas,
    short).
    """
    load_RE, home_E = problem.load_RE, problem.home_E
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
            if not held[r, e] and load_RE[r, e] > 0 and (best < 0 or load_RE[r, e] > load_RE[r, best]):
                best = e
        if best >= 0 and used < rep_expert.size:
            rep_expert[used] = best
            rep_rank[used] = r
            used += 1
    return used, short


@entry(INTS_2D, INTS, INTS, FLOATS, FLOATS, FLOATS, INTS, BOOLS_2D, BOOL, FLOAT, FLOAT, INT)
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
) -> tuple[BoolArray, float, float]:
    """Search replicas for the predicted `load_RE`; return (holds [E, R], their cost, the cost of homes only).

    For slot limits 1, 2, … up to `limit_R` the best of the limits so far competes with fresh candidates, so
    that a further slot never makes the prediction worse. `evaluations` bounds the trial moves per limit.
    """
    ranks, experts = load_RE.shape
    total_E = expert_totals(load_RE)
    home_load, home_groups, home_moved = home_traffic(load_RE, total_E, home_E, node_R)
    problem = Problem(
        load_RE,
        total_E,
        home_E,
        node_R,
        speed_R,
        seconds_per_token_R,
        figures,
        home_load,
        home_groups,
        home_moved,
    )
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
    base = placement_cost(problem, rep_expert, rep_rank, 0)
    best = base.copy()
    tokens = 0
    total_speed = 0.0
    for r in range(ranks):
        tokens += home_load[r]
        total_speed += speed_R[r]
    limit = np.empty(ranks, np.int64)
    for slot in range(1, most + 1):
        short = False
        for r in range(ranks):
            limit[r] = min(limit_R[r], slot)
        tries = evaluations
        # Exports down to a ladder of levels: all the way where transfers are free, less far where they are
        # not.
        slack = 0.0
        while True:
            level = tokens / total_speed * (1.0 + slack)
            used, lacking = export_excess(problem, level, limit, rep_expert, rep_rank)
            short = short or lacking
            if used == 0:
                break
            cost = placement_cost(problem, rep_expert, rep_rank, used)
            if cost[0] < best[0]:
                best = cost
                best_used = used
                best_expert[:used] = rep_expert[:used]
                best_rank[:used] = rep_rank[:used]
            if cost[3] + cost[4] <= 0.0 or slack > 8.0:
                break
            slack = 0.05 if slack == 0.0 else slack * 2.0
        # Replicas that pay by keeping tokens local: a layer of one per rank at a time, as long as each helps.
        while tries > 0 and best[1] > 0.0:
            rep_expert[:best_used] = best_expert[:best_used]
            rep_rank[:best_used] = best_rank[:best_used]
            used, lacking = add_local_layer(problem, limit, rep_expert, rep_rank, best_used)
            short = short or lacking
            if used == best_used:
                break
            tries -= 1
            cost = placement_cost(problem, rep_expert, rep_rank, used)
            if cost[0] >= best[0]:
                break
            best = cost
            best_used = used
            best_expert[:used] = rep_expert[:used]
            best_rank[:used] = rep_rank[:used]
        # Drop replicas that do not pay.
        i = best_used - 1
        while tries > 0 and i >= 0 and best[3] + best[4] > 0.0:
            used = 0
            for k in range(best_used):
                if k != i:
                    rep_expert[used] = best_expert[k]
                    rep_rank[used] = best_rank[k]
                    used += 1
            tries -= 1
            cost = placement_cost(problem, rep_expert, rep_rank, used)
            if cost[0] <= best[0]:
                best = cost
                best_used = used
                best_expert[:used] = rep_expert[:used]
                best_rank[:used] = rep_rank[:used]
            i -= 1
        if not short:
            break
    if best[0] > base[0] * (1.0 - gain_margin):
        best_used = 0
        best = base
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
            cost = placement_cost(problem, rep_expert, rep_rank, used)
            if cost[0] <= best[0] * (1.0 + keep_margin) and cost[0] <= base[0] * (1.0 - gain_margin):
                best = cost
                best_used = used
                best_expert[:used] = rep_expert[:used]
                best_rank[:used] = rep_rank[:used]
    holds = np.zeros((experts, ranks), np.bool_)
    for e in range(experts):
        holds[e, home_E[e]] = True
    for i in range(best_used):
        holds[best_expert[i], best_rank[i]] = True
    return holds, best[0], base[0]
