"""The values that pass between the rooms: frozen, validated when built, free of torch and of any process group."""

from prophet.spec.arrays import BoolArray, FloatArray, IntArray, digest, odd_ones_out
from prophet.spec.checked import checked
from prophet.spec.cost import (
    FORM_NAMES,
    Cover,
    FormName,
    LayerShape,
    Link,
    PlanContext,
    StepCost,
    Topology,
    TransferSeconds,
    Windows,
)
from prophet.spec.feed_forward import (
    ACTIVATIONS,
    Activation,
    ActivationParts,
    Bias,
    Function,
    activation_named,
    bias_of,
    has_biases,
    parts_of,
)
from prophet.spec.placement import Placement, check_experts_per_rank, check_load
from prophet.spec.routes import Groups, Route, Routes, by_node, relayed, routes_of, transfer_pairs
from prophet.spec.slowest import expected_last, last_of_alike
from prophet.spec.split import Flows, Split

__all__ = [
    "ACTIVATIONS",
    "FORM_NAMES",
    "Activation",
    "ActivationParts",
    "Bias",
    "BoolArray",
    "Cover",
    "FloatArray",
    "Flows",
    "FormName",
    "Function",
    "Groups",
    "IntArray",
    "LayerShape",
    "Link",
    "Placement",
    "PlanContext",
    "Route",
    "Routes",
    "Split",
    "StepCost",
    "Topology",
    "TransferSeconds",
    "Windows",
    "activation_named",
    "bias_of",
    "by_node",
    "check_experts_per_rank",
    "check_load",
    "checked",
    "digest",
    "expected_last",
    "has_biases",
    "last_of_alike",
    "odd_ones_out",
    "parts_of",
    "relayed",
    "routes_of",
    "transfer_pairs",
]
