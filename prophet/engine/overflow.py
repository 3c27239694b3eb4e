"""Shares what torch's `GradScaler` finds in the gradients of one rank, so that all ranks act upon it.

The gradient of an expert's weight exists on its home rank alone. Where it overflows, a `GradScaler` that knew of this
rank only would skip `optimizer.step()` here and halve the loss scale here, while the other ranks take the step. So the
ranks of the expert-parallel group exchange what they found, and then the processes that hold the same experts.

A script makes its scaler itself and never shows it to the library. Hence two methods of torch's class are replaced,
once. For optimizers that hold no experts and that no engine follows they do what they did.

Shape legend: R ranks.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from prophet.layer.moe import MoE
from prophet.ranks.messages import share
from prophet.ranks.operation import Operation

_OPERATION = Operation("GradScaler's check for infinite gradients")


class Follower(Protocol):
    """Something whose steps end with an optimizer's, as an engine. `updates`: how often the optimizer has run."""

    layers: list[MoE]
    updates: int

    def complete_gradients(self) -> None:
        """Bring home gradients that are still away, before the optimizer's gradients are read."""

    def finish_step(self) -> None:
        """End the step that is under way, if one is."""


# Weak, so that layers and optimizers end with their model although torch's class is changed for good
_lock = threading.Lock()
_layers: list[weakref.ref[MoE]] = []
_followers: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Follower]] = weakref.WeakKeyDictionary()


def share_overflows(layers: Sequence[MoE]) -> None:
    """Make what a `GradScaler` finds in the gradients of these layers' experts count on all ranks from now on.

    Call it on all ranks, in the same order of layers. A second call does nothing.
    """
    with _lock:
        known = {id(layer) for layer in _layers_alive()}
        _layers[:] = [ref for ref in _layers if ref() is not None]
        _layers.extend(weakref.ref(layer) for layer in layers if id(layer) not in known)
        _replace_methods()


class Following:
    """Ends a step of `follower` also where a `GradScaler` skips the step of `optimizer`, until `remove` is called."""

    def __init__(self, optimizer: torch.optim.Optimizer, follower: Follower) -> None:
        self._optimizer, self._follower = weakref.ref(optimizer), follower
        _followers.setdefault(optimizer, []).append(follower)

    def remove(self) -> None:
        """Stop following."""
        optimizer = self._optimizer()
        if optimizer is not None:
            _followers[optimizer].remove(self._follower)


def _layers_alive() -> Iterator[MoE]:
    return (layer for ref in list(_layers) if (layer := ref()) is not None)


def _followers_of(optimizer: Any) -> list[Follower]:
    return _followers.get(optimizer, []) if isinstance(optimizer, torch.optim.Optimizer) else []


def _layers_of(optimizer: Any) -> list[MoE]:
    """Find the layers that a scaler's decision about `optimizer` concerns, the same on all ranks."""
    # Those of a follower count although this rank's optimizer may hold none of their experts: ranks must agree on
    # whether they exchange anything
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    followed = {id(layer) for follower in _followers_of(optimizer) for layer in follower.layers}
    return [x for x in _layers_alive() if id(x) in followed or any(id(p) in held for p in x.experts.parameters())]


# --- the exchange ---


def _share(found: dict[torch.device, Tensor], layers: Sequence[MoE]) -> None:
    """Replace `found` by what any rank has found; collective.

    Args:
        found: By device, not zero where a gradient is infinite; changed in place.
        layers: The layers that are concerned.
    """
    device = layers[0].experts.device
    # Whether an infinite gradient was found; whether there were any gradients
    mine = torch.zeros(2, dtype=torch.float64, device=device)
    for value in found.values():
        mine[0] += value.to(device, non_blocking=True)
        mine[1] = 1.0
    # By identity: layers share their groups, and one exchange per group is enough
    groups = {id(x.collective): x.collective for x in layers}
    groups |= {id(x.replicas): x.replicas for x in layers if x.replicas is not None}
    for group in groups.values():
        mine = share(group, mine, op=_OPERATION).amax(0)
    # Exactly one or zero: fused optimizers compare with one
    infinite = (mine[0] != 0).float()
    for value in found.values():
        value.copy_(infinite, non_blocking=True)
    # torch refuses an optimizer without gradients; where another rank has some, this one takes the step as well
    if not found and mine[1]:
        found[device] = infinite


# --- torch's class ---


def _parts_of(optimizer: Any) -> list[Any]:
    """Return `optimizer`, or two that stand for it where FSDP has cut some of its parameters."""
    # torch unscales all gradients of a device and dtype in one call, which cannot mix DTensors and tensors
    params = [p for group in optimizer.param_groups for p in group["params"]]
    cut = [p for p in params if hasattr(p, "full_tensor")]
    if not cut:
        return [optimizer]
    whole = [p for p in params if not hasattr(p, "full_tensor")]
    return [SimpleNamespace(param_groups=[{"params": part}]) for part in (cut, whole)]


def _replace_methods() -> None:
    """Replace two methods of torch's class, once; for optimizers without experts they do what they did."""
    if hasattr(GradScaler._unscale_grads_, "__wrapped__"):
        return
    unscale, maybe_step = GradScaler._unscale_grads_, GradScaler._maybe_opt_step

    @functools.wraps(unscale)
    def _unscale_grads_(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        layers = _layers_of(optimizer)
        if not layers:
            return unscale(scaler, optimizer, *args, **kwargs)
        # Unscaling reads the gradients, so the replicas' part has to be home by then
        for follower in _followers_of(optimizer):
            follower.complete_gradients()
        found: dict[torch.device, Tensor] = {}
        for part in _parts_of(optimizer):
            for device, value in unscale(scaler, part, *args, **kwargs).items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        _share(found, layers)
        return found

    @functools.wraps(maybe_step)
    def _maybe_opt_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        before = [(follower, follower.updates) for follower in _followers_of(optimizer)]
        result = maybe_step(scaler, optimizer, *args, **kwargs)
        for follower, updates in before:
            # The optimizer has not run, so its hook has not ended the step
            if follower.updates == updates:
                follower.finish_step()
        return result

    setattr(GradScaler, "_unscale_grads_", _unscale_grads_)  # noqa: B010 (mypy: a method)
    setattr(GradScaler, "_maybe_opt_step", _maybe_opt_step)  # noqa: B010
