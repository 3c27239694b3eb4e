"""State that travels while a step is under way: parameters, and what optimizers keep for them.

Only an update changes these, so the ranks that get layers may have them before this step's gradients are there. What
is left goes between the backward pass and the update: gradients, buffers, and what is registered for parameters.

A thread sends nothing on a device (ADR 28). There what leaves is copied to the host first, in the thread's own stream,
and what has come waits on the host for the move itself.

Shape legend: R replicas, P pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.ownership import digest_of
from pipeline_balance.pipeline.move.state import Held
from prophet.errors import CollectiveError, StageFailed, TransitionError, in_a_line
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.state.layout import Piece
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import TensorSpec
from prophet.state.transition import Allocate, Moved, State, transition

# Kinds of state that change in an update only
_KEPT = ("parameter", "optimizer")


@dataclass(frozen=True)
class Early:
    """What has travelled before a step's update.

    Attributes:
        moved: The transition's result.
        specs: What this rank held then, of the kinds that travel early.
        sent: Names on this rank of the tensors that others get, by those of the route.
        arrived: Digests of the tensors that have come, by the names of the route.
        stays: The pieces of the new layout that it held before, with the names that it has for them.
    """

    moved: Moved
    specs: Sequence[TensorSpec]
    sent: Mapping[str, str]
    arrived: Mapping[str, int]
    stays: Mapping[Piece, str]

    def holds(self, now: Held) -> bool:
        """Whether this rank still holds tensors of the same form."""
        return early_of(now).specs == self.specs

    def digests(self, now: Held) -> dict[str, int]:
        """Return digests of what has come, and of what this rank holds of it now; reads what others have got.

        Where all ranks' digests of a name are equal, what has come is what its owner still holds.

        Args:
            now: What this rank holds.
        """
        return {**self.arrived, **{name: _digest(now.tensors[own]) for name, own in self.sent.items()}}

    def state(self, now: Held, device: torch.device, allocate: Allocate) -> State:
        """Return the new state of these kinds: what has come, and of what stays the tensors in force.

        Args:
            now: What this rank holds.
            device: Where the state lies.
            allocate: How memory is asked for there.
        """

        def placed(tensor: Tensor) -> Tensor:
            if tensor.device.type == device.type:
                return tensor
            return allocate(tensor.shape, tensor.dtype, device).copy_(tensor)

        return {
            piece: now.tensors[self.stays[piece]] if piece in self.stays else placed(tensor)
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
    allocate: Allocate,
) -> Early | None:
    """Send what travels early; collective, in any thread.

    Args:
        held: What this rank holds of the kinds that travel early.
        names: Its names by those of the route, in which a replica's own tensors are named after it.
        schedule: This rank's part in the route.
        collective: The ranks of the route.
        budget_bytes: Bounds the buffers.
        allocate: How memory on the host is asked for.

    Returns:
        What has come; None on all ranks where one could not send or had no memory. Nothing has changed then.
    """
    before = schedule.route.before.on(schedule.rank)
    lacks = {piece.name for piece in before} - names.keys()
    got = [schedule.route.after.names_on(r) - schedule.route.before.names_on(r) for r in range(schedule.route.ranks)]
    sent = {piece.name for piece in before if any(piece.name in some for some in got)}

    def leaving(piece: Piece) -> Tensor:
        tensor = held.tensors[names[piece.name]]
        if tensor.device.type == "cpu":
            return tensor
        if piece.name in sent:
            return collective.on_host(tensor, op=Operation("state that leaves a device"))
        # it stays where it is: nobody reads this one, which has the shape alone
        return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)

    # replicas may keep different things for a parameter
    state, problem = dict[Piece, Tensor](), f"{min(lacks)} is not kept here" if lacks else ""
    try:
        state = {piece: leaving(piece) for piece in before if not lacks}
    except (CollectiveError, StageFailed):
        raise
    except Exception as error:
        problem = in_a_line(error)
    try:
        moved = transition(
            schedule.route,
            state,
            collective,
            budget_bytes=budget_bytes,
            device=torch.device("cpu"),
            allocate=allocate,
            problem=problem,
            ahead=schedule,
        )
    except TransitionError as error:
        if isinstance(error.__cause__, CollectiveError):
            # ranks have lost each other
            raise
        return None
    come = {piece.name: _digest(tensor) for piece, tensor in moved.state.items() if piece.name in got[schedule.rank]}
    stays = {piece: names[piece.name] for piece in before if piece in moved.state}
    return Early(moved, held.specs, {name: names[name] for name in sent}, come, stays)


def _digest(tensor: Tensor) -> int:
    # not the sum of bits, which is linear: small changes can leave it as it is
    return digest_of([("", tensor)])
