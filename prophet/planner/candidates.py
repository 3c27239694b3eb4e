"""Compiled kernels that make placements to begin with, and say what they cost.

Shape legend: R ranks, E experts, J experts of a flow, A arcs (one per expert and holder).

A placement is a list of replicas (expert, rank). Its cost is that of its split under the predicted load. Exports level
products; local layers keep tokens where they are.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import compiled
from prophet.planner.descent import Flow, attach, load_on, plain, sweep
from prophet.planner.export import export_excess
from prophet.planner.shortest import best_split, copies_moved, cost_of, guide_of, make_flow, reprice
from prophet.planner.timing import OVERHEAD_S, Problem, exposed_seconds
from prophet.spec import BoolArray, FloatArray, IntArray


@compiled
def holders_of(rep_expert: IntArray, rep_rank: IntArray, used: int, home_E: IntArray, ranks: int) -> BoolArray:
    """The placement as [E, R]."""
    holds = np.zeros((home_E.size, ranks), np.bool_)
    for e in range(home_E.size):
        holds[e, home_E[e]] = True
    for i in range(used):
        holds[rep_expert[i], rep_rank[i]] = True
    return holds


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
def placement_cost(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int, split_effort: float
) -> FloatArray:
    """Cost of a list of replicas under the split that it will get, [5] seconds as of `shortest.cost_of`."""
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    return best_split(problem, multi, start, arc_rank, split_effort)[1]


@compiled
def hand_over(
    tokens_AR: IntArray, busy: FloatArray, node_R: IntArray, j: int, a: int, home: int, to: int, tokens: int
) -> None:
    """Move tokens from arc j at their home to arc a: those of rank `to` first, then its node's, the home's own last."""
    for kind in range(4):
        start = to if kind == 0 else home if kind == 3 else 0
        others = kind in (1, 2)
        stop = node_R.size if others else start + 1
        for r in range(start, stop):
            if tokens == 0:
                return
            if others and (r in (home, to) or (node_R[r] == node_R[to]) != (kind == 1)):
                continue
            n = min(tokens, tokens_AR[j, r])
            tokens -= n
            tokens_AR[j, r] -= n
            tokens_AR[a, r] += n
            load_on(busy, node_R, r, home, -n)
            load_on(busy, node_R, r, to, n)


@compiled
def transfers_added(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int, cost: FloatArray
) -> FloatArray:
    """`cost` [5] with the exposed transfers of these replicas: what it is while the further ones take no tokens."""
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    flow = make_flow(problem, multi, used)
    for j in range(multi.size):
        for k in range(start[j], start[j + 1]):
            if arc_rank[k] != flow.rank_A[j]:
                attach(flow, j, arc_rank[k], 0.0)
    busiest = np.zeros(6)
    copies_moved(flow, np.empty((2, 6, problem.node_R.size)), busiest)
    now = cost.copy()
    now[3], now[4] = exposed_seconds(busiest, cost[2] / 3.0, problem.figures)
    now[0] = now[1] + now[2] + now[3] + now[4]
    return now


@compiled
def export_cost(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, rep_tokens: IntArray, used: int
) -> FloatArray:
    """Cost of exports whose tokens are known: local ones first, then those of the node, the home's own last."""
    ranks = problem.node_R.size
    row = np.full(problem.home_E.size, -1, np.int64)
    many = 0
    chosen = np.empty(used, np.int64)
    for i in range(used):
        if row[rep_expert[i]] < 0:
            row[rep_expert[i]] = many
            chosen[many] = rep_expert[i]
            many += 1
    flow = make_flow(problem, chosen[:many], used)
    for i in range(used):
        j = row[rep_expert[i]]
        a = attach(flow, j, rep_rank[i], problem.figures[OVERHEAD_S])
        hand_over(flow.tokens_AR, flow.busy, flow.node_R, j, a, flow.rank_A[j], rep_rank[i], rep_tokens[i])
    moved = np.empty((2, 6, ranks))
    busiest = np.zeros(6)
    copies_moved(flow, moved, busiest)
    return cost_of(flow, problem, chosen, busiest)


