"""What makes a module compute as it does, beside the values of its parameters: has somebody changed it since?

People replace an activation, put hooks on a module or give it a mask. A look costs a microsecond or two per module, as
it compares identities; only where these have changed is anything read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from prophet.experts.hooks import KINDS

# in which mode a module is, and what it holds, is looked at otherwise, or does not matter
_BESIDE = {"training", "_parameters", "_buffers", "_modules", "_is_full_backward_hook", *KINDS}
_VALUES = (bool, int, float, complex, str, bytes, type(None))


class Structure:
    """That of one expert at this moment.

    Attributes that are new later are left out, as no forward pass reads them; tools put such things on modules.
    """

    def __init__(self, expert: nn.Module) -> None:
        self._expert = expert
        self._settings = {
            name: [k for k in vars(m) if k not in _BESIDE and k != "forward"] for name, m in expert.named_modules()
        }
        self._seen = self._identities()
        self._made = self.text()

    def unchanged(self) -> bool:
        """Whether the expert is what it was."""
        now = self._identities()
        if now == self._seen:
            return True
        if self.text() != self._made:
            return False
        self._seen = now  # the same again, in other objects
        return True

    def _identities(self) -> list[Any]:
        found: list[Any] = []
        ahead = [("", self._expert)]
        for name, module in ahead:
            own = vars(module)
            children = own["_modules"]
            found += [type(module), own.get("forward"), [id(own.get(k)) for k in self._settings.get(name, ())]]
            found += [list(own["_parameters"]), [id(b) for b in own["_buffers"].values()]]
            found += [bool(own[hooks]) for hooks in KINDS]
            found.append([(k, id(m)) for k, m in children.items()])
            ahead += [(f"{name}.{k}" if name else k, m) for k, m in children.items() if m is not None]
        return found

    def text(self) -> str:
        """Names, classes, settings and hooks of all modules inside, as they are now; the same in every process."""
        lines = []
        for name, module in self._expert.named_modules():
            own = vars(module)
            settings = {k: own.get(k) for k in (*self._settings.get(name, ()), "forward")}
            said = {k: repr(v) if isinstance(v, _VALUES) else _kind(v) for k, v in settings.items()}
            hooks = {k: [_kind(hook) for hook in own[k].values()] for k in KINDS}
            buffers = {k: b if b is None else (list(b.shape), str(b.dtype)) for k, b in own["_buffers"].items()}
            lines.append(f"{name} {_kind(type(module))} {said} {hooks} {buffers} {list(own['_parameters'])}")
        return "\n".join(lines)


def _kind(value: object) -> str:
    """The name of a function or class, or of the class of anything else."""
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def digest(structures: Iterable[Structure]) -> int:
    """56 bits of what experts are like now, in order."""
    found = hashlib.blake2b(digest_size=7)
    for one in structures:
        found.update(one.text().encode())
    return int.from_bytes(found.digest(), "little")
