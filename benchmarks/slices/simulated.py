"""Schedules over slices on paper: their bubbles with equal slices and attention alone, and attention exchange.

Shape legend: P ranks, V stages per rank, M microbatches, N slices.
"""

from __future__ import annotations

import time
from itertools import pairwise, product

import numpy as np

from benchmarks.common import Row
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.classic import interleaved, one_f_one_b
from pipeline_balance.schedules.closed_forms import sliced_idle_over_work
from pipeline_balance.schedules.exchange import Exchange, plan
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds, simulate_exchange
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import slice_starts, sliced

RANKS, SLICES, MICROBATCHES = 4, 16, 4
COSTS = {"equal slices": 0.0, "attention only": 1.0}
TRANSFERS = (0.0, 0.25)  # of a unit's forward
EXCHANGE_OVER_FORM = 0.6  # of the bubble that equal slices have
EXCHANGE_BYTES = {0: (1.2, 2.4), SLICES: (0.7, 1.4)}  # by kept chunks: forward and backward, in L M_h per microbatch


def bubbles() -> list[Row]:
    """A row per schedule, cost of slices and transfer. Backward takes twice as long as forward."""
    schedules = {"own-1f1b": one_f_one_b(RANKS, MICROBATCHES), "interleaved-v2": interleaved(RANKS, 2, MICROBATCHES)}
    schedules |= {
        f"{order}-n{SLICES}": sliced(RANKS, 1, MICROBATCHES, SLICES, order) for order in ("minimal", "aligned")
    }
    schedules[f"minimal-n{SLICES}-v2"] = sliced(RANKS, 2, MICROBATCHES, SLICES)
    rows = []
    for name, schedule in schedules.items():
        for cost, share in COSTS.items():
            for transfer in TRANSFERS:
                found = simulate(schedule, _durations(schedule, share, transfer))
                row: Row = {"case": "bubble", "schedule": name, "p": RANKS, "m": MICROBATCHES, "n": schedule.slices}
                row |= {"v": schedule.stages // RANKS, "costs": cost, "transfer_of_forward": transfer}
                row |= {"idle_over_work": found.idle_over_work, "bubble_ratio": found.bubble_ratio}
                rows.append(row)
    return rows


def _durations(schedule: Schedule, attention: float, transfer: float) -> Durations:
    """Microbatches take one second per stage forward; a slice's share grows with its number where attention counts."""
    n, stages = schedule.slices, schedule.stages
    of_slice = (1 - attention) / n + attention * 2 * (np.arange(n) + 1) / (n * (n + 1))
    forward = np.broadcast_to(np.tile(of_slice, schedule.units // n) / (stages // RANKS), (stages, schedule.units))
    links = np.full(stages - 1, transfer / n / (stages // RANKS))
    return Durations(
        forward_s=forward,
        input_s=forward,
        weight_s=forward,
        forward_transfer_s=links,
        backward_transfer_s=links,
        activation_bytes=(1,) * stages,
    )


def exchanged() -> list[Row]:
    """Attention alone with exchange, beside slices of equal cost: a row for P, V and transfer, the worst of N and M."""
    rows = []
    for p, v, transfer in product(range(2, 9), (1, 2), TRANSFERS):
        found = [_exchanged(p, v, a * p, m, transfer) for a, m in product((1, 2, 4), (1, 2, 4, 8))]
        rows.append(max(found, key=lambda row: row["over_form"]))
    return [_exchanged(RANKS, 1, SLICES, MICROBATCHES, x) for x in TRANSFERS] + rows


def _exchanged(p: int, v: int, n: int, m: int, transfer: float) -> Row:
    schedule = sliced(p, v, m, n, "aligned", helped=True)
    exchange = plan(schedule)
    mean = n / 2  # of slices' forwards, in chunks: a slice attends to half of itself
    piece, both = LayerSeconds(piece_s=0.5, diagonal_s=0.5), LayerSeconds(piece_s=1.0, diagonal_s=1.0)
    costs = ExchangeCosts(forward=piece, backward=both, boundary_s=transfer * mean)
    found = simulate_exchange(exchange, schedule, costs, activation_bytes=(n,) * p * v)
    form = sliced_idle_over_work(p, v, m, n)
    row: Row = {"case": "exchange", "schedule": f"aligned-n{n}-exchange", "p": p, "m": m, "n": n, "v": v}
    row |= {"costs": "attention only", "transfer_of_forward": transfer, "idle_over_work": found.idle_over_work}
    row |= {"over_form": found.idle_over_work / form, "peak_units": max(found.peak_activation_bytes) / n}
    uneven = sliced(p, v, m, n, "aligned")
    starts = slice_starts(n * 16_000, n, 0)
    cost = np.tile(np.array([(b * b - a * a) / 2 for a, b in pairwise(starts)]) / 16_000**2, (p * v, m))
    links = np.full(p * v - 1, transfer * mean)
    each = Durations(forward_s=cost, input_s=cost, weight_s=cost, forward_transfer_s=links, backward_transfer_s=links)
    row["uneven_idle_over_work"] = simulate(uneven, each).idle_over_work
    lengths = [[b - a for a, b in pairwise(starts)] * m] * p * v
    row["uneven_peak_units"] = max(peak_activation_bytes(uneven, lengths)) / 16_000
    if not transfer:
        # what transfers add cannot be balanced away
        row |= {"target": f"<= {EXCHANGE_OVER_FORM} of the form", "met": row["over_form"] <= EXCHANGE_OVER_FORM}
    return row


def exchange_bytes() -> list[Row]:
    """What exchange sends for the rank that sends most, with as many key heads as query heads, by kept chunks."""
    rows = []
    schedule = sliced(RANKS, 1, MICROBATCHES, SLICES, "aligned", helped=True)
    for kept, limits in EXCHANGE_BYTES.items():
        exchange = plan(schedule, keep=2 * kept)
        for kind, moved, limit in zip(("forward", "backward"), _volumes(exchange), limits, strict=True):
            row: Row = {"case": "exchange-bytes", "schedule": f"aligned-n{SLICES}-exchange", "operations": kind}
            row |= {"p": RANKS, "m": MICROBATCHES, "n": SLICES, "v": 1, "kept_chunks": kept, "volumes": moved}
            rows.append(row | {"volume": max(moved), "target": f"<= {limit}", "met": max(moved) <= limit})
    return rows


def _volumes(exchange: Exchange) -> list[list[float]]:
    """By direction and donor, in L M_h per microbatch."""
    units = sum(exchange.layers) * len(exchange.pieces)
    return [[x / units for x in moved] for moved in exchange.slices_moved()]


def many_ranks() -> list[Row]:
    """What it takes to build the schedule of 64 ranks and 256 slices, to plan its exchange, and to simulate it."""
    began = time.perf_counter()
    schedule = sliced(64, 1, 4, 256, "aligned", helped=True)
    piece = LayerSeconds(piece_s=0.5, diagonal_s=0.5)
    found = simulate_exchange(plan(schedule), schedule, ExchangeCosts(forward=piece, backward=piece))
    row: Row = {"case": "exchange-ranks", "schedule": "aligned-n256-exchange", "p": 64, "m": 4, "n": 256, "v": 1}
    row |= {"idle_over_work": found.idle_over_work, "plan_s": time.perf_counter() - began}
    return [row]
