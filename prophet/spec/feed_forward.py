"""What a feed-forward expert may compute: the one table of activations that kernels, planner and conversion read.

Shape legend: D model dim, H hidden dim, O output dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prophet.errors import SpecError

Function = Literal["identity", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu"]
"""A function of one number, with its derivative in every kernel."""

Activation = Literal[
    "identity",
    "relu",
    "relu2",
    "gelu",
    "gelu_tanh",
    "silu",
    "quick_gelu",
    "reglu",
    "geglu",
    "geglu_tanh",
    "swiglu",
    "swiglu_clamped",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationParts:
    """How an activation is made: `function` of the pre-activations, or, if `gated`, of the gate, times `up`.

    A gated expert has 2H rows in w_in, the gate's first. If `clamped`, the gate is bounded from above and `up` on both
    sides before, and 1 is added to `up`.
    """

    function: Function
    gated: bool = False
    clamped: bool = False


ACTIVATION_PARTS: Mapping[Activation, ActivationParts] = MappingProxyType(
    {
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
        "swiglu_clamped": ActivationParts(function="quick_gelu", gated=True, clamped=True),
    }
)
ACTIVATIONS: tuple[Activation, ...] = tuple(ACTIVATION_PARTS)
GATED: tuple[Activation, ...] = tuple(name for name, parts in ACTIVATION_PARTS.items() if parts.gated)

Bias = bool | Literal["in", "out"]
"""Which biases experts have: both, none, that of w_in alone, or that of w_out alone."""


def has_biases(bias: Bias) -> tuple[bool, bool]:
    """Whether there is a bias behind w_in, and behind w_out. Raises `SpecError` for what is no `Bias`."""
    if bias not in (True, False, "in", "out"):
        raise SpecError(f"bias must be True, False, 'in' or 'out', got {bias!r}")
    return bias in (True, "in"), bias in (True, "out")


def bias_of(b_in: object, b_out: object) -> Bias:
    """The inverse of `has_biases`, from the biases themselves, None for one that is not there."""
    if (b_in is None) == (b_out is None):
        return b_in is not None
    return "out" if b_in is None else "in"
