"""Which slices suit a pipeline: every candidate is simulated with measured costs, and the fastest that fits is taken.

Shape legend: L units of the model, P ranks, S stages, V stages per rank, M microbatches, N slices, T tokens of a
sequence, U = M N. All figures are of a microbatch with all of its rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.exchange import Exchange, plan
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds, simulate_exchange
from pipeline_balance.schedules.offload import Offload, hidden_in, offload
from pipeline_balance.schedules.simulate import Durations, Simulation, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import Order, slice_starts, sliced
from pipeline_balance.slices.options import Balance, Recompute, SliceOptions
from prophet.errors import SpecError

Auto = Literal["auto"]
# Of the shortest step: what is as fast as it is taken by its memory
NEARLY = 0.02
# Slices of a sequence that are tried at most
MOST_SLICES = 32
# Messages under way beside those of the slices that a rank holds: two or five that come, four that leave
_MESSAGES = {True: 6, False: 9}


class SliceSeconds(NamedTuple):
    """What a slice of some length costs in one unit of the model.

    Attributes:
        tokens: Of the slice.
        forward_s: If nothing comes before it.
        backward_s: Likewise.
        forward_column_s: More for every earlier token that it attends to.
        backward_column_s: Likewise.
    """

    tokens: int
    forward_s: float
    backward_s: float
    forward_column_s: float = 0.0
    backward_column_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """What one unit of the model costs.

    Attributes:
        lengths: Of slices of some lengths, ascending.
        kept_bytes: What a token keeps until its backward, by what is computed again; "none" at least.
        again_s: Seconds that computing again adds to a token's backward, likewise.
        gradient_bytes: What gradients of a token's keys and values take.
        chunk_bytes: What its keys and values take of what it keeps: they never go to the host.
        attentions: How many attentions it has.
        window: How many tokens a token sees; None: all before it.
    """

    lengths: tuple[SliceSeconds, ...]
    kept_bytes: Mapping[str, float]
    again_s: Mapping[str, float] = field(default_factory=dict)
    gradient_bytes: float = 0.0
    chunk_bytes: float = 0.0
    attentions: int = 0
    window: int | None = None

    def seconds(self, tokens: int, before: int, recompute: str = "none") -> tuple[float, float]:
        """What a slice takes forward and backward.

        Args:
            tokens: Of the slice.
            before: Tokens of the sequence that come before it.
            recompute: What is computed again.
        """
        seen = before if self.window is None else min(before, self.window - 1)
        forward, backward, forward_column, backward_column = self._at(tokens)
        again = self.again_s.get(recompute, 0.0) * tokens
        return forward + seen * forward_column, backward + again + seen * backward_column

    def kept(self, recompute: str) -> float:
        """What a token keeps; what is in front of the layers and behind them is never computed again."""
        return self.kept_bytes.get(recompute, self.kept_bytes["none"])

    def _at(self, tokens: int) -> list[float]:
        """The figures of a slice of any length, on lines between those that were measured."""
        at = [one.tokens for one in self.lengths]
        share = [value * tokens / at[0] for value in self.lengths[0][1:]]
        if len(at) == 1:
            return share
        k = min(max(bisect_right(at, tokens), 1), len(at) - 1)
        (below, *low), (above, *high) = self.lengths[k - 1 : k + 1]
        found = [a + (b - a) / (above - below) * (tokens - below) for a, b in zip(low, high, strict=True)]
        # noise may tilt the lines at both ends
        least = share if tokens < at[0] else high if tokens > at[-1] else found
        return [max(pair) for pair in zip(found, least, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceCosts:
    """What slices cost on the slowest rank.

    Attributes:
        units: The model's units [L].
        boundary_bytes: What a token's activations take between two stages.
        latency_s: Of a message.
        byte_s: Seconds that each of its bytes adds.
        heads: Of queries, and of keys, of the model's attention.
        query_bytes: What a token's queries take in one attention; 0: attention cannot be exchanged.
        call_s: What a further call of attention's kernel takes, forward and backward.
        wide: How many times as wide as its keys the sums of a token's gradients are: one or two.
    """

    units: tuple[UnitCosts, ...]
    boundary_bytes: float = 0.0
    latency_s: float = 0.0
    byte_s: float = 0.0
    heads: tuple[int, int] = (1, 1)
    query_bytes: float = 0.0
    call_s: tuple[float, float] = (0.0, 0.0)
    wide: int = 1

    def message_s(self, n_bytes: float) -> float:
        """Seconds of a message of so many bytes."""
        return self.latency_s + self.byte_s * n_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSlices:
    """Slices that are chosen at the first batch of a length: what is "auto" is chosen, and what is named is kept.

    Attributes:
        slices: N, parts of every sequence.
        order: As `SliceOptions` has it.
        balance: As there.
        recompute: As there; for layers of your own "auto" is "none".
        stages_per_rank: V, which the stage map is made by and which is not chosen.
        memory_bytes: What a rank may hold beside parameters, their gradients and the optimizer's state. None takes what
            the device, or this process's share of the machine, has free at that moment.
        keep_bytes: As there, where attention is exchanged.
        host_bytes_per_s: Of the link to the host, each way. Where less memory or none would do without, what layers
            save waits there as far as the schedule hides it (`offload="auto"` there). None: nothing goes to the host,
            which on a CPU has no other memory.
        costs: What slices cost. None measures it on all ranks.

    Raises:
        SpecError: For values that do not exist, or do not fit together.
    """

    slices: int | Auto = "auto"
    order: Order | Auto = "auto"
    balance: Balance | Auto = "auto"
    recompute: Recompute | Auto = "auto"
    stages_per_rank: int = 1
    memory_bytes: int | None = None
    keep_bytes: int = 0
    host_bytes_per_s: float | None = None
    costs: SliceCosts | None = None

    models: ClassVar[str] = SliceOptions.models

    def __post_init__(self) -> None:
        limit = self.memory_bytes
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise SpecError(f"memory_bytes must be a number of bytes from 1 on, got {limit!r}")
        keep = self.keep_bytes if self.balance in ("auto", "exchange") else 0
        if keep != self.keep_bytes:
            raise SpecError('keep_bytes needs balance="exchange" or "auto": other slices keep nothing of other ranks')
        # what is named must fit together, as it would there
        replace(
            self.whole(),
            slices=2 if self.slices == "auto" else self.slices,
            order="aligned" if self.order == "auto" else self.order,
            balance="exchange" if keep else "none" if self.balance == "auto" else self.balance,
            keep_bytes=keep,
            offload="auto" if self.host_bytes_per_s is not None else 0.0,
            host_bytes_per_s=self.host_bytes_per_s,
        )

    def whole(self) -> SliceOptions:
        """The same without slices."""
        recompute = "none" if self.recompute == "auto" else self.recompute
        return SliceOptions(1, self.stages_per_rank, recompute=recompute)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The pipeline that slices are chosen for.

    Attributes:
        stages: The units of every stage [S].
        ranks: The rank of every stage [S], from 0 to P - 1.
        tokens: Of every microbatch's sequences [M].
        lengths: Those of all replicas; slices must divide them unless they are uneven.
        memory_bytes: What every rank may hold [P]; None: there is no limit.
    """

    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    memory_bytes: tuple[int | None, ...]

    @property
    def used(self) -> int:
        """P."""
        return len(set(self.ranks))

    @property
    def stages_per_rank(self) -> int:
        """V."""
        return len(self.ranks) // self.used


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What is predicted of a candidate.

    Attributes:
        candidate: What would be in force.
        step_s: Seconds of a step.
        work_s: Seconds that a rank computes, over ranks on average.
        peak_bytes: What every rank holds at most [P].
    """

    candidate: SliceOptions
    step_s: float
    work_s: float
    peak_bytes: tuple[int, ...]

    def __str__(self) -> str:
        waits_s, peak = self.step_s - self.work_s, max(self.peak_bytes) / 1e6
        return (
            f"{self.step_s:.3g} s a step predicted (a rank works {self.work_s:.3g} s and waits {waits_s:.3g} s), "
            f"at most {peak:.4g} MB on a rank"
        )

    def over(self, memory_bytes: Sequence[int | None]) -> int:
        """Bytes by which the rank with the least room holds more than it may [P]; not above 0: all fit."""
        return max((a - b for a, b in zip(self.peak_bytes, memory_bytes, strict=True) if b is not None), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        score: What is in force, and what is predicted of it.
        whole: What is predicted without slices; None where such a schedule does not exist.
        scores: Of all candidates.
        reason: The choice in words, with its figures.
    """

    score: Score
    whole: Score | None
    scores: tuple[Score, ...]
    reason: str

    @property
    def options(self) -> SliceOptions:
        """What is in force."""
        return self.score.candidate

    def __str__(self) -> str:
        return self.reason


