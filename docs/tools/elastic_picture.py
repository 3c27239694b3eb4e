"""Draws the picture of `elastic.md`: bytes by link over the time of a simulated switch.

python docs/tools/elastic_picture.py docs/images/elastic.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pipeline_balance.elastic.layouts.boxes import layout_of
from pipeline_balance.elastic.layouts.order import ordered
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.predict.bound import demand_of, least_s
from pipeline_balance.elastic.predict.models import description_of
from pipeline_balance.elastic.predict.simulate import simulate
from pipeline_balance.elastic.predict.switch import STATED
from prophet.machine.models import model_named
from prophet.state.route import route

MODEL, RANKS, NODES, CHUNK = "llama2-7b", 8, 2, 256 << 20
BEFORE, AFTER = Parallelism(pp=8, zero=1), Parallelism(tp=4, dp=2, zero=1, order=FEWEST_BYTES)
WIDE, HIGH, LEFT, TOP = 700, 44, 130, 52  # pixels: all time, a rank's four ports, their names, the titles
COLOURS = {True: "#3182bd", False: "#9ecae1"}  # between nodes, within one


def draw() -> str:
    """The whole picture, as SVG."""
    model, rates = description_of(model_named(MODEL)), STATED["a800"].rates
    nodes = np.arange(RANKS) * NODES // RANKS
    before = layout_of(model, BEFORE, ranks=RANKS)
    after = layout_of(model, ordered(model, before, AFTER, nodes=nodes), ranks=RANKS)
    way = route(before, after, nodes=nodes)
    chunks: list[tuple[int, int, int, float, float]] = []
    found = simulate(way, rates, CHUNK, seen=lambda *chunk: chunks.append(chunk))
    least = least_s(demand_of(way.atoms, way.space.item_bytes), nodes, rates)
    scale = WIDE / found.seconds
    title = (
        f"{MODEL}, pp8 to tp4,dp2, on {NODES} nodes: {found.seconds * 1e3:.0f} ms; the links need {least * 1e3:.0f} ms"
    )
    lines = [f'<text x="0" y="18" font-weight="bold">{title}</text>']
    lines.append(
        '<text x="0" y="38">dark: between nodes, pale: within one. Upper two rows: sends; lower two: receives</text>'
    )
    port = HIGH // 4 - 1
    for rank in range(RANKS):
        y = TOP + rank * HIGH
        lines.append(f'<text x="0" y="{y + 2 * port + 5}">rank {rank} (node {nodes[rank]})</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{WIDE}" height="{4 * port}" fill="#f4f4f4"/>')
    for source, destination, _, start, end in chunks:
        far = bool(nodes[source] != nodes[destination])
        for rank, row in ((source, 1 - far), (destination, 3 - far)):
            place = f'x="{LEFT + start * scale:.1f}" y="{TOP + rank * HIGH + row * port}"'
            size = f'width="{(end - start) * scale:.1f}" height="{port}"'
            lines.append(f'<rect {place} {size} fill="{COLOURS[far]}" stroke="white" stroke-width="0.5"/>')
    size = f'width="{LEFT + WIDE + 4}" height="{TOP + RANKS * HIGH}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, *lines, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
