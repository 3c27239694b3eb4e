"""Seconds that a route takes: chunks in windows, simulated port by port.

Shape legend: P ranks. Each kind of link (within nodes, between them) is an open shop: a rank sends one chunk at a time
and receives one. A free sender serves the free receiver that has most left to receive. There are no global steps.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from pipeline_balance.elastic.bound import Rates
from prophet.spec import IntArray
from prophet.state.route import Route
from prophet.state.table import numbered

CHUNKS = 64
"""Into how many chunks the busiest port's bytes are cut, where no size is given."""
_MOST_CHUNKS = 400_000  # of one simulation; beyond, chunks are larger


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What a route takes. seconds: until the last chunk is there; port_s: bytes of the busiest port over its rate."""

    seconds: float
    port_s: float
    intra_bytes: int
    inter_bytes: int
    busiest_intra_bytes: int
    busiest_inter_bytes: int
    messages: int


def simulate(route: Route, rates: Rates, chunk_bytes: int | None = None) -> Simulated:
    """Run the route's bytes over the ports. `chunk_bytes`: None takes the busiest port's over `CHUNKS`."""
    rows, nodes = route.rows, route.nodes
    outside = nodes[route.source] != nodes[rows.destination]
    found = []
    for kind, rate, latency in (
        (~outside, rates.intra_bytes_per_s, rates.intra_latency_s),
        (outside, rates.inter_bytes_per_s, rates.inter_latency_s),
    ):
        source, target, n_bytes = _pairs(route.source[kind], rows.destination[kind], rows.n_bytes[kind], route.ranks)
        sent, received = np.bincount(source, n_bytes, route.ranks), np.bincount(target, n_bytes, route.ranks)
        busiest = int(max(sent.max(), received.max()))
        chunk = chunk_bytes or max(-(-busiest // CHUNKS), -(-int(n_bytes.sum()) // _MOST_CHUNKS), 1)
        seconds, messages = _open_shop(source, target, n_bytes, chunk, rate, latency)
        found.append((seconds, busiest / rate, int(n_bytes.sum()), busiest, messages))
    intra, inter = found
    return Simulated(
        seconds=max(intra[0], inter[0]),
        port_s=max(intra[1], inter[1]),
        intra_bytes=intra[2],
        inter_bytes=inter[2],
        busiest_intra_bytes=intra[3],
        busiest_inter_bytes=inter[3],
        messages=intra[4] + inter[4],
    )


def _pairs(source: IntArray, target: IntArray, n_bytes: IntArray, ranks: int) -> tuple[IntArray, IntArray, IntArray]:
    """Bytes of every pair of ranks that has any."""
    pair, first = numbered(source * ranks + target)
    return source[first], target[first], np.bincount(pair, n_bytes, len(first)).astype(np.int64)


def _open_shop(
    source: IntArray, target: IntArray, n_bytes: IntArray, chunk: int, rate: float, latency_s: float
) -> tuple[float, int]:
    """Seconds and number of chunks; greedy, one chunk at a time at each end."""
    left: dict[int, dict[int, int]] = {}
    senders_of: dict[int, set[int]] = {}
    to_receive: dict[int, int] = {}
    for s, t, n in zip(source.tolist(), target.tolist(), n_bytes.tolist(), strict=True):
        left.setdefault(s, {})[t] = n
        senders_of.setdefault(t, set()).add(s)
        to_receive[t] = to_receive.get(t, 0) + n
    free_out, free_in = set(left), set(to_receive)
    to_send = {s: sum(row.values()) for s, row in left.items()}
    running: list[tuple[float, int, int]] = []
    now, messages = 0.0, 0

    def start(s: int, t: int) -> None:
        nonlocal messages
        size = min(chunk, left[s][t])
        left[s][t] -= size
        to_receive[t] -= size
        to_send[s] -= size
        if not left[s][t]:
            del left[s][t]
            senders_of[t].discard(s)
        free_out.discard(s)
        free_in.discard(t)
        messages += 1
        heapq.heappush(running, (now + latency_s + size / rate, s, t))

    def serve(s: int) -> None:
        best = max((t for t in left[s] if t in free_in), key=lambda t: (to_receive[t], -t), default=None)
        if best is not None:
            start(s, best)

    for s in sorted(left, key=lambda s: (-to_send[s], s)):
        serve(s)
    while running:
        now, s, t = heapq.heappop(running)
        free_out.add(s)
        free_in.add(t)
        serve(s)
        if t in free_in:
            other = max((o for o in senders_of[t] if o in free_out), key=lambda o: (to_send[o], -o), default=None)
            if other is not None:
                start(other, t)
    return now, messages
