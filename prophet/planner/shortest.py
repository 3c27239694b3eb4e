"""Compiled kernels of the split that makes a step shortest, for given holders.

Shape legend: R ranks, E experts, J experts with several holders, A arcs (one per expert and holder).

First the exact split of `flow.py`: the lowest bottleneck, and as few tokens on the way as that allows. Where exchanges
are a part of the step that matters, descent (`descent.py`) goes on from there, because the busiest sender or receiver
counts and not the sum, and because a slightly higher bottleneck can be worth a shorter exchange. The better split is
taken.
"""

from __future__ import annotations

import numpy as np

from prophet.planner.arcs import index_holders
from prophet.planner.compiled import BOOLS_2D, FLOAT, FLOATS, INTS, INTS_2D, bare, compiled, entry
from prophet.planner.descent import RESOURCES, Flow, link, norms, plain, set_prices, sweep
from prophet.planner.flow import expand, solve_totals
from prophet.planner.timing import (
    INTER_BYTES_PER_S,
    INTER_LATENCY_S,
    INTRA_BYTES_PER_S,
    INTRA_LATENCY_S,
    OVERHEAD_S,
    TOKEN_BYTES,
    Problem,
    exchange_seconds,
    exposed_seconds,
    felt,
    hiding,
    make_problem,
    negative,
    transfers,
)
from prophet.spec import BoolArray, FloatArray, IntArray

SETTLE_S = 3e-8  # assumed seconds to settle one rank and expert once; only fixes how many sweeps an effort buys
LEVELS = 9  # of q, from 2 on
MOST_SWEEPS = 4 * LEVELS  # further ones gain next to nothing
LEVELLED = 1e-3  # a level is left when a sweep lowers its norm by less
FAR = 0.1  # share of the step by which an exchange exceeds its floor where few sweeps are best made at low q
WORTH_IT = 0.01  # share of the step that an exchange must be above its floor for descent to be tried


@compiled
def make_flow(problem: Problem, chosen_J: IntArray, spare_arcs: int) -> Flow:
    """All tokens at home; the experts `chosen_J` may get up to `spare_arcs` replicas."""
    flow = make_frame(problem, chosen_J, spare_arcs)
    fill_homes(flow, problem, chosen_J)
    return flow


@bare
def fill_homes(flow: Flow, problem: Problem, chosen_J: IntArray) -> None:
    """Write the tokens of all arcs: those of an expert are at its home."""
    load_RE, tokens_AR = problem.load_RE, flow.tokens_AR
    ranks = problem.node_R.size
    for a in range(chosen_J.size, flow.counters[0]):
        for r in range(ranks):
            tokens_AR[a, r] = 0
    for r in range(ranks):
        for j in range(chosen_J.size):
            tokens_AR[j, r] = load_RE[r, chosen_J[j]]


@compiled
def make_frame(problem: Problem, chosen_J: IntArray, spare_arcs: int) -> Flow:
    """`make_flow` whose tokens are still to be written: what is busy counts them at home."""
    ranks = problem.node_R.size
    chosen = chosen_J.size
    figures = problem.figures
    by_rank = np.empty((5, RESOURCES, ranks))
    rate, base, busy = by_rank[0], by_rank[1], by_rank[2]
    for r in range(ranks):
        rate[0, r] = problem.seconds_per_token_R[r]
        base[0, r] = problem.home_groups[r] * figures[OVERHEAD_S]
        busy[0, r] = problem.home_load[r]
        for k in range(4):
            rate[1 + k, r] = figures[TOKEN_BYTES] / figures[INTRA_BYTES_PER_S if k < 2 else INTER_BYTES_PER_S]
            base[1 + k, r] = figures[INTRA_LATENCY_S if k < 2 else INTER_LATENCY_S]
            busy[1 + k, r] = problem.home_moved[k, r]
    arcs = chosen + spare_arcs
    tokens = np.empty((arcs, ranks), np.int64)
    by_arc = np.empty((3, arcs), np.int64)
    following, rank, expert = by_arc[0], by_arc[1], by_arc[2]
    for j in range(chosen):
        following[j] = -1
        expert[j] = j
        rank[j] = problem.home_E[chosen_J[j]]
    counters = np.empty(14 + ranks, np.int64)
    counters[0] = chosen
    counters[1] = chosen
    return Flow(
        problem.node_R, rate, base, busy, by_rank[3], by_rank[4], np.empty(4), following, rank, expert, tokens,
        counters[:2], counters[2:],
    )  # fmt: skip


