"""Compiled kernels that make a step short: tokens move from dear resources to cheap ones.

Shape legend: R ranks, J experts that take part, A arcs (one per expert and holder), K = 5 resources of a rank.

A step ends when its busiest resources do: a rank's products, what it sends and what it receives within its node, and
the same between nodes. The largest of many is replaced by their q-norm, whose derivative is a price for every resource:
next to nothing where there is room, high where the step waits. A token of rank r computed on rank d pays for d's
products, and for r's sending and d's receiving unless r is d. Each pair of a rank and an expert moves tokens from the
holder that is dearest for it to the one that is cheapest, as many as level the two prices; with growing q the norm
becomes the maximum itself. q is a power of two, so that only products and square roots are needed, which round alike
on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.spec import FloatArray, IntArray

LEVEL_PRICES = 0.01  # a token does not move for less; at high q this is next to nothing in seconds
LEAST_S = 1e-30  # seconds that stand for none where they divide
RESOURCES = 5  # of a rank: its products; what it sends and receives within its node; the same between nodes


class Flow(NamedTuple):
    """Tokens on their way, changed in place. The arcs of expert j are a linked list that starts with its home, arc j.

    `busy` [K, R] counts tokens on every resource, `rate` seconds per token, `base` the seconds it takes in any case
    (latency, fixed cost of an expert); `work` is what `norms` makes of them. `scale` holds the reference seconds and
    the weight of the products and of the exchanges, `counters` the arcs in use and the experts. `scratch` [12 + R] is
    room to work in.
    """

    node_R: IntArray
    rate: FloatArray
    base: FloatArray
    busy: FloatArray
    price: FloatArray
    work: FloatArray
    scale: FloatArray
    following_A: IntArray
    rank_A: IntArray
    expert_A: IntArray
    tokens_AR: IntArray
    counters: IntArray
    scratch: IntArray


@bare
def plain(number: int) -> int:
    """`number` as any integer: numba would compile a callee once more for every literal."""
    return number


@bare
def power(value: float, q: int) -> float:
    """`value` to the power q, a power of two."""
    while q > 1:
        value *= value
        q >>= 1
    return value


@bare
def root(value: float, q: int) -> float:
    """The q-th root of `value`, q a power of two."""
    while q > 1:
        value = np.sqrt(value)
        q >>= 1
    return value


@bare
def norms(flow: Flow, q: int) -> tuple[float, float, float, float]:
    """Largest and q-norm seconds of the exchanges, then of the products; `work` keeps the powers they are made of."""
    busy, rate, base, work = flow.busy, flow.rate, flow.base, flow.work
    ranks = flow.node_R.size
    longest = 0.0
    forward = 0.0
    for r in range(ranks):
        forward = max(forward, busy[0, r] * rate[0, r] + base[0, r])
    for k in range(1, RESOURCES):
        for r in range(ranks):
            if busy[k, r] > 0:
                longest = max(longest, busy[k, r] * rate[k, r] + base[k, r])
    if q == 0:
        return longest, longest, forward, forward
    for k in range(RESOURCES):
        reference = max(forward if k == 0 else longest, LEAST_S)
        for r in range(ranks):
            work[k, r] = (busy[k, r] * rate[k, r] + base[k, r]) / reference
    n = q
    while n > 1:  # as in `power`, all at once
        for k in range(RESOURCES):
            for r in range(ranks):
                work[k, r] *= work[k, r]
        n >>= 1
    forward_q = 0.0
    if forward > 0.0:
        total = 0.0
        for r in range(ranks):
            total += work[0, r]
        forward_q = forward * root(total, q)
    longest_q = 0.0
    if longest > 0.0:
        total = 0.0
        for k in range(1, RESOURCES):
            for r in range(ranks):
                if busy[k, r] > 0:
                    total += work[k, r]
        longest_q = longest * root(total, q)
    return longest, longest_q, forward, forward_q


@bare
def set_prices(
    flow: Flow,
    q: int,
    exchange_weight: float,
    forward_weight: float,
    longest: float,
    longest_q: float,
    forward: float,
    forward_q: float,
) -> None:
    """Prices of all resources: what one more token on them adds to the weighted norms.

    These, and `work`, are as `norms` has left them for this q and these tokens.
    """
    rate, work, price, scale = flow.rate, flow.work, flow.price, flow.scale
    scale[0] = max(forward, LEAST_S)
    scale[1] = max(longest, LEAST_S)
    scale[2] = forward_weight
    scale[3] = exchange_weight
    if forward > 0.0:
        scale[2] = forward_weight / power(forward_q / forward, q)
    if longest > 0.0:
        scale[3] = exchange_weight / power(longest_q / longest, q)
    for k in range(RESOURCES):
        weight = scale[2] if k == 0 else scale[3]
        for r in range(flow.node_R.size):
            price[k, r] = weight * rate[k, r] * work[k, r]


@bare
def token_price(here: bool, near: bool, own: float, near_s: float, far_s: float) -> float:
    """What a token pays on a holder that is its own rank (`here`), in its node (`near`) or elsewhere.

    `own` is the price of the holder's products; `near_s` and `far_s` are those of the way there. Numbers only: a call
    that passes arrays counts references, which takes longer than the sums.
    """
    if here:
        return own
    return own + (near_s if near else far_s)


@bare
def settle(
    first: int,
    last: int,
    q: int,
    node_R: IntArray,
    rate: FloatArray,
    base: FloatArray,
    busy: FloatArray,
    price: FloatArray,
    scale: FloatArray,
    following_A: IntArray,
    rank_A: IntArray,
    tokens_AR: IntArray,
    scratch: IntArray,
) -> int:
    """Let every rank move tokens of experts first..last-1, each from its dearest holder to its cheapest; return the
    number of moves.
    """
    moves = 0
    kind = scratch[:6]
    place = scratch[6:12]
    arc = scratch[12:]
    ranks = node_R.size
    own, out_near, in_near, out_far, in_far = price[0], price[1], price[2], price[3], price[4]
    for j in range(first, last):
        if following_A[j] < 0:
            continue
        holders = 0
        a = j
        while a >= 0:
            arc[holders] = a
            holders += 1
            a = following_A[a]
        for r in range(ranks):
            dear = -1
            cheap = -1
            high = -1.0
            low = np.inf
            for i in range(holders):
                a = arc[i]
                d = rank_A[a]
                p = token_price(
                    d == r, node_R[d] == node_R[r], own[d], out_near[r] + in_near[d], out_far[r] + in_far[d]
                )
                paid = p if tokens_AR[a, r] > 0 else -1.0
                dear = a if paid > high else dear  # no branches: which holder it is cannot be guessed
                high = max(high, paid)
                cheap = a if p < low else cheap
                low = min(low, p)
            if dear < 0 or cheap < 0 or dear == cheap or high <= low * (1.0 + LEVEL_PRICES):
                continue
            # Resources of the giver's side (0..2) and of the taker's side (3..5): their kind (-1: none) and rank.
            for i in range(0, 6, 3):
                d = rank_A[dear if i == 0 else cheap]
                level = -1
                if d != r:
                    level = 1 if node_R[d] == node_R[r] else 3
                kind[i] = 0
                kind[i + 1] = level
                kind[i + 2] = level + 1 if level > 0 else -1
                place[i] = d
                place[i + 1] = r
                place[i + 2] = d
            if kind[1] == kind[4]:  # what r sends does not change
                kind[1] = -1
                kind[4] = -1
            bend = 0.0  # how fast the two prices near each other, per token
            high = 0.0
            low = 0.0
            for i in range(6):
                k = kind[i]
                if k >= 0:
                    n = place[i]
                    c = rate[k, n]
                    bend += q * price[k, n] * c / (max(busy[k, n], 1.0) * c + base[k, n])
                    if i < 3:
                        high += price[k, n]
                    else:
                        low += price[k, n]
            step = tokens_AR[dear, r]
            gap = high - low
            if bend * step > gap:
                step = max(1, int(gap / bend))
            while step > 0:
                above = 0.0
                for i in range(6):
                    k = kind[i]
                    if k >= 0:
                        n = place[i]
                        c = rate[k, n]
                        sign = -step if i < 3 else step
                        group = 0 if k == 0 else 1
                        p = scale[2 + group] * c * power(((busy[k, n] + sign) * c + base[k, n]) / scale[group], q)
                        above += p if i >= 3 else -p
                if above < 0.5 * gap:
                    break
                step >>= 1
            if step == 0:
                continue
            moves += 1
            tokens_AR[dear, r] -= step
            tokens_AR[cheap, r] += step
            for i in range(6):
                k = kind[i]
                if k >= 0:
                    n = place[i]
                    c = rate[k, n]
                    busy[k, n] += -step if i < 3 else step
                    group = 0 if k == 0 else 1
                    price[k, n] = scale[2 + group] * c * power((busy[k, n] * c + base[k, n]) / scale[group], q)
    return moves


@bare
def settle_expert(flow: Flow, j: int, q: int) -> int:
    """`settle` for a whole flow."""
    return settle(
        j, j + 1, q, flow.node_R, flow.rate, flow.base, flow.busy, flow.price, flow.scale, flow.following_A,
        flow.rank_A, flow.tokens_AR, flow.scratch,
    )  # fmt: skip


@bare
def sweep(flow: Flow, q: int) -> int:
    """Settle every expert with several holders once; return the number of moves."""
    return settle(
        0, flow.counters[1], q, flow.node_R, flow.rate, flow.base, flow.busy, flow.price, flow.scale, flow.following_A,
        flow.rank_A, flow.tokens_AR, flow.scratch,
    )  # fmt: skip


@bare
def link(flow: Flow, j: int, rank: int, overhead_s: float) -> int:
    """Give expert j a further holder, whose tokens are still to be written; return its arc."""
    a = flow.counters[0]
    flow.counters[0] = a + 1
    flow.rank_A[a] = rank
    flow.expert_A[a] = j
    flow.following_A[a] = flow.following_A[j]
    flow.following_A[j] = a
    flow.base[0, rank] += overhead_s
    return int(a)


@bare
def attach(flow: Flow, j: int, rank: int, overhead_s: float) -> int:
    """Give expert j a further holder, without tokens yet; return its arc."""
    a = link(flow, j, rank, overhead_s)
    for r in range(flow.node_R.size):
        flow.tokens_AR[a, r] = 0
    return a


@bare
def redirect(busy: FloatArray, node_R: IntArray, source: int, giver: int, taker: int, tokens: float) -> None:
    """Tokens of `source` go to `taker` instead of `giver`: the exchange rows of `busy`, the products not."""
    back = 0
    if giver != source:
        back = 1 if node_R[giver] == node_R[source] else 3
        busy[back + 1, giver] -= tokens
    to = 0
    if taker != source:
        to = 1 if node_R[taker] == node_R[source] else 3
        busy[to + 1, taker] += tokens
    if back != to:
        if back > 0:
            busy[back, source] -= tokens
        if to > 0:
            busy[to, source] += tokens


@bare
def detach(flow: Flow, a: int, overhead_s: float) -> None:
    """Take replica `a` away; its tokens go to the holder that is cheapest for them at the present prices."""
    price, node_R, busy, tokens_AR = flow.price, flow.node_R, flow.busy, flow.tokens_AR
    rank_A, following_A = flow.rank_A, flow.following_A
    own, out_near, in_near, out_far, in_far = price[0], price[1], price[2], price[3], price[4]
    j = flow.expert_A[a]
    rank = rank_A[a]
    k = j
    while following_A[k] != a:
        k = following_A[k]
    following_A[k] = following_A[a]
    for r in range(node_R.size):
        n = tokens_AR[a, r]
        if n == 0:
            continue
        best = -1
        low = 0.0
        k = j
        while k >= 0:
            d = rank_A[k]
            near_s, far_s = out_near[r] + in_near[d], out_far[r] + in_far[d]
            p = token_price(d == r, node_R[d] == node_R[r], own[d], near_s, far_s)
            if best < 0 or p < low:
                best = k
                low = p
            k = following_A[k]
        busy[0, rank] -= n
        busy[0, rank_A[best]] += n
        redirect(busy, node_R, r, rank, rank_A[best], n)
        tokens_AR[best, r] += n
    flow.base[0, rank] -= overhead_s
    last = flow.counters[0] - 1
    flow.counters[0] = last
    if last != a:  # the last arc moves into the gap
        k = flow.expert_A[last]
        while flow.following_A[k] != last:
            k = flow.following_A[k]
        flow.following_A[k] = a
        flow.following_A[a] = flow.following_A[last]
        flow.rank_A[a] = flow.rank_A[last]
        flow.expert_A[a] = flow.expert_A[last]
        for r in range(node_R.size):
            tokens_AR[a, r] = tokens_AR[last, r]


@bare
def copy_flow(source: Flow, target: Flow) -> None:
    """Overwrite `target` by `source` (of the same sizes)."""
    arcs = source.counters[0]
    ranks = source.node_R.size
    for r in range(ranks):
        target.base[0, r] = source.base[0, r]
    for k in range(RESOURCES):
        for r in range(ranks):
            target.busy[k, r] = source.busy[k, r]
    for a in range(arcs):
        target.following_A[a] = source.following_A[a]
        target.rank_A[a] = source.rank_A[a]
        target.expert_A[a] = source.expert_A[a]
        for r in range(ranks):
            target.tokens_AR[a, r] = source.tokens_AR[a, r]
    target.counters[0] = arcs


@compiled
def twin(flow: Flow) -> Flow:
    """A second flow of the same sizes and contents."""
    return Flow(
        flow.node_R, flow.rate, flow.base.copy(), flow.busy.copy(), flow.price.copy(), flow.work.copy(),
        flow.scale.copy(), flow.following_A.copy(), flow.rank_A.copy(), flow.expert_A.copy(), flow.tokens_AR.copy(),
        flow.counters.copy(), flow.scratch.copy(),
    )  # fmt: skip
