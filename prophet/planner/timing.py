"""The compiled twin of `cost.step_cost`, and the split that makes a step shortest.

Shape legend: R ranks, E experts, M experts with replicas, A arcs (holders of those experts), C replicas.

Machine figures travel as one float array, indexed by the constants below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.compiled import BOOLS_2D, FLOATS, INTS, INTS_2D, compiled, entry
from prophet.planner.flow import expand, expert_totals, index_holders, solve_totals
from prophet.spec import BoolArray, FloatArray, IntArray

TOKEN_BYTES, INTRA_BYTES_PER_S, INTRA_LATENCY_S, INTER_BYTES_PER_S, INTER_LATENCY_S = 0, 1, 2, 3, 4
PARAM_BYTES, GRAD_BYTES, FNEC_S, BNEC_S, OVERHEAD_S = 5, 6, 7, 8, 9
FIGURES = 10

EXCHANGE_MATTERS = 0.15  # share of the step that the all-to-alls must have for a relaxed bottleneck to be tried
RELAX_GAIN = 0.002  # what a higher bottleneck must gain at least


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
def flow_cost(
    problem: Problem,
    multi: IntArray,
    start: IntArray,
    arc_rank: IntArray,
    x: IntArray,
    rank_load: IntArray,
    flows: IntArray,
    rows: int,
    trans_s: float,
    agg_s: float,
) -> FloatArray:
    """Cost of a split, [6] seconds: total, a2a, expert, exposed Trans, exposed Agg, and a guide for the search.

    The guide adds the mean rank's exchange, so that a move counts that helps some ranks before it helps the
    slowest.
    """
    load_RE, home_E, node_R, figures = problem.load_RE, problem.home_E, problem.node_R, problem.figures
    ranks = load_RE.shape[0]
    groups = problem.home_groups.copy()
    moved = problem.home_moved.copy()
    for j in range(multi.size):
        e = multi[j]
        h = home_E[e]
        if problem.total_E[e] > 0:
            groups[h] -= 1
        for r in range(ranks):
            n = load_RE[r, e]
            if r != h and n > 0:
                level = 0 if node_R[r] == node_R[h] else 2
                moved[level, r] -= n
                moved[level + 1, h] -= n
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
    forward_s = 0.0
    intra = 0
    inter = 0
    all_intra = 0
    all_inter = 0
    for r in range(ranks):
        all_intra += moved[0, r]
        all_inter += moved[2, r]
        forward_s = max(forward_s, rank_load[r] * problem.seconds_per_token_R[r] + groups[r] * figures[OVERHEAD_S])
        intra = max(intra, moved[0, r], moved[1, r])
        inter = max(inter, moved[2, r], moved[3, r])
    cost = np.empty(6)
    cost[1] = 4.0 * exchange_seconds(float(intra), float(inter), figures[TOKEN_BYTES], figures)
    cost[2] = 3.0 * forward_s
    cost[3] = max(0.0, trans_s - forward_s - figures[FNEC_S])
    cost[4] = max(0.0, agg_s - 2.0 * forward_s - figures[BNEC_S])
    cost[0] = cost[1] + cost[2] + cost[3] + cost[4]
    cost[5] = cost[0] + (
        (2.0 * figures[TOKEN_BYTES] / ranks)
        * (all_intra / figures[INTRA_BYTES_PER_S] + all_inter / figures[INTER_BYTES_PER_S])
    )
    return cost


@compiled
def best_flows(
    problem: Problem, multi: IntArray, start: IntArray, arc_rank: IntArray, timed: bool
) -> tuple[FloatArray, IntArray, IntArray, int, IntArray, float]:
    """The split over given holders: its cost [6], tokens per arc [A], flows and their number, rank loads, T.

    The exact bottleneck comes first. If `timed`, and the exchanges are a good part of the step, higher bottlenecks
    are tried, which leave more tokens where they are, and the one with the shortest step is taken.
    """
    load_RE, home_E, node_R, figures = problem.load_RE, problem.home_E, problem.node_R, problem.figures
    ranks = load_RE.shape[0]
    fixed = problem.home_load.copy()
    for j in range(multi.size):
        fixed[home_E[multi[j]]] -= problem.total_E[multi[j]]
    trans_s = 0.0
    agg_s = 0.0
    if multi.size > 0:
        units = transfer_units(home_E, multi, start, arc_rank, node_R)
        trans_s = transfer_seconds(units, figures[PARAM_BYTES], figures)
        agg_s = transfer_seconds(units, figures[GRAD_BYTES], figures)
    x = np.empty(arc_rank.size, np.int64)
    rank_load = np.empty(ranks, np.int64)
    level = solve_totals(
        load_RE,
        problem.total_E,
        fixed,
        multi,
        start,
        arc_rank,
        node_R,
        problem.speed_R,
        x,
        rank_load,
        0.0,
    )
    flows, rows = expand(load_RE, multi, start, arc_rank, node_R, x)
    cost = flow_cost(problem, multi, start, arc_rank, x, rank_load, flows, rows, trans_s, agg_s)
    if timed and multi.size > 0 and cost[1] > EXCHANGE_MATTERS * cost[0]:
        exact = level
        slack = 0.03
        misses = 0
        while misses < 2 and slack < 4.0:
            other_x = np.empty(arc_rank.size, np.int64)
            other_load = np.empty(ranks, np.int64)
            other_level = solve_totals(
                load_RE,
                problem.total_E,
                fixed,
                multi,
                start,
                arc_rank,
                node_R,
                problem.speed_R,
                other_x,
                other_load,
                exact * (1.0 + slack),
            )
            other_flows, other_rows = expand(load_RE, multi, start, arc_rank, node_R, other_x)
            other = flow_cost(
                problem, multi, start, arc_rank, other_x, other_load, other_flows, other_rows, trans_s, agg_s
            )
            if other[0] < cost[0] * (1.0 - RELAX_GAIN):
                cost, x, rank_load, level = other, other_x, other_load, other_level
                flows, rows = other_flows, other_rows
                misses = 0
            else:
                misses += 1
            slack *= 1.8
    return cost, x, flows, rows, rank_load, level


@compiled
def placement_cost(problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int, timed: bool) -> FloatArray:
    """Cost of a list of replicas under its split, [6] seconds as of `flow_cost`."""
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    return best_flows(problem, multi, start, arc_rank, timed)[0]


@compiled
def make_problem(
    load_RE: IntArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
) -> Problem:
    """Everything about a load that no placement changes."""
    total_E = expert_totals(load_RE)
    home_load, home_groups, home_moved = home_traffic(load_RE, total_E, home_E, node_R)
    return Problem(
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


@entry(INTS_2D, BOOLS_2D, INTS, INTS, FLOATS, FLOATS, FLOATS)
def timed_flows(
    load_RE: IntArray,
    holds_ER: BoolArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
) -> tuple[IntArray, IntArray, IntArray, float]:
    """Like `flow.split_flows`, with the bottleneck that makes the step shortest."""
    problem = make_problem(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures)
    multi, start, arc_rank = index_holders(holds_ER, home_E)
    _, _, flows, rows, rank_load, level = best_flows(problem, multi, start, arc_rank, True)
    return multi, flows[:rows], rank_load, level
