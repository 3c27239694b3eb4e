"""Names of the operations that ranks take part in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of all ranks, as error messages and timelines show it. `layer`: its number, where it has one."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"
