"""Tensors that users keep beside parameters, such as moving averages: they live and travel where the parameter does.

A handle stays with its parameter, as an attribute, so whatever carries a parameter's attributes over carries it too.
In the state of a run a tensor `ema` of `3.weight` is called `3.weight%ema`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.errors import LayoutError, SpecError

_ATTRIBUTE = "_registered"
MARK = "%"


@dataclass(eq=False)
class Registered:
    """A registered tensor: `tensor` is what this process has of it now, on `meta` where its parameter is."""

    name: str
    tensor: Tensor


Settings = list[tuple[Registered, Tensor]]
"""Handles, with the tensors that they are to have."""


def register(name: str, tensor: Tensor, spec: nn.Parameter) -> Registered:
    """Have `tensor` travel with the parameter `spec`, under this name; the handle has it after every change.

    It is in the parameter's layout: of its shape, on `meta` or a `DTensor` where that is. Call it on every process.
    Under a name that is there already the tensor is replaced. Raises `SpecError` for another shape or layout.
    """
    if not isinstance(spec, nn.Parameter):
        raise SpecError(f"{name}: expected a parameter that it travels with, got a {type(spec).__name__}")
    if not name or set(name) & set("#@%"):
        raise SpecError(f"a registered name must be a word without #, @ and %, got {name!r}")
    if tensor.requires_grad or tensor.grad_fn is not None:
        raise SpecError(f"{name}: a registered tensor must be detached")
    mine, theirs = _layout(tensor), _layout(spec)
    if mine != theirs:
        raise SpecError(f"{name}: expected a tensor that lies as its parameter does ({theirs}), got {mine}")
    found: dict[str, Registered] = spec.__dict__.setdefault(_ATTRIBUTE, {})
    handle = found.setdefault(name, Registered(name, tensor))
    handle.tensor = tensor
    return handle


def _layout(tensor: Any) -> tuple[Any, ...]:
    shards = (str(tensor.device_mesh), str(tensor.placements)) if hasattr(tensor, "placements") else ()
    return (list(tensor.shape), "meta" if tensor.is_meta else tensor.device.type, *shards)


def registered(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Registered]]:
    """What is registered for the parameter called `name`, by its name in the state."""
    for word, handle in vars(parameter).get(_ATTRIBUTE, {}).items():
        yield f"{name}{MARK}{word}", handle


def settings(
    parameters: Mapping[str, nn.Parameter],
    values: Mapping[str, Tensor],
    like: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    new_owner: Callable[[str], Tensor] | None = None,
) -> Settings:
    """What all handles become, from the parameters and registered tensors that have come, by their names in the state.

    A handle whose parameter has not come is of one that lives elsewhere: its tensor goes to `meta`, and lies there as
    the parameter does, which is then `new_owner(name)`. `like(name, value)` makes a parameter's tensor of a value.
    Raises `LayoutError` where one is not registered here, or has not come.
    """
    found: Settings = []
    known: set[str] = set()
    for name, parameter in parameters.items():
        for key, handle in registered(name, parameter):
            known.add(key)
            if key in values:
                found.append((handle, like(name, values[key])))
            elif name in values:
                raise LayoutError(f"{key} is registered, but has not come with its parameter")
            else:
                after = new_owner(name) if new_owner is not None else parameter
                device = None if after.is_meta else "meta"
                found.append((handle, torch.empty_like(after.detach(), dtype=handle.tensor.dtype, device=device)))
    strange = sorted(key for key in values if MARK in key and key not in known)
    if strange:
        raise LayoutError(f"{strange[0]} is not registered on this process: call elastic.register on every one")
    return found
