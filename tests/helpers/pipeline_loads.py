"""What a layer costs under each kind of dynamism: functions from a dense layer's cost to its cost now.

The papers' load formulas (DynMo, Section 2) add an inner sum over all layers to every layer and take a frozen layer for
free; here a layer's load depends on that layer alone, and freezing on what lies upstream. `LayerCost.forward_s` and the
two backward parts are seconds per microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipeline_balance.spec import LayerCost
from prophet.errors import SpecError


def _fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise SpecError(f"{name} must be from 0 to 1, got {value!r}")


def scaled(cost: LayerCost, share: float, fixed: float = 0.0) -> LayerCost:
    """All three times at `fixed` + (1 - `fixed`) * `share` of what they were; `fixed` is the part that does not
    shrink.
    """
    _fraction("fixed", fixed)
    if share < 0:
        raise SpecError(f"share must not be negative, got {share!r}")
    factor = fixed + (1.0 - fixed) * share
    return replace(
        cost,
        forward_s=cost.forward_s * factor,
        backward_input_s=cost.backward_input_s * factor,
        backward_weight_s=cost.backward_weight_s * factor,
    )


def mixture_of_experts(cost: LayerCost, rank_loads: Sequence[float], *, fixed: float = 0.0) -> LayerCost:
    """An MoE layer waits for its most loaded expert-parallel rank: times grow with max / mean of `rank_loads`
    (tokens).
    """
    if not rank_loads or min(rank_loads) < 0:
        raise SpecError("rank_loads must hold one or more figures that are not negative")
    total = sum(rank_loads)
    return scaled(cost, max(rank_loads) * len(rank_loads) / total if total else 0.0, fixed)


def pruned(cost: LayerCost, kept: float, *, break_even: float = 0.25) -> LayerCost:
    """A layer of which the share `kept` of weights is left. Sparse products pay only below `break_even`, from there in
    proportion; state shrinks to the values and their indices (8 bytes each) where that is less than the dense matrix.
    """
    _fraction("kept", kept)
    if not 0.0 < break_even <= 1.0:
        raise SpecError(f"break_even must be above 0 and at most 1, got {break_even!r}")
    if kept >= break_even:
        return cost
    # values of 4 bytes with an index of 8: a sparse element takes three times a dense one
    dense = 3.0 * kept
    return replace(
        scaled(cost, kept / break_even),
        parameter_bytes=int(cost.parameter_bytes * min(dense, 1.0)),
        gradient_bytes=int(cost.gradient_bytes * kept),
        optimizer_bytes=int(cost.optimizer_bytes * kept),
    )


def frozen(costs: Sequence[LayerCost], is_frozen: Sequence[bool]) -> list[LayerCost]:
    """F + B_in * [a trainable parameter upstream] + W * [trainable here], for every layer of a model.

    A frozen layer keeps its parameters, but neither gradients nor optimizer state; without a trainable layer upstream
    it keeps no activations for backward either.
    """
    if len(costs) != len(is_frozen):
        raise SpecError(f"{len(costs)} layers and {len(is_frozen)} flags were given")
    result = []
    trains_upstream = False
    for cost, stopped in zip(costs, is_frozen, strict=True):
        changes: dict[str, float | int] = {}
        if not trains_upstream:
            changes["backward_input_s"] = 0.0
        if stopped:
            changes.update(backward_weight_s=0.0, gradient_bytes=0, optimizer_bytes=0)
            if not trains_upstream:
                changes["activation_bytes"] = 0
        result.append(replace(cost, **changes))  # type: ignore[arg-type]
        trains_upstream = trains_upstream or not stopped
    return result


def sparse_attention(cost: LayerCost, density: float, *, attention_share: float) -> LayerCost:
    """`density` is the share of attention blocks computed; `attention_share` what dense attention takes of the
    layer.
    """
    _fraction("density", density)
    _fraction("attention_share", attention_share)
    return scaled(cost, density, fixed=1.0 - attention_share)


def early_exit(costs: Sequence[LayerCost], alive: Sequence[float], *, fixed: float = 0.0) -> list[LayerCost]:
    """`alive[i]` is the share of tokens that reach layer i; it cannot grow with depth."""
    if len(costs) != len(alive):
        raise SpecError(f"{len(costs)} layers and {len(alive)} shares were given")
    for earlier, later in pairwise(alive):
        if later > earlier:
            raise SpecError(f"a token that left cannot come back: shares {earlier!r} then {later!r}")
    return [mixture_of_depths(c, a, fixed=fixed) for c, a in zip(costs, alive, strict=True)]


def mixture_of_depths(cost: LayerCost, routed: float, *, fixed: float = 0.0) -> LayerCost:
    """`routed` is the share of tokens that the layer's router takes in; activations shrink with it."""
    _fraction("routed", routed)
    return replace(scaled(cost, routed, fixed), activation_bytes=round(cost.activation_bytes * routed))
