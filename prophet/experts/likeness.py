"""Expert modules side by side: which parameters they have, and whether all have the same.

Shape legend: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prophet.experts.elsewhere import Elsewhere


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of an expert.

    Attributes:
        name: The first by which the module lists it.
        shape, dtype, requires_grad: The parameter's.
        places: (submodule, attribute) of every name; several where a parameter is used in several places.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    places: tuple[tuple[str, str], ...]

    def numel(self) -> int:
        """Return how many elements the parameter has."""
        return math.prod(self.shape)


def parts_of(expert: nn.Module) -> list[Part]:
    """Return the expert's parameters, those of the widest dtype first.

    Laid end to end in this order, each is aligned as its dtype asks.
    """
    places: dict[int, list[tuple[str, str]]] = {}
    params: dict[int, tuple[str, nn.Parameter]] = {}
    # all names of a shared parameter: a replica has to set every attribute through which it is read
    for name, p in expert.named_parameters(remove_duplicate=False):
        where, _, attribute = name.rpartition(".")
        places.setdefault(id(p), []).append((where, attribute))
        params.setdefault(id(p), (name, p))
    found = [Part(name, p.shape, p.dtype, p.requires_grad, tuple(places[key])) for key, (name, p) in params.items()]
    return sorted(found, key=lambda part: -part.dtype.itemsize)


def strip(expert: nn.Module) -> None:
    """Take an expert's parameters away; names, shapes and dtypes stay, and buffers with their values."""
    known: dict[int, nn.Parameter] = {}
    for module in expert.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in known:
                known[id(p)] = Elsewhere.like(p)
            # by setattr, since modules may watch what is set, as torch's recurrent ones do
            setattr(module, name, known[id(p)])


def check_alike(experts: Mapping[int, nn.Module], home: Iterable[int] = (), *, tensors: bool = True) -> None:
    """Raise ValueError unless all experts have parameters of the same names, shapes and dtypes.

    Args:
        experts: Expert modules by number.
        home: Numbers that must be among them.
        tensors: Also refuse parameters and modules that cannot have a replica.
    """
    lost = [e for e in home if e not in experts]
    if lost or not experts:
        raise ValueError(f"expected the home experts {list(home)}, got {sorted(experts)}: expert {lost[:1]} is missing")
    first = min(experts)
    wanted = {p.name: p for p in parts_of(experts[first])}
    if not wanted:
        raise ValueError(f"expert {first} ({type(experts[first]).__name__}) has no parameters")
    for e, expert in experts.items():
        found = {p.name: p for p in parts_of(expert)}
        for name in sorted(wanted.keys() ^ found.keys()):
            has, lacks = (first, e) if name in wanted else (e, first)
            raise ValueError(f"expert {has} has a parameter {name}, expert {lacks} has none: expected alike experts")
        for name, part in found.items():
            # `requires_grad` is left out: experts may be frozen one by one, and replicas follow
            for what in ("shape", "dtype", "places"):
                ours, theirs = getattr(wanted[name], what), getattr(part, what)
                if ours != theirs:
                    shown = [list(v) if isinstance(v, torch.Size) else v for v in (ours, theirs)]
                    raise ValueError(
                        f"{name}: {what} is {shown[0]} in expert {first} and {shown[1]} in expert {e}: expected alike "
                        f"experts"
                    )
        if tensors:
            _check_replicable(e, expert)


def _check_replicable(number: int, expert: nn.Module) -> None:
    """Raise ValueError for what would be lost in a replica of the expert, naming it."""
    who = f"expert {number}"
    for name, module in expert.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{who}.{name}" if name else who
            raise ValueError(f"{where}: TorchScript reads its own parameters, not a replica's: pass the module itself")
    for name, p in expert.named_parameters():
        where = f"{who}: parameter {name}"
        if isinstance(p, Elsewhere):
            continue
        # the flat vector takes views of a parameter's elements, which other layouts do not give
        if not p.is_floating_point() or p.is_sparse or type(p.data) is not Tensor:
            kind = type(p.data).__name__ if type(p.data) is not Tensor else str(p.dtype)
            raise ValueError(f"{where} is {kind}: expected plain floating-point tensors, not quantised or sharded ones")
    check_no_hooks(who, dict(expert.named_parameters()))


def check_no_hooks(who: str, params: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for hooks of the user's on an expert's parameters; DeepSpeed's are allowed for."""
    for name, p in params.items():
        # a replica's gradient is added at home by Agg, past autograd, so no hook would run for it
        hooks = [*(p._backward_hooks or {}).values(), *(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks):
            raise ValueError(
                f"{who}: parameter {name} has a hook (as an optimizer in backward has), which a replica's gradients "
                f"would pass by: remove it"
            )
