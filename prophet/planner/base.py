"""The interface of planners: two functions from values to values.

A planner owns no clock, no environment variable, no process group and no device. Given equal arguments it returns equal
values on every rank and every machine: comparisons are made on integers or on float64 sums taken in a fixed order, and
ties are broken by the lower index.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from prophet.spec import IntArray, Placement, PlanContext, Split

# Share of a step that a planner may search by default
EFFORT = 0.003


@runtime_checkable
class Planner(Protocol):
    """Chooses replica placements from a predicted load and splits from an exact one.

    Derive from it, and a planner needs `name`, `place` and `split` only; the rest has defaults:

    >>> class Mine(Planner):  # doctest: +SKIP
    ...     name = "mine"
    ...     def place(self, load, context): ...
    ...     def split(self, load, placement, context): ...
    """

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which `get_planner` finds it."""
        ...

    @property
    def replicates(self) -> bool:
        """Whether it ever places a replica. If it does not, ranks need not compare placements."""
        return True

    @property
    def withdraws(self) -> bool:
        """Whether replicas are withdrawn when the counts show that they are not worth the rest of their transfers."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether `place` goes on from `context.previous`. If it does not, earlier steps change nothing."""
        return False

    @property
    def needs_core(self) -> bool:
        """Whether it cannot plan without `prophet.planner.core`."""
        return False

    @abstractmethod
    def place(self, load: IntArray, context: PlanContext) -> Placement:
        """Choose which ranks hold which experts in the next step.

        Args:
            load: The predicted load, [R, E] integers.
            context: The machine, the layer and its homes.

        Returns:
            A placement that respects `context.slot_limits()` and keeps `context.home`.
        """
        ...

    @abstractmethod
    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        """Assign a step's tokens to the ranks that hold their expert.

        Args:
            load: The exact load, [R, E] integers.
            placement: Which ranks hold which experts.
            context: The machine, the layer and its homes.

        Returns:
            A split that conserves every token.
        """
        ...