def numbers(asked: AutoSlices, ranks: int, lengths: Sequence[int]) -> list[int]:
    """Numbers of slices that are tried, ascending: powers of two, and their multiples of the ranks.

    Args:
        asked: What is named.
        ranks: P.
        lengths: Tokens of sequences.
    """
    if asked.slices != "auto":
        return [asked.slices]
    most = min(MOST_SLICES, *lengths)
    powers = [1 << k for k in range(most.bit_length())]
    return sorted({n for power in powers for n in (power, ranks * power) if n <= most})


def measured_lengths(asked: AutoSlices, ranks: int, lengths: Sequence[int]) -> list[int]:
    """Lengths of slices whose costs are worth measuring, ascending; whole sequences are the last.

    Args:
        asked: What is named.
        ranks: P.
        lengths: Tokens of sequences.
    """
    longest = max(lengths)
    tried = numbers(asked, ranks, lengths)
    # numbers between powers of two are interpolated
    each = [n for n in tried if n & (n - 1) == 0 or n in (tried[0], tried[-1])]
    return sorted({longest, *(max(longest // n, 1) for n in each)})


def choose(asked: AutoSlices, costs: SliceCosts, setting: Setting) -> Choice:
    """Choose the fastest candidate that fits in memory; of those within 2 % of it the one that holds least.

    What is faster and too large may fit with saved tensors on the host.

    Args:
        asked: What is named, and kept.
        costs: What slices cost.
        setting: The pipeline.

    Raises:
        SpecError: Nothing that may be chosen fits, or sequences cannot be cut.
    """
    scorer = _Scorer(asked, costs, setting)
    scores = [score for one in scorer.candidates() if (score := scorer.score(one)) is not None]
    limits = setting.memory_bytes
    if not scores:
        what = "" if asked.slices == "auto" else f" into {asked.slices} slices"
        raise SpecError(
            f"sequences of {', '.join(map(str, setting.lengths))} tokens cannot be cut{what} for {setting.used} ranks "
            f"with {setting.stages_per_rank} stages each, as AutoSlices asks"
        )
    fitting = [score for score in scores if score.over(limits) <= 0]
    if (away := scorer.on_host(scores, min((score.step_s for score in fitting), default=math.inf))) is not None:
        scores.append(away)
        fitting.append(away)
    if not fitting:
        least = min(scores, key=lambda score: score.over(limits))
        rank, need, room = max(
            ((r, a, b) for r, (a, b) in enumerate(zip(least.peak_bytes, limits, strict=True)) if b is not None),
            key=lambda one: one[1] - one[2],
        )
        link = asked.host_bytes_per_s
        raise SpecError(
            f"no slices fit in memory: the least need is {need} bytes on rank {rank}, with {_words(least.candidate)}, "
            f"and memory_bytes is {room} there"
            + ("" if link is None else f"; a link of {link / 1e9:.3g} GB/s to the host hides too little")
        )
    shortest = min(score.step_s for score in fitting)
    near = [score for score in fitting if score.step_s <= (1 + NEARLY) * shortest]
    # the first of equals, so that all ranks take the same
    best = min(near, key=lambda score: (max(score.peak_bytes), score.step_s))
    whole = scorer.score(asked.whole())
    return Choice(score=best, whole=whole, scores=tuple(scores), reason=_reason(best, whole, scores, limits))


def _words(one: SliceOptions) -> str:
    """A candidate in words."""
    again = f", recompute {one.recompute}" if one.recompute != "none" else ""
    if one.slices == 1:
        return f"no slices{again}"
    lengths = {"none": "equal", "uneven": "of equal cost", "exchange": "with exchange"}[one.balance]
    away = ", saved tensors on the host" if one.offloads else ""
    return f"{one.slices} slices, {lengths}, {one.order} order{again}{away}"


def _reason(best: Score, whole: Score | None, scores: Sequence[Score], limits: Sequence[int | None]) -> str:
    """What was chosen, and what of the others is closest to it."""
    room = min((limit for limit in limits if limit is not None), default=None)
    said = f"{_words(best.candidate)}: {best}" + (f", which may hold {room / 1e6:.4g} MB" if room is not None else "")
    others = [score for score in scores if score.candidate.slices > 1 and score.over(limits) <= 0]
    if best.candidate.slices == 1 and others:
        fastest = min(others, key=lambda score: score.step_s)
        said += f"; the fastest in slices, {_words(fastest.candidate)}: {fastest}"
    elif best.candidate.slices > 1 and whole is not None:
        said += f"; without slices {whole}" + (", which does not fit" if whole.over(limits) > 0 else "")
    if (link := best.candidate.host_bytes_per_s) is not None:
        said += f"; a link of {link / 1e9:.3g} GB/s to the host hides that, and without it "
        here = [score for score in scores if score.over(limits) <= 0 and not score.candidate.offloads]
        next_best = min(here, key=lambda score: score.step_s, default=None)
        said += f"the fastest that fits is {_words(next_best.candidate)}: {next_best}" if next_best else "nothing fits"
    left = [score for score in scores if score.over(limits) > 0 and score.step_s < best.step_s]
    if left:
        fastest = min(left, key=lambda score: score.step_s)
        said += f"; faster but too large is {_words(fastest.candidate)}: {fastest}"
    return said


class _Ran(NamedTuple):
    """A step that was simulated.

    Attributes:
        schedule: Its order.
        lengths: Of all slices, in tokens [U].
        durations: Seconds and bytes.
        found: What came of it.
    """

    schedule: Schedule
    lengths: Sequence[int]
    durations: Durations
    found: Simulation


def _plain(one: SliceOptions) -> SliceOptions:
    """The same without exchange."""
    return replace(one, balance="none", keep_bytes=0, exchange_costs=None) if one.exchanges else one


class _Scorer:
    """Simulates candidates; what several of them share is worked out once."""

    def __init__(self, asked: AutoSlices, costs: SliceCosts, setting: Setting) -> None:
        self._asked, self._costs, self._setting = asked, costs, setting
        self.score = cache(self._simulated)
        self._schedule = cache(self._sliced)
        self._seconds = cache(self._stage_seconds)
        self._attending = [unit for unit in costs.units if unit.attentions]
        self._windows = [unit.window for unit in self._attending for _ in range(unit.attentions)]
        self._plans: dict[int, Exchange] = {}

    def candidates(self) -> list[SliceOptions]:
        """What may be chosen, each once: what differs in words alone is left out."""
        asked, setting = self._asked, self._setting

        def allowed(named: Any, every: Sequence[Any]) -> Sequence[Any]:
            return every if named == "auto" else [named]

        modes = [how for how in get_args(Recompute) if all(how in unit.kept_bytes for unit in self._attending)]
        exchanged = self._costs.query_bytes and setting.used > 1
        balances = [one for one in get_args(Balance) if one != "exchange" or exchanged]
        # in the minimal order ranks cannot help each other
        every = product(allowed(asked.order, get_args(Order)), allowed(asked.balance, balances))
        ways = [way for way in every if way != ("minimal", "exchange")]
        return [
            self._options(n, order, balance, how)
            for n in numbers(asked, setting.used, setting.lengths)
            # with one slice all ways are one
            for order, balance in (ways[:1] if n == 1 else ways)
            for how in allowed(asked.recompute, modes)
        ]

    def _options(self, slices: int, order: Order, balance: Balance, recompute: Recompute) -> SliceOptions:
        exchange = balance == "exchange"
        return SliceOptions(
            slices=slices,
            stages_per_rank=self._setting.stages_per_rank,
            order=order,
            recompute=recompute,
            balance=balance,
            crossover_tokens=self._crossover if balance == "uneven" else None,
            keep_bytes=self._asked.keep_bytes if exchange else 0,
            exchange_costs=self._exchange_costs(slices, recompute) if exchange and slices > 1 else None,
        )

    def _simulated(self, one: SliceOptions) -> Score | None:
        """What is predicted; None where there is no such schedule, or sequences cannot be cut so."""
        if one.exchanges:
            return self._exchanged(one)
        ran = self._ran(one)
        if ran is None:
            return None
        messages = _MESSAGES[self._setting.stages_per_rank == 1] if self._setting.used > 1 else 0
        more = math.ceil(messages * self._costs.boundary_bytes * max(ran.lengths))
        found = ran.found
        return Score(
            candidate=one,
            step_s=found.makespan_s,
            work_s=sum(found.busy_s) / len(found.busy_s),
            peak_bytes=tuple(peak + more for peak in found.peak_activation_bytes),
        )

    def _ran(self, one: SliceOptions) -> _Ran | None:
        """A step without exchange; None where there is none."""
        setting, costs = self._setting, self._costs
        try:
            # several stages per rank do not go with every number
            schedule = self._schedule(one.slices, one.order)
            # also those of other replicas
            every = {*setting.lengths, *setting.tokens}
            cut = one.slices, one.crossover_tokens, self._windows
            starts = {tokens: slice_starts(tokens, *cut) for tokens in every}
        except SpecError:
            return None
        slices = [(b - a, a) for tokens in setting.tokens for a, b in pairwise(starts[tokens])]
        seconds = np.array([self._seconds(*place, one.recompute) for place in slices])
        forward, backward = seconds.transpose(1, 2, 0)
        lengths = [tokens for tokens, _ in slices]
        links = np.full(schedule.stages - 1, costs.message_s(costs.boundary_bytes * (sum(lengths) / len(lengths))))

        def n_bytes(of_token: Callable[[UnitCosts], float]) -> list[list[int]]:
            stages = [sum(of_token(costs.units[u]) for u in units) for units in setting.stages]
            return [[math.ceil(each * tokens) for tokens in lengths] for each in stages]

        durations = Durations(
            forward_s=forward,
            input_s=backward,
            weight_s=np.zeros_like(backward),
            forward_transfer_s=links,
            backward_transfer_s=links,
            activation_bytes=n_bytes(lambda unit: unit.kept(one.recompute)),
            chunk_gradient_bytes=n_bytes(lambda unit: unit.gradient_bytes),
        )
        return _Ran(schedule, lengths, durations, simulate(schedule, durations))

    def _sliced(self, slices: int, order: Order) -> Schedule:
        setting = self._setting
        shape = setting.used, setting.stages_per_rank, len(setting.tokens), slices
        # where nobody is helped, helps take no time
        return sliced(*shape, order, helped=order == "aligned")

    def _stage_seconds(self, tokens: int, before: int, recompute: str) -> list[list[float]]:
        """What a slice takes in every stage, forward and backward [2, S]."""
        of = [unit.seconds(tokens, before, recompute) for unit in self._costs.units]
        return [[sum(of[u][way] for u in units) for units in self._setting.stages] for way in (0, 1)]

    @cached_property
    def _crossover(self) -> int:
        """The tokens before one where attention costs as much as all else, by the shortest slice measured."""
        attending = self._attending or self._costs.units
        tokens = min(one.tokens for unit in attending for one in unit.lengths)
        alone = sum(sum(unit.seconds(tokens, 0)) for unit in attending)
        more = sum(sum(unit.seconds(tokens, 1)) - sum(unit.seconds(tokens, 0)) for unit in attending)
        # half of the slice itself comes before a token, on average; where nothing grows all slices are equal
        return max(round(alone / more - tokens / 2), 0) if more * 1e6 * tokens > alone else 10**9

    # --- the host ----------------------------------------------------------------------------------------------

    def on_host(self, scores: Sequence[Score], most_s: float) -> Score | None:
        """The fastest of what is too large that fits with saved tensors on the host; None where there is none.

        Args:
            scores: Of all candidates.
            most_s: It must be faster than that.
        """
        limits, link = self._setting.memory_bytes, self._asked.host_bytes_per_s
        if link is None:
            return None
        large = [score for score in scores if score.over(limits) > 0 and score.candidate.slices > 1]
        # what is hidden takes no time
        faster = sorted((score for score in large if score.step_s < most_s), key=lambda score: score.step_s)
        return next((found for score in faster if (found := self._offloaded(score, link)) is not None), None)

    def _offloaded(self, score: Score, bytes_per_s: float) -> Score | None:
        """The same with as much on the host as the schedule hides; None where that does not fit."""
        one, limits = score.candidate, self._setting.memory_bytes
        ran = self._ran(_plain(one))
        assert ran is not None
        whole = [tokens for tokens in self._setting.tokens for _ in range(one.slices)]
        sizes = [tokens / its for tokens, its in zip(ran.lengths, whole, strict=True)]
        # a plan knows no stages: what goes is that of the smallest here, and takes as long as the largest's
        least, most = [], []
        for row in ran.schedule.actions:
            stages = sorted({action.stage for action in row if action.kind == "F"})
            moved = [[self._moved(stage, tokens, one.recompute) for tokens in ran.lengths] for stage in stages]
            least.append([min(its) for its in zip(*moved, strict=True)])
            most.append([max(its) / bytes_per_s for its in zip(*moved, strict=True)])

        def after(plans: Iterable[Offload]) -> Score:
            away = [plan.away_bytes(moved) for plan, moved in zip(plans, least, strict=True)]
            kept, sums = ran.durations.activation_bytes, ran.durations.chunk_gradient_bytes
            peaks = zip(
                score.peak_bytes,
                ran.found.peak_activation_bytes,
                peak_activation_bytes(ran.schedule, kept, sums, away),
                strict=True,
            )
            candidate = replace(one, offload="auto", host_bytes_per_s=bytes_per_s)
            return replace(score, candidate=candidate, peak_bytes=tuple(peak - b + a for peak, b, a in peaks))

        rows = ran.schedule.actions
        # what needs least, whether hidden or not, is soon known
        if after(offload(row, one.slices, 1.0, sizes=sizes) for row in rows).over(limits) > 0:
            return None
        plans = [hidden_in(ran.found, row, one.slices, sizes, its).plan for row, its in zip(rows, most, strict=True)]
        found = after(plans)
        return found if found.over(limits) <= 0 else None

    def _moved(self, stage: int, tokens: int, recompute: str) -> int:
        """Bytes of a slice that may leave a stage: neither keys and values, nor what it has received."""
        units = [self._costs.units[unit] for unit in self._setting.stages[stage]]
        each = sum(unit.kept(recompute) - unit.chunk_bytes for unit in units)
        return max(math.floor((each - (self._costs.boundary_bytes if stage else 0.0)) * tokens), 0)

    # --- exchange ----------------------------------------------------------------------------------------------

    def _exchange_costs(self, slices: int, recompute: Recompute) -> ExchangeCosts | None:
        """Of an attention of the model, on average; None where it has none."""
        costs, units, tokens = self._costs, self._attending, max(self._setting.tokens) // slices
        if not units:
            return None
        count = sum(unit.attentions for unit in units)
        alone, longer = (
            [sum(way) for way in zip(*(unit.seconds(tokens, before, recompute) for unit in units), strict=True)]
            for before in (0, 1)
        )
        forward, backward = (
            LayerSeconds(
                # nothing costs nothing: a plan counts calls in pieces
                piece_s=max((more - rest) / count * tokens / 2, 1e-12),
                diagonal_s=0.0,
                rest_s=rest / count,
                call_s=call_s,
                slice_s=costs.message_s(costs.query_bytes * tokens),
            )
            for rest, more, call_s in zip(alone, longer, costs.call_s, strict=True)
        )
        queries, keys = costs.heads
        boundary_s = costs.message_s(costs.boundary_bytes * tokens)
        return ExchangeCosts(forward=forward, backward=backward, kv_share=keys / queries, boundary_s=boundary_s)

    def _exchanged(self, one: SliceOptions) -> Score | None:
        """What is predicted with exchange: as without it, but for what it saves and holds."""
        plain = self.score(_plain(one))
        if plain is None:
            return None
        costs, tokens = self._costs, max(self._setting.tokens) // one.slices
        # a slice's keys in one attention
        key_bytes = costs.query_bytes * costs.heads[1] / costs.heads[0] * tokens
        # of pieces that came now; those that are kept have their memory
        more = one.keep_bytes + math.ceil(2 * key_bytes * (1 + costs.wide))
        return replace(
            plain,
            candidate=one,
            step_s=plain.step_s - self._saved_s(one, key_bytes),
            peak_bytes=tuple(peak + more for peak in plain.peak_bytes),
        )

    def _saved_s(self, one: SliceOptions, key_bytes: float) -> float:
        """Seconds by which exchange shortens a step; 0 where it would not pay, as it is off then."""
        costs, of = self._costs, one.exchange_costs
        if not costs.query_bytes or of is None:
            return 0.0
        schedule = self._schedule(one.slices, one.order)
        if one.slices not in self._plans:
            self._plans[one.slices] = plan(
                schedule,
                [sum(costs.units[u].attentions for u in units) for units in self._setting.stages],
                heads=costs.heads,
                call=max(each.call_s / each.piece_s for each in (of.forward, of.backward)),
                keep=int(one.keep_bytes // key_bytes),
                gradients=costs.wide,
            )
        without_s, with_s = (
            simulate_exchange(self._plans[one.slices], schedule, of, helped=helped).makespan_s
            for helped in (False, True)
        )
        return max(without_s - with_s, 0.0)