@bare
def count_copies(flow: Flow, j: int, moved: FloatArray, sign: float) -> None:
    """Add `sign` times what Trans moves for expert j to `moved`, as of `copies_moved`."""
    node_R, rank_A, following_A, in_node = flow.node_R, flow.rank_A, flow.following_A, flow.scratch
    first = following_A[j]
    if first < 0:
        return
    sent = moved[0]
    received = moved[1]
    home = rank_A[j]
    n = 0
    a = first
    while a >= 0:
        in_node[node_R[rank_A[a]]] = 0
        a = following_A[a]
    a = first
    while a >= 0:
        n += 1
        in_node[node_R[rank_A[a]]] += 1
        a = following_A[a]
    part = sign / n
    a = first
    while a >= 0:
        d = rank_A[a]
        level = 0 if node_R[d] == node_R[home] else 1
        sent[level, home] += sign
        received[level, d] += sign
        sent[2 + level, home] += part
        received[2 + level, d] += part
        near = in_node[node_R[d]]
        sent[4, d] += (near - 1) * part
        sent[5, d] += (n - near) * part
        a = following_A[a]


@bare
def busiest_of(moved: FloatArray, busiest: FloatArray) -> None:
    """The largest of every row of `copies_moved`."""
    for i in range(6):
        busiest[i] = 0.0
        for r in range(moved.shape[2]):
            busiest[i] = max(busiest[i], moved[0, i, r], moved[1, i, r])


@bare
def copies_moved(flow: Flow, moved: FloatArray, busiest: FloatArray) -> None:
    """Copies of experts that Trans moves: `moved` [2, 6, R] sent and received by every rank, `busiest` [6].

    Direct, scatter and gather, each within and between nodes.
    """
    for side in range(2):
        for i in range(6):
            for r in range(moved.shape[2]):
                moved[side, i, r] = 0.0
    for j in range(flow.counters[1]):
        count_copies(flow, j, moved, 1.0)
    busiest_of(moved, busiest)


@bare
def write_cost(flow: Flow, groups: IntArray, busiest: FloatArray, figures: FloatArray, cost: FloatArray) -> None:
    """Write the cost of what is counted in `busy`, [5] seconds: total, a2a, expert, exposed Trans, exposed Agg."""
    busy, rate = flow.busy, flow.rate
    forward_s = 0.0
    near = 0.0
    far = 0.0
    for r in range(groups.size):
        forward_s = max(forward_s, busy[0, r] * rate[0, r] + groups[r] * figures[OVERHEAD_S])
        near = max(near, busy[1, r], busy[2, r])
        far = max(far, busy[3, r], busy[4, r])
    cost[1] = 4.0 * exchange_seconds(near, far, figures[TOKEN_BYTES], figures)
    cost[2] = 3.0 * forward_s
    cost[3], cost[4] = exposed_seconds(busiest, forward_s, figures)
    cost[0] = cost[1] + cost[2] + cost[3] + cost[4]


@compiled
def home_cost(problem: Problem) -> FloatArray:
    """The cost without replicas, [5] seconds as of `write_cost`."""
    load, groups, moved, figures = problem.home_load, problem.home_groups, problem.home_moved, problem.figures
    forward_s = 0.0
    near = 0.0
    far = 0.0
    for r in range(load.size):
        forward_s = max(forward_s, load[r] * problem.seconds_per_token_R[r] + groups[r] * figures[OVERHEAD_S])
        near = max(near, float(moved[0, r]), float(moved[1, r]))
        far = max(far, float(moved[2, r]), float(moved[3, r]))
    cost = np.zeros(5)
    cost[1] = 4.0 * exchange_seconds(near, far, figures[TOKEN_BYTES], figures)
    cost[2] = 3.0 * forward_s
    cost[0] = cost[1] + cost[2]
    return cost


