"""Compiled kernel of the placement search: a fast plan first, then moves for as long as they are worth their time.

Shape legend: R ranks, E experts, J experts of a flow, A arcs (one per expert and holder).
"""

from __future__ import annotations

import numpy as np

from prophet.planner.arcs import index_replicas
from prophet.planner.candidates import (
    exact_cost,
    holders_of,
    keep_better,
    local_copies,
    local_layers,
    make_layers,
    placement_cost,
    previous_replicas,
    transfers_added,
    try_exports,
)
from prophet.planner.compiled import BOOL, BOOLS_2D, FLOAT, FLOATS, INT, INTS, INTS_2D, bare, compiled, entry
from prophet.planner.descent import Flow, attach, copy_flow, plain, twin
from prophet.planner.export import export_excess
from prophet.planner.gradual import begin, continued, drawn, worth_growing
from prophet.planner.moves import grow, holds, look, make_search, shrink, swap
from prophet.planner.outlets import add_outlets
from prophet.planner.polish import judge, polish
from prophet.planner.shortest import MOST_SWEEPS, SETTLE_S, exchange_floor, home_cost, level_out, make_flow
from prophet.planner.timing import OVERHEAD_S, Problem, make_problem, negative
from prophet.spec import BoolArray, FloatArray, IntArray

EVEN = 1.005  # products this close to the even level count as level
LITTLE_LEFT = 1.06  # a step this close to even products alone is not searched for more
SURELY_BETTER = 0.8  # an estimated step this far below that of no replicas needs no exact comparison
STARTS = 7
POLISHED = 2  # starts
KICKS = 6  # further starts, each from the best so far with about half of its replicas changed
FIRST_SHARE, SECOND_SHARE, LATER_SHARE = 0.5, 0.25, 0.1  # of an effort, for the first slot limits and each later one
EXCHANGE_MATTERS = 0.02  # share of the step that the all-to-alls must have for local replicas to be tried
COPIES_FROM = 6  # slots: with fewer copies for its own tokens on every rank products are not level
COPIES_GAIN = 0.05  # share of the step that such copies must save by an estimate for an exact look at them
SPLIT_GLADLY = 2048  # ranks x experts up to which every slot limit's plan is split to be compared
FEWEST_TRIES = 8  # fewer trial moves are not worth a start

# Assumed seconds, about those of one core of 2020; they only fix what an effort buys.
TRIAL_S, TRIAL_PAIR_S = 4e-6, 4e-8  # a trial move: every time, and per rank and expert (2 R experts at most)
LAYER_S, LAYER_PAIR_S = 5e-6, 1e-8  # a layer of local replicas: the same


@bare
def replicas_of(flow: Flow, rep_expert: IntArray, rep_rank: IntArray) -> int:
    """Write the replicas of a flow over all experts; return how many there are."""
    first = flow.counters[1]
    for a in range(first, flow.counters[0]):
        rep_expert[a - first] = flow.expert_A[a]
        rep_rank[a - first] = flow.rank_A[a]
    return int(flow.counters[0] - first)


@bare
def attach_all(flow: Flow, rep_expert: IntArray, rep_rank: IntArray, used: int, overhead_s: float) -> None:
    """Attach the first `used` of these replicas."""
    for i in range(used):
        attach(flow, rep_expert[i], rep_rank[i], overhead_s)


@bare
def attach_everywhere(flow: Flow, problem: Problem, limit_R: IntArray) -> None:
    """Give the heaviest expert a holder on every rank: sent in two phases, many copies can cost less than a few."""
    heaviest = 0
    for e in range(problem.home_E.size):
        if problem.total_E[e] > problem.total_E[heaviest]:
            heaviest = e
    for r in range(limit_R.size):
        if limit_R[r] > 0 and r != problem.home_E[heaviest]:
            attach(flow, heaviest, r, problem.figures[OVERHEAD_S])


