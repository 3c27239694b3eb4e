"""What a switch would take: bytes by link, seconds, memory; from descriptions alone, before anything moves."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline_balance.elastic.layouts.boxes import ModelDescription, layout_of
from pipeline_balance.elastic.layouts.order import ordered
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.predict.bound import Rates, demand_of, least_direct_s, least_s
from pipeline_balance.elastic.predict.memory import memory_of
from pipeline_balance.elastic.predict.simulate import Simulated, simulate
from prophet.errors import SpecError, no_such
from prophet.state.in_place import in_place
from prophet.state.layout import Layout
from prophet.state.route import Route, route

MOST_CELLS = 20_000_000
"""Tensors times ranks up to which the peak of a switch in place is computed."""


class Ports(NamedTuple):
    """What a switch has to know of a machine.

    Attributes:
        rates: Of ports and hosts.
        ranks_per_node: How many ranks a node has.
        name: For reports.
        memory_bytes: Of a rank's device; None: not known.
        assumed: A description of what was not measured; None: all was.
    """

    rates: Rates
    ranks_per_node: int
    name: str
    memory_bytes: int | None
    assumed: str | None


# DynaTran, Section 6.1: 8 cards of 80 GB a node, one 200 Gb/s port a card; NVLink 400 GB/s both ways together.
STATED = {
    "a800": Ports(
        rates=Rates(intra_bytes_per_s=200e9, inter_bytes_per_s=25e9),
        ranks_per_node=8,
        name="a800",
        memory_bytes=80_000_000_000,
        assumed="a800 reaches all of its stated bandwidths",
    )
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned switch.

    Attributes:
        before, after: The layouts.
        parallelism: The layout to come, with its order of ranks.
        route: What each rank sends.
        layouts_s, order_s, routes_s: Seconds that planning took, by part.
    """

    before: Layout
    after: Layout
    parallelism: Parallelism
    route: Route
    layouts_s: float
    order_s: float
    routes_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a switch is predicted to take; bytes are exact, seconds are the port model's.

    Attributes:
        model, before, after, machine: Names, for reports.
        ranks, nodes: Size of the world.
        wire_bytes: What is sent.
        given_bytes: What would be sent if ranks kept their numbers.
        simulated: Seconds and bytes by link.
        least_s, least_direct_s: The bounds of those names in `bound`; None: too large to compute.
        before_bytes, after_bytes: Training state of the fullest rank.
        safe_peak_bytes: Of the fullest rank while both are whole, without buffers.
        in_place_peak_bytes: Likewise for a switch in place; None: too large to compute.
        memory_bytes: What a rank has; None: unknown.
        plan_s: Seconds that planning took.
    """

    model: str
    before: str
    after: str
    machine: str
    ranks: int
    nodes: int
    wire_bytes: int
    given_bytes: int
    simulated: Simulated
    least_s: float
    least_direct_s: float | None
    before_bytes: int
    after_bytes: int
    safe_peak_bytes: int
    in_place_peak_bytes: int | None
    memory_bytes: int | None
    plan_s: float

    @property
    def fits(self) -> bool | None:
        """Whether either layout's training state has room on its fullest rank; None where its memory is not known."""
        return None if self.memory_bytes is None else max(self.before_bytes, self.after_bytes) <= self.memory_bytes

    def as_json(self) -> dict[str, Any]:
        """All figures in one flat dictionary, those of the simulation included."""
        found = asdict(self)
        return {**{k: v for k, v in found.items() if k != "simulated"}, **found["simulated"], "fits": self.fits}


