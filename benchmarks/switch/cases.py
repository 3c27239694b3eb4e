"""Changes of the layout that are measured, on models cut to size: what must pass the busiest port is given.

Shape legend: P hosts, one rank each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pipeline_balance.elastic.layouts.boxes import ModelDescription
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.predict.bound import Rates, demand_of, least_s
from pipeline_balance.elastic.predict.models import description_of
from pipeline_balance.elastic.predict.switch import Plan, plan_switch
from prophet.machine.sizes import ModelSizes
from prophet.state.route import Route

LARGE_BYTES = 32_000_000
"""At the busiest port, from which on seconds are compared with the bound alone."""
SMALL_BYTES = 6_000_000
LAYERS, VOCABULARY, EXPERTS, STEP = 8, 1024, 8, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One change of the layout; port_bytes: at least so many must pass the busiest port (about), or dim is given."""

    name: str
    before: str
    after: str
    port_bytes: int
    experts: bool = False
    order: bool = True
    dim: int = 0

    @property
    def layouts(self) -> tuple[Parallelism, Parallelism]:
        """Before and after; the order of ranks is to be chosen, except where the ranks' numbers are the case."""
        before, after = Parallelism.parse(self.before), Parallelism.parse(self.after)
        return before, replace(after, order=FEWEST_BYTES) if self.order else after

    def model(self) -> ModelDescription:
        """bf16 parameters, float32 master weights and two moments."""
        d = self.dim
        sizes = ModelSizes(name="dense", layers=LAYERS, dim=d, hidden=2 * d, heads=8, vocabulary=VOCABULARY)
        if self.experts:
            sizes = replace(sizes, name="moe", hidden=d, heads=4, head_dim=128, experts=EXPERTS)
        return description_of(sizes)

    def plan(self, hosts: int) -> Plan:
        """Layouts, order of ranks and route in a world of `hosts`, each a node."""
        before, after = self.layouts
        return plan_switch(self.model(), before, after, ranks_per_node=1, ranks=hosts)


def _both(name: str, one: str, two: str, n_bytes: int, *, experts: bool = False) -> list[Case]:
    doubled, halved = (f"{name} doubled", f"{name} halved") if n_bytes == LARGE_BYTES else (name, f"{name}, back")
    common = {"port_bytes": n_bytes, "experts": experts}
    return [
        Case(name=doubled, before=one, after=two, **common),  # type: ignore[arg-type]
        Case(name=halved, before=two, after=one, **common),  # type: ignore[arg-type]
    ]


_ONE = {  # one dimension doubled, and halved again
    4: (("dp", "dp2", "dp4"), ("tp", "tp2", "tp4"), ("pp", "pp2", "pp4"), ("ep", "dp2,ep2", "dp4,ep4")),
    8: (
        ("dp", "tp2,dp2", "tp2,dp4"),
        ("tp", "tp2,dp2", "tp4,dp2"),
        ("pp", "pp2,dp2", "pp4,dp2"),
        ("ep", "dp4,ep4", "dp8,ep8"),
    ),
}
_HYBRID = {  # DynaTran, Table 1: by the factors of its rows
    4: (
        ("Table 1: 7B, 70B", "dp2", "tp2,pp2"),
        ("Table 1: 13B", "tp2", "pp2,dp2"),
        ("Table 1: 32B", "tp2,dp2", "pp2,dp2"),
        ("Table 1: 30B-A3B", "tp2,pp2,ep2", "dp4"),
        ("Table 1: 235B-A22B", "dp4,ep4", "tp2,pp2,ep2"),
    ),
    8: (
        ("Table 1: 7B, 70B", "pp2,dp2", "tp2,pp4"),
        ("Table 1: 13B", "tp2,pp2", "pp4,dp2"),
        ("Table 1: 32B", "tp2,pp2,dp2", "pp4,dp2"),
        ("Table 1: 30B-A3B", "tp2,pp4,ep2", "pp2,dp4"),
        ("Table 1: 235B-A22B", "pp2,dp4,ep4", "tp2,pp4,ep2"),
    ),
}
_MIGRATED = {4: ("pp4,stages2:2:2:2", "pp4,stages3:1:2:2"), 8: ("pp4,dp2,stages2:2:2:2", "pp4,dp2,stages3:1:2:2")}


def cases(hosts: int, *, large_bytes: int = LARGE_BYTES, small_bytes: int = SMALL_BYTES) -> list[Case]:
    """All cases of 4 or 8 hosts, with models that are large enough."""
    found: list[Case] = []
    for name, one, two in _ONE[hosts]:
        found += _both(name, f"{one},zero1", f"{two},zero1", LARGE_BYTES, experts=name == "ep")
    every = f"dp{hosts}"
    found += _both("zero 0 to 1", f"{every},zero0", f"{every},zero1", SMALL_BYTES)
    found += _both("zero 1 to 3", f"{every},zero1", f"{every},zero3", SMALL_BYTES)
    for name, one, two in _HYBRID[hosts]:
        found += _both(name, f"{one},zero1", f"{two},zero1", SMALL_BYTES, experts="ep" in one + two)
    one, two = _MIGRATED[hosts]
    migrates = Case(name="a layer migrates", before=f"{one},zero1", after=f"{two},zero1", port_bytes=SMALL_BYTES)
    found.append(replace(migrates, order=False))
    wanted = {LARGE_BYTES: large_bytes, SMALL_BYTES: small_bytes}
    return [sized(replace(case, port_bytes=wanted[case.port_bytes]), hosts) for case in found]


def alike(bytes_per_s: float, **host: float) -> Rates:
    """Links of one rate, within nodes and between them."""
    return Rates(intra_bytes_per_s=bytes_per_s, inter_bytes_per_s=bytes_per_s, **host)


def least_port_bytes(way: Route) -> int:
    """Bytes that must pass the busiest port, whatever the plan; every rank is a node."""
    return round(least_s(demand_of(way.atoms, way.space.item_bytes), np.arange(way.ranks), alike(1.0)))


def model_bytes(way: Route) -> int:
    """Of all that a job trains and keeps."""
    return sum(t.elements * t.item_bytes for t in way.space.tensors)


def sized(case: Case, hosts: int) -> Case:
    """The case with the smallest width of which at least `port_bytes` must pass a port.

    Where nothing has to move, a rank of the larger layout holds about as much.
    """
    dim = 4 * STEP

    def measure(dim: int) -> int:
        plan = replace(case, dim=dim).plan(hosts)
        return least_port_bytes(plan.route) or int(max(plan.before.table.rank_bytes().max(), 1))

    dim = max(math.isqrt(dim * dim * case.port_bytes // measure(dim)) // STEP * STEP, STEP)
    while measure(dim) < case.port_bytes:
        dim += STEP
    return replace(case, dim=dim)
