"""Which slices suit a pipeline: every candidate is simulated with measured costs, and the fastest that fits is taken.

Shape legend: L units of the model, P ranks, S stages, V stages per rank, M microbatches, N slices, T tokens of a
sequence, U = M N. All figures are of a microbatch with all of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import ClassVar, Literal, get_args

import numpy as np

from pipeline_balance.schedules.actions import Schedule, ScheduleError
from pipeline_balance.schedules.exchange import Exchange, plan
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds, verdict
from pipeline_balance.schedules.simulate import Durations, simulate
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSeconds:
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
        attentions: How many attentions it has.
        window: How many tokens a token sees; None: all before it.
    """

    lengths: tuple[SliceSeconds, ...]
    kept_bytes: Mapping[str, float]
    again_s: Mapping[str, float] = field(default_factory=dict)
    gradient_bytes: float = 0.0
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
        forward, backward, *columns = (
            self._at(tokens, name) for name in ("forward_s", "backward_s", "forward_column_s", "backward_column_s")
        )
        again = self.again_s.get(recompute, 0.0) * tokens
        return forward + seen * columns[0], backward + again + seen * columns[1]

    def _at(self, tokens: int, name: str) -> float:
        """A figure at any length, on lines between those that were measured."""
        at, value = [one.tokens for one in self.lengths], [float(getattr(one, name)) for one in self.lengths]
        if len(at) == 1:
            return value[0] * tokens / at[0]
        k = min(max(sum(a <= tokens for a in at), 1), len(at) - 1)
        slope = (value[k] - value[k - 1]) / (at[k] - at[k - 1])
        found = value[k - 1] + slope * (tokens - at[k - 1])
        # noise may tilt the lines at both ends
        if tokens < at[0]:
            return max(found, value[0] * tokens / at[0])
        return max(found, value[-1]) if tokens > at[-1] else found


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
        """Seconds of a message.

        Args:
            n_bytes: What it has.
        """
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
        SliceOptions(
            slices=2 if self.slices == "auto" else self.slices,
            stages_per_rank=self.stages_per_rank,
            order="aligned" if self.order == "auto" else self.order,
            balance="exchange" if keep else "none" if self.balance == "auto" else self.balance,
            recompute="none" if self.recompute == "auto" else self.recompute,
            keep_bytes=keep,
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be chosen; the values are those of `SliceOptions`."""

    slices: int
    order: Order = "minimal"
    balance: Balance = "none"
    recompute: Recompute = "none"

    def __str__(self) -> str:
        again = f", recompute {self.recompute}" if self.recompute != "none" else ""
        if self.slices == 1:
            return f"no slices{again}"
        lengths = {"none": "equal", "uneven": "of equal cost", "exchange": "with exchange"}[self.balance]
        return f"{self.slices} slices, {lengths}, {self.order} order{again}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What is predicted of a candidate.

    Attributes:
        candidate: What is simulated.
        step_s: Seconds of a step.
        work_s: Seconds that a rank computes, over ranks on average.
        peak_bytes: What every rank holds at most [P].
    """

    candidate: Candidate
    step_s: float
    work_s: float
    peak_bytes: tuple[int, ...]

    @property
    def wait_s(self) -> float:
        """Seconds that a rank waits, on average."""
        return self.step_s - self.work_s

    def over(self, memory_bytes: Sequence[int | None]) -> int:
        """Bytes by which the rank that has the least room holds more than it may; not above 0: all fit.

        Args:
            memory_bytes: What every rank may hold [P].
        """
        return max((a - b for a, b in zip(self.peak_bytes, memory_bytes, strict=True) if b is not None), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        options: What is in force.
        score: What is predicted of it.
        whole: What is predicted without slices; None where such a schedule does not exist.
        scores: Of all candidates.
        reason: The choice in words, with its figures.
    """

    options: SliceOptions
    score: Score
    whole: Score | None
    scores: tuple[Score, ...]
    reason: str

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
    return sorted({n for n in (*powers, *(ranks * power for power in powers)) if n <= most})


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
    if not fitting:
        least = min(scores, key=lambda score: score.over(limits))
        rank, need, room = max(
            ((r, a, b) for r, (a, b) in enumerate(zip(least.peak_bytes, limits, strict=True)) if b is not None),
            key=lambda one: one[1] - one[2],
        )
        raise SpecError(
            f"no slices fit in memory: the least need is {need} bytes on rank {rank}, with {least.candidate}, and "
            f"memory_bytes is {room} there"
        )
    shortest = min(score.step_s for score in fitting)
    near = [score for score in fitting if score.step_s <= (1 + NEARLY) * shortest]
    # the first of equals, so that all ranks take the same
    best = min(near, key=lambda score: (max(score.peak_bytes), score.step_s))
    whole = scorer.score(Candidate(1, recompute=asked.whole().recompute))
    return Choice(
        options=scorer.options(best.candidate),
        score=best,
        whole=whole,
        scores=tuple(scores),
        reason=_reason(best, whole, scores, limits),
    )


def _reason(best: Score, whole: Score | None, scores: Sequence[Score], limits: Sequence[int | None]) -> str:
    def figures(score: Score) -> str:
        return f"work {score.work_s:.3g} s and waits {score.wait_s:.3g} s"

    def size(score: Score) -> str:
        return f"{max(score.peak_bytes) / 1e6:.4g} MB"

    room = [limit for limit in limits if limit is not None]
    said = f"{best.candidate}: {best.step_s:.3g} s a step predicted ({figures(best)} of a rank), at most {size(best)}"
    said += f" of {min(room) / 1e6:.4g} MB on a rank" if room else " on a rank"
    others = [score for score in scores if score.candidate.slices > 1 and score.over(limits) <= 0]
    if best.candidate.slices == 1 and others:
        next_ = min(others, key=lambda score: score.step_s)
        said += f"; the fastest in slices, {next_.candidate}: {next_.step_s:.3g} s ({figures(next_)}), {size(next_)}"
    elif best.candidate.slices > 1 and whole is not None:
        said += f"; without slices {whole.step_s:.3g} s ({figures(whole)}), {size(whole)}"
        said += ", which does not fit" if whole.over(limits) > 0 else ""
    left = [score for score in scores if score.over(limits) > 0 and score.step_s < best.step_s]
    if left:
        first = min(left, key=lambda score: score.step_s)
        said += f"; faster but too large is {first.candidate}: {first.step_s:.3g} s, {size(first)}"
    return said


class _Scorer:
    """Simulates candidates.

    Args:
        asked: What is named.
        costs: What slices cost.
        setting: The pipeline.
    """

    def __init__(self, asked: AutoSlices, costs: SliceCosts, setting: Setting) -> None:
        self._asked, self._costs, self._setting = asked, costs, setting
        self._schedules: dict[tuple[int, Order, bool], Schedule | None] = {}
        self._plans: dict[int, Exchange] = {}

    def candidates(self) -> list[Candidate]:
        """What may be chosen, each once: what differs in words alone is left out."""
        asked, setting, costs = self._asked, self._setting, self._costs

        def named(value: str, every: Sequence[str]) -> Sequence[str]:
            return every if value == "auto" else [value]

        attending = [unit for unit in costs.units if unit.attentions]
        again = [how for how in get_args(Recompute) if all(how in unit.kept_bytes for unit in attending)]
        balances = get_args(Balance) if costs.query_bytes and setting.used > 1 else ("none", "uneven")
        found = []
        for n in numbers(asked, setting.used, setting.lengths):
            ways = [*product(named(asked.order, get_args(Order)), named(asked.balance, balances))]
            # in the minimal order ranks cannot help each other
            ways = [way for way in ways if way != ("minimal", "exchange")]
            # with one slice all ways are one
            for order, balance in ways[:1] if n == 1 else ways:
                found += [Candidate(n, order, balance, how) for how in named(asked.recompute, again)]  # type: ignore[arg-type]
        return found

    def options(self, one: Candidate) -> SliceOptions:
        """What puts a candidate in force.

        Args:
            one: The candidate.
        """
        exchanges, uneven = one.balance == "exchange", one.balance == "uneven"
        return SliceOptions(
            slices=one.slices,
            stages_per_rank=self._setting.stages_per_rank,
            order=one.order,
            recompute=one.recompute,
            balance=one.balance,
            crossover_tokens=self._crossover if uneven else None,
            keep_bytes=self._asked.keep_bytes if exchanges else 0,
            exchange_costs=self._exchange_costs(one) if exchanges and one.slices > 1 else None,
        )

    def score(self, one: Candidate) -> Score | None:
        """What is predicted; None where there is no such schedule, or sequences cannot be cut so.

        Args:
            one: The candidate.
        """
        schedule = self._schedule(one, helped=False)
        starts = self._starts(one)
        if schedule is None or starts is None:
            return None
        setting, costs = self._setting, self._costs
        slices = [(b - a, a) for its in starts for a, b in pairwise(its)]
        # microbatches are alike, mostly, so every slice is looked up once
        each = {place: self._stage_seconds(*place, one.recompute) for place in {*slices}}
        forward, backward = (np.array([each[place][way] for place in slices]).T for way in (0, 1))
        longest = max(tokens for tokens, _ in slices)
        mean = sum(tokens for tokens, _ in slices) / len(slices)
        links = np.full(schedule.stages - 1, costs.message_s(costs.boundary_bytes * mean))
        found = simulate(
            schedule,
            Durations(
                forward_s=forward,
                input_s=backward,
                weight_s=np.zeros_like(backward),
                forward_transfer_s=links,
                backward_transfer_s=links,
                activation_bytes=[[math.ceil(n * t) for t, _ in slices] for n in self._kept(one.recompute)],
                chunk_gradient_bytes=[[math.ceil(n * t) for t, _ in slices] for n in self._gradients()],
            ),
        )
        messages = _MESSAGES[setting.stages_per_rank == 1] if setting.used > 1 else 0
        more = math.ceil(messages * costs.boundary_bytes * longest)
        step_s = found.makespan_s
        if one.balance == "exchange" and one.slices > 1:
            step_s -= self._saved_s(one)
            # of pieces that came now; those that are kept have their memory
            more += self._asked.keep_bytes + math.ceil(2 * self._key_bytes * (1 + costs.wide) * longest)
        return Score(
            candidate=one,
            step_s=step_s,
            work_s=sum(found.busy_s) / len(found.busy_s),
            peak_bytes=tuple(peak + more for peak in found.peak_activation_bytes),
        )

    def _schedule(self, one: Candidate, *, helped: bool) -> Schedule | None:
        key = one.slices, one.order, helped
        if key not in self._schedules:
            setting = self._setting
            shape = setting.used, setting.stages_per_rank, len(setting.tokens), one.slices
            try:
                self._schedules[key] = sliced(*shape, one.order, helped=helped)
            except ScheduleError:
                # several stages per rank do not go with every number
                self._schedules[key] = None
        return self._schedules[key]

    def _starts(self, one: Candidate) -> list[tuple[int, ...]] | None:
        """Where every microbatch's slices begin [M][N + 1]."""
        crossover = self._crossover if one.balance == "uneven" else None
        try:
            # also those of other replicas
            for tokens in self._setting.lengths:
                slice_starts(tokens, one.slices, crossover)
            return [slice_starts(tokens, one.slices, crossover) for tokens in self._setting.tokens]
        except SpecError:
            return None

    def _stage_seconds(self, tokens: int, before: int, recompute: str) -> tuple[list[float], list[float]]:
        """What a slice takes in every stage, forward and backward [S]."""
        of = [unit.seconds(tokens, before, recompute) for unit in self._costs.units]
        forward, backward = ([sum(of[u][way] for u in units) for units in self._setting.stages] for way in (0, 1))
        return forward, backward

    def _kept(self, recompute: str) -> list[float]:
        """Bytes that a token keeps in every stage [S]."""
        units = self._costs.units
        # what is in front of the layers and behind them is never computed again
        return [
            sum(units[u].kept_bytes.get(recompute, units[u].kept_bytes["none"]) for u in its)
            for its in self._setting.stages
        ]

    def _gradients(self) -> list[float]:
        return [sum(self._costs.units[u].gradient_bytes for u in its) for its in self._setting.stages]

    @cached_property
    def _crossover(self) -> int:
        """The tokens before one where attention costs as much as all else, by the shortest slice measured."""
        attending = [unit for unit in self._costs.units if unit.attentions] or self._costs.units
        tokens = min(one.tokens for unit in attending for one in unit.lengths)
        alone, more = 0.0, 0.0
        for unit in attending:
            first, second = unit.seconds(tokens, 0), unit.seconds(tokens, 1)
            alone, more = alone + sum(first), more + sum(second) - sum(first)
        # half of the slice itself comes before a token, on average; where nothing grows all slices are equal
        return max(round(alone / more - tokens / 2), 0) if more * 1e6 * tokens > alone else 10**9

    # --- exchange ----------------------------------------------------------------------------------------------

    @property
    def _key_bytes(self) -> float:
        """What a token's keys take in one attention."""
        queries, keys = self._costs.heads
        return self._costs.query_bytes * keys / queries

    def _exchange_costs(self, one: Candidate) -> ExchangeCosts:
        """Of an attention of the model, on average."""
        costs = self._costs
        tokens = max(self._setting.tokens) // one.slices
        units = [unit for unit in costs.units if unit.attentions]
        count = sum(unit.attentions for unit in units)
        ways = []
        for way, call_s in enumerate(costs.call_s):
            alone = sum(unit.seconds(tokens, 0, one.recompute)[way] for unit in units)
            column = sum(unit.seconds(tokens, 1, one.recompute)[way] for unit in units) - alone
            ways.append(
                LayerSeconds(
                    # nothing costs nothing: a plan counts calls in pieces
                    piece_s=max(column / count * tokens / 2, 1e-12),
                    diagonal_s=0.0,
                    rest_s=alone / count,
                    call_s=call_s,
                    slice_s=costs.message_s(costs.query_bytes * tokens),
                )
            )
        queries, keys = costs.heads
        return ExchangeCosts(
            forward=ways[0],
            backward=ways[1],
            kv_share=keys / queries,
            boundary_s=costs.message_s(costs.boundary_bytes * tokens),
        )

    def _saved_s(self, one: Candidate) -> float:
        """Seconds by which exchange shortens a step; 0 where it would not pay, as it is off then."""
        if not self._costs.query_bytes:
            return 0.0
        schedule = self._schedule(one, helped=True)
        assert schedule is not None, "there is one without help"
        costs = self._exchange_costs(one)
        if one.slices not in self._plans:
            units = self._costs.units
            piece = self._key_bytes * max(self._setting.tokens) / one.slices
            self._plans[one.slices] = plan(
                schedule,
                [sum(units[u].attentions for u in its) for its in self._setting.stages],
                heads=self._costs.heads,
                call=max(each.call_s / each.piece_s for each in (costs.forward, costs.backward)),
                keep=int(self._asked.keep_bytes // piece) if piece else 0,
                gradients=self._costs.wide,
            )
        found = verdict(self._plans[one.slices], schedule, costs)
        return max(found.without_s - found.with_s, 0.0)
