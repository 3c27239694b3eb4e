"""The activations of feed-forward experts: the one table that kernels, planner and conversion read.

Shape legend: D model dim, H hidden dim, O output dim.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from prophet.errors import SpecError

Function = Literal["identity", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu"]
"""A function of one number, with its derivative in every kernel."""

Activation = str
"""The name of an activation, as `activation_named` writes it for its `ActivationParts`.

Either one of `ACTIVATIONS`, or a gated one of them whose factors are bounded, or whose `up` is increased by 1, or both:
"swiglu(limit=10)", "quick_geglu(limit=7, plus_one)".
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationParts:
    """The parts of an activation.

    Attributes:
        function: Applied to the pre-activations or, if `gated`, to the gate, and then multiplied by `up`.
        gated: Whether there is a gate: w_in then has 2H rows, the gate's first.
        limit: Bounds the gate from above and `up` on both sides, before the function; None for no bounds.
        plus_one: Whether 1 is added to `up`, after the bounds.

    Raises:
        SpecError: For a limit that is not positive and finite, and for `limit` or `plus_one` without a gate.
    """

    function: Function
    gated: bool = False
    limit: float | None = None
    plus_one: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise SpecError(f"limit: expected a positive and finite number, got {self.limit!r}")
        if not self.gated and (self.limit is not None or self.plus_one):
            raise SpecError(f"limit and plus_one belong to gated activations, got {self}")


_TABLE = {
    "identity": ActivationParts(function="identity"),
    "relu": ActivationParts(function="relu"),
    "relu2": ActivationParts(function="relu2"),
    "gelu": ActivationParts(function="gelu"),
    "gelu_tanh": ActivationParts(function="gelu_tanh"),
    "silu": ActivationParts(function="silu"),
    "quick_gelu": ActivationParts(function="quick_gelu"),
    "reglu": ActivationParts(function="relu", gated=True),
    "geglu": ActivationParts(function="gelu", gated=True),
    "geglu_tanh": ActivationParts(function="gelu_tanh", gated=True),
    "swiglu": ActivationParts(function="silu", gated=True),
    "quick_geglu": ActivationParts(function="quick_gelu", gated=True),
    "swiglu_clamped": ActivationParts(function="quick_gelu", gated=True, limit=7.0, plus_one=True),
}
# No two names have equal parts
_NAMES = {parts: name for name, parts in _TABLE.items()}
# As in "swiglu(limit=10)", "swiglu(limit=10, plus_one)" and "swiglu(plus_one)"
_OPTIONS = re.compile(r"(\w+)\((?:limit=([0-9.e+-]+)(, ?plus_one)?|(plus_one))\)")
# Every name that was read so far; not an lru_cache, of which torch.compile warns
_READ = dict(_TABLE)
ACTIVATIONS: tuple[Activation, ...] = tuple(_TABLE)


def parts_of(activation: Activation) -> ActivationParts:
    """Return the parts of an activation by its name, in any spelling of its limit.

    Raises:
        SpecError: For a value that names none.
    """
    found = None
    if isinstance(activation, str):
        found = _READ.get(activation) or _with_options(activation)
    if found is None:
        raise SpecError(
            f"activation: expected one of {', '.join(ACTIVATIONS)}, or a gated one with a positive limit, such as "
            f"'swiglu(limit=10)' or 'quick_geglu(limit=7, plus_one)', got {activation!r:.80}"
        )
    return found


def _with_options(activation: str) -> ActivationParts | None:
    """Read a name with options in brackets; None for another string."""
    found = _OPTIONS.fullmatch(activation)
    base = _TABLE.get(found[1]) if found else None
    # A name that has a limit already takes no other one
    if found is None or base is None or base.limit is not None:
        return None
    try:
        limit = None if found[2] is None else float(found[2])
        _READ[activation] = replace(base, limit=limit, plus_one=bool(found[3] or found[4]))
    # The limit is no number or not allowed, or there is no gate (SpecError is a ValueError)
    except ValueError:
        return None
    return _READ[activation]


def activation_named(parts: ActivationParts) -> Activation:
    """Return the name of an activation by its parts, the inverse of `parts_of`; equal parts have one name.

    Raises:
        SpecError: For a function that no gated activation has.
    """
    if parts in _NAMES:
        return _NAMES[parts]
    base = _NAMES.get(replace(parts, limit=None, plus_one=False))
    if base is None:
        functions = ", ".join(known.function for known in _TABLE.values() if known.gated == parts.gated)
        raise SpecError(f"function: expected one of {functions}, got {parts}")
    # As short as it can be written: the name goes into checkpoints and digests, which are compared as text
    options = [] if parts.limit is None else [f"limit={float(parts.limit)!r}".removesuffix(".0")]
    return f"{base}({', '.join(options + ['plus_one'] * parts.plus_one)})"


Bias = bool | Literal["in", "out"]
"""Which biases experts have: both, none, that of w_in alone, or that of w_out alone."""


def has_biases(bias: Bias) -> tuple[bool, bool]:
    """Return whether there is a bias after w_in, and after w_out; `SpecError` for a value that is no `Bias`."""
    if bias not in (True, False, "in", "out"):
        raise SpecError(f"bias must be True, False, 'in' or 'out', got {bias!r}")
    return bias in (True, "in"), bias in (True, "out")


def bias_of(b_in: object, b_out: object) -> Bias:
    """Return which biases there are, from the biases themselves or None: the inverse of `has_biases`."""
    if (b_in is None) == (b_out is None):
        return b_in is not None
    return "out" if b_in is None else "in"
