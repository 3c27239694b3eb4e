"""The naive twin of the timed split: plain Python over dense tokens, bit by bit the same.

Shape legend: R ranks, E experts, D destination ranks (equal to R).

It starts from the exact split, which has a naive twin elsewhere (`prophet.planner.split.naive`), and descends from
there by the rules that `cost.h` and `descent.cpp` state. Sums run in index order. Slow by design.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prophet.planner.model.machine import Machine
from prophet.spec import FormName, IntArray, Placement, TransferSeconds

LEVELS, MOST_SWEEPS, SETTLE_S = 9, 36, 3e-8
WORTH_IT, FAR, LEVELLED, LEVEL_PRICES, LEAST_S = 0.01, 0.1, 1e-3, 0.01, 1e-30
OUT_NEAR, IN_NEAR, OUT_FAR, IN_FAR = 1, 2, 3, 4  # resources of a rank, after its products, 0
OUT_PORT, IN_PORT = 5, 6  # of a node, where it has a port

Table = list[list[float]]  # by resource and rank, or by kind of copy and rank


@dataclass
class Figures:
    """A `Machine`'s figures by name."""

    token_bytes: float
    near_bytes_per_s: float
    near_latency_s: float
    far_bytes_per_s: float
    far_latency_s: float
    param_bytes: float
    grad_bytes: float
    sum_bytes: float
    fnec_s: float
    bnec_s: float
    overhead_s: float
    overlap_cost: float
    no_experts: float
    port_share: float


def power(value: float, q: int) -> float:
    for _ in range(q.bit_length() - 1):
        value *= value
    return value


def root(value: float, q: int) -> float:
    for _ in range(q.bit_length() - 1):
        value = math.sqrt(value)
    return value


