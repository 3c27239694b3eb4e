"""Draws the picture of `slices.md`: a simulated step without slices, and with them.

python docs/tools/slices_picture.py docs/images/slices.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.classic import one_f_one_b
from pipeline_balance.schedules.simulate import Durations, Simulation, simulate
from pipeline_balance.schedules.sliced import sliced

RANKS, MICROBATCHES, SLICES = 4, 4, 8
WIDE, HIGH, LEFT, GAP = 720, 22, 52, 34  # pixels: all time, a rank's row, its name, a panel's title
FORWARD, BACKWARD = ("#9ecae1", "#a1d99b"), ("#3182bd", "#31a354")  # by microbatch


def panel(title: str, schedule: Schedule, top: int, whole_s: float) -> list[str]:
    """A step's actions as rectangles, forward pale and backward dark, one row per rank."""
    part = 1 / schedule.slices
    found = simulate(schedule, Durations.uniform(RANKS, forward_s=part, input_s=part, weight_s=part))
    units = [u / schedule.slices for u in found.peak_activation_bytes]
    said = f"{title}: idle {found.bubble_ratio:.0%} of the time, rank 0 holds {units[0]:g} microbatches of its stage"
    lines = [f'<text x="0" y="{top + 20}" font-weight="bold">{said}</text>']
    for rank, row in enumerate(schedule.actions):
        y = top + GAP + rank * HIGH
        lines.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
        lines += list(_boxes(row, found, y, schedule.slices, whole_s))
    return lines


def _boxes(row: Sequence[Action], found: Simulation, y: int, slices: int, whole_s: float) -> Iterator[str]:
    scale = WIDE / whole_s
    for action in row:
        start, end = found.start_s[action] * scale, found.end_s[action] * scale
        colour = (FORWARD if action.kind == "F" else BACKWARD)[action.microbatch // slices % 2]
        box = f'x="{LEFT + start:.1f}" y="{y}" width="{end - start:.1f}" height="{HIGH - 3}" fill="{colour}"'
        yield f'<rect {box} stroke="white" stroke-width="0.6"/>'


def draw() -> str:
    """The whole picture, as SVG."""
    plain, cut = one_f_one_b(RANKS, MICROBATCHES), sliced(RANKS, 1, MICROBATCHES, SLICES)
    whole_s = simulate(plain, Durations.uniform(RANKS)).makespan_s
    below = GAP + RANKS * HIGH + 8
    lines = panel(f"{MICROBATCHES} microbatches", plain, 0, whole_s)
    lines += panel(f"the same in {SLICES} slices each", cut, below, whole_s)
    size = f'width="{LEFT + WIDE + 4}" height="{2 * below}"'
    style = 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, *lines, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