@compiled
def cost_of(flow: Flow, problem: Problem, chosen_J: IntArray, busiest: FloatArray) -> FloatArray:
    """`write_cost` for the tokens' present ways, as a new array."""
    groups = problem.home_groups.copy()
    for j in range(flow.counters[1]):
        if problem.total_E[chosen_J[j]] > 0:
            groups[flow.rank_A[j]] -= 1
    for a in range(flow.counters[0]):
        for r in range(groups.size):
            if flow.tokens_AR[a, r] > 0:
                groups[flow.rank_A[a]] += 1
                break
    cost = np.empty(5)
    write_cost(flow, groups, busiest, problem.figures, cost)
    return cost


@bare
def guide_of(flow: Flow, figures: FloatArray, busiest: FloatArray, q: int) -> float:
    """Seconds of a step with q-norms in place of the largest exchange and product (q = 0: the largest themselves)."""
    _, longest, forward_s, forward_q = norms(flow, q)
    trans_s, agg_s = exposed_seconds(busiest, forward_s, figures)
    return 4.0 * longest + 3.0 * forward_q + trans_s + agg_s


@bare
def reprice(flow: Flow, figures: FloatArray, busiest: FloatArray, q: int) -> None:
    """Set the prices of `descent.py`; longer products hide more of an exposed transfer and are cheaper for it."""
    trans_s, agg_s = transfers(busiest, figures)
    longest, longest_q, forward_s, forward_q = norms(flow, q)
    weight = max(3.0 - hiding(trans_s, agg_s, forward_s, figures), 0.1)
    set_prices(flow, q, 4.0, weight, longest, longest_q, forward_s, forward_q)


@compiled
def shorten(flow: Flow, figures: FloatArray, busiest: FloatArray, sweeps: int, far: bool) -> tuple[float, int]:
    """Descend with growing q for at most `sweeps` sweeps; the best found stays in place.

    Fewer sweeps than levels are spread over them: from the first level on where there is `far` to go, because low q
    moves most, else up to the last one. Returns the guide (q = 0), and the sweeps made.
    """
    low = guide_of(flow, figures, busiest, plain(0))
    trans_s, agg_s = transfers(busiest, figures)
    arcs = flow.counters[0]
    best_tokens = flow.tokens_AR[:arcs].copy()
    best_busy = flow.busy.copy()
    done = 0
    made = 0
    early = LEVELS - 1 if far else 0
    for i in range(LEVELS):
        q = plain(2) << i
        share = (sweeps * (i + 1) + early) // LEVELS
        smooth = np.inf
        if done < share:
            longest, longest_q, forward_s, forward_q = norms(flow, q)
        while done < share:
            done += 1
            made += 1
            weight = max(3.0 - hiding(trans_s, agg_s, forward_s, figures), 0.1)
            set_prices(flow, q, 4.0, weight, longest, longest_q, forward_s, forward_q)
            moves = sweep(flow, q)
            longest, longest_q, forward_s, forward_q = norms(flow, q)
            felt_trans_s, felt_agg_s = felt(trans_s, agg_s, forward_s, figures)
            now = 4.0 * longest + 3.0 * forward_s + felt_trans_s + felt_agg_s
            if now < low:
                low = now
                best_tokens[:] = flow.tokens_AR[:arcs]
                best_busy[:] = flow.busy
            before = smooth
            smooth = 4.0 * longest_q + 3.0 * forward_q + felt_trans_s + felt_agg_s
            if moves == 0 or smooth > before * (1.0 - LEVELLED):
                break
        done = max(done, share)
    flow.tokens_AR[:arcs] = best_tokens
    flow.busy[:] = best_busy
    return low, made


@bare
def affordable(above_s: float, effort: float, settled: int) -> int:
    """How many sweeps over `settled` pairs of rank and expert fit into this share of what they could save at best."""
    if settled <= 0:
        return 0
    return min(MOST_SWEEPS, int(effort * above_s / (SETTLE_S * settled)))


