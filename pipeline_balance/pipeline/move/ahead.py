"""State that travels while a step is under way: parameters, and what optimizers keep for them.

Only an update changes these, so the ranks that get layers may have them before this step's gradients are there. What
is left goes between the backward pass and the update: gradients, buffers, and what is registered for parameters.

Shape legend: R replicas, P pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.ownership import sum_of_bits
from pipeline_balance.pipeline.move.state import Held
from prophet.errors import CollectiveError, TransitionError
from prophet.ranks.collective import Collective
from prophet.state.layout import Piece
from prophet.state.route_schedule import RouteSchedule
from prophet.state.transition import Allocate, Moved, State, transition

# Kinds of state that change in an update only
_KEPT = ("parameter", "optimizer")


@dataclass(frozen=True)
class Early:
    """What has travelled before a step's update.

    Attributes:
        moved: The transition's result.
        held: What this rank held then, of the kinds that travel early.
        leaving: Digests of the tensors that this rank no longer needs under the new map, by name.
        stays: The pieces of the new layout that it held before, with the names that it has for them.
    """

    moved: Moved
    held: Held
    leaving: Mapping[str, int]
    stays: Mapping[Piece, str]

    def holds(self, now: Held) -> bool:
        """Whether what this rank has sent is what it still holds; reads the tensors that leave it."""
        kept = early_of(now)
        return kept.specs == self.held.specs and all(
            _digest(kept.tensors[name]) == digest for name, digest in self.leaving.items()
        )

    def state(self, now: Held) -> State:
        """Return the new state of these kinds: what has come, and of what stays the tensors in force.

        Args:
            now: What this rank holds.
        """
        return {
            piece: now.tensors[self.stays[piece]] if piece in self.stays else tensor
            for piece, tensor in self.moved.state.items()
        }


def early_of(held: Held) -> Held:
    """What travels early, without plain numbers."""
    specs = [spec for spec in held.specs if spec.kind in _KEPT]
    return Held(specs=specs, tensors={spec.name: held.tensors[spec.name] for spec in specs})


def rest_of(held: Held) -> Held:
    """What goes between the backward pass and the update."""
    specs = [spec for spec in held.specs if spec.kind not in _KEPT]
    return replace(held, specs=specs, tensors={spec.name: held.tensors[spec.name] for spec in specs})


def bring(
    held: Held,
    names: Mapping[str, str],
    schedule: RouteSchedule,
    collective: Collective,
    *,
    budget_bytes: int,
    device: torch.device,
    allocate: Allocate,
) -> Early | None:
    """Send what travels early; collective, in any thread.

    Args:
        held: What this rank holds of the kinds that travel early.
        names: Its names by those of the route, in which a replica's own tensors are named after it.
        schedule: This rank's part in the route.
        collective: The ranks of the route.
        budget_bytes: Bounds the buffers.
        device: Where the state lies.
        allocate: How memory is asked for.

    Returns:
        What has come; None on all ranks where one could not send or had no memory. Nothing has changed then.
    """
    before, after = schedule.route.before.on(schedule.rank), schedule.route.after.on(schedule.rank)
    leaves = {names[piece.name] for piece in before} - {names.get(piece.name) for piece in after}
    leaving = {name: _digest(held.tensors[name]) for name in leaves}
    try:
        moved = transition(
            schedule.route,
            {piece: held.tensors[names[piece.name]] for piece in before},
            collective,
            budget_bytes=budget_bytes,
            device=device,
            allocate=allocate,
            ahead=schedule,
        )
    except TransitionError as error:
        if isinstance(error.__cause__, CollectiveError):
            # ranks have lost each other
            raise
        return None
    return Early(moved, held, leaving, {piece: names[piece.name] for piece in before if piece in moved.state})


def _digest(tensor: Tensor) -> int:
    found = sum_of_bits([tensor])
    return int(found) if found is not None else 0
