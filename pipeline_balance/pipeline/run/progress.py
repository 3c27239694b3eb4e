"""How far a run is: what random numbers, the loss of an accumulated update, and packing onto fewer ranks depend on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from prophet.errors import SpecError


@dataclass
class Progress:
    """Counters of a run, equal on all ranks.

    `updates` are those made so far. `parts`, `counted` and `loss_sum` are of the update under way: its microbatches,
    labels that count (or their weight), and summed loss. Its gradients are those of the sum divided by `divisor`.
    `rows` is a training microbatch's size. `first_ranks` is how many ranks the run began with.
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
        return self.loss_sum / (self.counted or 1)

    def add(self, loss_sum: float, parts: int, counted: float) -> None:
        """A batch went forward and backward."""
        self.loss_sum += loss_sum
        self.parts += parts
        self.counted += counted

    def updated(self) -> None:
        """The gradients were used."""
        self.updates += 1
        self.restart()

    def restart(self) -> None:
        """The update under way begins anew."""
        self.parts, self.counted, self.loss_sum, self.divisor = 0, 0, 0.0, 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def take(self, said: dict[str, Any]) -> None:
        """Go on from another rank's or run's counters."""
        for field in fields(self):
            value, whole = said.get(field.name), field.type == "int"
            right = type(value) is int or (not whole and type(value) is float and math.isfinite(value))
            if not right or value is None or (whole and value < 0):
                expected = "a whole number" if whole else "a number"
                raise SpecError(f"progress: {field.name}: expected {expected}, got {value!r:.100}")
            setattr(self, field.name, value)
