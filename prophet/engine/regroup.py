"""Sharing the experts of a whole model over other ranks: the parameters that are cut, and the conditions for it.

Shape legend: E experts of a layer, m experts of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from prophet.errors import SpecError
from prophet.experts.bank import Bank
from prophet.experts.feed_forward import FeedForwardBank
from prophet.layer.moe import MoE, moe_layers
from prophet.ranks.collective import Collective
from prophet.spec.placement import check_shared


def has_experts(model: nn.Module) -> bool:
    """Whether `model` has layers of experts."""
    return bool(moe_layers(model))


def stacked_experts(model: nn.Module) -> dict[str, Bank]:
    """Return the parameters that stack a rank's experts in the first dimension, [m x rows, ...], with their banks."""
    banks = [layer.experts for layer in moe_layers(model)]
    stacked = [bank for bank in banks if isinstance(bank, FeedForwardBank)]
    names = {id(p): name for name, p in model.named_parameters()} if stacked else {}
    return {names[id(p)]: bank for bank in stacked for p in bank.parameters(recurse=False)}


def check_unsplit(model: nn.Module) -> None:
    """Raise `SpecError` unless every layer of `model` has all its experts here."""
    for name, layer in _layers(model):
        bank = layer.experts
        if bank.experts != bank.total_experts:
            raise SpecError(
                f"{name} has {bank.experts} of its {bank.total_experts} experts here, expected all of them: give it a "
                "group of one rank"
            )


def check_regroupable(model: nn.Module, ranks: int) -> None:
    """Check that `ranks` ranks can share the experts of every layer of `model`.

    Raises:
        SpecError: Where they cannot, or where a router needs an engine.
    """
    for name, layer in _layers(model):
        bank = layer.experts
        if layer.gate.config.bias_update_rate > 0:
            raise SpecError(f"{name}: only an engine updates balancing biases: expected bias_update_rate=0")
        # Modules are not stacked in one tensor, so there is nothing to cut by the first dimension
        if ranks > 1 and (not isinstance(bank, FeedForwardBank) or any(True for _ in bank.children())):
            raise SpecError(f"{name}: experts that are modules stay whole on every rank: expected ep1, got ep{ranks}")
        check_shared(name, bank.total_experts, ranks)


def _layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield name or "the model", module


def regroup(model: nn.Module, group: Collective, replicas: Collective | None, alike: Collective | None = None) -> None:
    """Have the ranks of `group` share the experts of every layer. Cannot fail once `check_regroupable` has passed.

    Args:
        model: The model, whose parameters the caller has put in place.
        group: The expert-parallel group from now on.
        replicas: See `MoE.regroup`.
        alike: See `MoE.regroup`.
    """
    for layer in moe_layers(model):
        layer.regroup(group, replicas, alike)


def inside_layers(model: nn.Module) -> set[int]:
    """Return the ids of the layers of experts in `model`, and of all modules in them."""
    return {id(module) for layer in moe_layers(model) for module in layer.modules()}


def known_references(model: nn.Module) -> set[int]:
    """Return the ids of weak references to `model` held by its layers of experts, which may stay with it."""
    # Converted layers remember the model that they came from, so that `revert` finds it
    found = (getattr(getattr(layer, "origin", None), "model", None) for layer in moe_layers(model))
    return {id(reference) for reference in found if reference is not None and reference() is model}
