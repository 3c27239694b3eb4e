"""Parameters of experts that live on another rank: they have a shape, and no values.

Every rank runs the same lines of a user's program. A line that writes to all experts in place thus runs at their homes,
too, so here it only has to draw the same random numbers. A line that reads values cannot be right here, and is refused.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from prophet.errors import ConversionError

_REFUSED = (
    "this expert lives on another rank, and its values are not here. Write to it in place, on all ranks alike, and its "
    "home keeps that; read it with prophet.convert.original_state_dict(model); or change the model between "
    "prophet.revert(model) and prophet.convert(model)"
)
_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div"))}


class _Valueless(Tensor):
    """What a function has made of an `Elsewhere`.

    `home` is the device on which random numbers for it are drawn.
    """

    home: torch.device

    def __reduce_ex__(self, _: Any) -> Any:
        raise ConversionError(_REFUSED)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class Elsewhere(nn.Parameter):
    """Stands in a module for a parameter without values.

    Attributes:
        home: The device on which random numbers for it are drawn.
        kept: Whether it is in a module, and not taken out of it, as by `state_dict`, which may be about to be saved.
    """

    home: torch.device
    kept = False

    @classmethod
    def like(cls, p: Tensor) -> Self:
        """Return one of the shape and dtype of `p`, with its `requires_grad`."""
        with torch._C.DisableTorchFunctionSubclass():
            # on the meta device: a shape without memory
            made = cls(torch.empty_like(p, device="meta").detach(), p.requires_grad)
            made.home, made.kept = p.home if isinstance(p, Elsewhere) else p.device, True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # two modules that share a parameter must share its stand-in in the copy, too
        if id(self) not in memo:
            memo[id(self)] = type(self).like(self)
        found: Self = memo[id(self)]
        return found

    def __reduce_ex__(self, _: Any) -> Any:
        # pickling it outside of its module is a checkpoint of values that are not here
        if not self.kept:
            raise ConversionError(_REFUSED)
        return _made, (tuple(self.shape), self.dtype, self.requires_grad, self.home)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


_KINDS = (Elsewhere, _Valueless)


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what `func` makes of arguments of which some have no values; `ConversionError` where it needs them."""
    # `p.data = x` writes values in place: the home keeps them, and here there is nothing to keep
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return None
    if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
        # functions of torch.nn.init leave meta tensors alone, and would draw nothing
        return False
    name, tensors = getattr(func, "__name__", ""), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    first = tensors[0] if tensors else None
    if not isinstance(first, _KINDS):
        # another tensor comes first, so this one would be read
        raise ConversionError(_REFUSED)
    try:
        # torch's convention: functions that end in an underscore write to their first argument
        if name in _WRITES or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
            return _write(func, args, kwargs, first)
        if name != "__set__" and any(not isinstance(x, _KINDS) and not x.is_meta for x in tensors):
            raise ConversionError(_REFUSED)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if not isinstance(found, Tensor | list | tuple) or isinstance(found, torch.Size):
                return found
            return tree_map_only(Tensor, lambda made: _of(first, made), found)
    except (RuntimeError, TypeError, ValueError) as error:
        # a meta tensor fails in many ways where values are needed; users should see one message
        raise error if isinstance(error, ConversionError) else ConversionError(_REFUSED) from error


def _write(func: Any, args: Any, kwargs: Any, target: Tensor) -> Any:
    """Draw what `func` draws, on zeros; only the shape of what it writes is kept."""
    # one per parameter: arguments that are the same tensor must stay the same
    zeros: dict[int, Tensor] = {}

    def blank(p: Any) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return zeros.setdefault(id(p), torch.zeros(p.shape, dtype=p.dtype, device=p.home))

    real = tree_map_only(_KINDS, blank, (args, kwargs))
    with torch.no_grad():
        found = func(*real[0], **real[1])
        # functions that reshape in place have to reshape the stand-in as well
        if zeros[id(target)].shape != target.shape:
            with torch._C.DisableTorchFunctionSubclass():
                func(*args, **kwargs)
    return None if found is None else target


def _of(source: Any, made: Tensor) -> Tensor:
    """Make what a function has made of `source` valueless as well."""
    if not made.is_meta or isinstance(made, _KINDS):
        return made
    # a parameter that is made of one, as a parametrization does, has to be of its class
    detached = isinstance(source, Elsewhere) and not made.requires_grad and made.shape == source.shape
    found: Any = made.as_subclass(Elsewhere if detached else _Valueless)
    found.home = source.home
    return found  # type: ignore[no-any-return]


def _made(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, home: torch.device) -> Elsewhere:
    made = Elsewhere.like(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad))
    made.home = home
    return made
