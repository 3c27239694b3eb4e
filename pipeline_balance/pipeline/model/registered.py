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
    """A registered tensor.

    Attributes:
        name: Its name, without that of the parameter.
        tensor: What this process has of it now; on `meta` where its parameter is.
    """

    name: str
    tensor: Tensor


Settings = list[tuple[Registered, Tensor]]
"""Handles, with the tensors that they are to have."""


def register(name: str, tensor: Tensor, spec: nn.Parameter) -> Registered:
    """Have a tensor travel with a parameter, such as a moving average; the handle has it after every change.

    Call it on every process. Under a name that is there already the tensor is replaced.

    Args:
        name: A word without `#`, `@` and `%`, which mark entries of the state.
        tensor: Detached, and in the parameter's layout: of its shape, on `meta` or a `DTensor` where that is.
        spec: The parameter that it travels with.

    Raises:
        SpecError: Another shape or layout than the parameter's, or a name or tensor that cannot be taken.
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
    # kept on the parameter, so whatever carries its attributes over carries the handle too
    found: dict[str, Registered] = spec.__dict__.setdefault(_ATTRIBUTE, {})
    handle = found.setdefault(name, Registered(name, tensor))
    handle.tensor = tensor
    return handle


def _layout(tensor: Any) -> tuple[Any, ...]:
    # by their texts: meshes of one layout may be several objects
    shards = (str(tensor.device_mesh), str(tensor.placements)) if hasattr(tensor, "placements") else ()
    return (list(tensor.shape), "meta" if tensor.is_meta else tensor.device.type, *shards)


def registered(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Registered]]:
    """Yield what is registered for the parameter called `name`, by its name in the state."""
    for suffix, handle in vars(parameter).get(_ATTRIBUTE, {}).items():
        yield f"{name}{MARK}{suffix}", handle


def settings(
    parameters: Mapping[str, nn.Parameter],
    values: Mapping[str, Tensor],
    like: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    new_owner: Callable[[str], Tensor] | None = None,
) -> Settings:
    """Find what all handles are to have, from the parameters and registered tensors that have come.

    A handle whose parameter has not come is of one that lives elsewhere: its tensor goes to `meta`.

    Args:
        parameters: All parameters by name, as they were before.
        values: What has come, by its name in the state.
        like: `like(name, value)` makes a tensor of `value` in the layout of the parameter called `name`.
        new_owner: `new_owner(name)` is the parameter from now on, where that is another one (None: it stays).

    Raises:
        LayoutError: A tensor has come that is not registered here, or one is registered and has not come.
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
                # the tensor lies on `meta` as its parameter will, which is sharded differently where the layout changed
                after = new_owner(name) if new_owner is not None else parameter
                device = None if after.is_meta else "meta"
                found.append((handle, torch.empty_like(after.detach(), dtype=handle.tensor.dtype, device=device)))
    # left out in silence, it would be gone from the next checkpoint
    strange = sorted(key for key in values if MARK in key and key not in known)
    if strange:
        raise LayoutError(f"{strange[0]} is not registered on this process: call elastic.register on every one")
    return found
