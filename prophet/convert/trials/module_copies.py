"""Copies of a user's modules, for trying what they do: without their experts, with random parameters, in float64.

Nothing here touches the model. Whatever is tried runs alone among threads, and leaves the random state as it was.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prophet.convert.trials.replay import same
from prophet.experts.hooks import KINDS

# Attributes that every module has
_OWN = set(vars(nn.Module())) - {"training"}
# Levels of values inside values that are compared
_DEPTH = 4
# Tolerance where something in float64 rounds to float32 on its way
ROUNDED = 1e-5


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def twin_of(module: nn.Module, put: Mapping[Any, Any] | None = None) -> nn.Module:
    """Copy a module deeply, without hooks.

    Process groups stay what they are: they cannot be copied.

    Args:
        module: What to copy.
        put: Modules or tensors inside it, and what replaces each in the copy.

    Raises:
        TypeError: Or whatever else a part raises that cannot be copied.
    """
    memo: dict[int, Any] = {id(old): new for old, new in (put or {}).items()}
    for part in module.modules():
        memo.update({id(v): v for v in vars(part).values() if isinstance(v, dist.ProcessGroup)})
        memo.update({id(hooks): type(hooks)() for hooks in (getattr(part, kind) for kind in KINDS)})
    twin: nn.Module = copy.deepcopy(module, memo)
    return twin


@torch.no_grad()
def scramble(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a module, in place, a dtype and random parameters and buffers; nothing stays frozen.

    A zero gate ties its experts, and a zero bias hides. Buffers of one number are left: they are settings, not state.
    The numbers are the same in every call, whoever else draws.
    """
    module.to(dtype)
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            # Scaled by the inputs of a matrix, so that answers stay near 1 through several layers.
            p.copy_(drawn * (0.5 if p.ndim < 2 else 2 / max(p.shape[-1], 1) ** 0.5))
    for b in module.buffers():
        if b.is_floating_point() and b.numel() > 1:
            # Positive, as buffers may be variances or counts
            b.copy_(torch.rand(b.shape, generator=generator, dtype=torch.float64) + 0.1)
    return module


# --- state outside of parameters and buffers ---


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a pass may leave behind: attributes, buffers and parameters of all modules inside, by name; copied."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        here = f"{name}." if name else ""
        values = {k: v for k, v in vars(part).items() if k not in _OWN and k != "training"}
        values |= {**part._buffers, **part._parameters}
        found |= {f"{here}{k}": _value(v, _DEPTH) for k, v in values.items()}
    return found


def _value(x: Any, depth: int) -> Any:
    """Copy `x` for a comparison: tensors, numbers, texts, containers, and objects by their attributes."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, torch.Generator):
        return x.get_state()
    if x is None or isinstance(x, bool | int | float | complex | str | bytes):
        return x
    if depth == 0 or isinstance(x, nn.Module | type) or callable(x):
        return None
    if isinstance(x, Mapping):
        return {repr(k): _value(v, depth - 1) for k, v in x.items()}
    if isinstance(x, Sized) and hasattr(x, "__iter__"):
        return [_value(v, depth - 1) for v in x]
    return {k: _value(v, depth - 1) for k, v in getattr(x, "__dict__", {}).items()}


def differences(want: Any, got: Any, tolerance: float, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield where two values of `state_of`, or two answers of a module, differ, and how.

    Args:
        want: The value as it was.
        got: The value as it is.
        tolerance: Share of a tensor's largest value.
        where: Place of the two values, for the places inside.
    """
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        if want.shape != got.shape or want.dtype != got.dtype:
            yield where, f"it was {text(want)} and is {text(got)}"
        elif want.numel():
            gap = distance(want, got)
            # Written so that a gap of NaN is a difference
            if not gap <= tolerance:
                yield where, f"it differs by {gap:.3g} of its largest value"
    elif isinstance(want, Mapping) and isinstance(got, Mapping):
        # In an order that all ranks have
        for key in dict.fromkeys((*want, *got)):
            place = f"{where}.{key}" if where else str(key)
            if key in want and key in got:
                yield from differences(want[key], got[key], tolerance, place)
            else:
                yield place, "it is there in one of them only"
    elif isinstance(want, list | tuple) and isinstance(got, list | tuple):
        if len(want) != len(got):
            yield where, f"it had {len(want)} values and has {len(got)}"
        else:
            for at, (a, b) in enumerate(zip(want, got, strict=True)):
                yield from differences(a, b, tolerance, f"{where}[{at}]")
    # By their text, in which NaN equals NaN
    elif isinstance(want, Tensor) or isinstance(got, Tensor) or repr(want) != repr(got):
        yield where, f"it was {text(want)} and is {text(got)}"


def distance(want: Tensor, got: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest value; NaN and infinity equal themselves."""
    a, b = want.detach().double(), got.detach().double()
    equal = same(a, b)
    if bool(equal.all()):
        return 0.0
    finite = a[a.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return float((a - b)[~equal].abs().max()) / max(scale, 1e-30)


def text(x: object) -> str:
    """A value as it stands in a message, cut short."""
    return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)[:40]


def globals_of(module: nn.Module) -> dict[str, float]:
    """Numbers, and sizes of containers, in the files that define the classes of `module`."""
    found: dict[str, float] = {}
    for place in {type(part).__module__ for part in module.modules()}:
        if place.split(".")[0] in ("torch", "builtins", "prophet"):
            continue
        for name, value in vars(sys.modules.get(place, object())).items() if place in sys.modules else ():
            if isinstance(value, int | float):
                found[f"{place}.{name}"] = float(value)
            elif isinstance(value, list | dict | set):
                found[f"{place}.{name}"] = float(len(value))
    return found


class Rounding(TorchDispatchMode):
    """Notes whether anything is computed in less than float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.happens = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.happens |= any(
            isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 for t in tree_leaves(result)
        )
        return result