@compiled
def attach_kicked(
    flow: Flow,
    problem: Problem,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
    seed: int,
) -> int:
    """Attach about half of these replicas, and drawn ones in the free slots; return the next seed."""
    overhead_s = problem.figures[OVERHEAD_S]
    free = limit_R.copy()
    for i in range(used):
        seed = drawn(seed)
        if (seed >> 16) % 2 == 0:
            attach(flow, rep_expert[i], rep_rank[i], overhead_s)
            free[rep_rank[i]] -= 1
    for r in range(limit_R.size):
        for _ in range(free[r]):
            seed = drawn(seed)
            e = (seed >> 16) % problem.home_E.size
            if problem.total_E[e] > 0 and not holds(flow, e, r):
                attach(flow, e, r, overhead_s)
    return seed


@compiled
def explore(
    problem: Problem,
    limit_R: IntArray,
    tries: int,
    rep_expert: IntArray,
    rep_rank: IntArray,
    rep_tokens: IntArray,
    best_expert: IntArray,
    best_rank: IntArray,
    best_used: int,
) -> tuple[int, int]:
    """Grow and shrink from several starts, swap and polish the best; writes the best placement met to `rep_*`.

    Returns (its replicas, the tries made of those given).

    Starts: the best so far, no replicas under norms of two kinds and without regard for transfers, what every rank
    routes most tokens to, the heaviest expert everywhere, exports. The shortest two are swapped and polished, since
    that takes many more tries than to begin does; then, while tries last, others are made from the best by kicks.
    """
    homes = make_flow(problem, np.arange(problem.home_E.size), rep_expert.size)
    flow = twin(homes)
    best = twin(homes)
    spare = twin(homes)
    search = make_search(problem.figures, limit_R, problem.home_E.size, tries)
    overhead_s = problem.figures[OVERHEAD_S]
    begun_expert = np.empty((STARTS, rep_expert.size), np.int64)
    begun_rank = np.empty((STARTS, rep_expert.size), np.int64)
    begun_used = np.zeros(STARTS, np.int64)
    begun_s = np.full(STARTS, np.inf)
    kept = -1
    low = np.inf
    sweeps = plain(4)
    for start in range(STARTS):
        if search.tries[0] <= 0 or (start == 0 and best_used == 0):
            continue
        copy_flow(homes, flow)
        if start == 0:
            attach_all(flow, best_expert, best_rank, best_used, overhead_s)
        elif start == 3:
            used = local_copies(problem, limit_R, rep_expert, rep_rank, 0.0)[0]
            attach_all(flow, rep_expert, rep_rank, used, overhead_s)
        elif start == 4:
            attach_everywhere(flow, problem, limit_R)
        elif start == 5:
            used, _ = export_excess(problem, 0.0, False, limit_R, rep_expert, rep_rank, rep_tokens)
            attach_all(flow, rep_expert, rep_rank, used, overhead_s)
        q = plain(2 if start == 1 else 4)
        reached = grow(flow, best, search, q, 0.0 if start == 6 else 1.0, sweeps)
        shrink(flow, best, search, q, reached, sweeps)
        copy_flow(best, flow)
        begun_s[start] = judge(flow, search, plain(MOST_SWEEPS))
        begun_used[start] = replicas_of(flow, begun_expert[start], begun_rank[start])
    kept_expert = np.empty_like(rep_expert)
    kept_rank = np.empty_like(rep_rank)
    seed = plain(1)
    for turn in range(POLISHED + KICKS):
        if turn > 0 and search.tries[0] <= 0:
            break
        start = 0
        for other in range(STARTS):
            if begun_s[other] < begun_s[start]:
                start = other
        copy_flow(homes, flow)
        if turn < POLISHED and begun_s[start] < np.inf:
            seconds = begun_s[start]
            if turn == 0:
                low = seconds
                kept = begun_used[start]
                kept_expert[:kept] = begun_expert[start, :kept]
                kept_rank[:kept] = begun_rank[start, :kept]
            for other in range(STARTS):  # different starts can lead to the same
                if begun_s[other] <= seconds:
                    begun_s[other] = np.inf
            attach_all(flow, begun_expert[start], begun_rank[start], begun_used[start], overhead_s)
            if search.tries[0] <= 0:
                break
            look(flow, search, plain(4), sweeps)
            q = plain(16)
        elif turn < POLISHED:
            continue
        else:
            seed = attach_kicked(flow, problem, limit_R, kept_expert, kept_rank, kept, seed)
            q = plain(8)
        look(flow, search, plain(8), sweeps)
        swap(flow, best, spare, search, q, plain(3), sweeps)
        seconds = polish(flow, best, spare, search, plain(8), plain(6))
        if seconds < low:
            low = seconds
            kept = replicas_of(flow, kept_expert, kept_rank)
    rep_expert[:kept] = kept_expert[:kept]
    rep_rank[:kept] = kept_rank[:kept]
    return int(kept), tries - search.tries[0]


