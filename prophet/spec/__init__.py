"""The values that flow between the rooms: frozen, validated when built, free of torch and of any process group."""

from prophet.spec.arrays import BoolArray, FloatArray, IntArray, digest, odd_ones_out
from prophet.spec.cost import ACTIVATIONS, GATED, Activation, LayerShape, Link, PlanContext, StepCost, Topology, Windows
from prophet.spec.placement import Placement, Split, check_experts_per_rank, check_load

__all__ = [
    "ACTIVATIONS",
    "GATED",
    "Activation",
    "BoolArray",
    "FloatArray",
    "IntArray",
    "LayerShape",
    "Link",
    "Placement",
    "PlanContext",
    "Split",
    "StepCost",
    "Topology",
    "Windows",
    "check_experts_per_rank",
    "check_load",
    "digest",
    "odd_ones_out",
]
