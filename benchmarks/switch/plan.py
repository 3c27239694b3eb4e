"""How long planning takes: layouts, order of ranks, routes, the first call of each, for 64 to 8,192 ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.predict.bound import demand_of, least_direct_s, least_s
from pipeline_balance.elastic.predict.models import description_of
from pipeline_balance.elastic.predict.simulate import simulate
from pipeline_balance.elastic.predict.switch import STATED, plan_switch
from prophet.machine.models import model_named

RANKS = (64, 256, 1024, 4096, 8192)
SWITCHES: dict[str, tuple[tuple[str, str], ...]] = {
    "llama2-7b": (("tp2,pp2", "tp4,pp2"), ("tp2,pp4", "tp2,pp2")),
    "llama2-13b": (("tp4,pp4", "tp4,pp2"), ("tp4,pp4", "tp2,pp8")),
    "llama2-70b": (("tp8,pp4", "tp8,pp8"), ("tp8,pp8", "tp4,pp16")),
    "qwen3-30b-a3b": (("tp2,pp4,ep8", "tp2,pp8,ep4"), ("tp2,pp4,ep8", "tp4,pp4,ep4")),
    "qwen3-235b-a22b": (("tp4,pp8,ep8", "tp4,pp4,ep8"), ("tp4,pp8,ep8", "tp8,pp8,ep4")),
}


def filled(text: str, ranks: int, order: str) -> Parallelism:
    """The layout with as much dp as makes `ranks` ranks, and ZeRO-1."""
    layout = Parallelism.parse(text.split(",ep", maxsplit=1)[0])
    return Parallelism.parse(f"{text},dp{ranks // layout.ranks},zero1{order}")


def cases(most_ranks: int = RANKS[-1]) -> Iterator[tuple[str, int, str, str]]:
    """(model, ranks, from, to) of every row."""
    for model, switches in SWITCHES.items():
        for ranks in (r for r in RANKS if r <= most_ranks):
            for before, after in switches:
                yield model, ranks, before, after


def measured(model: str, ranks: int, before: str, after: str, *, bounds: bool = True) -> dict[str, Any]:
    """One switch, planned once with nothing kept from before; seconds of each part, bytes, and the port over its bound.

    `bounds`: also simulate and solve for the bound, which planning does not need.
    """
    machine = STATED["a800"]
    began = time.perf_counter()
    description = description_of(model_named(model))
    description_s = time.perf_counter() - began
    planned = plan_switch(
        description,
        filled(before, ranks, ""),
        filled(after, ranks, ",orderfewest-bytes"),
        ranks_per_node=machine.ranks_per_node,
        ranks=ranks,
        flat=True,
    )
    total_s = time.perf_counter() - began
    way = planned.route
    row: dict[str, Any] = {
        "case": model,
        "from": before,
        "to": after,
        "ranks": ranks,
        "description_s": description_s,
        "layouts_s": planned.layouts_s,
        "order_s": planned.order_s,
        "routes_s": planned.routes_s,
        "plan_s": total_s,
        "wire_bytes": way.wire_bytes,
        "rows": len(way.rows),
    }
    if bounds:
        demand = demand_of(way.atoms, description.space.item_bytes)
        moved = simulate(way, machine.rates)
        direct = least_direct_s(demand, way.nodes, machine.rates)
        row |= {
            "bound_s": least_s(demand, way.nodes, machine.rates),
            "direct_bound_s": direct,
            "port_s": moved.port_s,
            "predicted_s": moved.seconds,
            "port_over_direct_bound": moved.port_s / direct if direct else None,
            "largest_over_mean_sent": _spread(way.sent_bytes()),
        }
    return row


def _spread(sent: tuple[int, ...]) -> float:
    mean = float(np.mean(sent))
    return max(sent) / mean if mean else 1.0


def imports_s() -> float:
    """Seconds that scipy's parts take to be imported, once per process: not in the rows."""
    began = time.perf_counter()
    import scipy.optimize
    import scipy.sparse

    assert scipy.optimize
    return time.perf_counter() - began
