"""Simulated steps with attention exchange: the bubble, unequal stages, transfers, memory, and whether it pays."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from benchmarks.slices.by_hand import Dims, chunk_gradient_bytes, unit_bytes
from pipeline_balance.schedules.closed_forms import (
    exchange_last_rank_idle_over_work,
    sliced_idle_over_work,
    sliced_peak_tokens,
)
from pipeline_balance.schedules.exchange import Exchange, plan
from pipeline_balance.schedules.exchange_times import (
    ExchangeCosts,
    LayerSeconds,
    Verdict,
    simulate_exchange,
    verdict,
)
from pipeline_balance.schedules.simulate import Durations, Simulation, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import slice_starts, sliced


def costs(diagonal: int = 1, rest_s: float = 0.0, call_s: float = 0.0, slice_s: float = 0.0) -> ExchangeCosts:
    """A chunk takes a second forward and two backward."""
    one, two = (
        LayerSeconds(
            piece_s=chunk / 2, diagonal_s=diagonal * chunk / 2, rest_s=rest_s * chunk, call_s=call_s, slice_s=slice_s
        )
        for chunk in (1.0, 2.0)
    )
    return ExchangeCosts(forward=one, backward=two)


def run(shape: tuple[int, int, int, int], diagonal: int = 1, helped: bool = True) -> tuple[Exchange, Simulation]:
    p, v, n, m = shape
    schedule = sliced(p, v, m, n, "aligned", helped=True)
    exchange = plan(schedule, diagonal=diagonal)
    return exchange, simulate_exchange(exchange, schedule, costs(diagonal), helped=helped)


@pytest.mark.parametrize("ranks", [(2, 3, 4), pytest.param((5, 6, 7, 8), marks=pytest.mark.slow)])
def test_the_bubble_of_attention_alone(ranks: tuple[int, ...]) -> None:
    for p, v, a, m in product(ranks, (1, 2), (1, 2, 4), (1, 2, 4, 8)):
        if p * v * a * p * m > 800 and p < 5:
            continue
        n = a * p
        for diagonal in (1, 2):
            _, found = run((p, v, n, m), diagonal)
            form = (p - 1) / (n * m * v)
            assert form == sliced_idle_over_work(p, v, m, n)
            assert found.idle_over_work <= 0.6 * form, (p, v, n, m, found.idle_over_work / form)


def test_sixteen_slices_on_four_ranks() -> None:
    shape = (4, 1, 16, 4)
    exchange, without = run(shape, diagonal=2, helped=False)
    # the aligned order without exchange, as the other simulator runs it
    cost = np.tile(np.arange(1, 17, dtype=np.float64), (4, 4))
    plain = simulate(sliced(4, 1, 4, 16, "aligned"), Durations(forward_s=cost, input_s=cost, weight_s=cost))
    assert without.makespan_s == pytest.approx(plain.makespan_s)
    assert without.idle_over_work == pytest.approx(0.237, abs=5e-4)
    _, found = run(shape, diagonal=2)
    assert sum(found.busy_s) == pytest.approx(sum(plain.busy_s))
    assert found.idle_over_work < 0.01
    assert max(found.busy_s) - min(found.busy_s) < max(plain.busy_s) / 50
    assert exchange.diagonal == 2


def test_every_pass_waits_for_its_input_and_its_rank() -> None:
    schedule = sliced(3, 2, 2, 6, "aligned", helped=True)
    exchange = plan(schedule, (2, 1, 0, 3, 1, 1))
    found = simulate_exchange(exchange, schedule, costs(rest_s=1.0, call_s=0.1, slice_s=0.2))
    for row in schedule.actions:
        for one, other in pairwise(row):
            assert found.end_s[one] <= found.start_s[other]
    for action, began in found.start_s.items():
        for other, ended in found.end_s.items():
            same = (other.kind, other.microbatch) == (action.kind, action.microbatch)
            before = action.stage - 1 if action.kind == "F" else action.stage + 1
            if action.kind != "H" and same and other.stage == before:
                assert ended <= began
    assert found.makespan_s > max(found.busy_s)


def test_unequal_stages_gain_as_well() -> None:
    schedule = sliced(4, 1, 4, 16, "aligned", helped=True)
    exchange = plan(schedule, (3, 2, 2, 1))
    helped, alone = (simulate_exchange(exchange, schedule, costs(), helped=x) for x in (True, False))
    assert helped.makespan_s < 0.75 * alone.makespan_s
    # the last rank has a third of the first one's layers and computes nearly as much
    assert min(helped.busy_s) > 0.95 * max(helped.busy_s)


def test_transfers_and_calls_cost_time() -> None:
    schedule = sliced(4, 1, 2, 8, "aligned", helped=True)
    exchange = plan(schedule)
    free, late, called = (
        simulate_exchange(exchange, schedule, each).makespan_s
        for each in (costs(), costs(slice_s=0.1), costs(call_s=0.1))
    )
    assert free < min(late, called)


def test_exchange_that_costs_more_than_it_gains_is_off() -> None:
    schedule = sliced(4, 1, 2, 8, "aligned", helped=True)
    exchange = plan(schedule)
    cheap, dear = (verdict(exchange, schedule, costs(slice_s=s)) for s in (0.01, 3.0))
    assert cheap.pays
    assert not dear.pays
    assert cheap.without_s == dear.without_s
    assert cheap.free_s == dear.free_s < cheap.with_s < cheap.without_s < dear.with_s
    gain = dear.without_s - dear.free_s
    assert (
        str(dear) == f"exchange is off: it saves {gain:.3g} s of waits and costs {dear.with_s - dear.free_s:.3g} s "
        "of transfers and calls"
    )
    assert str(Verdict(without_s=3.0, with_s=2.5, free_s=2.0)).startswith("exchange is on: it saves 1 s of waits and")


def test_kept_pieces_count_in_the_peak() -> None:
    schedule = sliced(4, 1, 4, 16, "aligned", helped=True)
    bare = peak_activation_bytes(schedule, (100,) * 4, (4,) * 4)
    assert bare == peak_activation_bytes(sliced(4, 1, 4, 16, "aligned"), (100,) * 4, (4,) * 4)
    peaks = []
    for keep in (0, 32):
        found = simulate_exchange(
            plan(schedule, keep=keep),
            schedule,
            costs(),
            activation_bytes=(100,) * 4,
            chunk_gradient_bytes=(4,) * 4,
            piece_bytes=2,
        )
        peaks.append(found.peak_activation_bytes)
    # what is in use counts as well, as long as it is
    assert all(a < b for a, b in zip(bare, peaks[0], strict=True))
    assert max(b - a for a, b in zip(bare, peaks[1], strict=True)) <= 2 * (32 + 2 * 32)
    assert peaks[1] != peaks[0]


def test_exchange_cannot_hold_four_fifths_of_what_slices_of_equal_cost_do() -> None:
    """The case of the emulated hosts (benchmarks/results/2026-11-30-slices-hosts.md): equal slices alone hold more."""
    tokens, slices, ranks, microbatches = 6144, 8, 4, 4
    each, starts = tokens // slices, slice_starts(tokens, slices, 1281)
    dims = Dims(hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=512)
    kept, gradients = unit_bytes(dims, 1, 1, 1), chunk_gradient_bytes(dims, 1, 1, 1)
    plain, helped = (sliced(ranks, 1, microbatches, slices, "aligned", helped=helped) for helped in (False, True))
    # whatever a token keeps: 1.75 microbatches of a stage, and 2.1
    assert 14 * each / sliced_peak_tokens(0, ranks, starts, "aligned") == pytest.approx(0.834, abs=5e-4)
    lengths = [b - a for a, b in pairwise(starts)] * microbatches
    tables = ([[n_bytes * t for t in lengths]] * ranks for n_bytes in (kept, gradients))
    uneven = max(peak_activation_bytes(plain, *tables))
    exchange = plan(helped, call=1.0)
    # two tensors of half a slice each, most of them when a rank holds less itself
    others = [[pieces * each * dims.hidden * 4 for pieces in row] for row in exchange.held_pieces()]
    given = (kept * each,) * ranks, (gradients * each,) * ranks
    equal, exchanged = (max(peak_activation_bytes(helped, *given, more)) for more in ((), others))
    assert equal / uneven == pytest.approx(0.855, abs=5e-4)
    assert exchanged / uneven == pytest.approx(0.862, abs=5e-4)


def test_the_table_of_the_page() -> None:
    # four ranks, 16 slices, four microbatches: docs/slices.md
    schedule = sliced(4, 1, 4, 16, "aligned", helped=True)
    exchange = plan(schedule)
    late = ExchangeCosts(forward=costs().forward, backward=costs().backward, boundary_s=0.25 * 8)
    free, found = (simulate_exchange(exchange, schedule, each).idle_over_work for each in (costs(), late))
    assert free == pytest.approx(0.002, abs=5e-4)
    assert found == pytest.approx(0.033, abs=5e-4)
    for keep, forward, backward in ((0, 1.07, 2.13), (32, 0.61, 1.22)):
        moved = [max(x) / (4 * 64) for x in plan(schedule, keep=keep).slices_moved()]
        assert moved == pytest.approx([forward, backward], abs=5e-3)


def test_the_papers_form_is_the_last_ranks_wait() -> None:
    for p, n, m in product((2, 4, 8), (8, 16), (1, 4)):
        # slices cost n + 1 forward and twice that backward; the first P - 1 run before the last rank has any
        wait = 3 * sum(s + 1 for s in range(p - 1))
        work = 3 * m * sum(s + 1 for s in range(n))
        assert exchange_last_rank_idle_over_work(p, m, n) == pytest.approx(wait / work)
    # it is not what exchange leaves: half a piece here and there, and idle ranks that help
    _, found = run((4, 1, 16, 4), diagonal=2)
    assert found.idle_over_work < exchange_last_rank_idle_over_work(4, 4, 16)
