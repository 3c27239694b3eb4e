"""Compiled kernel of the placement search: a fast plan first, then moves for as long as they are worth their time.

Shape legend: R ranks, E experts, J experts of a flow, A arcs (one per expert and holder).

A placement is a list of replicas (expert, rank). Its cost is that of its split under the predicted load.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import BOOL, BOOLS_2D, FLOAT, FLOATS, INT, INTS, INTS_2D, compiled, entry
from prophet.planner.descent import Flow, attach, copy_flow, load_on, plain, sweep, twin
from prophet.planner.export import export_excess
from prophet.planner.moves import grow, make_search, shrink, swap
from prophet.planner.outlets import add_outlets
from prophet.planner.shortest import (
    MOST_SWEEPS,
    best_split,
    copies_moved,
    cost_of,
    guide_of,
    make_flow,
    reprice,
    shorten,
)
from prophet.planner.timing import OVERHEAD_S, Problem, make_problem
from prophet.spec import BoolArray, FloatArray, IntArray

NEAR_ENOUGH = 1.005  # a plan this close to even products, with nothing else to save, is not searched further
STARTS = 11
RUNGS = 4  # the tries of an effort are shared out over so many slot limits
EXCHANGE_MATTERS = 0.15  # share of the step that the all-to-alls must have for local replicas to be tried
LAYER_S = 3e-8  # like TRIAL_S, for a layer of local replicas
TRIAL_S = 5e-8  # assumed seconds of a trial move per rank and expert; only fixes how many moves an effort buys


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
        home = flow.rank_A[j]
        to = rep_rank[i]
        a = attach(flow, j, to, problem.figures[OVERHEAD_S])
        left = rep_tokens[i]
        for kind in range(4):
            for r in range(ranks):
                if left == 0:
                    break
                near = problem.node_R[r] == problem.node_R[to]
                mine = 0 if r == to else 3 if r == home else 1 if near else 2
                if mine != kind:
                    continue
                n = min(left, flow.tokens_AR[j, r])
                if n > 0:
                    left -= n
                    flow.tokens_AR[j, r] -= n
                    flow.tokens_AR[a, r] += n
                    load_on(flow, r, home, -n)
                    load_on(flow, r, to, n)
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
        if cost[3] + cost[4] <= 0.0 or slack > 8.0 or misses > 2:
            break
        slack = 0.05 if slack == 0.0 else slack * 2.0
        used, lacking = export_excess(problem, slack, False, limit_R, rep_expert, rep_rank, rep_tokens)
        short = short or lacking
    return best_used, short


@compiled
def local_layers(
    problem: Problem,
    limit_R: IntArray,
    layers: int,
    flow: Flow,
    rep_expert: IntArray,
    rep_rank: IntArray,
) -> int:
    """Layer by layer, give every rank the expert it routes most tokens to and lacks: for steps that exchanges fill.

    `flow` starts with all tokens at home. Writes the best placement met, returns its replicas.
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
            best = -1
            for e in range(experts):
                n = problem.load_RE[r, e]
                if n > 0 and not held[e, r] and (best < 0 or n > problem.load_RE[r, best]):
                    best = e
            if best < 0:
                continue
            held[best, r] = True
            a = attach(flow, best, r, figures[OVERHEAD_S])
            n = flow.tokens_AR[best, r]
            flow.tokens_AR[best, r] -= n
            flow.tokens_AR[a, r] += n
            load_on(flow, r, flow.rank_A[best], -n)
            load_on(flow, r, r, n)
            rep_expert[used] = best
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
            best_used = used
            misses = 0
        if misses > 1:
            break
    return best_used


@compiled
def replicas_of(flow: Flow, rep_expert: IntArray, rep_rank: IntArray) -> int:
    """Write the replicas of a flow over all experts; return how many there are."""
    first = flow.counters[1]
    for a in range(first, flow.counters[0]):
        rep_expert[a - first] = flow.expert_A[a]
        rep_rank[a - first] = flow.rank_A[a]
    return int(flow.counters[0] - first)


