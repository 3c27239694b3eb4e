"""A user's hooks see a model's own passes: whoever only tries a module takes them off meanwhile."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Run `module` and the modules in it without their hooks inside the context; afterwards they have them as before.

    Hooks that set what the module computes with stay. These are torch's own, as of `weight_norm` and pruning, and
    functions that have a part of the module in their closure: a copy's hook would go on reading that part of the
    original.
    """
    kept = []
    own = {id(one) for part in module.modules() for one in (part, *part._parameters.values())}
    for part in module.modules():
        for kind in KINDS:
            hooks = getattr(part, kind)
            left = type(hooks)((key, hook) for key, hook in hooks.items() if _computes(hook, own))
            if len(left) < len(hooks):
                kept.append((part, kind, hooks))
                part.__dict__[kind] = left
    try:
        yield
    finally:
        # the same objects are put back: handles that remove a hook know them
        for part, kind, hooks in kept:
            part.__dict__[kind] = hooks


def _computes(hook: Any, own: set[int]) -> bool:
    held: list[Any] = []
    # a partial hides the function, and may hold a part of the module itself
    while isinstance(hook, functools.partial):
        held += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    if str(getattr(hook, "__module__", "")).startswith("torch.") or isinstance(hook, BasePruningMethod):
        return True
    cells = getattr(hook, "__closure__", None) or ()
    # a variable that is not set yet has an empty cell
    held += [cell.cell_contents for cell in cells if cell != types.CellType()]
    held += [*(getattr(hook, "__defaults__", None) or ()), *(getattr(hook, "__kwdefaults__", None) or {}).values()]
    return any(id(one) in own for one in held)
