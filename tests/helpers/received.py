"""What a rank of a schedule has received and not used up, by its steps."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_balance.schedules.transfers import Message, Step


def most_received(steps: Sequence[Step]) -> tuple[int, int, int]:
    """Most messages at a moment, from when each receive begins to the backward that reads it last.

    Together, activations alone, and gradients alone, each at its own moment.
    """
    here: set[tuple[bool, int, int]] = set()
    most = (0, 0, 0)
    for step in steps:
        if isinstance(step, Message):
            if step.what == "receive":
                here.add((step.forward, step.boundary, step.microbatch))
            activations = sum(forward for forward, _, _ in here)
            found = (len(here), activations, len(here) - activations)
            most = tuple(map(max, most, found))  # type: ignore[assignment]
        elif step.kind in "BW":
            here -= {(True, step.stage, step.microbatch), (False, step.stage + 1, step.microbatch)}
    return most
