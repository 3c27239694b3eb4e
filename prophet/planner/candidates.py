"""Compiled kernels that make placements to begin with, and say what they cost.

Shape legend: R ranks, E experts, J experts of a flow, A arcs (one per expert and holder).

A placement is a list of replicas (expert, rank). Its cost is that of its split under the predicted load. Exports level
products; local layers keep tokens where they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.arcs import index_replicas
from prophet.planner.compiled import bare, compiled
from prophet.planner.descent import Flow, attach, plain, redirect, sweep
from prophet.planner.export import export_excess
from prophet.planner.shortest import SETTLE_S, best_split, copies_moved, guide_of, make_flow, reprice
from prophet.planner.timing import (
    OVERHEAD_S,
    TOKEN_BYTES,
    Problem,
    exchange_seconds,
    exposed_seconds,
    felt,
    transfers,
    windows,
)
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
def previous_replicas(
    holds_ER: BoolArray, home_E: IntArray, limit_R: IntArray, rep_expert: IntArray, rep_rank: IntArray
) -> int:
    """Write the replicas of a placement in force; return how many, or 0 where they no longer fit the limits."""
    free = limit_R.copy()
    used = 0
    for e in range(home_E.size):
        for r in range(limit_R.size):
            if holds_ER[e, r] and home_E[e] != r:
                if free[r] <= 0 or used == rep_expert.size:
                    return 0
                free[r] -= 1
                rep_expert[used] = e
                rep_rank[used] = r
                used += 1
    return used


@compiled
def placement_cost(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int, split_effort: float
) -> tuple[FloatArray, float]:
    """Cost of a list of replicas under the split that it will get, [5] seconds as of `shortest.cost_of`.

    The other figure is the seconds that its descent is assumed to take.
    """
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    _, cost, _, _, _, made = best_split(problem, multi, start, arc_rank, split_effort, split_effort == 0.0)
    return cost, made * SETTLE_S * multi.size * problem.node_R.size


@compiled
def exact_cost(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int, split_effort: float
) -> tuple[FloatArray, float]:
    """Cost [5] under the exact split, and how much less it can be, at most, under the split it will get."""
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    _, cost, above_s, _, _, _ = best_split(problem, multi, start, arc_rank, split_effort, True)
    return cost, above_s


@compiled
def outline(problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int) -> FloatArray:
    """Copies of experts that the busiest rank moves for these replicas, [6] as of `shortest.copies_moved`."""
    experts = problem.home_E.size
    ranks = problem.node_R.size
    arcs = experts + used
    nothing = np.empty((0, 0))
    by_arc = np.empty((2, arcs), np.int64)
    following, rank = by_arc[0], by_arc[1]
    for e in range(experts):
        following[e] = -1
        rank[e] = problem.home_E[e]
    counters = np.empty(2 + ranks, np.int64)
    counters[0] = arcs
    counters[1] = experts
    for i in range(used):
        e = rep_expert[i]
        rank[experts + i] = rep_rank[i]
        following[experts + i] = following[e]
        following[e] = experts + i
    flow = Flow(
        problem.node_R, nothing, nothing, nothing, nothing, nothing, np.empty(0), following, rank, rank, by_arc,
        counters[:2], counters[2:],
    )  # fmt: skip
    busiest = np.empty(6)
    copies_moved(flow, np.empty((2, 6, ranks)), busiest)
    return busiest


@compiled
def transfers_added(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, used: int, cost: FloatArray
) -> FloatArray:
    """`cost` [5] with the exposed transfers of these replicas: what it is while the further ones take no tokens."""
    now = cost.copy()
    busiest = outline(problem, rep_expert, rep_rank, used)
    now[3], now[4] = exposed_seconds(busiest, cost[2] / 3.0, problem.figures)
    now[0] = now[1] + now[2] + now[3] + now[4]
    return now


@compiled
def export_cost(
    problem: Problem, rep_expert: IntArray, rep_rank: IntArray, rep_tokens: IntArray, used: int
) -> FloatArray:
    """Estimated cost [5] of exports whose tokens are known, in time that does not grow with ranks per replica.

    A replica takes its own rank's tokens first, then those of its node, then others', the home's own last. Of others'
    it takes the same share from every rank, as if no replica of that expert had taken any before.
    """
    load_RE, total_E, home_E, node_R = problem.load_RE, problem.total_E, problem.home_E, problem.node_R
    figures = problem.figures
    ranks = node_R.size
    first = np.empty(node_R[ranks - 1] + 2, np.int64)  # first rank of every node
    for r in range(ranks - 1, -1, -1):
        first[node_R[r]] = r
    first[node_R[ranks - 1] + 1] = ranks
    busy = np.empty((5, ranks))
    groups = problem.home_groups.copy()
    for r in range(ranks):
        busy[0, r] = problem.home_load[r]
        for k in range(4):
            busy[1 + k, r] = problem.home_moved[k, r]
    for i in range(used):
        e = rep_expert[i]
        to = rep_rank[i]
        home = home_E[e]
        here = node_R[to]
        there = node_R[home]
        groups[to] += 1
        busy[0, home] -= rep_tokens[i]
        busy[0, to] += rep_tokens[i]
        left = float(rep_tokens[i])
        part = min(left, float(load_RE[to, e]))
        redirect(busy, node_R, to, home, to, part)
        left -= part
        own = float(load_RE[home, e])
        others = total_E[e] - own - load_RE[to, e]
        near = 0.0
        if first[node_R[ranks - 1]] > 0:  # several nodes
            for r in range(first[here], first[here + 1]):
                if r not in (to, home):
                    part = min(left, float(load_RE[r, e]))
                    redirect(busy, node_R, r, home, to, part)
                    left -= part
                    near += load_RE[r, e]
            others -= near
            part = min(left, others)
            if there == here:  # from other nodes either way
                busy[4, home] -= part
                busy[4, to] += part
            elif part > 0.0:
                around = 0.0
                for r in range(first[there], first[there + 1]):
                    if r != home:
                        share = part * load_RE[r, e] / others
                        redirect(busy, node_R, r, home, to, share)
                        around += share
                busy[4, home] -= part - around
                busy[4, to] += part - around
        else:
            part = min(left, others)
            busy[2, home] -= part
            busy[2, to] += part
        redirect(busy, node_R, home, home, to, left - part)
    forward_s = 0.0
    near = 0.0
    far = 0.0
    for r in range(ranks):
        forward_s = max(forward_s, busy[0, r] * problem.seconds_per_token_R[r] + groups[r] * figures[OVERHEAD_S])
        near = max(near, busy[1, r], busy[2, r])
        far = max(far, busy[3, r], busy[4, r])
    cost = np.empty(5)
    cost[1] = 4.0 * exchange_seconds(near, far, figures[TOKEN_BYTES], figures)
    cost[2] = 3.0 * forward_s
    cost[3], cost[4] = exposed_seconds(outline(problem, rep_expert, rep_rank, used), forward_s, figures)
    cost[0] = cost[1] + cost[2] + cost[3] + cost[4]
    return cost


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
    split_effort: float,
    frugal: bool,
) -> tuple[int, bool, float]:
    """Exports down to a ladder of levels: all the way where transfers are free, less far where they are not.

    Writes the placement that costs less than `best` [5]; returns (its replicas or 0, slots were short, what the
    split it will get can save at most). A `frugal` search estimates costs instead of splitting.
    """
    best_used = 0
    slack = 0.0
    misses = 0
    above_s = 0.0
    best_above_s = 0.0
    used, short = export_excess(problem, slack, False, limit_R, rep_expert, rep_rank, rep_tokens)
    while used > 0:
        if frugal:
            cost = export_cost(problem, rep_expert, rep_rank, rep_tokens, used)
        else:
            cost, above_s = exact_cost(problem, rep_expert, rep_rank, used, split_effort)
        misses += 1
        if cost[0] < best[0]:
            misses = 0
            best[:] = cost
            best_used = used
            best_above_s = above_s
            best_expert[:used] = rep_expert[:used]
            best_rank[:used] = rep_rank[:used]
            best_tokens[:used] = rep_tokens[:used]
        if cost[3] + cost[4] <= 0.0 or slack > 8.0 or misses > 2:
            break
        slack = 0.05 if slack == 0.0 else slack * 2.0
        used, lacking = export_excess(problem, slack, False, limit_R, rep_expert, rep_rank, rep_tokens)
        short = short or lacking
    return best_used, short, best_above_s


@bare
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
    for i in range(cost.size):
        best[i] = cost[i]
    for i in range(used):
        best_expert[i] = now_expert[i]
        best_rank[i] = now_rank[i]
    return used


@compiled
def local_copies(
    problem: Problem, limit_R: IntArray, rep_expert: IntArray, rep_rank: IntArray, least_s: float
) -> tuple[int, float, bool]:
    """Give every rank the experts that it routes most tokens to and lacks, up to its limit.

    Returns (replicas, estimated seconds of the step, whether all of Trans and Agg is hidden). The estimate lets every
    rank keep what it can and levels the products, which take `least_s` forward at least.
    """
    load_RE, home_E, node_R, figures = problem.load_RE, problem.home_E, problem.node_R, problem.figures
    ranks, experts = load_RE.shape
    busy = np.zeros((5, ranks))
    for k in range(4):
        for r in range(ranks):
            busy[1 + k, r] = problem.home_moved[k, r]
    taken = np.empty(experts, np.bool_)
    used = 0
    groups = 0
    near = 0.0
    far = 0.0
    for r in range(ranks):
        for e in range(experts):
            taken[e] = home_E[e] == r
        before = used
        for _ in range(limit_R[r]):
            wanted = -1
            for e in range(experts):
                if not taken[e] and load_RE[r, e] > 0 and (wanted < 0 or load_RE[r, e] > load_RE[r, wanted]):
                    wanted = e
            if wanted < 0:
                break
            taken[wanted] = True
            rep_expert[used] = wanted
            rep_rank[used] = r
            used += 1
            redirect(busy, node_R, r, home_E[wanted], r, float(load_RE[r, wanted]))
        groups = max(groups, problem.home_groups[r] + used - before)
    for r in range(ranks):
        near = max(near, busy[1, r], busy[2, r])
        far = max(far, busy[3, r], busy[4, r])
    forward_s = least_s + groups * figures[OVERHEAD_S]
    busiest = outline(problem, rep_expert, rep_rank, used)
    trans_s, agg_s = transfers(busiest, figures)
    trans_window_s, agg_window_s = windows(forward_s, figures)
    trans_felt_s, agg_felt_s = felt(trans_s, agg_s, forward_s, figures)
    seconds = 4.0 * exchange_seconds(near, far, figures[TOKEN_BYTES], figures) + 3.0 * forward_s
    return used, seconds + trans_felt_s + agg_felt_s, trans_s <= trans_window_s and agg_s <= agg_window_s


class Layers(NamedTuple):
    """Local layers as far as they have come: their flow, who holds what [E, R], the replicas so far, and what follows.

    `state` holds the next layer, the replicas and the layers in a row that brought nothing; `low` the best guide.
    """

    flow: Flow
    held_ER: BoolArray
    rep_expert: IntArray
    rep_rank: IntArray
    state: IntArray
    low: FloatArray


@compiled
def make_layers(problem: Problem, slots: int) -> Layers:
    """No layer yet, all tokens at home."""
    ranks, experts = problem.load_RE.shape
    rep_expert = np.empty(slots, np.int64)
    rep_rank = np.empty(slots, np.int64)
    return Layers(
        make_flow(problem, np.arange(experts), slots),
        holders_of(rep_expert, rep_rank, 0, problem.home_E, ranks),
        rep_expert, rep_rank, np.zeros(3, np.int64), np.full(1, np.inf),
    )  # fmt: skip


@compiled
def local_layers(
    problem: Problem, limit_R: IntArray, most: int, layers: Layers, best_expert: IntArray, best_rank: IntArray
) -> int:
    """Layer by layer, give every rank the expert it routes most tokens to and lacks: for steps that exchanges fill.

    Goes on from where `layers` are, up to `most` in all. Writes the best of the new placements by exact splits; returns
    its replicas, or 0 where no new one looks better than those before.
    """
    ranks, experts = problem.load_RE.shape
    flow, held_ER, rep_expert, rep_rank = layers.flow, layers.held_ER, layers.rep_expert, layers.rep_rank
    load_RE, state, figures = problem.load_RE, layers.state, problem.figures
    moved = np.empty((2, 6, ranks))
    busiest = np.zeros(6)
    q = plain(8)
    best_s = np.inf
    best_used = 0
    while state[0] < most and state[2] <= 1:
        before = state[1]
        for r in range(ranks):
            if state[0] >= limit_R[r] or state[1] == rep_expert.size:
                continue
            wanted = -1
            for e in range(experts):
                n = load_RE[r, e]
                if n > 0 and not held_ER[e, r] and (wanted < 0 or n > load_RE[r, wanted]):
                    wanted = e
            if wanted < 0:
                continue
            held_ER[wanted, r] = True
            a = attach(flow, wanted, r, figures[OVERHEAD_S])
            n = flow.tokens_AR[wanted, r]
            flow.tokens_AR[wanted, r] -= n
            flow.tokens_AR[a, r] += n
            flow.busy[0, flow.rank_A[wanted]] -= n
            flow.busy[0, r] += n
            redirect(flow.busy, flow.node_R, r, flow.rank_A[wanted], r, n)
            rep_expert[state[1]] = wanted
            rep_rank[state[1]] = r
            state[1] += 1
        if state[1] == before:
            break
        state[0] += 1
        copies_moved(flow, moved, busiest)
        reprice(flow, figures, busiest, q)
        sweep(flow, q)
        now = guide_of(flow, figures, busiest, plain(0))
        state[2] += 1
        if now < layers.low[0] * (1.0 - 1e-3):
            layers.low[0] = now
            state[2] = 0
            seconds = exact_cost(problem, rep_expert, rep_rank, state[1], 0.0)[0][0]
            if seconds < best_s:
                best_s = seconds
                best_used = state[1]
                best_expert[:best_used] = rep_expert[:best_used]
                best_rank[:best_used] = rep_rank[:best_used]
    return int(best_used)