@bare
def exchange_floor(flow: Flow, problem: Problem, chosen_J: IntArray) -> float:
    """Seconds of an exchange in which every token goes no farther than it must and all ranks send alike."""
    load_RE, node_R, rank_A, following_A = problem.load_RE, problem.node_R, flow.rank_A, flow.following_A
    ranks = node_R.size
    near = 0
    far = 0
    for r in range(ranks):
        near += problem.home_moved[0, r]
        far += problem.home_moved[2, r]
    reached = flow.scratch  # by node
    for n in range(node_R[ranks - 1] + 1):
        reached[n] = 0
    for j in range(chosen_J.size):
        home = rank_A[j]
        a = j
        while a >= 0:
            reached[node_R[rank_A[a]]] = 1
            if a != j:  # what the replica's own rank routes stays there
                n = load_RE[rank_A[a], chosen_J[j]]
                if node_R[rank_A[a]] == node_R[home]:
                    near -= n
                else:
                    far -= n
            a = following_A[a]
        reached[node_R[home]] = 0
        for r in range(ranks):
            if reached[node_R[r]] > 0:  # a replica in its node is nearer than the home
                held = False
                a = following_A[j]
                while a >= 0:
                    held = held or rank_A[a] == r
                    a = following_A[a]
                if not held:
                    far -= load_RE[r, chosen_J[j]]
                    near += load_RE[r, chosen_J[j]]
        a = j
        while a >= 0:
            reached[node_R[rank_A[a]]] = 0
            a = following_A[a]
    seconds = 0.0
    if near > 0:
        seconds = flow.base[1, 0] + near / ranks * flow.rate[1, 0]
    if far > 0:
        seconds = max(seconds, flow.base[3, 0] + far / ranks * flow.rate[3, 0])
    return seconds


@bare
def count_rows(
    flows: IntArray, rows: int, home_E: IntArray, node_R: IntArray, rank_load: IntArray, busy: FloatArray
) -> None:
    """Count in `busy` [5, R], which has all tokens at home, the rows that go elsewhere."""
    sent_near, received_near, sent_far, received_far = busy[1], busy[2], busy[3], busy[4]
    for i in range(rows):
        r = flows[i, 0]
        home = home_E[flows[i, 1]]
        d = flows[i, 2]
        n = flows[i, 3]
        if d == home:
            continue
        node = node_R[r]
        if r != home:
            if node_R[home] == node:
                sent_near[r] -= n
                received_near[home] -= n
            else:
                sent_far[r] -= n
                received_far[home] -= n
        if r != d:
            if node_R[d] == node:
                sent_near[r] += n
                received_near[d] += n
            else:
                sent_far[r] += n
                received_far[d] += n
    for r in range(rank_load.size):
        busy[0, r] = rank_load[r]


@bare
def count_exact(
    problem: Problem,
    multi: IntArray,
    start: IntArray,
    arc_rank: IntArray,
    x: IntArray,
    rank_load: IntArray,
    busy: FloatArray,
    room: IntArray,
) -> None:
    """`count_rows` for the rows that `flow.expand` makes of `x` [A], without making them, in the `room` [2, R]."""
    load_RE, total_E, home_E, node_R = problem.load_RE, problem.total_E, problem.home_E, problem.node_R
    sent_near, received_near, sent_far, received_far = busy[1], busy[2], busy[3], busy[4]
    left, want = room[0], room[1]
    ranks = rank_load.size
    for j in range(multi.size):
        e = multi[j]
        home = home_E[e]
        if node_R[ranks - 1] == 0:  # what does not stay is sent within the node
            for k in range(start[j], start[j + 1]):
                d = arc_rank[k]
                n = load_RE[d, e]
                part = min(n, x[k])
                sent_near[d] += n - part if d == home else -part
                received_near[d] += x[k] - part - (total_E[e] - n if d == home else 0)
            continue
        for r in range(ranks):
            n = load_RE[r, e]
            left[r] = n
            if r != home:
                if node_R[r] == node_R[home]:
                    sent_near[r] -= n
                    received_near[home] -= n
                else:
                    sent_far[r] -= n
                    received_far[home] -= n
        for k in range(start[j], start[j + 1]):
            d = arc_rank[k]
            part = min(left[d], x[k])
            left[d] -= part
            want[d] = x[k] - part
        k = start[j]
        r = 0
        while r < ranks:  # node by node, sources and holders in rank order
            node = node_R[r]
            there = 0
            wanted = 0
            after = r
            while after < ranks and node_R[after] == node:
                there += left[after]
                after += 1
            end = k
            while end < start[j + 1] and arc_rank[end] < after:
                wanted += want[arc_rank[end]]
                end += 1
            inside = min(there, wanted)
            rest = inside
            while r < after:
                part = min(left[r], rest)
                rest -= part
                sent_near[r] += part
                sent_far[r] += left[r] - part
                r += 1
            while k < end:
                d = arc_rank[k]
                part = min(want[d], inside)
                inside -= part
                received_near[d] += part
                received_far[d] += want[d] - part
                k += 1
    for r in range(ranks):
        busy[0, r] = rank_load[r]


