"""How far a run is: what random numbers, the loss of an accumulated update, and packing onto fewer ranks depend on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from prophet.errors import SpecError


@dataclass
class Progress:
    """Counters of a run, equal on all ranks.

    Attributes:
        updates: Updates made so far.
        parts: Microbatches of the update under way.
        counted: Its labels that count, or their weight.
        loss_sum: Its summed loss.
        divisor: Its gradients are those of the sum divided by this.
        rows: A training microbatch's size.
        first_ranks: How many ranks the run began with.
    """

    updates: int = 0
    parts: int = 0
    counted: float = 0
    loss_sum: float = 0.0
    divisor: float = 1
    rows: int = 0
    first_ranks: int = 0

    @property
    def loss(self) -> float:
        """Mean loss of the update under way, so far."""
        # no label counts: the sum is zero, too
        return self.loss_sum / (self.counted or 1)

    def add(self, loss_sum: float, parts: int, counted: float) -> None:
        """Count a batch that went forward and backward.

        Args:
            loss_sum: Its summed loss.
            parts: Its microbatches, of all replicas.
            counted: Its labels that count, or their weight.
        """
        self.loss_sum += loss_sum
        self.parts += parts
        self.counted += counted

    def updated(self) -> None:
        """Count an update, which has used the gradients."""
        self.updates += 1
        self.restart()

    def restart(self) -> None:
        """Begin the update under way anew."""
        self.parts, self.counted, self.loss_sum, self.divisor = 0, 0, 0.0, 1

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    def take(self, counters: dict[str, Any]) -> None:
        """Go on from another rank's or run's counters. Raises `SpecError` where one is no such number."""
        for field in fields(self):
            # annotations are texts here, see `from __future__`
            value, whole = counters.get(field.name), field.type == "int"
            # `isinstance` would take true and false for numbers
            right = type(value) is int or (not whole and type(value) is float and math.isfinite(value))
            if not right or value is None or (whole and value < 0):
                expected = "a whole number" if whole else "a number"
                raise SpecError(f"progress: {field.name}: expected {expected}, got {value!r:.100}")
            setattr(self, field.name, value)
