"""What every planner is: two functions from values to values.

A planner owns no clock, no environment variable, no process group and no device. Given equal arguments it returns equal
values on every rank and every machine: comparisons are made on integers or on float64 sums taken in a fixed order, and
ties are broken by the lower index.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from prophet.spec import IntArray, Placement, PlanContext, Split


@runtime_checkable
class Planner(Protocol):
    """Chooses replica placements from a predicted load and splits from an exact one."""

    @property
    def name(self) -> str:
        """The name under which `get_planner` finds it."""
        ...

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        """Choose which ranks hold which experts next step.

        `load` is the predicted load, [R, E] integers. The result respects `context.slot_limits()` and keeps
        `context.home`.
        """
        ...

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        """Assign the exact `load` ([R, E] integers) to the ranks that hold each expert; conserves every token."""
        ...
