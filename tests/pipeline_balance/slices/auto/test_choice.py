"""Choosing slices: a naive search over all candidates finds the same, and no property of the choice depends on luck."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.schedules.actions import Schedule, ScheduleError
from pipeline_balance.schedules.exchange import Exchange
from pipeline_balance.schedules.exchange_times import ExchangeCosts
from pipeline_balance.schedules.simulate import Durations, Simulation, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import slice_starts, sliced
from pipeline_balance.slices.auto import choice
from pipeline_balance.slices.auto.choice import (
    NEARLY,
    AutoSlices,
    Choice,
    Setting,
    SliceCosts,
    SliceSeconds,
    UnitCosts,
    choose,
    measured_lengths,
    numbers,
)
from pipeline_balance.slices.options import SliceOptions
from prophet.errors import SpecError

LENGTHS = (16, 64, 256)
AGAIN = {"none": 1.0, "selective": 0.5, "full": 0.25}


def unit(
    token_s: float = 1.0,
    column_s: float = 0.0,
    fixed_s: float = 0.0,
    kept: float = 8.0,
    gradient_bytes: float = 1.0,
    again_s: float = 0.3,
    **more: Any,
) -> UnitCosts:
    """A layer whose rows all cost the same; backward takes twice as long."""

    def of(tokens: int) -> SliceSeconds:
        forward_s = fixed_s + token_s * tokens + column_s * tokens**2 / 2
        columns = column_s * tokens
        return SliceSeconds(
            tokens=tokens,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            forward_column_s=columns,
            backward_column_s=2 * columns,
        )

    given: dict[str, Any] = {"attentions": 1, **more}
    return UnitCosts(
        lengths=tuple(of(tokens) for tokens in LENGTHS),
        kept_bytes={how: kept * share for how, share in AGAIN.items()},
        again_s={"selective": again_s, "full": 2 * again_s},
        gradient_bytes=gradient_bytes,
        **given,
    )


def setting(
    ranks: int = 4, stages: int = 1, microbatches: int = 4, tokens: int = 256, room: int | None = None
) -> Setting:
    return Setting(
        stages=tuple((s,) for s in range(ranks * stages)),
        ranks=tuple(s % ranks for s in range(ranks * stages)),
        tokens=(tokens,) * microbatches,
        lengths=(tokens,),
        memory_bytes=(room,) * ranks,
    )


def costs(layers: int = 4, **of_unit: Any) -> SliceCosts:
    return SliceCosts(units=(unit(**of_unit),) * layers)


# --- the naive twin ---------------------------------------------------------------------------------------------

Candidate = tuple[int, str, str, str]
"""Slices, order, balance, and what is computed again."""


def candidate(options: SliceOptions) -> Candidate:
    return options.slices, options.order, options.balance, options.recompute


def naive(asked: AutoSlices, given: SliceCosts, at: Setting) -> dict[Candidate, tuple[float, tuple[int, ...]]]:
    """Step and peaks of every candidate without exchange, each from scratch."""
    found: dict[Candidate, tuple[float, tuple[int, ...]]] = {}
    tries = numbers(asked, at.used, at.lengths)
    orders = ["minimal", "aligned"] if asked.order == "auto" else [asked.order]
    balances = ["none", "uneven"] if asked.balance == "auto" else [asked.balance]
    modes = ["none", "selective", "full"] if asked.recompute == "auto" else [asked.recompute]
    for n, order, balance, how in product(tries, orders, balances, modes):
        if n == 1 and (order, balance) != (orders[0], balances[0]):
            continue
        one = (n, order, balance, how)
        try:
            schedule = sliced(at.used, at.stages_per_rank, len(at.tokens), n, order)  # type: ignore[arg-type]
            crossover = _crossover(given) if balance == "uneven" else None
            windows = [unit.window for unit in given.units]
            starts = [slice_starts(tokens, n, crossover, windows) for tokens in at.tokens]
        except (ScheduleError, SpecError):
            continue
        forward, backward, kept, sums = ([[] for _ in at.stages] for _ in range(4))  # type: ignore[var-annotated]
        for s, units in enumerate(at.stages):
            for its in starts:
                for a, b in pairwise(its):
                    seconds = [given.units[u].seconds(b - a, a, how) for u in units]
                    forward[s].append(sum(x for x, _ in seconds))
                    backward[s].append(sum(y for _, y in seconds))
                    kept[s].append(int(np.ceil(sum(given.units[u].kept_bytes[how] for u in units) * (b - a))))
                    sums[s].append(int(np.ceil(sum(given.units[u].gradient_bytes for u in units) * (b - a))))
        mean = sum(at.tokens) / len(at.tokens) / n
        link = np.full(schedule.stages - 1, given.latency_s + given.byte_s * given.boundary_bytes * mean)
        times = Durations(
            forward_s=np.array(forward),
            input_s=np.array(backward),
            weight_s=np.zeros_like(np.array(backward)),
            forward_transfer_s=link,
            backward_transfer_s=link,
        )
        longest = max(b - a for its in starts for a, b in pairwise(its))
        messages = (6 if at.stages_per_rank == 1 else 9) if at.used > 1 else 0
        more = int(np.ceil(messages * given.boundary_bytes * longest))
        peaks = peak_activation_bytes(schedule, kept, sums)
        found[one] = simulate(schedule, times).makespan_s, tuple(peak + more for peak in peaks)
    return found


def _crossover(given: SliceCosts) -> int:
    tokens = min(LENGTHS)
    alone = sum(sum(u.seconds(tokens, 0)) for u in given.units)
    more = sum(sum(u.seconds(tokens, 1)) - sum(u.seconds(tokens, 0)) for u in given.units)
    return max(round(alone / more - tokens / 2), 0) if more * 1e6 * tokens > alone else 10**9


@st.composite
def situations(draw: st.DrawFn) -> tuple[AutoSlices, SliceCosts, Setting]:
    ranks, stages = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    units = tuple(
        unit(
            token_s=draw(st.floats(0.01, 2.0)),
            column_s=draw(st.floats(0.0, 0.05)),
            fixed_s=draw(st.floats(0.0, 40.0)),
            kept=draw(st.floats(1.0, 20.0)),
            again_s=draw(st.floats(0.0, 0.5)),
            window=draw(st.sampled_from([None, 20])),
        )
        for _ in range(ranks * stages)
    )
    given = SliceCosts(
        units=units,
        boundary_bytes=draw(st.floats(0.0, 4.0)),
        latency_s=draw(st.floats(0.0, 2.0)),
        byte_s=draw(st.floats(0.0, 0.05)),
    )
    asked = AutoSlices(
        slices=draw(st.sampled_from(["auto", "auto", 4])),
        order=draw(st.sampled_from(["auto", "minimal", "aligned"])),
        balance=draw(st.sampled_from(["auto", "none", "uneven"])),
        recompute=draw(st.sampled_from(["auto", "none", "full"])),
        stages_per_rank=stages,
    )
    tokens = draw(st.sampled_from([64, 96, 256]))
    at = setting(ranks, stages, draw(st.integers(1, 5)), tokens)
    return asked, replace(given, query_bytes=0.0), at


@given(situations(), st.floats(0.0, 1.2))
@settings(max_examples=40, deadline=None)
def test_the_choice_is_that_of_a_naive_search(situation: tuple[AutoSlices, SliceCosts, Setting], share: float) -> None:
    asked, measured, at = situation
    every = naive(asked, measured, at)
    highest = max(max(peaks) for _, peaks in every.values())
    room = max(round(share * highest), 1)
    at = replace(at, memory_bytes=(room,) * at.used)
    fitting = {one: (step_s, max(peaks)) for one, (step_s, peaks) in every.items() if max(peaks) <= room}
    if not fitting:
        least = min(max(peaks) for _, peaks in every.values())
        with pytest.raises(SpecError, match=rf"the least need is {least} bytes .*memory_bytes is {room} there"):
            choose(asked, measured, at)
        return
    found = choose(asked, measured, at)
    assert {candidate(score.candidate): (score.step_s, score.peak_bytes) for score in found.scores} == every
    shortest = min(step_s for step_s, _ in fitting.values())
    near = {one: figures for one, figures in fitting.items() if figures[0] <= (1 + NEARLY) * shortest}
    step_s, peak = fitting[candidate(found.options)]
    assert candidate(found.options) in near
    assert (peak, step_s) == min((peak, step_s) for step_s, peak in near.values())


@given(situations(), st.lists(st.floats(0.05, 1.2), min_size=2, max_size=4))
@settings(max_examples=25, deadline=None)
def test_more_memory_never_makes_a_step_longer(
    situation: tuple[AutoSlices, SliceCosts, Setting], shares: list[float]
) -> None:
    asked, measured, at = situation
    highest = max(max(score.peak_bytes) for score in choose(asked, measured, at).scores)
    taken: list[float] = []
    for share in sorted(shares):
        room = max(round(share * highest), 1)
        try:
            found = choose(asked, measured, replace(at, memory_bytes=(room,) * at.used))
        except SpecError:
            # once something fits, it fits in more
            assert not taken
            continue
        assert max(found.score.peak_bytes) <= room
        taken.append(found.score.step_s)
    assert taken == sorted(taken, reverse=True)


@pytest.mark.parametrize("stages", [1, 2])
def test_nothing_is_simulated_twice(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    seen: Counter[tuple[Any, ...]] = Counter()
    plain, exchanging = choice.simulate, choice.simulate_exchange

    def counted(schedule: Schedule, durations: Durations) -> Simulation:
        tables = (durations.forward_s, durations.input_s, durations.activation_bytes)
        passes = [[action for action in row if action.kind != "H"] for row in schedule.actions]
        seen[str(passes), *(np.array(table).tobytes() for table in tables)] += 1
        return plain(schedule, durations)

    def exchanged(exchange: Exchange, schedule: Schedule, given: ExchangeCosts, *, helped: bool) -> Simulation:
        seen[id(exchange), given, helped] += 1
        return exchanging(exchange, schedule, given, helped=helped)

    monkeypatch.setattr(choice, "simulate", counted)
    monkeypatch.setattr(choice, "simulate_exchange", exchanged)
    at = setting(2, stages)
    growing = replace(costs(2 * stages, token_s=0.01, column_s=1.0), query_bytes=1.0)
    found = choose(AutoSlices(stages_per_rank=stages, keep_bytes=64), growing, at)
    by = Counter(score.candidate.balance for score in found.scores)
    assert by["exchange"] > 3
    assert set(seen.values()) == {1}
    # one for each candidate without exchange; with it, one with help and one without
    assert len(seen) == by["none"] + by["uneven"] + 2 * by["exchange"]


def test_equal_figures_give_an_equal_choice() -> None:
    first, second = (choose(AutoSlices(), costs(column_s=0.02), setting(room=20_000)) for _ in range(2))
    assert first == second


# --- what is chosen ---------------------------------------------------------------------------------------------


def chosen(asked: AutoSlices | None = None, at: Setting | None = None, **of_unit: Any) -> Choice:
    at = at or setting()
    return choose(asked or AutoSlices(), costs(len(at.stages), **of_unit), at)


def test_slices_fill_waits_of_few_microbatches() -> None:
    assert chosen(at=setting(microbatches=2)).options.slices > 1


def test_what_a_slice_costs_however_short_it_is_speaks_against_slices() -> None:
    assert chosen(fixed_s=2000.0).options.slices == 1
    assert chosen(at=setting(1)).options.slices == 1  # a rank alone waits for nobody


def test_a_kernel_that_is_slow_below_some_rows_keeps_slices_as_long() -> None:
    """The floor of 768 rows that CPUs have is not written anywhere: it comes from what is measured."""

    def of(tokens: int) -> SliceSeconds:
        each = 1.0 if tokens >= 768 else 3.0
        return SliceSeconds(tokens=tokens, forward_s=each * tokens, backward_s=2 * each * tokens)

    lengths = measured_lengths(AutoSlices(), 4, [6144])
    assert {768, 384} <= set(lengths)
    layer = UnitCosts(lengths=tuple(of(t) for t in lengths), kept_bytes={"none": 1.0}, attentions=1)
    found = choose(AutoSlices(), SliceCosts(units=(layer,) * 4), setting(tokens=6144))
    assert found.options.slices == 8


def test_attention_that_grows_asks_for_slices_of_equal_cost() -> None:
    found = chosen(token_s=0.01, column_s=1.0)
    assert found.options.balance == "uneven"
    assert found.options.crossover_tokens is not None
    assert chosen(column_s=0.0).options.balance == "none"


def test_exchange_is_chosen_where_messages_are_fast() -> None:
    at = setting(microbatches=2)
    growing = replace(costs(token_s=0.01, column_s=1.0, gradient_bytes=8.0), query_bytes=1.0)
    asked = AutoSlices(slices=16, balance="auto", order="aligned", recompute="none")
    found = choose(asked, growing, at)
    by = {score.candidate.balance: score for score in found.scores}
    assert by["exchange"].step_s < by["none"].step_s
    # slices of equal cost hold more, so less memory leaves exchange
    room = max(by["exchange"].peak_bytes)
    assert room < max(by["uneven"].peak_bytes)
    tight = choose(asked, growing, replace(at, memory_bytes=(room,) * 4))
    assert tight.options.balance == "exchange"
    assert tight.options.exchange_costs is not None
    slow = choose(asked, replace(growing, byte_s=1e3), replace(at, memory_bytes=(room,) * 4))
    assert slow.options.balance == "none"


def test_exchange_may_be_named_where_nothing_attends() -> None:
    at = setting(microbatches=2)
    found = choose(AutoSlices(slices=4, balance="exchange"), costs(attentions=0), at)
    plain = choose(AutoSlices(slices=4, balance="none", order="aligned"), costs(attentions=0), at)
    assert found.options.exchange_costs is None
    assert (found.score.step_s, found.score.peak_bytes) == (plain.score.step_s, plain.score.peak_bytes)


def test_recomputing_is_chosen_where_nothing_else_fits() -> None:
    free = chosen()
    assert free.options.recompute == "none"
    least = min(max(s.peak_bytes) for s in free.scores if s.candidate.recompute == "none")
    assert chosen(at=setting(room=least - 1)).options.recompute != "none"
    with pytest.raises(SpecError, match=r"no slices fit in memory: the least need is \d+ bytes on rank 0"):
        chosen(AutoSlices(recompute="none"), setting(room=least - 1))


FAST, SLOW = 1e6, 1e-3  # a token takes a second of a layer and keeps eight bytes


def test_the_host_is_chosen_where_nothing_else_fits() -> None:
    free = chosen(AutoSlices(recompute="none"))
    least = min(max(s.peak_bytes) for s in free.scores)
    at = setting(room=least - 1)
    with pytest.raises(SpecError, match="no slices fit in memory"):
        chosen(AutoSlices(recompute="none"), at)
    found = chosen(AutoSlices(recompute="none", host_bytes_per_s=FAST), at)
    assert (found.options.offload, found.options.host_bytes_per_s) == ("auto", FAST)
    assert max(found.score.peak_bytes) < least
    assert "a link of 0.001 GB/s to the host hides that, and without it nothing fits" in str(found)
    # what is hidden takes no time
    assert found.score.step_s in {s.step_s for s in free.scores if s.candidate.slices == found.options.slices}
    with pytest.raises(SpecError, match=r"a link of 1e-12 GB/s to the host hides too little"):
        chosen(AutoSlices(recompute="none", host_bytes_per_s=SLOW), at)


def test_the_host_is_chosen_where_computing_again_would_take_longer() -> None:
    free = chosen(AutoSlices(balance="none"))
    room = min(max(s.peak_bytes) for s in free.scores if s.candidate.recompute == "none") - 1
    again = chosen(AutoSlices(balance="none"), setting(room=room))
    assert again.options.recompute != "none"
    found = chosen(AutoSlices(balance="none", host_bytes_per_s=FAST), setting(room=room))
    assert found.options.offload == "auto"
    assert found.score.step_s < again.score.step_s
    assert "and without it the fastest that fits is" in str(found)
    # a link that hides nothing changes nothing
    assert chosen(AutoSlices(balance="none", host_bytes_per_s=SLOW), setting(room=room)) == again


def test_where_memory_suffices_nothing_goes_to_the_host() -> None:
    assert chosen(AutoSlices(host_bytes_per_s=FAST)) == chosen()
    assert chosen(AutoSlices(host_bytes_per_s=FAST), setting(1)).options.slices == 1


def test_exchange_may_leave_saved_tensors_on_the_host() -> None:
    growing = replace(costs(token_s=0.01, column_s=1.0, gradient_bytes=8.0), query_bytes=1.0)
    asked = AutoSlices(slices=16, balance="exchange", order="aligned", recompute="none")
    (score,) = choose(asked, growing, setting(microbatches=2)).scores
    at = setting(microbatches=2, room=max(score.peak_bytes) - 1)
    found = choose(replace(asked, host_bytes_per_s=FAST), growing, at)
    assert (found.options.offload, found.options.exchanges) == ("auto", True)
    assert found.score.step_s == score.step_s


def test_of_nearly_equal_steps_the_one_that_holds_least_is_taken() -> None:
    found = chosen(again_s=0.001)
    assert found.options.recompute == "full"
    assert found.score.step_s <= (1 + NEARLY) * min(score.step_s for score in found.scores)


@pytest.mark.parametrize(
    ("name", "value"),
    [("slices", 8), ("order", "aligned"), ("balance", "uneven"), ("recompute", "full")],
)
def test_what_is_named_is_kept(name: str, value: Any) -> None:
    found = chosen(AutoSlices(**{name: value}), fixed_s=20.0)
    assert getattr(found.options, name) == value
    assert {getattr(score.candidate, name) for score in found.scores} == {value}


def test_several_stages_per_rank_take_numbers_that_go_with_them() -> None:
    at = setting(3, 2, microbatches=2, tokens=96)
    found = chosen(AutoSlices(stages_per_rank=2), at)
    assert found.options.stages_per_rank == 2
    assert all(n % 3 == 0 for n in {score.candidate.slices for score in found.scores} - {1})


def test_lengths_that_no_number_divides_are_cut_unevenly() -> None:
    at = replace(setting(microbatches=2), tokens=(251, 251), lengths=(251,))
    found = choose(AutoSlices(), costs(column_s=0.1), at)
    assert found.options.balance == "uneven"
    with pytest.raises(SpecError, match="sequences of 251 tokens cannot be cut into 4 slices"):
        choose(AutoSlices(slices=4, balance="none"), costs(), at)


def test_the_reason_has_the_figures() -> None:
    found = chosen(at=setting(microbatches=2))
    assert found.whole is not None
    assert f"{found.score.step_s:.3g} s a step" in str(found)
    assert f"without slices {found.whole.step_s:.3g} s" in str(found)
    assert re.search("the fastest in slices, .* slices", str(chosen(fixed_s=2000.0)))
    need = min(max(score.peak_bytes) for score in found.scores if score.candidate.slices > 1)
    assert "faster but too large is" in str(chosen(at=setting(microbatches=2, room=need)))


# --- costs ------------------------------------------------------------------------------------------------------


def test_costs_are_those_measured_and_lines_between_them() -> None:
    layer = unit(token_s=1.0, column_s=0.0, fixed_s=5.0)
    assert [layer.seconds(t, 0)[0] for t in (16, 40, 256, 512)] == [21.0, 45.0, 261.0, 517.0]
    assert unit(column_s=0.5).seconds(64, 100)[0] == pytest.approx(64 + 0.5 * (64**2 / 2 + 64 * 100))
    # a window hides what is further away
    assert unit(column_s=0.5, window=11).seconds(64, 100)[0] == pytest.approx(64 + 0.5 * (64**2 / 2 + 64 * 10))
    # noise never makes anything cheaper than its share
    noisy = UnitCosts(
        lengths=(
            SliceSeconds(tokens=10, forward_s=1.0, backward_s=9.0),
            SliceSeconds(tokens=20, forward_s=5.0, backward_s=1.0),
        ),
        kept_bytes={"none": 1.0},
    )
    assert noisy.seconds(5, 0) == (0.5, 13.0)
    assert noisy.seconds(40, 0) == (13.0, 1.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"slices": 0}, "slices must be a number from 1 on"),
        ({"slices": "many"}, "slices must be a number from 1 on"),
        ({"order": "other"}, "order must be one of"),
        ({"balance": "other"}, "balance must be one of"),
        ({"recompute": "other"}, "recompute must be one of"),
        ({"memory_bytes": 0}, "memory_bytes must be a number of bytes"),
        ({"memory_bytes": True}, "memory_bytes must be a number of bytes"),
        ({"balance": "exchange", "order": "minimal"}, "needs order="),
        ({"balance": "none", "keep_bytes": 4}, "keep_bytes needs"),
        ({"keep_bytes": -1}, "keep_bytes must be"),
        ({"host_bytes_per_s": 0}, "host_bytes_per_s must be"),
    ],
)
def test_bad_values_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        AutoSlices(**wrong)
