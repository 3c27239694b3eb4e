"""What makes a module compute as it does, beside the values of its parameters: has somebody changed it since?

People replace an activation, put hooks on a module or give it a mask. A comparison by identity costs a few microseconds
per module; only where something has changed is anything read.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from prophet.experts.hooks import KINDS

# a module's mode does not matter, and what it holds is looked at in another place
_BESIDE = {"training", "_parameters", "_buffers", "_modules", "_is_full_backward_hook", *KINDS}
# names that tools give to what they put on modules
_MARKS = ("_", "ds_")
_VALUES = (bool, int, float, complex, str, bytes, type(None))
# of values inside values: bounds the text, and cycles
_DEPTH = 3


class Structure:
    """What one expert's modules are at this moment.

    Compared are classes and their forward methods, submodules, names of parameters, buffers, hooks, and attributes:
    their objects, and what is in lists and dictionaries. What an object of another class holds is not compared, nor a
    new attribute whose name is private.

    Args:
        expert: The module; it is kept, and looked at again later.
    """

    def __init__(self, expert: nn.Module) -> None:
        self._expert = expert
        self._names = {name: set(vars(module)) for name, module in expert.named_modules()}
        self._seen = self._now()

    def unchanged(self) -> bool:
        """Return whether the expert is what it was."""
        now = self._now()
        return len(now) == len(self._seen) and all(map(_same, now, self._seen))

    def _now(self) -> list[Any]:
        """Return all that is compared, as objects."""
        # the objects themselves and not ids: an id may be another's once its object is gone
        found: list[Any] = []
        ahead = [("", self._expert)]
        for name, module in ahead:
            own = vars(module)
            found += [type(module), type(module).forward, *own["_parameters"]]
            for key in self._settings(name, module):
                value = own[key]
                found += [key, value]
                if isinstance(value, dict):
                    found += [len(value), *value, *value.values()]
                elif isinstance(value, list | tuple):
                    found += [len(value), *value]
            found += own["_buffers"].values()
            # whether there are any: handles change the dictionaries in place, and `text` tells which they are
            found += [bool(own[hooks]) for hooks in KINDS]
            for key, child in own["_modules"].items():
                found += [key, child]
                if child is not None:
                    ahead.append((f"{name}.{key}" if name else key, child))
        return found

    def _settings(self, name: str, module: nn.Module) -> list[str]:
        known = self._names.get(name, ())
        return [k for k in vars(module) if k not in _BESIDE and (k in known or not k.startswith(_MARKS))]

    def text(self) -> str:
        """Return all of it, and the hooks, as they are now; the same text in every process."""
        lines = []
        for name, module in self._expert.named_modules():
            own = vars(module)
            settings = {k: _text(own[k], _DEPTH) for k in sorted(self._settings(name, module))}
            hooks = {k: [_text(hook, _DEPTH) for hook in own[k].values()] for k in KINDS}
            buffers = {k: b if b is None else (list(b.shape), str(b.dtype)) for k, b in own["_buffers"].items()}
            kind, forward = _text(type(module), 0), _text(type(module).forward, _DEPTH)
            lines.append(f"{name} {kind} {forward} {settings} {hooks} {buffers} {list(own['_parameters'])}")
        return "\n".join(lines)


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, _VALUES) and type(now) is type(before) and now == before)


def _text(value: Any, depth: int) -> str:
    """Describe a value, a function with what it computes by, or the class of anything else."""
    if isinstance(value, _VALUES):
        return repr(value)
    if depth and isinstance(value, functools.partial):
        return f"partial {[_text(v, depth - 1) for v in (value.func, *value.args, *sorted(value.keywords.items()))]}"
    if depth and isinstance(value, list | tuple):
        return str([_text(v, depth - 1) for v in value])
    if depth and isinstance(value, dict):
        return str({str(k): _text(v, depth - 1) for k, v in value.items()})
    # a lambda's name says nothing: its code, names, constants and closure do, and are alike in every process
    code = getattr(value, "__code__", None)
    named = value if hasattr(value, "__qualname__") else type(value)
    text = f"{named.__module__}.{named.__qualname__}"
    if depth and code is not None:
        cells = [cell for cell in getattr(value, "__closure__", None) or () if cell != types.CellType()]
        held = [cell.cell_contents for cell in cells] + [*(getattr(value, "__defaults__", None) or ())]
        text += f" {code.co_code.hex()} {code.co_names} {[c for c in code.co_consts if isinstance(c, _VALUES)]}"
        text += f" {[_text(v, depth - 1) for v in held]}"
    return text


def digest(structures: Iterable[Structure], requires_grad: Iterable[bool]) -> int:
    """Return 56 bits of what experts are like now, in order, and of which of their parameters train."""
    found = hashlib.blake2b(bytes(requires_grad), digest_size=7)
    for one in structures:
        found.update(one.text().encode())
    return int.from_bytes(found.digest(), "little")
