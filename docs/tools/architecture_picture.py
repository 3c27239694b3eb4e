"""Draws the picture of `architecture.md`: the rooms of both packages, and who imports whom, read from the sources.

python -m docs.tools.architecture_picture docs/images/architecture.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.house import PACKAGES, arrows, imports_in, rooms

# (column, row from the top) of every room that is drawn. An import that does not lead downwards is an error.
PLACES = {
    "prophet.commands": (1, 0),
    "prophet.doctor": (0, 1),
    "prophet.monitor": (1, 1),
    "prophet.demo": (2, 1),
    "prophet.report": (1, 2),
    "prophet.convert": (3, 2),
    "prophet.engine": (2, 3),
    "prophet.traces": (1, 4),
    "prophet.layer": (3, 4),
    "prophet.scheduler": (2, 5),
    "prophet.machine": (0, 5),
    "prophet.experts": (3, 6),
    "prophet.planner": (1, 7),
    "prophet.kernels": (3, 7),
    "prophet.state": (4, 7),
    "prophet.spec": (1, 8),
    "prophet.ranks": (3, 8),
    "pipeline_balance.elastic": (6, 0),
    "pipeline_balance.control": (5, 2),
    "pipeline_balance.slices": (6, 2),
    "pipeline_balance.release": (7, 2),
    "pipeline_balance.dynamics": (8, 2),
    "pipeline_balance.pipeline": (6, 3),
    "pipeline_balance.maps": (6, 4),
    "pipeline_balance.schedules": (6, 5),
    "pipeline_balance.spec": (6, 6),
}
# small helpers that many rooms use, the checks of a machine with GPUs, which use all, and the front of each package
_LEFT_OUT = ("errors", "files", "sharing", "trials", "terminal", "gpu_check", "cli", "__main__")
LEFT_OUT = {f"prophet.{name}" for name in _LEFT_OUT} | {*PACKAGES}
# the options of `prophet switch`, which the room of the layouts adds to the commands, and its checks of GPUs
NOT_DRAWN = {("pipeline_balance.elastic", "prophet.commands"), ("pipeline_balance.elastic", "prophet.doctor")}
FILLS = {"prophet": "#deebf7", "pipeline_balance": "#e5f5e0"}
LINES = {"prophet": "#3182bd", "pipeline_balance": "#31a354"}
COLUMN, ROW, WIDE, HIGH, TOP = 100, 62, 86, 28, 40  # pixels


def shortest(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows without those that a chain of others implies."""
    below: dict[str, set[str]] = {room: {b for a, b in found if a == room} for room in PLACES}
    reach: dict[str, set[str]] = {}
    for room in sorted(PLACES, key=lambda r: -PLACES[r][1]):
        reach[room] = below[room].union(*(reach[b] for b in below[room]))
    return {(a, b) for a, b in found if not any(b in reach[c] for c in below[a] - {b})}


def draw(found: set[tuple[str, str]]) -> str:
    """The picture as SVG; ValueError for a room without a place, or an import that leads upwards."""
    unknown = rooms() - PLACES.keys() - LEFT_OUT
    if unknown:
        raise ValueError(f"expected a place for every room, got none for {sorted(unknown)}")
    drawn = {(a, b) for a, b in found - NOT_DRAWN if a in PLACES and b in PLACES and a != b}
    upwards = {(a, b) for a, b in drawn if PLACES[a][1] >= PLACES[b][1]}
    if upwards:
        raise ValueError(f"expected imports to lead downwards, got {sorted(upwards)}")
    width, height = 9 * COLUMN + 20, TOP + 9 * ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{2.5 * COLUMN}" y="22" font-weight="bold">prophet</text>',
        f'<text x="{7 * COLUMN}" y="22" font-weight="bold">pipeline_balance</text>',
    ]
    for a, b in sorted(shortest(drawn)):
        (x, y), (to_x, to_y) = _middle(a), _middle(b)
        y, to_y, bend = y + HIGH / 2, to_y - HIGH / 2, 0.45 * (to_y - y)
        colour = LINES[a.split(".")[0]]
        path = f"M{x:g} {y:g} C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y - 5:g}"
        lines.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        lines.append(f'<path d="M{to_x - 3:g} {to_y - 6:g} h6 l-3 6 z" fill="{colour}"/>')
    for room in PLACES:
        x, y = _middle(room)
        package, name = room.split(".")
        box = f'x="{x - WIDE / 2:g}" y="{y - HIGH / 2:g}" width="{WIDE}" height="{HIGH}" rx="4"'
        lines.append(f'<rect {box} fill="{FILLS[package]}" stroke="{LINES[package]}"/>')
        lines.append(f'<text x="{x:g}" y="{y + 4.5:g}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _middle(room: str) -> tuple[float, float]:
    column, row = PLACES[room]
    return 10 + (column + 0.5) * COLUMN, TOP + (row + 0.35) * ROW


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(arrows(imports_in(*PACKAGES), rooms())), encoding="utf-8")