def plan_switch(
    model: ModelDescription,
    before: Parallelism,
    after: Parallelism,
    *,
    ranks_per_node: int,
    ranks: int | None = None,
    flat: bool = False,
) -> Plan:
    """Layouts, order of ranks (where `after` asks for one) and routes of a switch.

    Args:
        model: What is laid out.
        before: The layout in force.
        after: The layout to come.
        ranks_per_node: Ranks k n .. k n + n - 1 are on one node.
        ranks: Size of the world; None: as many as both layouts need.
        flat: As `layout_of` takes it.
    """
    world = ranks or max(before.ranks, after.ranks, *before.rank_of_place, *_order(after))
    nodes = (np.arange(world) // ranks_per_node).tolist()
    # planning is part of what a switch costs, so it is timed part by part
    times = [time.perf_counter()]
    old = layout_of(model, before, ranks=world, flat=flat)
    times.append(time.perf_counter())
    chosen = ordered(model, old, after, nodes=nodes, flat=flat)
    times.append(time.perf_counter())
    new = layout_of(model, chosen, ranks=world, flat=flat)
    times.append(time.perf_counter())
    planned_route = route(old, new, nodes=nodes)
    times.append(time.perf_counter())
    old_s, order_s, new_s, routes_s = np.diff(times).tolist()
    return Plan(
        before=old,
        after=new,
        parallelism=chosen,
        route=planned_route,
        layouts_s=old_s + new_s,
        order_s=order_s,
        routes_s=routes_s,
    )


def _order(parallelism: Parallelism) -> tuple[int, ...]:
    """One more than every rank that the order names; 1 where it names none."""
    order = parallelism.order
    return tuple(r + 1 for r in order) if isinstance(order, tuple) else (1,)


def predict(
    model: ModelDescription,
    before: Parallelism,
    after: Parallelism,
    *,
    machine: Ports,
    ranks: int | None = None,
    flat: bool = False,
) -> Prediction:
    """What the switch takes on this machine.

    Args:
        model: What is laid out.
        before: The layout in force.
        after: The layout to come.
        machine: Rates of its ports, and its memory.
        ranks: Size of the world; None: as many as both layouts need.
        flat: As `layout_of` takes it.
    """
    rates = machine.rates
    planned = plan_switch(model, before, after, ranks_per_node=machine.ranks_per_node, ranks=ranks, flat=flat)
    planned_route = planned.route
    given = planned_route.wire_bytes
    if after.order == FEWEST_BYTES:
        # to say what choosing the order saves
        as_given = layout_of(model, replace(after, order=None), ranks=planned_route.ranks, flat=flat)
        given = route(planned.before, as_given, nodes=planned_route.nodes.tolist()).wire_bytes
    demand = demand_of(planned_route.atoms, model.space.item_bytes)
    memory = memory_of(planned.before, planned.after)
    peak = None
    if len(model.space.tensors) * planned_route.ranks <= MOST_CELLS:
        peak = int(in_place(planned.before, planned.after)[1].max())
    return Prediction(
        model=model.name,
        before=str(before),
        after=str(replace(after, order=None)),
        machine=machine.name,
        ranks=planned_route.ranks,
        nodes=int(planned_route.nodes.max()) + 1,
        wire_bytes=planned_route.wire_bytes,
        given_bytes=given,
        simulated=simulate(planned_route, rates),
        least_s=least_s(demand, planned_route.nodes, rates),
        least_direct_s=least_direct_s(demand, planned_route.nodes, rates),
        before_bytes=int(memory.before.max()),
        after_bytes=int(memory.after.max()),
        safe_peak_bytes=int(memory.safe_peak.max()),
        in_place_peak_bytes=peak,
        memory_bytes=machine.memory_bytes,
        plan_s=planned.layouts_s + planned.order_s + planned.routes_s,
    )


def ports_of(text: str) -> Ports:
    """The ports of a machine: one in `STATED`, a preset of `prophet`, or a topology file.

    Raises:
        SpecError: For a name that none of them has, or a file that cannot be read.
    """
    if text in STATED:
        return STATED[text]
    from prophet.machine.named import machine_named
    from prophet.machine.presets import CLUSTERS

    try:
        machine = machine_named(text)
    except SpecError as error:
        # a file or a preset with a size was meant: its own message says more than a list of names
        if text.endswith(".toml") or ":" in text:
            raise
        raise SpecError(no_such("machine", text, [*STATED, *CLUSTERS])) from error
    topology = machine.topology(machine.ranks or 8)
    # a preset comes in any size: its ports are those of a node of 8
    per_node = topology.ranks_per_node if machine.ranks else 8
    return Ports(
        rates=Rates.of(topology.intra, topology.even_inter),
        ranks_per_node=per_node,
        name=machine.name,
        memory_bytes=machine.memory_bytes,
        assumed=machine.assumed,
    )