@compiled
def try_exports(
    problem: Problem,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    rep_tokens: IntArray,
    best_expert: IntArray,
    best_rank: IntArray,
    best_tokens: IntArray,
    best: FloatArray,
) -> tuple[int, bool]:
    """Exports down to a ladder of levels: all the way where transfers are free, less far where they are not.

    Writes the placement that costs less than `best` [5]; returns (its replicas or 0, slots were short).
    """
    best_used = 0
    slack = 0.0
    misses = 0
    used, short = export_excess(problem, slack, False, limit_R, rep_expert, rep_rank, rep_tokens)
    while used > 0:
        cost = export_cost(problem, rep_expert, rep_rank, rep_tokens, used)
        misses += 1
        if cost[0] < best[0]:
            misses = 0
            best[:] = cost
            best_used = used
            best_expert[:used] = rep_expert[:used]
            best_rank[:used] = rep_rank[:used]
            best_tokens[:used] = rep_tokens[:used]
        if cost[3] + cost[4] <= 0.0 or slack > 8.0 or misses > 2:
            break
        slack = 0.05 if slack == 0.0 else slack * 2.0
        used, lacking = export_excess(problem, slack, False, limit_R, rep_expert, rep_rank, rep_tokens)
        short = short or lacking
    return best_used, short


@compiled
def keep_better(
    cost: FloatArray,
    now_expert: IntArray,
    now_rank: IntArray,
    used: int,
    best_expert: IntArray,
    best_rank: IntArray,
    best_used: int,
    best: FloatArray,
) -> int:
    """Take a placement over, in place, if its `cost` is below `best` (both [5]); return the replicas held now."""
    if cost[0] >= best[0]:
        return best_used
    best[:] = cost
    best_expert[:used] = now_expert[:used]
    best_rank[:used] = now_rank[:used]
    return used


@compiled
def local_layers(
    problem: Problem,
    limit_R: IntArray,
    layers: int,
    split_effort: float,
    flow: Flow,
    rep_expert: IntArray,
    rep_rank: IntArray,
    best_expert: IntArray,
    best_rank: IntArray,
    best: FloatArray,
) -> int:
    """Layer by layer, give every rank the expert it routes most tokens to and lacks: for steps that exchanges fill.

    `flow` starts with all tokens at home. Writes the placement that costs less than `best`; returns its replicas or 0.
    """
    ranks, experts = problem.load_RE.shape
    figures = problem.figures
    held = holders_of(rep_expert, rep_rank, 0, problem.home_E, ranks)
    moved = np.empty((2, 6, ranks))
    busiest = np.zeros(6)
    q = plain(8)
    low = np.inf
    used = 0
    best_used = 0
    misses = 0
    for layer in range(layers):
        before = used
        for r in range(ranks):
            if layer >= limit_R[r] or used == rep_expert.size:
                continue
            wanted = -1
            for e in range(experts):
                n = problem.load_RE[r, e]
                if n > 0 and not held[e, r] and (wanted < 0 or n > problem.load_RE[r, wanted]):
                    wanted = e
            if wanted < 0:
                continue
            held[wanted, r] = True
            a = attach(flow, wanted, r, figures[OVERHEAD_S])
            n = flow.tokens_AR[wanted, r]
            flow.tokens_AR[wanted, r] -= n
            flow.tokens_AR[a, r] += n
            load_on(flow.busy, flow.node_R, r, flow.rank_A[wanted], -n)
            load_on(flow.busy, flow.node_R, r, r, n)
            rep_expert[used] = wanted
            rep_rank[used] = r
            used += 1
        if used == before:
            break
        copies_moved(flow, moved, busiest)
        reprice(flow, figures, busiest, q)
        sweep(flow, q)
        now = guide_of(flow, figures, busiest, plain(0))
        misses += 1
        if now < low * (1.0 - 1e-3):
            low = now
            misses = 0
            cost = placement_cost(problem, rep_expert, rep_rank, used, split_effort)
            best_used = keep_better(cost, rep_expert, rep_rank, used, best_expert, best_rank, best_used, best)
        if misses > 1:
            break
    return best_used