class Twin:
    """One load, one placement, one machine."""

    def __init__(self, load: IntArray, placement: Placement, machine: Machine) -> None:
        self.load, self.machine = load, machine
        self.f = Figures(*machine.figures.tolist())
        self.ranks, self.experts = load.shape
        self.home, self.node = placement.home.tolist(), machine.node.tolist()
        self.speed, seconds = machine.speed.tolist(), machine.seconds_per_token.tolist()
        self.holders = {}  # of shared experts: the home, then the replicas from the last rank to the first
        for e in range(self.experts):
            others = [r for r in reversed(range(self.ranks)) if placement.holds[e, r] and r != self.home[e]]
            if others:
                self.holders[e] = [self.home[e], *others]
        self.at_home = np.zeros((self.ranks, self.experts, self.ranks), np.int64)
        for e in range(self.experts):
            self.at_home[:, e, self.home[e]] = load[:, e]
        near_s, far_s = self.f.token_bytes / self.f.near_bytes_per_s, self.f.token_bytes / self.f.far_bytes_per_s
        self.rate: Table = [seconds, *([s] * self.ranks for s in (near_s, near_s, far_s, far_s))]
        latency = (self.f.near_latency_s, self.f.near_latency_s, self.f.far_latency_s, self.f.far_latency_s)
        self.base: Table = [[0.0] * self.ranks, *([s] * self.ranks for s in latency)]
        self.kinds, self.nodes = 5, self.node[-1] + 1
        if self.f.port_share > 0:
            self.kinds = 7
            self.rate += [[far_s * self.f.port_share] * self.nodes] * 2
            self.base += [[self.f.far_latency_s] * self.nodes] * 2
        for r, groups in enumerate(self.groups(self.at_home)):
            self.base[0][r] = groups * self.f.overhead_s
        for holders in self.holders.values():
            for d in reversed(holders[1:]):
                self.base[0][d] += self.f.overhead_s
        self.trans, self.agg = self.transfer(self.f.param_bytes), self.transfer(self.f.grad_bytes, self.f.sum_bytes)

    # ------------------------------------------------------------------------------------------------- cost

    def groups(self, tokens: IntArray) -> list[int]:
        """Experts with tokens on every rank."""
        return [int(np.count_nonzero(tokens[:, :, d].sum(axis=0))) for d in range(self.ranks)]

    def busy(self, tokens: IntArray) -> Table:
        """Tokens on every resource."""
        found = [[0.0] * len(row) for row in self.rate]
        for r, e, d in np.argwhere(tokens > 0).tolist():
            for k, n in self.way(r, d):
                found[k][n] += int(tokens[r, e, d])
        return found

    def port_units(self, out: list[float], back: list[float]) -> float:
        """What the busiest port moves, as what a rank's link moves in that time; `out` and `back` are by rank."""
        most = 0.0
        for moved in (out, back):
            sums = [0.0] * self.nodes
            for r, units in enumerate(moved):
                sums[self.node[r]] += units
            most = max(most, *sums)
        return most * self.f.port_share

    def exchange_s(self, near: float, far: float, n_bytes: float) -> float:
        near_s = self.f.near_latency_s + near * n_bytes / self.f.near_bytes_per_s if near > 0 else 0.0
        far_s = self.f.far_latency_s + far * n_bytes / self.f.far_bytes_per_s if far > 0 else 0.0
        return max(near_s, far_s)

    def transfer(self, n_bytes: float, sum_bytes: float | None = None) -> TransferSeconds:
        """Trans in every form; Agg where it says what goes home."""
        found = self.phases(n_bytes, sum_bytes, "two-phase")
        if 1 < self.nodes < self.ranks:
            found += self.phases(n_bytes, sum_bytes, "node-once")[1:]
            if any(self.crosses_by_relays(holders[0], holders[1:]) for holders in self.holders.values()):
                found += self.phases(n_bytes, sum_bytes, "spread")[1:]
        return TransferSeconds(*found)

    def phases(self, n_bytes: float, sum_bytes: float | None, form: FormName) -> tuple[float, ...]:
        """Seconds directly, and of both phases of a form."""
        sent, received = ([[0.0] * self.ranks for _ in range(8)] for _ in range(2))

        def move(kind: int, source: int, target: int, amount: float) -> None:
            """Kinds are direct, scatter, gather and spread, each within and between nodes."""
            if source != target:
                kind += self.node[source] != self.node[target]
                sent[kind][source] += amount
                received[kind][target] += amount

        for holders in self.holders.values():
            home, others = holders[0], holders[1:]
            if form == "spread" and self.crosses_by_relays(home, others):
                relays = self.ranks_of(self.node[home])
                for j, relay in enumerate(relays):
                    move(6, home, relay, 1.0 / len(relays))
                    for v in {self.node[d] for d in others}:
                        there = self.ranks_of(v)
                        carrier = there[j % len(there)]
                        if v != self.node[home]:
                            move(2, relay, carrier, 1.0 / len(relays))
                        for d in others:
                            if self.node[d] == v:
                                move(4, carrier, d, 1.0 / len(relays))
                continue
            apart = form != "two-phase" and self.crosses_once(home, others)
            for d in others:
                level = int(self.node[d] != self.node[home])
                near = sum(self.node[o] == self.node[d] for o in others)
                group = near if apart else len(others)
                part = 1.0 / group
                for kind, amount in ((level, 1.0), (2 + level, part)):
                    sent[kind][home] += 0.0 if apart and kind > 1 else amount
                    received[kind][d] += amount
                for side in (sent, received):
                    side[4][d] += (near - 1) * part
                    side[5][d] += (group - near) * part
            for v in {self.node[d] for d in others} if apart else ():
                sent[2 + (v != self.node[home])][home] += 1.0
        most = [max(0.0, *sent[kind], *received[kind]) for kind in range(8)]
        for kind in (1, 3, 5):
            most[kind] = max(most[kind], self.port_units(sent[kind], received[kind]))
        home_bytes = n_bytes if sum_bytes is None else sum_bytes
        sizes = ((0, n_bytes), (2, home_bytes), (4, n_bytes), (6, home_bytes))
        direct_s, scatter_s, gather_s, spread_s = (self.exchange_s(*most[k : k + 2], size) for k, size in sizes)
        if form == "spread":
            if sum_bytes is None:
                return direct_s, spread_s + scatter_s, gather_s
            return direct_s, gather_s + scatter_s, spread_s
        return (direct_s, scatter_s, gather_s) if sum_bytes is None else (direct_s, gather_s, scatter_s)

    def ranks_of(self, v: int) -> list[int]:
        return [r for r in range(self.ranks) if self.node[r] == v]

    def crossings(self, home: int, others: list[int]) -> tuple[float, float]:
        """What crosses between nodes in one group of all, and in groups by node."""
        groups = [sum(self.node[d] == v for d in others) for v in range(self.nodes)]
        n, here, share = len(others), groups[self.node[home]], self.f.port_share
        beyond = sum(k > 0 for k in groups) - (here > 0)
        gather = max((n - k) * max(1.0, k * share) for k in groups if k)
        return (n - here) * max(1.0, share) + gather, n * beyond * max(1.0, share)

    def crosses_once(self, home: int, others: list[int]) -> bool:
        """Whether groups by node take less time between nodes than one group of all."""
        groups = [sum(self.node[d] == v for d in others) for v in range(self.nodes)]
        if sum(k > 0 for k in groups) < 2 or max(groups) < 2:
            return False
        together, apart = self.crossings(home, others)
        return apart < together

    def crosses_by_relays(self, home: int, others: list[int]) -> bool:
        """Whether they take less time still where the ranks of the home's node send in its place."""
        relays, nodes = len(self.ranks_of(self.node[home])), {self.node[d] for d in others} - {self.node[home]}
        if self.f.port_share >= 1.0 or relays < 2 or not nodes:
            return False
        crossing = float(len(nodes))
        for v in nodes:
            crossing = max(crossing, math.ceil(relays / len(self.ranks_of(v))))
        crossing = max(crossing, len(nodes) * relays * self.f.port_share)
        return len(others) * crossing < relays * min(self.crossings(home, others))

    def covers(self, forward_s: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Windows of the two phases of Trans and of Agg."""
        beside_s = (1.0 - self.f.no_experts) * forward_s
        trans = (self.f.fnec_s, 0.0) if self.f.no_experts else (beside_s, self.f.fnec_s)
        return trans, (self.f.bnec_s, 2.0 * beside_s)

    def felt_by_form(self, t: TransferSeconds, cover: tuple[float, float]) -> list[float]:
        """Directly, in two phases, and in those of the node-once and of the spread form."""
        window_s, c = cover[0] + cover[1], self.f.overlap_cost
        felt = [max(0.0, t.direct - window_s) + c * min(t.direct, window_s)]
        for first, second in (t[1:3], t[3:5], t[5:7]):
            exposed_s = max(0.0, first - cover[0]) + max(0.0, second - cover[1])
            felt.append(exposed_s + c * (min(first, cover[0]) + min(second, cover[1])))
        return felt

    def exposed_seconds(self, forward_s: float) -> tuple[float, float]:
        there, back = self.covers(forward_s)
        return min(self.felt_by_form(self.trans, there)), min(self.felt_by_form(self.agg, back))

    def step_s(self, tokens: IntArray) -> tuple[float, float]:
        """Seconds of the step, and of its all-to-alls."""
        busy = self.busy(tokens)
        products = zip(busy[0], self.rate[0], self.groups(tokens), strict=True)
        forward_s = max(0.0, *(n * rate + groups * self.f.overhead_s for n, rate, groups in products))
        near, far = max(busy[OUT_NEAR] + busy[IN_NEAR]), max(busy[OUT_FAR] + busy[IN_FAR])
        far = max(far, self.port_units(busy[OUT_FAR], busy[IN_FAR]))
        a2a_s = 4.0 * self.exchange_s(near, far, self.f.token_bytes)
        trans_s, agg_s = self.exposed_seconds(forward_s)
        return a2a_s + 3.0 * forward_s + trans_s + agg_s, a2a_s

    def exchange_floor_s(self) -> float:
        """Every token goes no farther than it must, and all ranks send alike."""
        near = far = 0
        for r in range(self.ranks):
            for e in range(self.experts):
                holders = self.holders.get(e, [self.home[e]])
                if r in holders:
                    continue
                if any(self.node[d] == self.node[r] for d in holders):
                    near += int(self.load[r, e])
                else:
                    far += int(self.load[r, e])
        seconds = self.f.near_latency_s + near / self.ranks * self.rate[OUT_NEAR][0] if near > 0 else 0.0
        if far > 0:
            ways = [(self.ranks, OUT_FAR), *((self.nodes, k) for k in range(OUT_PORT, self.kinds))]
            seconds = max(seconds, *(self.f.far_latency_s + far / many * self.rate[k][0] for many, k in ways))
        return seconds

    # ---------------------------------------------------------------------------------------------- descent

    def seconds(self, busy: Table) -> Table:
        rows = zip(busy, self.rate, self.base, strict=True)
        return [[n * c + b for n, c, b in zip(*row, strict=True)] for row in rows]

    def norms(self, busy: Table, q: int) -> tuple[float, float, float, float, Table]:
        """Largest and q-norm of exchanges, of products, and the powers that they are made of."""
        seconds = self.seconds(busy)
        used = [(k, r) for k in range(1, self.kinds) for r in range(len(busy[k])) if busy[k][r] > 0]
        longest, forward = max([0.0, *(seconds[k][r] for k, r in used)]), max(0.0, *seconds[0])
        if q == 0:
            return longest, longest, forward, forward, seconds
        work = [[power(s / max(longest if k else forward, LEAST_S), q) for s in row] for k, row in enumerate(seconds)]
        forward_q = longest_q = total = 0.0
        for w in work[0]:
            total += w
        if forward > 0:
            forward_q = forward * root(total, q)
        total = 0.0
        for k, r in used:
            total += work[k][r]
        if longest > 0:
            longest_q = longest * root(total, q)
        return longest, longest_q, forward, forward_q, work

    def prices(self, busy: Table, q: int) -> None:
        longest, longest_q, forward, forward_q, work = self.norms(busy, q)
        hidden = 0.0
        both = zip((self.trans, self.agg), self.covers(forward), strict=True)
        for phase, (t, cover) in enumerate(both):
            felt = self.felt_by_form(t, cover)
            form = felt.index(min(felt))  # the first of the least
            # under products run the first phase of Trans and the second of Agg
            longer = t[2 * form - 1 + phase] > cover[phase] if form else t.direct > cover[0] + cover[1]
            hidden += (phase + 1.0) * longer
        hidden = hidden * (1.0 - self.f.no_experts) * (1.0 - self.f.overlap_cost)
        self.reference = [max(forward, LEAST_S), *[max(longest, LEAST_S)] * (self.kinds - 1)]
        weight = max(3.0 - hidden, 0.1)
        products = weight / power(forward_q / forward, q) if forward > 0 else weight
        exchanges = 4.0 / power(longest_q / longest, q) if longest > 0 else 4.0
        self.weight = [products, *[exchanges] * (self.kinds - 1)]
        self.price = [
            [self.weight[k] * c * w for c, w in zip(self.rate[k], work[k], strict=True)] for k in range(self.kinds)
        ]

    def way(self, r: int, d: int) -> list[tuple[int, int]]:
        """The resources, each with its rank or node, that a token of r on d takes."""
        if r == d:
            return [(0, d)]
        if self.node[r] == self.node[d]:
            return [(0, d), (OUT_NEAR, r), (IN_NEAR, d)]
        ports = [(OUT_PORT, self.node[r]), (IN_PORT, self.node[d])] if self.kinds > OUT_PORT else []
        return [(0, d), (OUT_FAR, r), (IN_FAR, d), *ports]

    def price_of(self, r: int, d: int) -> float:
        first, *rest = (self.price[k][n] for k, n in self.way(r, d))
        if len(rest) > 2:
            return first + ((rest[0] + rest[2]) + (rest[1] + rest[3]))
        return first + (rest[0] + rest[1]) if rest else first

    def price_at(self, k: int, n: int, tokens: float, q: int) -> float:
        return (
            self.weight[k]
            * self.rate[k][n]
            * power((tokens * self.rate[k][n] + self.base[k][n]) / self.reference[k], q)
        )

    def settle(self, tokens: IntArray, busy: Table, e: int, r: int, q: int) -> bool:
        """Rank r moves tokens of expert e from the dearest holder to the cheapest; whether any."""
        holders = self.holders[e]
        paid = [self.price_of(r, d) for d in holders]
        giving = [i for i, d in enumerate(holders) if tokens[r, e, d] > 0]
        if not giving:
            return False
        dear = max(giving, key=lambda i: paid[i])  # the first of the largest
        cheap = min(range(len(holders)), key=lambda i: paid[i])
        if dear == cheap or paid[dear] <= paid[cheap] * (1.0 + LEVEL_PRICES):
            return False
        given, taken = self.way(r, holders[dear]), self.way(r, holders[cheap])
        # What r sends may stay the same, or what passes a port
        ways = [(-1, step) for step in given if step not in taken], [(1, step) for step in taken if step not in given]
        ranks, ports = (
            [(sign, *step) for way in ways for sign, step in way if (step[0] >= OUT_PORT) == p] for p in (0, 1)
        )
        changed = ranks + ports
        bend, side = 0.0, {-1: 0.0, 1: 0.0}
        for sign, k, n in changed:
            c = self.rate[k][n]
            bend += q * self.price[k][n] * c / (max(busy[k][n], 1.0) * c + self.base[k][n])
            side[sign] += self.price[k][n]
        step, gap = int(tokens[r, e, holders[dear]]), side[-1] - side[1]
        if bend * step > gap:
            step = max(1, int(gap / bend))
        while step > 0:
            above = 0.0
            for sign, k, n in changed:
                above += sign * self.price_at(k, n, busy[k][n] + sign * step, q)
            if above < 0.5 * gap:
                break
            step //= 2
        if step == 0:
            return False
        tokens[r, e, holders[dear]] -= step
        tokens[r, e, holders[cheap]] += step
        for sign, k, n in changed:
            busy[k][n] += sign * step
            self.price[k][n] = self.price_at(k, n, busy[k][n], q)
        return True

    def guide(self, busy: Table, q: int) -> float:
        _, longest, forward_s, forward_q, _ = self.norms(busy, q)
        trans_s, agg_s = self.exposed_seconds(forward_s)
        return 4.0 * longest + 3.0 * forward_q + trans_s + agg_s

    def shorten(self, tokens: IntArray, sweeps: int, far: bool) -> IntArray:
        """The best tokens that the descent sees."""
        tokens, busy = tokens.copy(), self.busy(tokens)
        low, best = self.guide(busy, 0), tokens.copy()
        done = 0
        for i in range(LEVELS):
            q = 2 << i
            share = (sweeps * (i + 1) + (LEVELS - 1 if far else 0)) // LEVELS
            smooth = math.inf
            while done < share:
                done += 1
                self.prices(busy, q)
                moves = [self.settle(tokens, busy, e, r, q) for e in self.holders for r in range(self.ranks)]
                now = self.guide(busy, 0)
                if now < low:
                    low, best = now, tokens.copy()
                before, smooth = smooth, self.guide(busy, q)
                if not any(moves) or smooth > before * (1.0 - LEVELLED):
                    break
            done = max(done, share)
        return best

    def split(self, exact: IntArray, effort: float) -> tuple[IntArray, float]:
        """Tokens [R, E, D] and the seconds of the step, from those of the exact split."""
        tokens, (step_s, a2a_s) = exact, self.step_s(exact)
        if effort > 0 and a2a_s > WORTH_IT * step_s:
            above_s = a2a_s - 4.0 * self.exchange_floor_s()
            pairs = len(self.holders) * self.ranks
            if above_s > WORTH_IT * step_s and pairs:
                sweeps = min(MOST_SWEEPS, int(effort * above_s / (SETTLE_S * pairs)))
                if sweeps > 0:
                    shorter = self.shorten(tokens, sweeps, above_s > FAR * step_s)
                    shorter_s = self.step_s(shorter)[0]
                    if shorter_s < step_s:
                        tokens, step_s = shorter, shorter_s
        home_s = self.step_s(self.at_home)[0]
        if effort > 0 and home_s < step_s:
            return self.at_home, home_s
        return tokens, step_s