@compiled
def explore(
    problem: Problem,
    limit_R: IntArray,
    tries: int,
    homes: Flow,
    flows: tuple[Flow, Flow, Flow],
    rep_expert: IntArray,
    rep_rank: IntArray,
    rep_tokens: IntArray,
    best_expert: IntArray,
    best_rank: IntArray,
    best_used: int,
) -> int:
    """Grow, shrink and swap from several starts; writes the best placement met to `rep_*` and returns its replicas.

    Starts: the best so far, no replicas, exports, no replicas under a smoother norm and without regard for transfers;
    then, while tries last, the best of all with one in three of its replicas missing.
    """
    flow, best, spare = flows
    search = make_search(problem.figures, limit_R, problem.home_E.size, tries)
    overhead_s = problem.figures[OVERHEAD_S]
    kept_expert = np.empty_like(rep_expert)
    kept_rank = np.empty_like(rep_rank)
    kept = 0
    low = np.inf
    left = tries
    for start in range(STARTS):
        if left <= 0 or (start == 0 and best_used == 0) or (start > 4 and kept < 2):
            continue
        copy_flow(homes, flow)
        q = plain(2 if start == 3 else 4)
        sweeps = plain(4)
        rounds = plain(3)
        if start == 0:
            for i in range(best_used):
                attach(flow, best_expert[i], best_rank[i], overhead_s)
        elif start > 4:
            for i in range(kept):
                if i % 3 != start % 3:
                    attach(flow, kept_expert[i], kept_rank[i], overhead_s)
        elif start == 2:
            used, _ = export_excess(problem, 0.0, False, limit_R, rep_expert, rep_rank, rep_tokens)
            for i in range(used):
                attach(flow, rep_expert[i], rep_rank[i], overhead_s)
        search.tries[0] = left
        reached = grow(flow, best, search, q, 0.0 if start == 4 else 1.0, sweeps)
        shrink(flow, best, search, q, reached, sweeps)
        copy_flow(best, flow)
        for q in (plain(4), plain(16)):
            swap(flow, best, spare, search, q, rounds, sweeps)
        left = search.tries[0]
        copies_moved(flow, search.moved, search.busiest)
        seconds = shorten(flow, problem.figures, search.busiest, plain(MOST_SWEEPS))
        if seconds < low:
            low = seconds
            kept = replicas_of(flow, kept_expert, kept_rank)
    rep_expert[:kept] = kept_expert[:kept]
    rep_rank[:kept] = kept_rank[:kept]
    return kept


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
def with_spares(
    problem: Problem,
    limit_R: IntArray,
    floor: int,
    split_effort: float,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
) -> int:
    """Append spare replicas (`outlets.py`) to a placement; return the replicas there are then."""
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    flow = best_split(problem, multi, start, arc_rank, split_effort)[0]
    x = np.zeros(arc_rank.size, np.int64)
    for a in range(flow.counters[0]):
        j = flow.expert_A[a]
        for k in range(start[j], start[j + 1]):
            if arc_rank[k] == flow.rank_A[a]:
                for r in range(problem.node_R.size):
                    x[k] += flow.tokens_AR[a, r]
    grown, _ = add_outlets(
        problem.load_RE, problem.total_E, problem.home_E, problem.node_R, limit_R, multi, start, arc_rank, x, floor,
        rep_expert, rep_rank, used,
    )  # fmt: skip
    return grown


