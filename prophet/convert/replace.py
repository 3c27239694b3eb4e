"""A block's experts are replaced by a layer that holds this rank's; nothing else of the block changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from prophet.convert.find import Found
from prophet.convert.layers.cut import CutExperts, cut_bank
from prophet.convert.layers.listed import ListedExperts
from prophet.convert.layers.lora import lora_layer
from prophet.convert.layers.modules import RoutedModules, modules_bank
from prophet.convert.layers.routed import Origin, RoutedExperts, copied_rest
from prophet.convert.sources.listed import Listed
from prophet.convert.sources.lists import list_in
from prophet.convert.sources.lora import LoraBlock
from prophet.experts.feed_forward import FeedForwardBank
from prophet.kernels.choice import Impl
from prophet.ranks.collective import Collective


def replace(model: nn.Module, f: Found, collective: Collective, impl: Impl) -> tuple[RoutedExperts, tuple[str, ...]]:
    """Put this rank's experts into a layer, and the layer into the block; the old experts are left untouched.

    Args:
        model: Changed in place.
        f: The block.
        collective: The expert-parallel group.
        impl: Which kernels run the experts, as for `prophet.MoE`.

    Returns:
        The layer, and the names of the block's methods that were replaced.
    """
    experts, block, spec = f.experts(model), f.block(model), f.spec
    params = dict(experts.named_parameters())
    # Megatron, DeepSpeed and users mark parameters, which are new objects afterwards.
    attributes = {n: dict(vars(p)) for n, p in params.items() if vars(p)}
    rest = copied_rest(f.adapter, spec, params)
    origin = Origin(f.adapter, spec, experts, attributes, around=f.around, rest=rest)
    methods: Mapping[str, Any]
    if isinstance(f.adapter, Listed):
        methods = {"forward": f.adapter.forward_of(type(block))}
    else:
        methods = f.adapter.methods(block)
    layer: RoutedExperts
    rank, ranks = collective.rank, collective.size
    if spec.bank == "modules" and isinstance(f.adapter, LoraBlock):
        layer = lora_layer(f.adapter, experts, origin, collective, impl)
    elif spec.places:
        cut: Any = cut_bank(experts, block, spec, rank, ranks)
        layer = CutExperts(cut, origin, collective, impl)
    elif spec.form == "modules":
        kept = ListedExperts if isinstance(f.adapter, Listed) else RoutedModules
        bank = modules_bank(list_in(experts, f.adapter.list_prefix), spec, rank, ranks)
        layer = kept(bank, origin, collective, impl)
    else:
        layer = RoutedExperts(_stacked(f, params, collective), origin, collective, impl)
    # A new module is in training mode, whatever the block is in
    layer.train(block.training)
    setattr(f.holder(model), f.where.rpartition(".")[2], layer)
    if methods:
        kind = origin.block_class = type(block)
        # transformers 4.57 leaves a block's own method on it, which would hide the new one.
        for name in methods:
            if getattr(vars(block).get(name), "__func__", None) is getattr(kind, name):
                del vars(block)[name]
        # a subclass, so that whoever asks for the block's class still finds it
        block.__class__ = type(f"Prophet{kind.__name__}", (kind,), {"__module__": kind.__module__, **methods})
    return layer, tuple(methods)


def _stacked(f: Found, params: Mapping[str, Tensor], collective: Collective) -> FeedForwardBank:
    """A bank of copies of this rank's experts."""
    spec = f.spec
    state = {name: p.detach() for name, p in params.items()}
    m = spec.num_experts // collective.size
    first = collective.rank * m
    offset = first if spec.held == spec.num_experts else 0
    weights = [f.adapter.unpack(spec, state, offset + i) for i in range(m)]
    bank = FeedForwardBank.from_weights(
        weights,
        spec.activation,
        first_expert=first,
        total_experts=spec.num_experts,
        ep_size=collective.size,
    )
    # Frozen all or none: `check_stackable` has refused the rest
    bank.requires_grad_(any(p.requires_grad for p in params.values()))
    return bank
