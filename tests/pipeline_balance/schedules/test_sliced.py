"""1F1B over slices: valid orders, the closed forms, and what is refused."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

from pipeline_balance.schedules.actions import Action, Schedule, ScheduleError, build
from pipeline_balance.schedules.classic import interleaved, one_f_one_b
from pipeline_balance.schedules.closed_forms import (
    sliced_idle_over_work,
    sliced_idle_over_work_attention,
    sliced_peak_bytes,
    sliced_peak_tokens,
    sliced_peak_units,
)
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import Order, slice_starts, sliced
from pipeline_balance.spec import LayerCost, RankLimits, StageMap, in_flight, rank_memory_bytes
from prophet.errors import SpecError

ORDERS: tuple[Order, ...] = ("minimal", "aligned")
# P ranks, V stages per rank, M microbatches, N slices
GRID = [(p, v, m, a * p) for p, v, m, a in product(range(1, 9), (1, 2, 3), range(1, 5), (1, 2, 4)) if a * p > 1]
SIZES = pytest.mark.parametrize("ranks", [range(1, 6), pytest.param(range(6, 9), marks=pytest.mark.slow)])


@SIZES
@pytest.mark.parametrize("order", ORDERS)
def test_peak_units_and_bubble_are_the_closed_forms(order: Order, ranks: range) -> None:
    for p, v, m, n in GRID:
        if p not in ranks:
            continue
        schedule = sliced(p, v, m, n, order)
        shape = (p, v, m, n, order)
        peaks = peak_activation_bytes(schedule, (1,) * schedule.stages)
        assert peaks == tuple(sliced_peak_units(r, *shape) for r in range(p)), shape
        # any ratio of backward to forward gives the same bubble
        even = Durations.uniform(p * v, forward_s=2.0, input_s=1.0, weight_s=2.0)
        assert simulate(schedule, even).idle_over_work == pytest.approx(sliced_idle_over_work(p, v, m, n)), shape


def naive_peaks(schedule: Schedule, kept: list[list[int]], added: list[list[int]]) -> list[int]:
    """Most bytes of every rank, counted anew at every action from what has run before it."""
    peaks = []
    for row in schedule.actions:
        peak = 0
        for number, now in enumerate(row):
            before = {str(action) for action in row[:number]}
            held = 0
            for stage, unit in product({a.stage for a in row}, range(schedule.units)):
                later = range(unit + 1, (unit // schedule.slices + 1) * schedule.slices)
                done = f"{stage}B{unit}" in before
                if (f"{stage}F{unit}" in before or f"{stage}F{unit}" == str(now)) and not done:
                    held += kept[stage][unit]
                # a slice after it has gone backward, or goes now
                if any(f"{stage}B{u}" in before or f"{stage}B{u}" == str(now) for u in later) and not done:
                    held += added[stage][unit]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p", "v", "m", "n"), [(1, 1, 2, 4), (2, 1, 3, 1), (3, 1, 2, 5), (2, 2, 2, 4), (4, 1, 2, 3)])
def test_peaks_are_those_of_a_naive_count(p: int, v: int, m: int, n: int, order: Order) -> None:
    schedule, draw = sliced(p, v, m, n, order), random.Random(p + n)
    kept, added = ([[draw.randint(0, 9) for _ in range(m * n)] for _ in range(p * v)] for _ in range(2))
    assert list(peak_activation_bytes(schedule, kept, added)) == naive_peaks(schedule, kept, added)


@SIZES
def test_the_minimal_bubble_of_attention_alone(ranks: range) -> None:
    for p, v, m, n in GRID:
        if v > 1 or p not in ranks:
            continue
        cost = np.tile(np.arange(1, n + 1, dtype=np.float64), (p, m))
        uneven = Durations(forward_s=cost, input_s=cost, weight_s=cost)
        found = simulate(sliced(p, v, m, n), uneven).idle_over_work
        assert found == pytest.approx(sliced_idle_over_work_attention(p, m, n)), (p, m, n)


def test_the_aligned_order_hides_transfers() -> None:
    # four ranks, 16 slices, a transfer of a quarter of a forward, backward twice a forward
    late = Durations.uniform(4, forward_s=1.0, input_s=1.0, weight_s=1.0, transfer_s=0.25)
    found = {order: simulate(sliced(4, 1, 4, 16, order), late).idle_over_work for order in ORDERS}
    assert found["aligned"] == pytest.approx(0.055, abs=5e-4)
    assert found["minimal"] == pytest.approx(0.148, abs=5e-4)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_keys_and_values_count(order: Order) -> None:
    for p, _, m, n in [shape for shape in GRID if shape[1] == 1]:
        peaks = peak_activation_bytes(sliced(p, 1, m, n, order), (8,) * p, (3,) * p)
        units = [sliced_peak_units(r, p, 1, m, n, order) for r in range(p)]
        assert peaks == tuple(sliced_peak_bytes(u, n, 8, 3) for u in units), (p, m, n, order)


def test_gradients_of_chunks_by_hand() -> None:
    # one rank, one microbatch of three slices: the last slice's backward holds 3 units and two chunks' gradients
    row = [Action(0, kind, u) for kind, u in [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)]]  # type: ignore[arg-type]
    schedule = build([row], 1, 1, 3)
    assert peak_activation_bytes(schedule, (10,), (4,)) == (38,)
    # a late slice keeps less than the first: after B2 (10 + 6 left, gradients of 0 and 1) B1 holds 24, less than before
    assert peak_activation_bytes(schedule, [[10, 6, 1]], (4,)) == (25,)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 3), (4, 1, 6), (3, 2, 6), (2, 3, 2)])
def test_one_slice_is_1f1b(p: int, v: int, m: int, order: Order) -> None:
    assert sliced(p, v, m, 1, order) == (one_f_one_b(p, m) if v == 1 else interleaved(p, v, m))


def test_one_stage_per_rank_takes_any_number_of_slices() -> None:
    for p, n, m, order in product((2, 3, 5), (2, 3, 7), (1, 2), ORDERS):
        simulate(sliced(p, 1, m, n, order), Durations.uniform(p))


def test_printed_and_loaded_by_torch() -> None:
    from torch.distributed.pipelining.schedules import _Action

    schedule = sliced(2, 2, 2, 4)
    assert Schedule.parse(str(schedule), slices=4) == schedule
    for row in schedule.actions:
        assert [str(_Action.from_str(str(a))) for a in row] == [str(a) for a in row]


@pytest.mark.parametrize("order", ORDERS)
def test_swapped_slices_are_refused(order: Order) -> None:
    schedule = sliced(3, 1, 2, 3, order)
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        rows = [list(row) for row in schedule.actions]
        row = rng.choice(rows)
        one, other = rng.sample(range(len(row)), 2)
        if row[one].kind != row[other].kind or row[one].microbatch // 3 != row[other].microbatch // 3:
            continue
        row[one], row[other] = row[other], row[one]
        with pytest.raises(ScheduleError, match=r"slices go (forward in order|backward in reverse)"):
            build(rows, 3, 2, 3)
        refused += 1
    assert refused > 5
    # the same order is right for whole microbatches
    build([[*(Action(0, "F", u) for u in (1, 0)), *(Action(0, "B", u) for u in (0, 1))]], 1, 2)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((4, 2, 1, 6), "take 4 or 8 instead of 6"),
        ((4, 2, 1, 3), "take 4 instead of 3"),
        ((4, 1, 1, 0), "slices must be at least 1"),
        ((4, 0, 1, 4), "stages_per_rank"),
        ((0, 1, 1, 4), "ranks"),
        ((2, 1, 1, 2, "shortest"), "one of minimal, aligned"),
    ],
)
def test_bad_shapes_are_refused(shape: tuple[int, ...], error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        sliced(*shape)  # type: ignore[arg-type]


def test_bad_figures_are_refused() -> None:
    schedule = sliced(2, 1, 1, 2)
    with pytest.raises(ScheduleError, match="no whole microbatches of 4"):
        Schedule.parse(str(schedule), slices=4)
    with pytest.raises(ScheduleError, match="outside 1 stages x 2 microbatches x 2 slices"):
        build([[Action(0, "F", 4)]], 1, 2, 2)
    with pytest.raises(SpecError, match="chunk_gradient_bytes needs one figure"):
        peak_activation_bytes(schedule, (), (1,))
    with pytest.raises(SpecError, match="activation_bytes needs one figure per stage"):
        peak_activation_bytes(schedule, [[1, 1], [1, 1, 1]])


def test_memory_counts_units() -> None:
    cost = LayerCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, activation_bytes=10, parameter_bytes=3)
    costs, stage_map, limits = [cost] * 4, StageMap.contiguous(range(5)), RankLimits.uniform(4)
    assert [in_flight(s, 4, 2, 8) for s in range(4)] == [sliced_peak_units(r, 4, 1, 2, 8) for r in range(4)]
    assert [in_flight(s, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    # ten bytes in four slices are three each, rounded up
    assert rank_memory_bytes(costs, stage_map, limits, 2, slices=4) == tuple(3 + 3 * u for u in (7, 6, 5, 4))
    assert rank_memory_bytes(costs, stage_map, limits, 2) == (23, 23, 23, 13)


def test_what_a_first_rank_holds_of_a_microbatch() -> None:
    # SlimPipe, Table 2: (1 + 2(P - 1) / N) / P of a microbatch, where 1F1B holds a whole one
    for p, n in ((4, 16), (8, 32)):
        held = Fraction(sliced_peak_units(0, p, 1, 4, n, "aligned"), n * p)
        assert held == (1 + Fraction(2 * (p - 1), n)) / p


# --- slices of equal cost ------------------------------------------------------------------------------------


def costs(starts: tuple[int, ...], crossover: int) -> list[int]:
    """Cost of every slice: token t costs C + t."""
    return [crossover * (b - a) + (b * b - a * a) // 2 for a, b in pairwise(starts)]


@pytest.mark.parametrize("crossover", [0, 7, 1500, 10**9])
@pytest.mark.parametrize(("tokens", "slices"), [(4096, 16), (4099, 7), (50, 13), (16, 16), (1 << 20, 64)])
def test_slices_of_equal_cost(tokens: int, slices: int, crossover: int) -> None:
    starts = slice_starts(tokens, slices, crossover)
    assert (len(starts), starts[0], starts[-1]) == (slices + 1, 0, tokens)
    lengths = [b - a for a, b in pairwise(starts)]
    assert min(lengths) >= 1
    block = 16 if tokens >= 256 * slices else 1
    assert not any(start % block for start in starts[:-1])
    if tokens > 50:  # else the last slices would be empty, or a token is much
        # the last one has what is left over
        assert all(b <= a + block for a, b in pairwise(lengths[:-1]))
        assert lengths[-1] <= lengths[-2] + block + tokens % block
        found = costs(starts, crossover)
        # both ends of a slice are rounded by half a block at most
        assert all(abs(c * slices - sum(found)) <= block * slices * (crossover + tokens) for c in found)


@pytest.mark.parametrize("crossover", [0, 40, 1500])
@pytest.mark.parametrize("windows", [[7], [None, 100, 100, 100], [30, None], [300, 20, None]])
def test_slices_of_equal_cost_with_windows(windows: list[int | None], crossover: int) -> None:
    tokens, slices = 1000, 5
    starts = slice_starts(tokens, slices, crossover, windows)
    by_token = [sum(crossover + min(t + 0.5, (w or tokens + 1) - 1) for w in windows) for t in range(tokens)]
    found = [sum(by_token[a:b]) for a, b in pairwise(starts)]
    assert max(found) - min(found) <= 2 * max(by_token)
    without = slice_starts(tokens, slices, crossover)
    assert starts != without or crossover == 1500
    # windows that hide nothing, and attentions that are all alike
    assert slice_starts(tokens, slices, crossover, [None, tokens, None, 2 * tokens]) == without


def test_without_attention_slices_are_equal() -> None:
    assert slice_starts(64, 4) == slice_starts(64, 4, 10**6) == (0, 16, 32, 48, 64)
    with pytest.raises(SpecError, match="60 or 64 tokens"):
        slice_starts(62, 4)
    for crossover in (None, 5):
        with pytest.raises(SpecError, match="pad them to 4 tokens"):
            slice_starts(3, 4, crossover)


@pytest.mark.parametrize("order", ORDERS)
def test_slices_of_equal_cost_wait_least_and_hold_more(order: Order) -> None:
    for p, _, m, n in [shape for shape in GRID if shape[1] == 1]:
        starts = slice_starts(n * 16_000, n, 0)
        schedule = sliced(p, 1, m, n, order)
        lengths = [[b - a for a, b in pairwise(starts)] * m] * p
        peaks = peak_activation_bytes(schedule, lengths)
        if m >= 3 and n >= 2 * (p - 1):
            assert peaks == tuple(sliced_peak_tokens(r, p, starts, order) for r in range(p)), (p, m, n)
        cost = np.tile(np.array(costs(starts, 0), dtype=np.float64), (p, m))
        found = simulate(schedule, Durations(forward_s=cost, input_s=cost, weight_s=cost)).idle_over_work
        assert found == pytest.approx(sliced_idle_over_work(p, 1, m, n), rel=0.02, abs=2e-3), (p, m, n)


def test_the_table_of_the_page_on_attention_alone() -> None:
    # four ranks, 16 slices: 1.87 microbatches of a stage instead of 1.375, in the minimal order 1.60 instead of 1.19
    starts = slice_starts(16_000, 16, 0)
    assert sliced_peak_tokens(0, 4, starts, "aligned") / 16_000 == pytest.approx(1.87, abs=5e-3)
    assert sliced_peak_tokens(0, 4, starts) / 16_000 == pytest.approx(1.60, abs=5e-3)
    even = slice_starts(16_000, 16)
    assert sliced_peak_tokens(0, 4, even, "aligned") == 22_000
    assert sliced_peak_tokens(0, 4, even) == 19_000
    cost = np.tile(np.array(costs(even, 0), dtype=np.float64), (4, 4))
    uneven = Durations(forward_s=cost, input_s=cost, weight_s=cost)
    assert simulate(sliced(4, 1, 4, 16), uneven).idle_over_work == pytest.approx(0.34, abs=5e-3)
    assert sliced_idle_over_work(4, 1, 4, 16) == pytest.approx(0.047, abs=5e-4)


def test_gradients_of_longer_chunks_count_more() -> None:
    row = [Action(0, kind, u) for kind, u in [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)]]  # type: ignore[arg-type]
    schedule = build([row], 1, 1, 3)
    # the last slice's backward holds all units and the gradients of the first two chunks
    assert peak_activation_bytes(schedule, [[10, 6, 1]], [[5, 3, 1]]) == (25,)
    with pytest.raises(SpecError, match="chunk_gradient_bytes needs one figure per stage"):
        peak_activation_bytes(schedule, (1,), [[1, 2]])
