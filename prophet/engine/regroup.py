"""Sharing the experts of a whole model over other ranks: which parameters are cut, and what a layer takes to be.

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
    """The parameters whose first dimension counts a rank's experts, by name, with their bank: [m x rows, ...]."""
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
    """Raise `SpecError` unless so many ranks can share the experts of every layer, and its router needs no engine."""
    for name, layer in _layers(model):
        bank = layer.experts
        if layer.gate.config.bias_update_rate > 0:
            raise SpecError(f"{name}: only an engine updates balancing biases: expected bias_update_rate=0")
        if ranks > 1 and (not isinstance(bank, FeedForwardBank) or any(True for _ in bank.children())):
            raise SpecError(f"{name}: experts that are modules stay whole on every rank: expected ep1, got ep{ranks}")
        check_shared(name, bank.total_experts, ranks)


def _layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield name or "the model", module


def regroup(model: nn.Module, group: Collective, replicas: Collective | None, alike: Collective | None = None) -> None:
    """Have the ranks of `group` share the experts of every layer; see `MoE.regroup` for the others. Cannot fail.

    The parameters are put in place by the caller, once `check_regroupable` has passed.
    """
    for layer in moe_layers(model):
        layer.regroup(group, replicas, alike)


def inside_layers(model: nn.Module) -> set[int]:
    """The ids of the layers of experts in `model`, and of all modules in them."""
    return {id(module) for layer in moe_layers(model) for module in layer.modules()}


def known_references(model: nn.Module) -> set[int]:
    """The ids of the weak references to `model` that its layers of experts have, which may go on with it."""
    found = (getattr(getattr(layer, "origin", None), "model", None) for layer in moe_layers(model))
    return {id(reference) for reference in found if reference is not None and reference() is model}
