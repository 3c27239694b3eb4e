"""More published policies, each built from its description; `baselines.py` holds the ones that Pro-Prophet names.

Shape legend: R ranks, E experts.

Several were made for inference or choose homes freely. In training an expert's home keeps its optimizer state, so here
the home's copy is pinned and only the further copies follow the policy. Policies that plan from exact counts get their
placement from the predicted ones like everyone else, and re-divide the exact counts over it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.baselines import Copies
from prophet.planner.cost import exchange_seconds
from prophet.planner.split import exact_split, local_split
from prophet.spec import FloatArray, IntArray, Placement, PlanContext, Split, check_load


def forced_balance(load: IntArray, context: PlanContext) -> tuple[Split, Placement]:
    """The ceiling: the same tokens, routed evenly over all experts. It changes the model, so it is no planner."""
    load = check_load(load)
    experts = load.shape[1]
    rows = load.sum(axis=1)
    even = rows[:, None] // experts + (np.arange(experts)[None, :] < (rows % experts)[:, None])
    homes = context.homes_only()
    return local_split(even, homes), homes


def fill(load: IntArray, amounts: IntArray, placement: Placement, node: IntArray) -> Split:
    """Meet `amounts` [E, R] (tokens of e computed on r): local tokens first, then the same node, then the rest."""
    ranks, experts = load.shape
    tokens = np.zeros((ranks, experts, ranks), dtype=np.int64)
    rank, expert = np.divmod(np.arange(ranks * experts), experts)
    single = placement.holds.sum(axis=1) == 1
    tokens[rank, expert, placement.home[expert]] = np.where(single[expert], load.reshape(-1), 0)
    same_node = node[:, None] == node[None, :]
    for e in np.flatnonzero(~single):
        left, want = load[:, e].copy(), amounts[e].copy()
        stays = np.minimum(left, want)
        tokens[np.arange(ranks), e, np.arange(ranks)] += stays
        left -= stays
        want -= stays
        for allowed in (same_node, np.ones_like(same_node)):
            for d in np.flatnonzero(want):
                for r in np.flatnonzero(left * allowed[:, d]):
                    part = min(left[r], want[d])
                    tokens[r, e, d] += part
                    left[r] -= part
                    want[d] -= part
    return Split.trusted(tokens)


def even_amounts(load: IntArray, placement: Placement) -> IntArray:
    """Every expert's tokens divided evenly among its holders, [E, R]."""
    total = load.sum(axis=0)
    copies = placement.holds.sum(axis=1)
    order = np.cumsum(placement.holds, axis=1) - 1
    share = (total // copies)[:, None] + (order < (total % copies)[:, None])
    amounts: IntArray = np.where(placement.holds, share, 0).astype(np.int64)
    return amounts


def pack(copies: IntArray, total: IntArray, context: PlanContext, by_node: bool = False) -> Placement:
    """Place `copies` [E] replicas per expert: heaviest share first, each on the least loaded rank with a slot.

    `by_node` prefers the node that holds fewest copies of the expert.
    """
    state = Copies.of(context)
    node = context.topology.node_ids()
    share = total / (copies + 1)
    load = np.bincount(state.home, weights=share, minlength=context.ranks)
    for e in np.argsort(-share, kind="stable"):
        for _ in range(int(copies[e])):
            allowed = (state.free > 0) & ~state.holds[e]
            if not allowed.any():
                break
            if by_node:
                cover = np.bincount(node[state.holds[e]], minlength=context.topology.nodes)[node]
                allowed &= cover == cover[allowed].min()
            target = int(np.flatnonzero(allowed)[load[allowed].argmin()])
            load[target] += share[e]
            state.copy_to(int(e), np.array([target]))
    return state.placement()


def heap_copies(total: IntArray, slots: int, most: int) -> IntArray:
    """Give `slots` replicas one by one to the expert with the most load per copy, at most `most` each, [E]."""
    copies = np.zeros(total.size, dtype=np.int64)
    for _ in range(slots):
        per_copy = np.where(copies < most, total / (copies + 1), -1.0)
        best = int(per_copy.argmax())
        if per_copy[best] <= 0:
            break
        copies[best] += 1
    return copies


def _slots(context: PlanContext, per_rank: int) -> int:
    return int(np.minimum(context.slot_limits(), per_rank).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class FasterMoEPlanner(Planner):
    """FasterMoE's dynamic shadowing (He et al., PPoPP 2022): heavy experts on all ranks while its model improves.

    Its model: (3c + 4f) b for the heaviest expert not shadowed, and 2 alpha dim^2 bytes / bandwidth per shadowed one.
    """

    name: str = "fastermoe"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        shape, topology = context.shape, context.topology
        bandwidth = topology.intra.bytes_per_s if topology.nodes == 1 else topology.inter.bytes_per_s
        per_token_s = 3 * shape.forward_flops_per_token / float(np.mean(topology.flops_per_s))
        per_token_s += 4 * shape.token_bytes / bandwidth
        shadow_s = 2 * shape.expert_bytes / bandwidth
        total = load.sum(axis=0)
        order = np.argsort(-total, kind="stable")
        best_s = per_token_s * float(total[order[0]])
        state = Copies.of(context)
        for i, e in enumerate(order[:-1], start=1):
            seconds = per_token_s * float(total[order[i]]) + i * shadow_s
            if seconds >= best_s:
                break
            best_s = seconds
            state.copy_to(int(e), np.arange(context.ranks))
        return state.placement()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        del context
        return local_split(load, placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class EplbPlanner(Planner):
    """DeepSeek's EPLB: a fixed number of extra slots, heaviest load per copy first, greedy packing, even shares."""

    extra_per_rank: int = 2
    name: str = "eplb"

    def __post_init__(self) -> None:
        if self.extra_per_rank < 0:
            raise SpecError(f"{self.name} planner: extra_per_rank must not be negative, got {self.extra_per_rank}")

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        total = check_load(load).sum(axis=0)
        copies = heap_copies(total, _slots(context, self.extra_per_rank), context.ranks - 1)
        return pack(copies, total, context)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        load = check_load(load)
        return fill(load, even_amounts(load, placement), placement, context.topology.node_ids())


@dataclass(frozen=True, kw_only=True, slots=True)
class FineEpPlanner(Planner):
    """FineEP: copies as fixed by EPLB's rule, tokens divided by a linear program for the lowest bottleneck.

    The exact split solves the same program in integers, local tokens first, so it is used here.
    """

    extra_per_rank: int = 2
    name: str = "fine-ep"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        return EplbPlanner(extra_per_rank=self.extra_per_rank).place(load, context)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        return exact_split(load, placement, context.topology)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlepPlanner(Planner):
    """Least-loaded EP: above `threshold` max/mean, homes keep up to alpha x mean and the rest spills in chunks."""

    alpha: float = 1.0
    threshold: float = 1.3
    chunk: int = 64
    name: str = "llep"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        state = Copies.of(context)
        everywhere = np.ones((context.experts, context.ranks), dtype=np.bool_)
        amounts = self._amounts(load, state.home, everywhere, state.free)
        for e, r in np.argwhere(amounts > 0):
            state.copy_to(int(e), np.array([r]))
        return state.placement()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        load = check_load(load)
        slots = np.full(context.ranks, context.experts, dtype=np.int64)
        amounts = self._amounts(load, placement.home, placement.holds, slots)
        return fill(load, amounts, placement, context.topology.node_ids())

    def _amounts(
        self, load: IntArray, home: IntArray, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], free: IntArray
    ) -> IntArray:
        """Tokens of e on r, [E, R]."""
        experts, ranks = home.size, load.shape[0]
        total = load.sum(axis=0)
        amounts = np.zeros((experts, ranks), dtype=np.int64)
        at_home = np.bincount(home, weights=total, minlength=ranks).astype(np.int64)
        amounts[np.arange(experts), home] = total
        if at_home.max() * ranks < self.threshold * max(1, int(total.sum())):
            return amounts
        cap = int(np.ceil(self.alpha * total.sum() / ranks))
        free = free.copy()
        taken = np.zeros(ranks, dtype=np.int64)  # what ranks compute so far
        pending = at_home.copy()  # what homes still have to take
        for e in np.argsort(-total, kind="stable"):
            h = home[e]
            pending[h] -= total[e]
            keep = int(np.clip(cap - taken[h] - pending[h], 0, total[e]))
            rest = int(total[e]) - keep
            amounts[e] = 0
            amounts[e, h] = keep
            while rest > 0:
                open_ranks = allowed[e] & ((free > 0) | (amounts[e] > 0))
                open_ranks[h] = False
                room = np.where(open_ranks, cap - taken - pending, -1)
                target = int(room.argmax())
                part = min(rest, max(int(room[target]), self.chunk))
                if room[target] <= 0:
                    target, part = int(h), rest
                elif amounts[e, target] == 0:
                    free[target] -= 1
                amounts[e, target] += part
                taken[target] += part if target != h else 0
                rest -= part
            taken[h] += amounts[e, h]
        return amounts


@dataclass(frozen=True, kw_only=True, slots=True)
class LaerPlanner(Planner):
    """LAER-MoE: even or heap-made copy counts, packed over the least covered nodes; the better by its own score."""

    extra_per_rank: int = 2
    name: str = "laer"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        total = load.sum(axis=0)
        slots = _slots(context, self.extra_per_rank)
        spread = np.full(context.experts, slots // context.experts, dtype=np.int64)
        spread[np.argsort(-total, kind="stable")[: slots % context.experts]] += 1
        best: tuple[float, Placement] | None = None
        for copies in (np.minimum(spread, context.ranks - 1), heap_copies(total, slots, context.ranks - 1)):
            placement = pack(copies, total, context, by_node=True)
            split = self.split(load, placement, context)
            pairs: FloatArray = split.tokens.sum(axis=1) * float(context.shape.token_bytes)
            seconds_per_token = context.shape.forward_flops_per_token / np.asarray(context.topology.flops_per_s)
            score = 4 * exchange_seconds(pairs, context.topology)
            score += 3 * float((split.rank_load() * seconds_per_token).max())
            if best is None or score < best[0]:
                best = (score, placement)
        return best[1] if best is not None else context.homes_only()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        load = check_load(load)
        return fill(load, even_amounts(load, placement), placement, context.topology.node_ids())


@dataclass(frozen=True, kw_only=True, slots=True)
class UltraEpPlanner(Planner):
    """UltraEP: bisect a load threshold (to 1 %); overloaded ranks export their heaviest experts where there is slack.

    `exact_match` is MoonEP's variant: the most overloaded home meets the roomiest rank until loads are even.
    """

    exact_match: bool = False
    name: str = "ultraep"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        total = check_load(load).sum(axis=0)
        even = float(total.sum()) / context.ranks
        done, placement = self._export(total, even, context)
        if self.exact_match or done or even == 0:
            return placement
        low = even
        high = float(np.bincount(np.asarray(context.home), weights=total, minlength=context.ranks).max())
        placement = context.homes_only()
        while high - low > 0.01 * even:
            middle = (low + high) / 2
            done, candidate = self._export(total, middle, context)
            if done:
                high, placement = middle, candidate
            else:
                low = middle
        return placement

    def _export(self, total: IntArray, level: float, context: PlanContext) -> tuple[bool, Placement]:
        """Exports that bring all loads to `level`: (whether all excess was placed, placement)."""
        state = Copies.of(context)
        slack = level - np.bincount(state.home, weights=total, minlength=context.ranks)
        left = total.astype(np.float64)
        stuck = np.zeros(context.ranks, dtype=np.bool_)
        while True:
            excess = np.where(stuck, 0.0, -slack)
            giver = int(excess.argmax())
            if excess[giver] < 1.0:
                return bool((slack > -1.0).all()), state.placement()
            mine = np.flatnonzero(state.home == giver)
            e = int(mine[left[mine].argmax()])
            open_ranks = (state.free > 0) & (slack > 0) & ~state.holds[e]
            if left[e] <= 0 or not open_ranks.any():
                stuck[giver] = True
                continue
            target = int(np.where(open_ranks, slack, -1.0).argmax())
            part = min(excess[giver], slack[target], left[e])
            left[e] -= part
            slack[giver] += part
            slack[target] -= part
            state.copy_to(e, np.array([target]))

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        return exact_split(load, placement, context.topology)
