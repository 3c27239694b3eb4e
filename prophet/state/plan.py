"""Cutting a route into stages whose buffers fit a memory budget; pure, and equal on every rank.

Shape legend: P ranks. In step s of 0 .. P-1, rank i exchanges with rank (s - i) mod P and no other, so every pair meets
in exactly one step, whatever P is. (DynaTran prints a pairing by OR; XOR was meant, and that needs steps up to the next
power of two.) The cost of a step is the largest over all ranks, because a rank that reckoned with its own cost alone
would cut the stages elsewhere than its peers and wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prophet.errors import BudgetError
from prophet.state.route import Route, Transfer
from prophet.state.space import Box, flat_boxes


@dataclass(frozen=True)
class Plan:
    """A route in stages: [stages][...] transfers; in no stage does a rank buffer more than `budget_bytes`."""

    route: Route
    budget_bytes: int
    stages: tuple[tuple[Transfer, ...], ...]

    def buffer_bytes(self, rank: int) -> int:
        """Largest buffer (sent and received together) that `rank` needs in any stage."""
        return max((_rank_bytes(self.route, stage, rank) for stage in self.stages), default=0)


def peer(rank: int, step: int, ranks: int) -> int:
    """Whom `rank` meets in `step`; may be the rank itself."""
    return (step - rank) % ranks


def _rank_bytes(route: Route, transfers: Sequence[Transfer], rank: int) -> int:
    return sum(route.n_bytes(t) for t in transfers if rank in (t.source, t.destination))


def _cost(route: Route, transfers: Sequence[Transfer]) -> int:
    """Largest buffer of any rank for these transfers."""
    load: dict[int, int] = {}
    for t in transfers:
        for rank in (t.source, t.destination):
            load[rank] = load.get(rank, 0) + route.n_bytes(t)
    return max(load.values(), default=0)


def plan(route: Route, budget_bytes: int) -> Plan:
    """Stages of as many consecutive steps as fit in the budget; a step that alone does not fit is split.

    `budget_bytes` bounds what each rank holds in send and receive buffers together, and must be equal on all ranks: use
    the least of what they have. Raises `BudgetError` if an element on its way out and one on its way in do not fit.
    """
    if budget_bytes < 1:
        raise BudgetError(f"the budget must be at least one byte, got {budget_bytes}")
    steps: list[list[Transfer]] = [[] for _ in range(route.ranks)]
    for t in route.transfers:
        steps[(t.source + t.destination) % route.ranks].append(t)
    stages: list[tuple[Transfer, ...]] = []
    current: list[Transfer] = []
    current_cost = 0
    for step in steps:
        for part in _within(route, step, budget_bytes):
            cost = _cost(route, part)
            if current and current_cost + cost > budget_bytes:
                stages.append(tuple(current))
                current, current_cost = [], 0
            current += part
            current_cost += cost
    if current:
        stages.append(tuple(current))
    return Plan(route, budget_bytes, tuple(stages))


def _within(route: Route, step: list[Transfer], budget_bytes: int) -> list[list[Transfer]]:
    """The step itself where it fits, else parts of it that do: half the budget in each direction of every pair."""
    if not step:
        return []
    if _cost(route, step) <= budget_bytes:
        return [step]
    half = budget_bytes // 2
    windows: dict[int, list[Transfer]] = {}
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for t in step:
        pairs.setdefault((t.source, t.destination), []).append(t)
    for transfers in pairs.values():
        number, used = 0, 0
        for t in transfers:
            item = route.space[t.name].item_bytes
            if item > half:
                raise BudgetError(
                    f"a budget of {budget_bytes} bytes cannot hold one element of {t.name} ({item} bytes) "
                    f"on its way out and one on its way in"
                )
            for box in _fill(t, item, half, used):
                size = box.elements * item
                if used + size > half:
                    number, used = number + 1, 0
                windows.setdefault(number, []).append(Transfer(t.name, box, t.source, t.destination))
                used += size
    return list(windows.values())


def _fill(transfer: Transfer, item: int, half: int, used: int) -> list[Box]:
    """The transfer's box in parts: first what the open window still takes, then whole windows."""
    total = transfer.box.elements
    first = min(total, (half - used) // item)
    cuts = [0, *range(first, total, half // item), total]
    shape, offset = transfer.box.shape, transfer.box.start
    return [box.shift(offset) for begin, end in pairwise(cuts) for box in flat_boxes(shape, begin, end)]
