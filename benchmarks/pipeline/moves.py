"""How long moving state takes, against its bytes over the bandwidth; on emulated hosts.

Shape legend: L layers, P ranks. Every layer is a float32 parameter with Adam's two moments. A move's least time is that
of its busiest link in one direction: max over ranks of max(sent, received) / bandwidth, links being full duplex. The
bandwidth is that of one long message between two hosts, measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.cluster.host import Host
from benchmarks.cluster.testbed import Testbed
from benchmarks.measure import meet, slowest
from benchmarks.pacing import wake_promptly
from benchmarks.tables import words
from pipeline_balance.pipeline.move.state import by_layer
from pipeline_balance.spec import StageMap
from prophet.machine.memory import keep_memory
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.state.route import Route, route
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import transition

LAYERS, RANKS, ENTRIES = 8, 4, ("parameter", "exp_avg", "exp_avg_sq")
LAYER_BYTES = (256 << 10, 1 << 20, 4 << 20, 12 << 20)
BUDGETS = (4 << 20, 64 << 20)
REPETITIONS = 3

_EVEN = StageMap.contiguous((0, 2, 4, 6, 8))
_HALF = StageMap.contiguous((0, 4, 8))
MOVES: Mapping[str, tuple[StageMap, StageMap]] = {
    "one layer to the neighbour": (_EVEN, StageMap.contiguous((0, 3, 4, 6, 8))),
    "all layers to the next rank": (_EVEN, StageMap(_EVEN.boundaries, (1, 2, 3, 0))),
    "four ranks to two": (_EVEN, _HALF),
    "two ranks to four": (_HALF, _EVEN),
    "one rank to four": (StageMap.contiguous((0, 8)), _EVEN),
}


def space_of(layer_bytes: int) -> Space:
    """L layers of `layer_bytes` of training state each."""
    elements = layer_bytes // 4 // len(ENTRIES)
    return Space(
        tuple(
            TensorSpec(
                name=f"{i}/{entry}",
                shape=(elements,),
                kind="parameter" if entry == "parameter" else "optimizer",
                layer=i,
            )
            for i in range(LAYERS)
            for entry in ENTRIES
        )
    )


def way_of(space: Space, name: str) -> Route:
    before, after = MOVES[name]
    return route(by_layer(space, before, RANKS), by_layer(space, after, RANKS))


def missing_bytes(space: Space, name: str) -> int:
    """Bytes of the layers that change rank, counted without the route."""
    before, after = MOVES[name]
    moving = {m.layer for m in before.moves_to(after)}
    return sum(t.elements * t.item_bytes for t in space.tensors if t.layer in moving)


def busiest_bytes(way: Route) -> int:
    """Most bytes that one rank sends, or receives."""
    return max(*way.sent_bytes(), *way.received_bytes())


def run_moves(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """All moves on this host; seconds are of its own clock, from a meeting to the end of its part."""
    # Not paced: nothing computes beside the moves, so no thread's time is stretched, and each may run on any core.
    wake_promptly()
    keep_memory()
    with host.process_group(timeout_s=float(args["timeout_s"])):
        collective = ProcessGroupCollective(timeout_s=float(args["timeout_s"]))
        bandwidth = _bandwidth(host.rank, collective)
        asked = product(MOVES, args["layer_bytes"], args["budgets"])
        rows = [_move(host.rank, collective, name, layer_bytes, budget) for name, layer_bytes, budget in asked]
        return {"bytes_per_s": bandwidth, "rows": rows}


def _bandwidth(rank: int, collective: Collective) -> float:
    """Bytes per second of one long message between ranks 0 and 1; the median of a few."""
    message, taken = torch.zeros(16 << 20, dtype=torch.uint8), []
    for _ in range(5):
        meet(collective)
        began = time.perf_counter()
        sends, recvs = ([(1, message)] if rank == 0 else []), ([(0, message)] if rank == 1 else [])
        collective.exchange(sends, recvs, op=Operation("measuring the bandwidth")).wait()
        taken.append(time.perf_counter() - began)
    return message.numel() / statistics.median(taken)


def _move(rank: int, collective: Collective, name: str, layer_bytes: int, budget_bytes: int) -> dict[str, Any]:
    way = way_of(space_of(layer_bytes), name)
    state = {
        piece: torch.full(piece.box.shape, float(hash_of(piece.name)), dtype=torch.float32)
        for piece in way.before.pieces[rank]
    }
    taken, sent, messages = [], 0, 0
    for _ in range(REPETITIONS):
        meet(collective)
        began = time.perf_counter()
        moved = transition(way, state, collective, budget_bytes=budget_bytes)
        taken.append(time.perf_counter() - began)
        sent, messages = moved.sent_bytes, moved.messages
        wrong = [p.name for p, t in moved.state.items() if not bool((t == float(hash_of(p.name))).all())]
        if wrong:
            raise RuntimeError(f"{name}: {wrong[:4]} did not arrive as they were sent")
    return {"sent_bytes": sent, "messages": messages, "seconds": taken}


def hash_of(name: str) -> int:
    """A number that float32 holds exactly, another for every tensor."""
    layer, entry = name.split("/")
    return 1 + 3 * int(layer) + ENTRIES.index(entry)


def compare(
    bed: Testbed, *, timeout_s: float, limit_s: float, layer_bytes: Sequence[int] = LAYER_BYTES
) -> dict[str, Any]:
    """Rows of all moves; prints them as a table."""
    job = {"timeout_s": timeout_s, "layer_bytes": list(layer_bytes), "budgets": list(BUDGETS)}
    results = bed.run("benchmarks.pipeline.moves:run_moves", job, timeout_s=limit_s)
    bandwidth = results[0]["bytes_per_s"]
    print(f"one long message: {bandwidth / 1e6:.1f} MB/s", flush=True)
    rows = []
    asked = product(MOVES, layer_bytes, BUDGETS)
    for (name, size, budget), parts in zip(asked, zip(*(r["rows"] for r in results), strict=True), strict=True):
        seconds = statistics.median(slowest(p["seconds"] for p in parts))
        rows.append(row_of(name, size, budget, sum(p["sent_bytes"] for p in parts), seconds, bandwidth))
        rows[-1]["messages"] = sum(p["messages"] for p in parts)
        print(words(rows[-1], 4))
    return {"bytes_per_s": bandwidth, "moves": rows}


def row_of(
    name: str, layer_bytes: int, budget_bytes: int, wire_bytes: int, seconds: float, bytes_per_s: float
) -> dict[str, Any]:
    """One move's row: what was sent against what was missing, seconds against the busiest link's least time."""
    space = space_of(layer_bytes)
    least_s = busiest_bytes(way_of(space, name)) / bytes_per_s
    return {
        "move": name,
        "layer_bytes": layer_bytes,
        "budget_bytes": budget_bytes,
        "wire_bytes": wire_bytes,
        "missing_bytes": missing_bytes(space, name),
        "least_s": least_s,
        "seconds": seconds,
        "of_bandwidth": least_s / seconds,
    }
