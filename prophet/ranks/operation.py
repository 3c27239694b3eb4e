"""What ranks communicate, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """What is being communicated, for error messages and timelines."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"
