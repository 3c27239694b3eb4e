"""The default planner: few replicas from the predicted load, an exact split of the real one.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prophet.errors import SpecError
from prophet.planner import search, timing
from prophet.planner.base import Planner
from prophet.planner.core import native
from prophet.planner.split import Flows
from prophet.spec import (
    BoolArray,
    FloatArray,
    IntArray,
    LayerShape,
    Placement,
    PlanContext,
    Split,
    Topology,
    Windows,
    check_load,
)

REMEMBERED = 4  # contexts
MOST_TRIES = 2400  # trial moves per slot limit, however long the step


@dataclass(frozen=True, eq=False, slots=True)
class Machine:
    """A `PlanContext` as the arrays that the kernels take; all read-only."""

    topology: Topology
    shape: LayerShape
    windows: Windows
    home_tuple: tuple[int, ...]
    budget_bytes: tuple[int, ...] | None
    slots_per_rank: int
    home: IntArray
    node: IntArray
    speed: FloatArray
    seconds_per_token: FloatArray
    figures: FloatArray
    limit: IntArray

    @classmethod
    def of(cls, context: PlanContext) -> Machine:
        topology, shape = context.topology, context.shape
        figures = np.zeros(timing.FIGURES)
        figures[timing.TOKEN_BYTES] = shape.token_bytes
        figures[timing.INTRA_BYTES_PER_S] = topology.intra.bytes_per_s
        figures[timing.INTRA_LATENCY_S] = topology.intra.latency_s
        figures[timing.INTER_BYTES_PER_S] = topology.inter.bytes_per_s
        figures[timing.INTER_LATENCY_S] = topology.inter.latency_s
        figures[timing.PARAM_BYTES] = context.trans_bytes
        figures[timing.GRAD_BYTES] = context.agg_bytes
        figures[timing.FNEC_S] = context.windows.fnec_s
        figures[timing.BNEC_S] = context.windows.bnec_s
        figures[timing.OVERHEAD_S] = topology.expert_overhead_s
        figures[timing.OVERLAP_COST] = topology.overlap_cost
        figures[timing.NO_EXPERTS] = float(not context.windows.experts)
        limit = np.minimum(context.slot_limits(), context.experts)
        return cls(
            topology=topology,
            shape=shape,
            windows=context.windows,
            home_tuple=context.home,
            budget_bytes=context.budget_bytes,
            slots_per_rank=context.slots_per_rank,
            home=np.asarray(context.home, dtype=np.int64),
            node=topology.node_ids(),
            speed=topology.relative_speed(),
            seconds_per_token=shape.forward_flops_per_token / np.asarray(topology.flops_per_s),
            figures=figures,
            limit=limit,
        )

    def matches(self, context: PlanContext) -> bool:
        """Whether `context` (apart from `previous`) is the one these arrays were made from."""
        return (
            self.slots_per_rank == context.slots_per_rank
            and _same(self.topology, context.topology)
            and _same(self.shape, context.shape)
            and _same(self.windows, context.windows)
            and _same(self.home_tuple, context.home)
            and _same(self.budget_bytes, context.budget_bytes)
        )


def _same(a: object, b: object) -> bool:
    return a is b or a == b


@dataclass(frozen=True, kw_only=True, slots=True)
class ProphetPlanner(Planner):
    """Cost-aware replicas with fractional use, and an exact split.

    `keep_margin`: the placement in force is kept while its predicted cost is within this fraction of the best one
    found. `gain_margin`: replicas are used only when the prediction gains at least this fraction over none.
    `spare`: replicas are added until every rank can drain this share of the mean load to any other, where that costs
    at most `spare_margin` of the step (0: no spare replicas).
    `effort`: the share of the predicted step that one core may search beyond the fast plan, which levels products, and
    with six or more slots keeps tokens local where that shortens the step and all transfers are hidden. Work is
    counted by assumed times, so that every rank does the same; a share that buys next to nothing is not spent. 0, the
    default, is the fast plan; more pays where exchanges take much of a step and hidden transfers cost nothing, which
    the model takes for granted and not every machine keeps.
    `least_search_s`: the seconds that it may search however short the step, counted alike; a share of a very short step
    buys next to nothing.
    `split_effort`: the share of the seconds by which exchanges exceed their floor that the split may take to bring them
    down, counted by an assumed time, too; 0 always minimises the bottleneck.
    `gradual`: where exchanges matter, `effort` and `least_search_s` are spent in the mean of many calls, on changes of
    the placement in force (`context.previous`) that are tried now and then, and a quarter as much on fast plans that
    are compared with it; elsewhere the fast plan is made. Most calls return what they were given. Without a placement
    in force the first is grown at once.
    `withdraws`: whether a step goes on without its replicas where the exact load turns out not to be worth the rest of
    their transfers (see `planner.withdraw`).
    """

    keep_margin: float = 0.002
    gain_margin: float = 0.01
    spare: float = 0.4
    spare_margin: float = 0.02
    effort: float = 0.0
    least_search_s: float = 0.0
    split_effort: float = 0.03
    withdraws: bool = True
    gradual: bool = False
    name: str = "prophet"
    _memo: list[Machine] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        low = min(self.keep_margin, self.spare, self.spare_margin, self.effort, self.least_search_s, self.split_effort)
        if not low >= 0 or not 0 <= self.gain_margin < 1:
            raise SpecError(f"prophet planner: no option may be negative, and gain_margin must be below 1, got {self}")

    def warm(self) -> None:
        """Compile the kernels, or load them from their cache."""
        from prophet.planner import warm

        warm()

    def _machine(self, context: PlanContext) -> Machine:
        # The last contexts are remembered, since the same ones come back for every layer and step: that of the first
        # layer and that of the others. Replacing them is one assignment, so that a planning thread and the training
        # thread may share the planner.
        memo = self._memo
        for machine in tuple(memo):
            if machine.matches(context):
                return machine
        machine = Machine.of(context)
        memo[:] = [machine, *memo[: REMEMBERED - 1]]
        return machine

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        """Choose replicas for the predicted `load` [R, E]; homes only where nothing beats them."""
        machine = self._machine(context)
        load = _checked(load, context)
        previous = context.previous
        holds, base_s = search.search(
            load,
            machine.home,
            machine.node,
            machine.speed,
            machine.seconds_per_token,
            machine.figures,
            machine.limit,
            machine_previous(previous, load),
            previous is not None,
            self.keep_margin,
            self.gain_margin,
            self.spare,
            self.spare_margin,
            self.effort,
            self.least_search_s,
            self.split_effort,
            MOST_TRIES,
            self.gradual,
        )
        if base_s < 0:
            raise SpecError("load must not be negative")
        return Placement.trusted(machine.home, holds)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        """Assign `load` [R, E] exactly, for the shortest step."""
        tokens = np.empty((context.ranks, context.experts, context.ranks), dtype=np.int64)
        native.split_tokens(*self._to_split(load, placement, context), self.split_effort, tokens)
        return Split.trusted(tokens)

    def flows(self, load: IntArray, placement: Placement, context: PlanContext) -> Flows:
        """The same as `split` in sparse form, for large groups."""
        given = self._to_split(load, placement, context)
        shared, rows, rank_load, level, _ = native.split_rows(*given, self.split_effort)
        return Flows(given[0], placement.home, shared, rows, rank_load, level)

    def _to_split(
        self, load: IntArray, placement: Placement, context: PlanContext
    ) -> tuple[IntArray, BoolArray, IntArray, IntArray, FloatArray, FloatArray, FloatArray]:
        machine = self._machine(context)
        load = _checked(load, context)
        if placement.holds.shape != (context.experts, context.ranks):
            raise SpecError(
                f"placement is for {placement.experts} experts x {placement.ranks} ranks, "
                f"the context for {context.experts} x {context.ranks}"
            )
        return (
            load,
            placement.holds,
            placement.home,
            machine.node,
            machine.speed,
            machine.seconds_per_token,
            machine.figures,
        )


def machine_previous(previous: Placement | None, load: IntArray) -> BoolArray:
    """The holders of the placement in force, or an array of the same type that stands for none."""
    if previous is None:
        return np.zeros((1, 1), dtype=np.bool_)
    if previous.holds.shape != (load.shape[1], load.shape[0]):
        raise SpecError(
            f"previous placement is for {previous.experts} experts x {previous.ranks} ranks, load is {list(load.shape)}"
        )
    return previous.holds


def _checked(load: IntArray, context: PlanContext) -> IntArray:
    # The kernels look at the signs: half of the time that a check takes here goes there.
    if type(load) is not np.ndarray or load.dtype != np.int64 or not load.flags.c_contiguous:
        load = check_load(load)
    if load.shape != (context.ranks, context.experts):
        raise SpecError(f"load must be [{context.ranks} ranks, {context.experts} experts], got {list(load.shape)}")
    return load
