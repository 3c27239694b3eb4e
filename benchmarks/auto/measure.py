"""What every rank does: measure as on first use, look it up as the next run does, and calibrate thoroughly."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.common import TIMEOUT_S, Row
from benchmarks.measure import meet
from prophet.experts.feed_forward import FeedForwardBank
from prophet.machine import auto
from prophet.machine.calibrate import calibrate
from prophet.planner import get_planner
from prophet.planner.model.cost import step_cost
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import collective_for
from prophet.spec import PlanContext, Topology

_EXPERTS_PER_RANK, _LOADS = 4, 24


def on_nodes(rank: int, ranks_per_node: int) -> AbstractContextManager[Any]:
    """Take `ranks_per_node` ranks in a row for those of a node: an emulated host has a network of its own."""
    return patch.object(auto, "place", lambda: rank // ranks_per_node)


@contextmanager
def _on_first_use() -> Iterator[None]:
    """Remember nothing of this machine."""
    with (
        tempfile.TemporaryDirectory(prefix="prophet-auto-") as folder,
        patch.object(auto, "cache_folder", lambda: Path(folder)),
    ):
        yield


def measure(
    collective: Collective, *, device: Any, shape: tuple[int, int], tokens: int, ranks_per_node: int, repeats: int
) -> list[Row]:
    """One row for each of `repeats` turns: seconds, figures, and predicted steps of the same plans; collective."""
    dim, hidden = shape
    ranks = collective.size
    bank = FeedForwardBank(dim, hidden, _EXPERTS_PER_RANK).to(device)
    rows = []
    for turn in range(repeats):
        with _on_first_use(), on_nodes(collective.rank, ranks_per_node):
            first_s, first = _timed(collective, lambda: auto.topology_of(collective, bank))
            next_s, again = _timed(collective, lambda: auto.topology_of(collective, bank))
        thorough_s, told = _timed(
            collective,
            lambda: calibrate(collective, dim=dim, hidden=hidden, device=device, ranks_per_node=ranks_per_node),
        )
        thorough = replace(told.topology, free_bytes=first.free_bytes)
        rows.append(
            {
                "turn": turn,
                "first_s": first_s,
                "next_s": next_s,
                "thorough_s": thorough_s,
                "remembered": again == first,
                **_steps(first, thorough, bank, ranks, tokens),
                "auto": _figures(first),
                "thorough": _figures(thorough),
            }
        )
    return rows


def on_host(host: Any, args: dict[str, Any]) -> list[Row]:
    """The same on one emulated host."""
    with host.process_group(timeout_s=TIMEOUT_S), host.paced():
        return measure(collective_for(None, timeout_s=TIMEOUT_S), device="cpu", **args)


def _timed(collective: Collective, run: Callable[[], Any]) -> tuple[float, Any]:
    meet(collective)
    before = time.perf_counter()
    found = run()
    return time.perf_counter() - before, found


def _steps(first: Topology, thorough: Topology, bank: FeedForwardBank, ranks: int, tokens: int) -> dict[str, float]:
    """Predicted MoE seconds by auto's figures over those by the thorough ones, for plans of either.

    The loads are drawn, from nearly even to one in which a few experts have most.
    """
    experts = ranks * _EXPERTS_PER_RANK
    contexts = [
        PlanContext(topology=t, shape=bank.shape(), home=tuple(e // _EXPERTS_PER_RANK for e in range(experts)))
        for t in (first, thorough)
    ]
    generator = np.random.default_rng(0)
    planner = get_planner("prophet")
    predicted, planned = [], []
    for alpha in np.geomspace(0.2, 5.0, _LOADS):
        load = generator.multinomial(tokens, generator.dirichlet(np.full(experts, alpha)), size=ranks)
        seconds = []
        for context in contexts:
            placement = planner.place(load, context)
            split = planner.split(load, placement, context)
            seconds.append([step_cost(split, placement, c).total_s for c in contexts])
        by_auto, by_thorough = seconds
        predicted.append(by_thorough[0] / by_thorough[1])
        # What it costs to plan with auto's figures if the thorough ones are true
        planned.append(by_auto[1] / by_thorough[1])
    return {
        "predicted": float(np.median(predicted)),
        "predicted_least": min(predicted),
        "predicted_most": max(predicted),
        "planned": float(np.exp(np.mean(np.log(planned)))),
        "planned_most": max(planned),
    }


def _figures(topology: Topology) -> dict[str, float | None]:
    return {
        "flops_per_s": min(topology.flops_per_s),
        "expert_overhead_s": topology.expert_overhead_s,
        "call_overhead_s": topology.call_overhead_s,
        "intra_bytes_per_s": topology.intra.bytes_per_s,
        "inter_bytes_per_s": topology.inter.bytes_per_s,
        "inter_latency_s": topology.inter.latency_s,
        "port_bytes_per_s": topology.port_bytes_per_s,
        "trans_rate": topology.trans_rate,
        "agg_rate": topology.agg_rate,
        "overlap_cost": topology.overlap_cost,
    }
