"""Bubbles of schedules over slices on paper: equal slices, slices of attention alone, and slow transfers."""

from __future__ import annotations

import numpy as np

from benchmarks.common import Row
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.classic import interleaved, one_f_one_b
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.schedules.sliced import sliced

RANKS, SLICES, MICROBATCHES = 4, 16, 4
COSTS = {"equal slices": 0.0, "attention only": 1.0}
TRANSFERS = (0.0, 0.25)  # of a unit's forward


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