@compiled
def level_out(
    problem: Problem, multi: IntArray, start: IntArray, arc_rank: IntArray
) -> tuple[IntArray, IntArray, float]:
    """The exact split: tokens of every arc [A], of every rank [R], and the bottleneck T."""
    ranks = problem.node_R.size
    arcs = arc_rank.size
    room = np.empty(arcs + 2 * ranks, np.int64)
    x = room[:arcs]
    rank_load = room[arcs : arcs + ranks]
    fixed = room[arcs + ranks :]
    for r in range(ranks):
        fixed[r] = problem.home_load[r]
    for j in range(multi.size):
        fixed[problem.home_E[multi[j]]] -= problem.total_E[multi[j]]
    level = solve_totals(
        problem.load_RE, problem.total_E, fixed, multi, start, arc_rank, problem.node_R, problem.speed_R, x, rank_load,
        0.0,
    )  # fmt: skip
    return x, rank_load, level


@compiled
def lay_out(flow: Flow, problem: Problem, multi: IntArray, flows: IntArray, rows: int) -> None:
    """Write the tokens of `flow.expand`."""
    fill_homes(flow, problem, multi)
    place = np.full(flow.node_R.size, -1, np.int64)  # the arc of the present expert on every rank
    tokens_AR = flow.tokens_AR
    i = 0
    for j in range(multi.size):
        a = j
        while a >= 0:
            place[flow.rank_A[a]] = a
            a = flow.following_A[a]
        while i < rows and flows[i, 1] == multi[j]:
            tokens_AR[j, flows[i, 0]] -= flows[i, 3]
            tokens_AR[place[flows[i, 2]], flows[i, 0]] += flows[i, 3]
            i += 1


@bare
def send_home(flow: Flow, problem: Problem) -> float:
    """Count all tokens at home; return the bottleneck."""
    level = 0.0
    for r in range(problem.node_R.size):
        flow.busy[0, r] = problem.home_load[r]
        for k in range(4):
            flow.busy[1 + k, r] = problem.home_moved[k, r]
        level = max(level, problem.home_load[r] / problem.speed_R[r])
    return level


