"""Compiled kernels of a search that goes on from step to step: now and then, one change of the placement in force.

Shape legend: R ranks, E experts, J experts of a flow (all of them), A arcs (one per expert and holder).

Routing changes slowly, so what was found in one step is where the next one goes on: a few microseconds in every step
find in hundreds of steps what a search finds in milliseconds. A try starts from no replicas, puts an expert everywhere,
draws about half of the replicas anew, lets two exchange their ranks or takes up to three away, and lets grow what is
then worth it (`growth.py`). A few sweeps rule most tries out; what may be better is judged by the splits that both
would get, so that no try lengthens a step by the prediction. Beside that the fast plan is made now and then, and takes
over where it is better: routing may have changed by more than tries can follow.

Nothing is remembered but the placement: what is tried is drawn from the counts, which differ from step to step and are
the same on all ranks.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.arcs import index_replicas
from prophet.planner.candidates import placement_cost, previous_replicas
from prophet.planner.compiled import bare, compiled
from prophet.planner.descent import Flow, attach, detach, plain, settle_expert, sweep
from prophet.planner.growth import BARRED, SMOOTH, Room, count_free, grow_on, make_room, price_all
from prophet.planner.moves import holds, least_missed
from prophet.planner.shortest import best_split, copies_moved, make_flow
from prophet.planner.timing import OVERHEAD_S, Problem
from prophet.spec import BoolArray, FloatArray, IntArray

FRESH, EVERYWHERE, REDRAWN, EXCHANGED, FEWER, OTHERS = 0, 1, 2, 3, 4, 6  # kinds of tries; FEWER and OTHERS count twice
KINDS = 8
MAYBE = 0.02  # a try whose step looks longer by more than this, after a few sweeps, is not compared by its split

FROM = 0.1  # share of the step that the all-to-alls must have: else the fast plan is as good
MOSTLY = 0.5  # the same from which on the fast plan is no way out where routing has changed
UNEVEN = 1.1  # products this far above the even level, under the placement in force, say that it has
STALE, HASTE = 1.5, 8.0  # products above this level are a reason to try so many times as often
PAIRS, WORK = 1 << 15, 1 << 22  # ranks x experts, replicas x ranks^2: up to both a try takes some thirty milliseconds

# Assumed seconds of a try and of a fast plan, those of one slow core; they only fix how often there is one.
TRY_S, TRY_PAIR_S, TRY_WORK_S = 3e-5, 1e-6, 3e-9
FAST_S, FAST_PAIR_S = 1e-4, 1e-8
FAST_SHARE = 0.25  # of what tries may take, for fast plans beside them
FAST_MOST = 0.33  # of the calls


@bare
def drawn(seed: int) -> int:
    """The number after `seed` in a fixed sequence, the same on every machine; its upper bits are the better ones."""
    return (seed * 1103515245 + 12345) & 0x7FFFFFFF


@bare
def seed_of(problem: Problem) -> int:
    """A number that changes with the counts."""
    seed = plain(1)
    for e in range(problem.total_E.size):
        seed = drawn(seed ^ problem.total_E[e])
    for r in range(problem.node_R.size):
        for k in range(4):
            seed = drawn(seed ^ problem.home_moved[k, r])
    return seed


@bare
def calm(flow: Flow, room: Room, figures: FloatArray) -> float:
    """Let tokens settle for a few sweeps; return the seconds of the step."""
    copies_moved(flow, room.moved, room.busiest)
    for i in range(2):
        q = plain(8) << (2 * i)
        for _ in range(2):
            price_all(flow, figures, room.busiest, q)
            if sweep(flow, q) == 0:
                break
    return price_all(flow, figures, room.busiest, plain(32))[1]


@bare
def settle_all(flow: Flow, room: Room, figures: FloatArray, q: int) -> None:
    """Let tokens settle after many replicas have changed."""
    copies_moved(flow, room.moved, room.busiest)
    for _ in range(3):
        price_all(flow, figures, room.busiest, q)
        if sweep(flow, q) == 0:
            break


@bare
def thin_out(flow: Flow, room: Room, figures: FloatArray, q: int) -> None:
    """Take replicas away, the least missed first, while the step gets no longer."""
    overhead_s = figures[OVERHEAD_S]
    copies_moved(flow, room.moved, room.busiest)
    low = price_all(flow, figures, room.busiest, q)[0]
    while flow.counters[0] > flow.counters[1]:
        a = least_missed(flow, plain(-1))
        j, d = flow.expert_A[a], flow.rank_A[a]
        detach(flow, a, overhead_s)
        settle_expert(flow, j, q)
        copies_moved(flow, room.moved, room.busiest)
        now = price_all(flow, figures, room.busiest, q)[0]
        if now > low:
            attach(flow, j, d, overhead_s)
            settle_expert(flow, j, q)
            settle_expert(flow, j, q)
            break
        low = now


@bare
def put_everywhere(flow: Flow, room: Room, problem: Problem, limit_R: IntArray, seed: int) -> int:
    """Give the heavier of two drawn experts a holder on every rank, half of the time with no other replicas beside.

    Sent in two phases, many copies of one expert can cost less than a few. Returns the next seed.
    """
    overhead_s = problem.figures[OVERHEAD_S]
    experts = flow.counters[1]
    if (seed >> 20) % 2 == 0:
        strip(flow, overhead_s)
    seed = drawn(seed)
    j = (seed >> 16) % experts
    seed = drawn(seed)
    i = (seed >> 16) % experts
    if problem.total_E[i] > problem.total_E[j]:
        j = i
    count_free(flow, limit_R, room.free_R)
    for r in range(limit_R.size):
        if limit_R[r] <= 0 or holds(flow, j, r):
            continue
        if room.free_R[r] <= 0:
            detach(flow, least_missed(flow, r), overhead_s)
        attach(flow, j, r, overhead_s)
    return seed


@bare
def strip(flow: Flow, overhead_s: float) -> None:
    """Take all replicas away."""
    while flow.counters[0] > flow.counters[1]:
        detach(flow, flow.counters[0] - 1, overhead_s)


@bare
def redraw(flow: Flow, room: Room, problem: Problem, limit_R: IntArray, seed: int) -> int:
    """Take about half of the replicas away, and fill all slots with drawn ones; return the next seed."""
    overhead_s = problem.figures[OVERHEAD_S]
    experts = flow.counters[1]
    for a in range(flow.counters[0] - 1, experts - 1, -1):
        seed = drawn(seed)
        if (seed >> 16) % 2 == 0:
            detach(flow, a, overhead_s)
    count_free(flow, limit_R, room.free_R)
    for r in range(limit_R.size):
        for _ in range(min(room.free_R[r], experts)):
            seed = drawn(seed)
            j = (seed >> 16) % experts
            if problem.total_E[j] > 0 and not holds(flow, j, r):
                attach(flow, j, r, overhead_s)
    return seed


@bare
def exchange(flow: Flow, overhead_s: float, q: int, seed: int) -> int:
    """Let two drawn replicas exchange their ranks, or only take the first away; return the next seed."""
    experts = flow.counters[1]
    if flow.counters[0] - experts < 2:
        return seed
    seed = drawn(seed)
    a = experts + (seed >> 16) % (flow.counters[0] - experts)
    j, d = flow.expert_A[a], flow.rank_A[a]
    detach(flow, a, overhead_s)
    seed = drawn(seed)
    a = experts + (seed >> 16) % (flow.counters[0] - experts)
    i, r = flow.expert_A[a], flow.rank_A[a]
    if i == j or r == d or holds(flow, j, r) or holds(flow, i, d):
        return seed
    detach(flow, a, overhead_s)
    attach(flow, j, r, overhead_s)
    attach(flow, i, d, overhead_s)
    for _ in range(2):
        settle_expert(flow, j, q)
        settle_expert(flow, i, q)
    return seed


@bare
def take_some(flow: Flow, room: Room, overhead_s: float, seed: int) -> int:
    """Take up to three drawn replicas away and bar them; return the next seed."""
    experts = flow.counters[1]
    for n in range(min(1 + (seed >> 20) % BARRED, flow.counters[0] - experts)):
        seed = drawn(seed)
        a = experts + (seed >> 16) % (flow.counters[0] - experts)
        room.barred[2 * n] = flow.expert_A[a]
        room.barred[2 * n + 1] = flow.rank_A[a]
        detach(flow, a, overhead_s)
    return seed


@bare
def add_one(flow: Flow, room: Room, problem: Problem, limit_R: IntArray, q: int, seed: int) -> int:
    """Put a drawn expert on the first rank with a free slot from a drawn one on; return the next seed."""
    ranks = limit_R.size
    count_free(flow, limit_R, room.free_R)
    seed = drawn(seed)
    d = (seed >> 16) % ranks
    for _ in range(ranks):
        if room.free_R[d] > 0:
            break
        d = (d + 1) % ranks
    seed = drawn(seed)
    j = (seed >> 16) % flow.counters[1]
    if room.free_R[d] > 0 and problem.total_E[j] > 0 and not holds(flow, j, d):
        attach(flow, j, d, problem.figures[OVERHEAD_S])
        settle_expert(flow, j, q)
        settle_expert(flow, j, q)
    return seed


@bare
def change(flow: Flow, room: Room, problem: Problem, limit_R: IntArray, kind: int, seed: int) -> None:
    """Change the placement of `flow` in this way, and let it grow."""
    figures = problem.figures
    overhead_s = figures[OVERHEAD_S]
    seed = drawn(seed)
    q = plain(SMOOTH) << ((seed >> 16) % 3)
    copies_moved(flow, room.moved, room.busiest)
    price_all(flow, figures, room.busiest, q)
    if kind == FRESH:
        strip(flow, overhead_s)
    elif kind in (EVERYWHERE, REDRAWN):
        if kind == EVERYWHERE:
            put_everywhere(flow, room, problem, limit_R, seed)
        else:
            redraw(flow, room, problem, limit_R, seed)
        settle_all(flow, room, figures, q)
        thin_out(flow, room, figures, q)
    elif kind == EXCHANGED:
        exchange(flow, overhead_s, q, seed)
    else:
        seed = take_some(flow, room, overhead_s, seed)
        if kind >= OTHERS:
            add_one(flow, room, problem, limit_R, q, seed)
        grow_on(flow, room, figures, limit_R, q)
        for n in range(2 * BARRED):
            room.barred[n] = -1
    grow_on(flow, room, figures, limit_R, q)


@bare
def same(flow: Flow, rep_expert: IntArray, rep_rank: IntArray, used: int) -> bool:
    """Whether a flow has these replicas and no others."""
    if flow.counters[0] - flow.counters[1] != used:
        return False
    found = 0
    for i in range(used):
        found += 1 if holds(flow, rep_expert[i], rep_rank[i]) else 0
    return found == used


@compiled
def try_once(
    problem: Problem,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
    most_s: float,
    split_effort: float,
    kind: int,
    seed: int,
) -> int:
    """Change these replicas in one way, and write what becomes of them where a step gets shorter by it.

    Returns how many there are. A try from no replicas is always compared by its split. A step with replicas may take
    `most_s`.
    """
    experts = problem.home_E.size
    figures = problem.figures
    flow = make_flow(problem, np.arange(experts), rep_expert.size)
    room = make_room(experts, limit_R.size)
    for i in range(used):
        attach(flow, rep_expert[i], rep_rank[i], figures[OVERHEAD_S])
    before_s = np.inf if kind == FRESH else calm(flow, room, figures)
    change(flow, room, problem, limit_R, kind, seed)
    if same(flow, rep_expert, rep_rank, used) or calm(flow, room, figures) > before_s * (1.0 + MAYBE):
        return used
    now = flow.counters[0] - experts
    now_expert = flow.expert_A[experts : experts + now].copy()
    now_rank = flow.rank_A[experts : experts + now].copy()
    before = placement_cost(problem, rep_expert, rep_rank, used, split_effort)[0][0]
    seconds = placement_cost(problem, now_expert, now_rank, now, split_effort)[0][0]
    if seconds >= before or (now > 0 and seconds > most_s):
        return used
    rep_expert[:now] = now_expert
    rep_rank[:now] = now_rank
    return int(now)


@compiled
def begin(
    problem: Problem,
    limit_R: IntArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    used: int,
    most_s: float,
    split_effort: float,
) -> int:
    """Compare these replicas with those that grow from none, and write the best; returns how many there are.

    Slot limits double up to those that are grown in, so that a further slot makes no prediction worse.
    """
    grown_R = grown_limits(limit_R)
    slot = 1
    while slot <= grown_R.max():
        limit = np.minimum(grown_R, slot)
        used = try_once(problem, limit, rep_expert, rep_rank, used, most_s, split_effort, plain(FRESH), plain(0))
        slot *= 2
    return used


@bare
def worth_growing(base: FloatArray, ranks: int, experts: int) -> bool:
    """Whether exchanges matter enough, where a step without replicas costs `base` [5], and tries take little enough."""
    return bool(base[1] > FROM * base[0] and ranks * experts <= PAIRS and ranks * ranks * ranks <= WORK)


@compiled
def grown_limits(limit_R: IntArray) -> IntArray:
    """The slots that are grown in: so many that a try takes little enough."""
    ranks = limit_R.size
    return np.minimum(limit_R, WORK // (ranks * ranks * ranks))


@bare
def over_even(problem: Problem, level: float) -> float:
    """The longest products, at the bottleneck T = `level`, in units of the even level."""
    tokens = 0
    speed = 0.0
    for r in range(problem.node_R.size):
        tokens += problem.home_load[r]
        speed += problem.speed_R[r]
    return level * speed / max(tokens, 1)


@compiled
def continued(
    problem: Problem,
    limit_R: IntArray,
    holds_ER: BoolArray,
    rep_expert: IntArray,
    rep_rank: IntArray,
    base: FloatArray,
    most_s: float,
    split_effort: float,
    budget_s: float,
) -> int:
    """Write the replicas to go on with from those in force; returns how many there are, 0: plan anew.

    `base` [5] is the cost without replicas, `most_s` what a step with replicas may take, `budget_s` what tries may take
    in the mean of many calls. Now and then we plan anew by chance, as we
    try, and always where a step takes longer than it may, or where products matter most and are no longer level.
    """
    ranks, experts = problem.load_RE.shape
    grown_R = grown_limits(limit_R)
    used = previous_replicas(holds_ER, problem.home_E, limit_R, rep_expert, rep_rank)
    uneven = 1.0
    if used > 0:
        multi, start, arc_rank = index_replicas(rep_expert, rep_rank, used, problem.home_E)
        _, cost, _, level, _, _ = best_split(problem, multi, start, arc_rank, split_effort, True)
        uneven = over_even(problem, level)
        if cost[0] > most_s and placement_cost(problem, rep_expert, rep_rank, used, split_effort)[0][0] > most_s:
            return 0
    if uneven > STALE:
        budget_s *= HASTE
    seed = drawn(seed_of(problem))
    work = max(used, grown_R.sum()) * ranks * ranks
    try_s = TRY_S + TRY_PAIR_S * experts * ranks + TRY_WORK_S * work
    if work <= WORK and (seed >> 8) * try_s < budget_s * (1 << 23):
        seed = drawn(seed)
        return try_once(problem, grown_R, rep_expert, rep_rank, used, most_s, split_effort, (seed >> 16) % KINDS, seed)
    seed = drawn(seed)
    fast_s = FAST_S + FAST_PAIR_S * experts * ranks
    if (seed >> 8) * fast_s < min(FAST_SHARE * budget_s, FAST_MOST * fast_s) * (1 << 23):
        return 0
    return 0 if uneven > UNEVEN and base[1] < MOSTLY * base[0] else used