@compiled
def with_spares(
    problem: Problem,
    limit_R: IntArray,
    floor: int,
    rep_expert: IntArray,
    rep_rank: IntArray,
    rep_tokens: IntArray,
    used: int,
    known: bool,
) -> int:
    """Append spare replicas (`outlets.py`) to a placement; return the replicas there are then.

    `rep_tokens` are the tokens on every replica where they are `known`; else those of the exact split are taken.
    """
    multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
    if known:
        x = np.zeros(arc_rank.size, np.int64)
        row = np.empty(problem.home_E.size, np.int64)
        for j in range(multi.size):
            row[multi[j]] = j
            for k in range(start[j], start[j + 1]):
                if arc_rank[k] == problem.home_E[multi[j]]:
                    x[k] = problem.total_E[multi[j]]
        for i in range(used):
            j = row[rep_expert[i]]
            for k in range(start[j], start[j + 1]):
                if arc_rank[k] == rep_rank[i]:
                    x[k] += rep_tokens[i]
                elif arc_rank[k] == problem.home_E[rep_expert[i]]:
                    x[k] -= rep_tokens[i]
    else:
        x = level_out(problem, multi, start, arc_rank)[0]
    grown, _ = add_outlets(
        problem.load_RE, problem.total_E, problem.home_E, problem.node_R, limit_R, multi, start, arc_rank, x, floor,
        rep_expert, rep_rank, used,
    )  # fmt: skip
    return grown