@compiled
def best_split(
    problem: Problem, multi: IntArray, start: IntArray, arc_rank: IntArray, effort: float, exact: bool
) -> tuple[Flow, FloatArray, float, float, IntArray, int]:
    """The split over given holders (`arcs.index_holders`): what is busy, its cost [5], the seconds that the descent
    which `effort` buys could save at most, the bottleneck T, and its rows as of `flow.expand`, or none where descent
    has changed it: then the flow has the tokens. The last are the sweeps made. For an `exact` split no descent is made,
    neither rows nor tokens are written, and T is its own even where the cost is that of replicas left alone.
    """
    ranks = problem.node_R.size
    x, rank_load, level = level_out(problem, multi, start, arc_rank)
    flow = make_frame(problem, multi, arc_rank.size - multi.size)
    groups = problem.home_groups.copy()
    for j in range(multi.size):
        if problem.total_E[multi[j]] > 0:
            groups[flow.rank_A[j]] -= 1
        for k in range(start[j], start[j + 1]):
            if x[k] > 0:
                groups[arc_rank[k]] += 1
            if arc_rank[k] != flow.rank_A[j]:
                link(flow, j, arc_rank[k], problem.figures[OVERHEAD_S])
    costs = np.empty((3, 6))
    busiest = costs[0]
    unused = costs[1, :5]
    cost = costs[2, :5]
    copies_moved(flow, np.empty((2, 6, ranks)), busiest)
    write_cost(flow, problem.home_groups, busiest, problem.figures, unused)
    if exact:
        flows = np.empty((2, ranks), np.int64)
        rows = 0
        count_exact(problem, multi, start, arc_rank, x, rank_load, flow.busy, flows)
    else:
        flows, rows = expand(problem.load_RE, multi, start, arc_rank, problem.node_R, x)
        count_rows(flows, rows, problem.home_E, flow.node_R, rank_load, flow.busy)
    write_cost(flow, groups, busiest, problem.figures, cost)
    sweeps = 0
    made = 0
    above_s = 0.0
    if effort > 0.0 and cost[1] > WORTH_IT * cost[0]:
        above_s = cost[1] - 4.0 * exchange_floor(flow, problem, multi)
        if above_s > WORTH_IT * cost[0]:
            sweeps = affordable(above_s, effort, multi.size * ranks)
    if rows == 0 and not exact:
        fill_homes(flow, problem, multi)  # nothing was routed to these experts
    if sweeps > 0 and not exact:
        lay_out(flow, problem, multi, flows, rows)
        tokens = flow.tokens_AR.copy()
        before = flow.busy.copy()
        made = shorten(flow, problem.figures, busiest, sweeps, above_s > FAR * cost[0])[1]
        other = cost_of(flow, problem, multi, busiest)
        if other[0] < cost[0]:
            cost[:] = other
            rows = 0
            level = 0.0
            for r in range(ranks):
                level = max(level, flow.busy[0, r] / problem.speed_R[r])
        else:
            flow.tokens_AR[:] = tokens
            flow.busy[:] = before
    if effort > 0.0 and unused[0] < cost[0]:  # replicas planned for other routing than this can be in the way
        cost[:] = unused
        rows = 0
        if not exact:
            level = send_home(flow, problem)
            fill_homes(flow, problem, multi)
    return flow, cost, above_s if sweeps > 0 else 0.0, level, flows[:rows], made


@entry(INTS_2D, BOOLS_2D, INTS, INTS, FLOATS, FLOATS, FLOATS, FLOAT)
def timed_flows(
    load_RE: IntArray,
    holds_ER: BoolArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
    effort: float,
) -> tuple[IntArray, IntArray, IntArray, float, FloatArray]:
    """Like `flow.split_flows`, for the shortest step; the last is its cost [5]. T is -1 for a negative load.

    `effort` is the share of what could be saved on exchanges that may be spent on saving it.
    """
    if negative(load_RE):
        return np.empty(0, np.int64), np.empty((0, 4), np.int64), np.empty(0, np.int64), -1.0, np.empty(5)
    problem = make_problem(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures)
    multi, start, arc_rank = index_holders(holds_ER, home_E)
    flow, cost, _, level, unchanged, _ = best_split(problem, multi, start, arc_rank, effort, False)
    ranks = node_R.size
    if unchanged.size > 0 or multi.size == 0:
        return multi, unchanged, flow.busy[0].astype(np.int64), level, cost
    rows = 0
    for a in range(flow.counters[0]):
        for r in range(ranks):
            if flow.tokens_AR[a, r] > 0:
                rows += 1
    flows = np.empty((rows, 4), np.int64)
    i = 0
    for a in range(flow.counters[0]):
        for r in range(ranks):
            if flow.tokens_AR[a, r] > 0:
                flows[i, 0] = r
                flows[i, 1] = multi[flow.expert_A[a]]
                flows[i, 2] = flow.rank_A[a]
                flows[i, 3] = flow.tokens_AR[a, r]
                i += 1
    return multi, flows, flow.busy[0].astype(np.int64), level, cost
