"""The planner `prophet`: few replicas for the predicted load, improved from step to step, and an exact split.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prophet.errors import SpecError
from prophet.planner import core
from prophet.planner.base import EFFORT, Planner
from prophet.planner.model.machine import Machine
from prophet.planner.split.exact import NOT_DENSE
from prophet.spec import BoolArray, FloatArray, Flows, IntArray, Placement, PlanContext, check_load

# Contexts whose arrays are kept; a model has two, that of its first layer and that of the others
REMEMBERED = 4
_NONE = np.zeros((0, 0), dtype=np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProphetPlanner(Planner):
    """Cost-aware replicas with fractional use, and an exact split.

    The first call makes a good plan; later ones start from the placement in force (`context.previous`), and now and
    then try a change of it. Where routing has jumped, a call makes a new plan at once.

    Attributes:
        effort: The share of the predicted step that one core may search, averaged over many calls. Work is counted by
            assumed times and never by a clock, so that every rank does the same. With 0 only a first plan is made.
        split_effort: The share of the seconds by which exchanges exceed their floor that the split may take to bring
            them down; 0 always minimises the bottleneck. For tests and studies.

    Raises:
        SpecError: For a negative effort.
    """

    effort: float = EFFORT
    split_effort: float = 0.06
    _memo: list[Machine] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.effort >= 0 and self.split_effort >= 0):
            raise SpecError(f"planner prophet: effort must not be negative, got {self.effort}, {self.split_effort}")

    @property
    def name(self) -> str:
        """The name under which `get_planner` finds it."""
        return "prophet"

    @property
    def withdraws(self) -> bool:
        """Whether replicas may be withdrawn; see `prophet.planner.model.withdraw`."""
        return True

    @property
    def goes_on(self) -> bool:
        """Whether a call starts from the placement in force, of which it changes little."""
        return True

    @property
    def needs_core(self) -> bool:
        """Whether the compiled core is needed: both plan and split run in it."""
        return True

    def _machine(self, context: PlanContext) -> Machine:
        # The same contexts come back for every layer and step. Replacing them is one assignment, so that a planning
        # thread and the training thread may share the planner.
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
        holds = np.empty((context.experts, context.ranks), dtype=np.bool_)
        core.native.plan(
            load,
            machine.home,
            *machine.arrays,
            machine.limit,
            _in_force(context),
            self.effort,
            self.split_effort,
            holds,
        )
        return Placement.trusted(machine.home, holds)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Flows:
        """Split a step's tokens for the shortest step.

        Args:
            load: The exact load, [R, E].
            placement: Which ranks hold which experts.
            context: The machine and the layer.
        """
        given = self._to_split(load, placement, context)
        shared, rows, rank_load, level, _ = core.native.split(*given, self.split_effort, NOT_DENSE)
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
        return (load, placement.holds, placement.home, *machine.arrays)


def _in_force(context: PlanContext) -> BoolArray:
    """Return the holders of the placement in force; no rows where there is none."""
    previous = context.previous
    if previous is None:
        return _NONE
    if previous.holds.shape != (context.experts, context.ranks):
        raise SpecError(
            f"previous placement is for {previous.experts} experts x {previous.ranks} ranks, "
            f"the context for {context.experts} x {context.ranks}"
        )
    return previous.holds


def _checked(load: IntArray, context: PlanContext) -> IntArray:
    # The core checks the signs, which takes half of a check's time here
    if type(load) is not np.ndarray or load.dtype != np.int64 or not load.flags.c_contiguous:
        load = check_load(load)
    if load.shape != (context.ranks, context.experts):
        raise SpecError(f"load must be [{context.ranks} ranks, {context.experts} experts], got {list(load.shape)}")
    return load