@entry(
    INTS_2D, INTS, INTS, FLOATS, FLOATS, FLOATS, INTS, BOOLS_2D, BOOL,
    FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT, BOOL,
)  # fmt: skip
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
    least_s: float,
    split_effort: float,
    most_tries: int,
    gradual: bool,
) -> tuple[BoolArray, float]:
    """Search replicas for the predicted `load_RE`; return (holds [E, R], the cost of homes only, -1: a negative load).

    Slot limits grow step by step up to `limit_R`; the best placement so far goes along. A further slot does not make
    the prediction worse: what a limit is given of the effort follows from its place alone. `effort` is the share of
    the step that searching may take, and `least_s` what it may take however short the step. Work is counted by assumed
    seconds, so that all ranks and machines do the same; no slot limit is given more than `most_tries` trial moves.
    A `gradual` search takes that much in the mean of many calls, and goes on from the placement in force.
    """
    ranks, experts = load_RE.shape
    if negative(load_RE):
        return np.empty((0, 0), np.bool_), -1.0
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
    by_slot = np.empty((9, slots), np.int64)
    rep_expert, rep_rank, rep_tokens = by_slot[0], by_slot[1], by_slot[2]
    now_expert, now_rank, now_tokens = by_slot[3], by_slot[4], by_slot[5]
    best_expert, best_rank, best_tokens = by_slot[6], by_slot[7], by_slot[8]
    known = False
    best_used = 0
    base = home_cost(problem)
    best = base.copy()
    budget_s = max(effort * base[0], least_s)
    growing = gradual and worth_growing(base, ranks, experts)
    most_s = base[0] * (1.0 - gain_margin)  # of a step with replicas
    if growing and previous_given:
        used = continued(problem, limit_R, previous_EH, rep_expert, rep_rank, base, most_s, split_effort, budget_s)
        if used > 0:
            return holders_of(rep_expert, rep_rank, used, home_E, ranks), base[0]
    if gradual:
        budget_s = 0.0
    # What it takes to compare a placement by the split it will get: a guess from the homes, then as it was last time.
    above_s = 0.0
    if budget_s > 0.0:
        nothing = np.empty(0, np.int64)
        above_s = max(0.0, base[1] - 4.0 * exchange_floor(make_flow(problem, nothing, plain(0)), problem, nothing))
    split_s = min(split_effort * above_s, MOST_SWEEPS * SETTLE_S * ranks * min(experts, slots))
    trial_s = TRIAL_S + TRIAL_PAIR_S * ranks * min(experts, 2 * ranks)
    layer_s = LAYER_S + LAYER_PAIR_S * ranks * experts
    layered = base[1] > EXCHANGE_MATTERS * base[0]
    searching = budget_s >= 2.0 * split_s + (layer_s if layered else FEWEST_TRIES * trial_s)
    layered = layered and searching
    if layered:
        layers = make_layers(problem, slots)
    allowed_s = 0.0
    spent_s = 0.0
    # Where splitting takes long, the slot limits are compared by the exports' own tokens, and only the best is split.
    frugal = not searching and ranks * experts > SPLIT_GLADLY
    # The fast plan goes by exact splits; a further slot must gain more than the split one will get could save without.
    costing = split_effort if searching else 0.0
    best_above_s = 0.0
    local = not frugal and most >= COPIES_FROM and base[1] > COPIES_GAIN * base[0]
    lacking = True  # slots for exports
    limit = limit_R.copy()
    slot = 1
    rung = 0
    while slot <= most and base[0] > even_s * (1.0 + gain_margin):
        for r in range(ranks):
            limit[r] = min(limit_R[r], slot)
        deepest = slot
        slot += max(1, slot // 2)
        share = FIRST_SHARE if rung == 0 else (SECOND_SHARE if rung == 1 else LATER_SHARE)
        allowed_s = min(allowed_s + budget_s * share, budget_s)
        rung += 1
        cost = base.copy()
        used, short, above_s = 0, False, 0.0
        if lacking or searching:
            used, short, above_s = try_exports(
                problem, limit, rep_expert, rep_rank, rep_tokens, now_expert, now_rank, now_tokens, cost,
                split_effort, frugal,
            )  # fmt: skip
        lacking = short
        if used > 0 and searching:
            cost, split_s = placement_cost(problem, now_expert, now_rank, used, costing)
            spent_s += split_s
        elif used > 0 and best_used > 0 and best[0] - best_above_s < cost[0] < best[0]:
            used = 0
        if used > 0:
            if cost[0] < best[0]:
                known = True
                best_above_s = above_s
                best_tokens[:used] = now_tokens[:used]
            best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
        if local and deepest >= COPIES_FROM:
            used, seconds, local = local_copies(problem, limit, now_expert, now_rank, even_s / 3.0)
            if local and seconds < best[0] * (1.0 - COPIES_GAIN):
                least_s = best[0]
                if searching:
                    cost, split_s = placement_cost(problem, now_expert, now_rank, used, costing)
                    spent_s += split_s
                else:
                    cost, above_s = exact_cost(problem, now_expert, now_rank, used, split_effort)
                    least_s -= best_above_s
                if cost[0] < least_s:
                    known = False
                    best_above_s = above_s
                    best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
        if layered and allowed_s - spent_s > split_s:
            before = layers.state[0]
            deepest = min(deepest, before + int((allowed_s - spent_s - split_s) / layer_s))
            used = local_layers(problem, limit, deepest, layers, now_expert, now_rank)
            spent_s += layer_s * (layers.state[0] - before)
            if used > 0:
                cost, split_s = placement_cost(problem, now_expert, now_rank, used, costing)
                spent_s += split_s
                known = known and cost[0] >= best[0]
                best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
        tries = min(most_tries, int((allowed_s - spent_s - split_s) / trial_s))
        if tries >= FEWEST_TRIES and best[0] > even_s * LITTLE_LEFT:
            used, made = explore(
                problem, limit, tries, now_expert, now_rank, rep_tokens, best_expert, best_rank, best_used
            )
            cost, split_s = placement_cost(problem, now_expert, now_rank, used, costing)
            spent_s += split_s + trial_s * made
            known = known and cost[0] >= best[0]
            best_used = keep_better(cost, now_expert, now_rank, used, best_expert, best_rank, best_used, best)
        if searching:  # the moves may want a slot where exports do not
            taken = np.zeros(ranks, np.int64)
            for i in range(best_used):
                taken[best_rank[i]] += 1
            for r in range(ranks):
                short = short or (taken[r] >= limit[r] and limit[r] < limit_R[r])
        even = best[2] <= even_s * EVEN and best[3] + best[4] <= 0.0
        if not (short or local) or (even and best[1] <= 0.05 * best[0]):
            break
    if frugal and best_used > 0 and best[0] > SURELY_BETTER * base[0]:
        best[:] = placement_cost(problem, best_expert, best_rank, best_used, costing)[0]
    kept = best.copy()
    kept_used = best_used
    now_expert[:best_used] = best_expert[:best_used]
    now_rank[:best_used] = best_rank[:best_used]
    limit[:] = limit_R
    if best_used > 0 and spare > 0.0:  # replicas against drift, as long as they cost next to nothing
        floor = max(1, int(spare * tokens / ranks))
        used = with_spares(problem, limit, floor, now_expert, now_rank, best_tokens, best_used, known)
        if used > best_used:
            least_s = best[0]
            if frugal:
                cost = transfers_added(problem, now_expert, now_rank, used, best)
            elif searching:
                cost = placement_cost(problem, now_expert, now_rank, used, costing)[0]
            else:
                cost, above_s = exact_cost(problem, now_expert, now_rank, used, split_effort)
                least_s -= best_above_s
            cheap = cost[0] <= least_s * (1.0 + spare_margin)
            if not cheap and least_s < best[0]:  # by the splits they will get
                least_s = placement_cost(problem, best_expert, best_rank, best_used, split_effort)[0][0]
                timed_s = placement_cost(problem, now_expert, now_rank, used, split_effort)[0][0]
                cheap = timed_s <= least_s * (1.0 + spare_margin)
            if cheap and cost[0] <= most_s:
                kept = cost
                kept_used = used
    if kept[0] > most_s:
        kept_used = 0
        kept[:] = base
    if previous_given:
        used = previous_replicas(previous_EH, home_E, limit_R, rep_expert, rep_rank)
        if used > 0:
            if growing:  # by the splits that both will get: exact ones may be no use to it
                costing = split_effort
                kept = placement_cost(problem, now_expert, now_rank, kept_used, costing)[0]
                if kept[0] > most_s:
                    kept_used = 0
                    kept[:] = base
            cost = placement_cost(problem, rep_expert, rep_rank, used, costing)[0]
            if cost[0] <= kept[0] * (1.0 + keep_margin) and cost[0] <= most_s:
                return holders_of(rep_expert, rep_rank, used, home_E, ranks), base[0]
    elif growing:
        kept_used = begin(problem, limit_R, now_expert, now_rank, kept_used, most_s, split_effort)
    return holders_of(now_expert, now_rank, kept_used, home_E, ranks), base[0]
