"""A `GradScaler` for pipelines: what one rank finds in its gradients, all ranks act upon.

A pipeline's rank holds the gradients of the layers that it runs. A scaler that knew of these alone would skip the
update here and halve the scale here while the other ranks take the step. torch scales the loss where the model ends,
and has no scale elsewhere. Here every rank has it from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.ownership import local
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

_OPERATION = Operation("GradScaler's check for infinite gradients")


class PipelineScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that is the same on all ranks, idle ones too. `pipe.scaler(...)` makes it.

    `unscale_` and `step` are collective, once for every optimizer, in the same order on all ranks. An optimizer without
    a gradient on this rank takes its step as well. As in torch, each optimizer skips its own overflows, and `update`
    lowers the scale after any. `state_dict` is the same on all ranks.

    Args:
        world: Returns the communicator of all ranks; asked anew, as it changes with the group.
        device: The pipeline's.
        **arguments: Those of `torch.amp.GradScaler` by name, without its `device`.
    """

    def __init__(self, world: Callable[[], Collective], device: torch.device, **arguments: Any) -> None:
        super().__init__(device.type, **arguments)
        self._world = world
        if self.is_enabled():
            # torch makes the scale when a loss is first scaled, which happens on no rank of a pipeline
            self._lazy_init_scale_growth_tracker(device)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Run torch's method, then take over what any rank has found. Collective.

        Raises:
            SpecError: On all ranks where their scales differ: their gradients were scaled differently.
        """
        here: Any = SimpleNamespace(param_groups=[{"params": _as_they_lie(optimizer)}])
        found = super()._unscale_grads_(here, inv_scale, found_inf, allow_fp16)
        # whether an infinite gradient was found; whether there is any gradient; one over the scale
        mine = torch.zeros(3, dtype=torch.float64, device=inv_scale.device)
        for value in found.values():
            mine[0] = torch.maximum(mine[0], (value != 0).to(mine))
            mine[1] = 1.0
        mine[2] = inv_scale
        world = self._world()
        every = world.all_gather(world.on_host(mine, op=_OPERATION, limited=False), op=_OPERATION)
        scales = every[:, 2].reciprocal().tolist()
        if min(scales) != max(scales):
            listed = ", ".join(f"{s:g} on rank {r}" for r, s in enumerate(scales))
            raise SpecError(
                f"the scaler's scale differs: {listed}; call update() and load_state_dict() on all ranks alike"
            )
        # one and no larger number: fused optimizers compare with one
        infinite = every[:, 0].amax().float().to(inv_scale.device)
        for value in found.values():
            value.copy_(infinite)
        # torch refuses an optimizer without gradients; where another rank has some, this one takes the step as well
        if not found and bool(every[:, 1].amax()):
            found[inv_scale.device] = infinite
        return found


def _as_they_lie(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank has of the parameters with gradients: torch unscales no mix of shards and other tensors."""
    found = []
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        here = p if local(p) is p else local(p).detach()
        if here is not p:
            here.grad = local(p.grad)
        found.append(here)
    return found


def check_scaler(scaler: object) -> None:
    """Raise `SpecError` unless `scaler` is None or what `pipe.scaler(...)` returns."""
    if scaler is None or isinstance(scaler, PipelineScaler):
        return
    hint = ""
    if isinstance(scaler, torch.amp.GradScaler):
        hint = ": it would see the gradients of one rank only, and ranks would skip different updates"
    kind = type(scaler)
    raise SpecError(
        f"step(scaler=) does not take a plain {kind.__module__}.{kind.__qualname__}{hint}; "
        f"write scaler = pipe.scaler(...), with GradScaler's arguments"
    )
