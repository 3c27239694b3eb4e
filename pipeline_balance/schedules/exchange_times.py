"""What a schedule takes with attention exchange: start and end of every pass, waits for help, and what it costs.

Shape legend: P ranks, S stages, N slices. In a position a rank sends early keys and values, runs a layer up to its
attention, sends queries, computes its own part, then others', and waits for what comes back. All are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.exchange import Exchange, Help
from pipeline_balance.schedules.simulate import Simulation, peak_activation_bytes


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Of one layer of one slice, in one direction.

    Attributes:
        piece_s: Attention to one piece, which is half a chunk.
        diagonal_s: Attention of the slice to itself.
        rest_s: All else.
        call_s: A further call of the kernel, beside its products.
        slice_s: The transfer of one slice of queries.
    """

    piece_s: float
    diagonal_s: float
    rest_s: float = 0.0
    call_s: float = 0.0
    slice_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExchangeCosts:
    """What passes cost.

    Attributes:
        forward: Of a layer forward.
        backward: Of a layer backward.
        kv_share: Key heads over query heads.
        boundary_s: A transfer between stages on different ranks.
    """

    forward: LayerSeconds
    backward: LayerSeconds
    kv_share: float = 1.0
    boundary_s: float = 0.0

    def ahead_s(self, one: Help, *, forward: bool) -> float:
        """Until a helper has keys and values, from when the donor begins the layer."""
        return (self.forward if forward else self.backward).slice_s * self.kv_share * len(one.sent)

    def there_s(self, *, forward: bool) -> float:
        """Until a helper has the rest, from when the donor comes to its attention."""
        # queries; backward also the output and its gradient
        return self.forward.slice_s if forward else 3 * self.backward.slice_s

    def back_s(self, one: Help, *, forward: bool) -> float:
        """Until the donor has what the helper has found."""
        of, pieces = (self.forward, 0) if forward else (self.backward, len(one.freed))
        return of.slice_s * (1 + self.kv_share * pieces)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether exchange pays.

    Attributes:
        without_s: A step without exchange.
        with_s: A step with it.
        free_s: The same if transfers and further calls of the kernel took no time.
    """

    without_s: float
    with_s: float
    free_s: float

    @property
    def pays(self) -> bool:
        """Whether a step is shorter with it."""
        return self.with_s < self.without_s

    def __str__(self) -> str:
        gain, cost = self.without_s - self.free_s, self.with_s - self.free_s
        state = "on" if self.pays else "off"
        return f"exchange is {state}: it saves {gain:.3g} s of waits and costs {cost:.3g} s of transfers and calls"


def simulate_exchange(
    exchange: Exchange,
    schedule: Schedule,
    costs: ExchangeCosts,
    *,
    helped: bool = True,
    activation_bytes: Sequence[int] = (),
    chunk_gradient_bytes: Sequence[int] = (),
    piece_bytes: int = 0,
) -> Simulation:
    """Run a schedule with exchange on paper.

    Args:
        exchange: Its plan.
        schedule: The schedule that was planned.
        costs: Of passes.
        helped: False: the same schedule without exchange.
        activation_bytes: What a unit keeps in a stage [S].
        chunk_gradient_bytes: What the gradients of one slice's keys and values take [S].
        piece_bytes: What a piece's keys and values take in one layer; a helper holds them beside its own.
    """
    run = _Run(exchange, schedule, costs, helped)
    for number in range(len(exchange.slots)):
        run.slot(number)
    holds = helped and piece_bytes
    kept = [[piece_bytes * held for held in row] for row in exchange.held_pieces()] if holds else ()
    return Simulation(
        makespan_s=max(run.free),
        start_s=_by_action(schedule, run.start),
        end_s=_by_action(schedule, run.end),
        busy_s=tuple(run.busy),
        # means over replicas come after all of it, and exchange does not change them
        reduced_s=(0.0,) * schedule.ranks,
        peak_activation_bytes=peak_activation_bytes(schedule, activation_bytes, chunk_gradient_bytes, kept),
    )


def _by_action(schedule: Schedule, times: Sequence[Sequence[float]]) -> dict[Action, float]:
    return {a: s for row, its in zip(schedule.actions, times, strict=True) for a, s in zip(row, its, strict=True)}


def verdict(exchange: Exchange, schedule: Schedule, costs: ExchangeCosts) -> Verdict:
    """Whether exchange pays.

    Args:
        exchange: The plan.
        schedule: The schedule that was planned.
        costs: Of passes, with transfers and further calls.
    """

    def free(of: LayerSeconds) -> LayerSeconds:
        return LayerSeconds(piece_s=of.piece_s, diagonal_s=of.diagonal_s, rest_s=of.rest_s)

    nothing = ExchangeCosts(
        forward=free(costs.forward), backward=free(costs.backward), kv_share=costs.kv_share, boundary_s=costs.boundary_s
    )
    return Verdict(
        without_s=simulate_exchange(exchange, schedule, costs, helped=False).makespan_s,
        with_s=simulate_exchange(exchange, schedule, costs).makespan_s,
        free_s=simulate_exchange(exchange, schedule, nothing).makespan_s,
    )


class _Run:
    """A schedule as far as it has been run.

    Attributes:
        free: When every rank is free [P].
        busy: Seconds that every rank computes [P].
        start, end: When every rank begins and ends its action in every slot [P, slots].
    """

    def __init__(self, exchange: Exchange, schedule: Schedule, costs: ExchangeCosts, helped: bool) -> None:
        self._exchange, self._costs, self._helped = exchange, costs, helped
        ranks = range(schedule.ranks)
        self.free, self.busy = [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.start: list[list[float]] = [[] for _ in ranks]
        self.end: list[list[float]] = [[] for _ in ranks]
        home = schedule.stage_ranks
        # by direction and stage: what a transfer from the stage before takes
        apart = [costs.boundary_s if a != b else 0.0 for a, b in pairwise(home)]
        self._coming = {True: [0.0, *apart], False: [*apart, 0.0]}
        # when passes' results are there, by direction, stage and unit; in front of the first stage they always are
        self._ended = {way: [[0.0] * schedule.units for _ in range(schedule.stages + 1)] for way in (True, False)}

    def slot(self, number: int) -> None:
        """Run one slot."""
        slot = self._exchange.slots[number]
        way, ended, coming = slot.forward, self._ended[slot.forward], self._coming[slot.forward]
        last = len(ended) - 2
        at = list(self.free)
        for rank, one in enumerate(slot.passes):
            # backwards count stages from the last one
            if one is not None:
                before = one[0] if way else last - one[0]
                at[rank] = max(at[rank], ended[before][one[1]] + coming[one[0]])
            self.start[rank].append(at[rank])
        for position in range(self._exchange.positions(number)):
            helps = self._exchange.at(number, position) if self._helped else ()
            runs = [one is not None and self._exchange.layers[one[0]] > position for one in slot.passes]
            units = [one[1] if one is not None else 0 for one in slot.passes]
            self._position(at, runs, units, helps, forward=way)
        for rank, one in enumerate(slot.passes):
            if one is not None:
                ended[one[0] + 1 if way else last - one[0] + 1][one[1]] = at[rank]
            self.end[rank].append(at[rank])
        self.free = at

    def _position(
        self, at: list[float], runs: Sequence[bool], units: Sequence[int], helps: Sequence[Help], *, forward: bool
    ) -> None:
        """One layer of every rank; `at` is when ranks come to it, and then when they leave it."""
        costs = self._costs
        of = costs.forward if forward else costs.backward
        begun = list(at)
        asked = [began + (of.rest_s if here else 0.0) for began, here in zip(at, runs, strict=True)]
        given = [0] * len(at)
        for one in helps:
            given[one.donor] += len(one.pieces)
        done, back = list(asked), [0.0] * len(at)
        for rank, here in enumerate(runs):
            if here:
                own = of.diagonal_s + of.piece_s * (len(self._exchange.pieces[units[rank]]) - given[rank])
                done[rank] += own
                self.busy[rank] += own + of.rest_s
        # what is there first is computed first
        for one in sorted(helps, key=lambda help: (asked[help.donor], help.donor)):
            took = of.call_s + of.piece_s * len(one.pieces)
            keys_s = begun[one.donor] + costs.ahead_s(one, forward=forward)
            queries_s = max(asked[one.donor], keys_s) + costs.there_s(forward=forward)
            done[one.helper] = max(done[one.helper], queries_s) + took
            self.busy[one.helper] += took
            back[one.donor] = max(back[one.donor], done[one.helper] + costs.back_s(one, forward=forward))
        at[:] = [max(a, b) for a, b in zip(done, back, strict=True)]