@entry(INTS_2D, INTS, INTS, FLOATS, FLOATS, FLOATS, INTS, BOOLS_2D, BOOL, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT)
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
    spare: float,
    spare_margin: float,
    effort: float,
    split_effort: float,
    most_tries: int,
) -> tuple[BoolArray, float, float]:
    """Search replicas for the predicted `load_RE`; return (holds [E, R], their cost, the cost of homes only).

    Slot limits grow step by step up to `limit_R`; the best placement so far goes along, so that a further slot does
    not make the prediction worse. `effort` is the share of the step that planning may take, turned into a number of
    trial moves by the sizes alone (at most `most_tries`), so that all ranks and machines make the same.
    """
    ranks, experts = load_RE.shape
    problem = make_problem(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures)
    most = 0
    slots = 0
    tokens = 0
    total_rate = 0.0
    for r in range(ranks):
        most = max(most, limit_R[r])
        slots += limit_R[r]
        tokens += problem.home_load[r]
        total_rate += 1.0 / seconds_per_token_R[r]
    slots = min(slots, experts * ranks)
    even_s = 3.0 * tokens / total_rate
    rep_expert = np.empty(slots, np.int64)
    rep_rank = np.empty(slots, np.int64)
    rep_tokens = np.empty(slots, np.int64)
    best_expert = np.empty(slots, np.int64)
    best_rank = np.empty(slots, np.int64)
    now_expert = np.empty(slots, np.int64)
    now_rank = np.empty(slots, np.int64)
    best_used = 0
    nothing = np.empty(0, np.int64)
    base = cost_of(make_flow(problem, nothing, plain(0)), problem, nothing, np.zeros(6))
    best = base.copy()
    trial_s = TRIAL_S * ranks * min(experts, 2 * ranks)
    tries = min(most_tries, int(effort * base[0] / (RUNGS * trial_s)))
    layers = int(effort * base[0] / (LAYER_S * ranks * experts))
    chosen = np.arange(experts if tries > 0 else 0)
    homes = make_flow(problem, chosen, slots if tries > 0 else plain(0))
    flows = (twin(homes), twin(homes), twin(homes))
    if layers > 0 and base[1] > EXCHANGE_MATTERS * base[0]:
        used = local_layers(
            problem, limit_R, layers, make_flow(problem, np.arange(experts), slots), now_expert, now_rank
        )
        if used > 0:
            cost = placement_cost(problem, now_expert, now_rank, used, split_effort)
            best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
    limit = limit_R.copy()
    slot = 1
    while slot <= most and base[0] > even_s * (1.0 + gain_margin):
        for r in range(ranks):
            limit[r] = min(limit_R[r], slot)
        slot += max(1, slot // 2)
        used, short = try_exports(problem, limit, rep_expert, rep_rank, rep_tokens, now_expert, now_rank, base.copy())
        if used > 0:
            cost = placement_cost(problem, now_expert, now_rank, used, split_effort)
            best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
        if tries > 0 and best[0] > even_s * NEAR_ENOUGH:
            used = explore(
                problem, limit, tries, homes, flows, now_expert, now_rank, rep_tokens, best_expert, best_rank, best_used
            )
            cost = placement_cost(problem, now_expert, now_rank, used, split_effort)
            best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
        taken = np.zeros(ranks, np.int64)
        for i in range(best_used):
            taken[best_rank[i]] += 1
        for r in range(ranks):
            short = short or (taken[r] == limit[r] and limit[r] < limit_R[r])
        even = best[2] <= even_s * NEAR_ENOUGH and best[3] + best[4] <= 0.0
        if not short or (even and best[1] <= 0.05 * best[0]):
            break
    kept = best.copy()
    kept_used = best_used
    now_expert[:best_used] = best_expert[:best_used]
    now_rank[:best_used] = best_rank[:best_used]
    if best_used > 0 and spare > 0.0:  # replicas against drift, as long as they cost next to nothing
        floor = max(1, int(spare * tokens / ranks))
        used = with_spares(problem, limit_R.copy(), floor, split_effort, now_expert, now_rank, best_used)
        if used > best_used:
            cost = placement_cost(problem, now_expert, now_rank, used, split_effort)
            if cost[0] <= best[0] * (1.0 + spare_margin):
                kept = cost
                kept_used = used
    if kept[0] > base[0] * (1.0 - gain_margin):
        kept_used = 0
        kept[:] = base
    if previous_given:
        used = previous_replicas(previous_EH, home_E, limit_R, rep_expert, rep_rank)
        if used > 0:
            cost = placement_cost(problem, rep_expert, rep_rank, used, split_effort)
            if cost[0] <= kept[0] * (1.0 + keep_margin) and cost[0] <= base[0] * (1.0 - gain_margin):
                return holders_of(rep_expert, rep_rank, used, home_E, ranks), cost[0], base[0]
    return holders_of(now_expert, now_rank, kept_used, home_E, ranks), kept[0], base[0]
