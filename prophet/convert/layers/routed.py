"""Experts behind a router of the model's own.

Shape legend: N tokens, K top-k, E experts, m experts of this rank, D model dim, O output dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec
from prophet.convert.checks import check_adapters
from prophet.convert.layers.partial_state import mark_part
from prophet.errors import ConversionError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.gate import Router, Routing
from prophet.kernels.choice import Impl
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation


@dataclass(slots=True)
class Origin:
    """Where converted experts come from, and all that is needed to put them back.

    Attributes:
        adapter: The one that described them.
        spec: Its description.
        skeleton: The module that held them, its parameters on the meta device.
        attributes: What was set on its parameters, by their names.
        block_class: The block's class, where methods of it were replaced.
        around: How many modules up that block is from the one that holds the experts.
        model: What was converted.
        renamed: Of the holder's other parameters and buffers, those that had another name before, and that name.
        stays: Why it cannot be put back, if it cannot.
        rest: What `Adapter.rest` returned, in the host's memory.
    """

    adapter: Adapter
    spec: ExpertsSpec
    skeleton: nn.Module
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    block_class: type | None = None
    around: int = 0
    model: weakref.ref[nn.Module] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    stays: str = ""
    rest: Mapping[str, Tensor] = field(default_factory=dict)


class RoutedExperts(MoE):
    """The experts of a converted block: a `prophet.MoE` whose routes come from the block's own router.

    In a state dict they have the names that experts have in every `prophet.MoE`. They cannot be written to a file of
    one rank; see `original_state_dict`.

    Args:
        bank: This rank's experts.
        origin: Where they come from.
        collective: The expert-parallel group.
        impl: Which kernels run the experts, as for `prophet.MoE`.
    """

    experts: FeedForwardBank
    initialised_here = False

    def __init__(self, bank: FeedForwardBank, origin: Origin, collective: Collective, impl: Impl = "auto") -> None:
        # Past `MoE.__init__`, which makes a gate and experts; `_assemble` takes those given.
        nn.Module.__init__(self)
        self._assemble(Router(), bank, origin.spec.top_k, collective, impl)
        self.origin = origin
        # torch has not annotated this method
        module: Any = self
        module.register_state_dict_post_hook(mark_part)
        self._adapters_checked = False

    def forward(  # type: ignore[override]  # the one layer that does not route by itself
        self, x: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        """Apply the experts to the rows that the block's router sends them. Collective over the group.

        Args:
            x: [..., D], N rows in all.
            ids: [N, K] the experts of every row.
            weights: [N, K] factors of their outputs.
            kept: [N, K] booleans, False where a choice was dropped for lack of capacity; None keeps all.

        Returns:
            [..., O] in the dtype of `x`.
        """
        if kept is None and self.origin.adapter.drops_none:
            kept = ids != self.num_experts
            # The id E would index beyond the experts; any valid one does, as `kept` drops the choice.
            ids = ids.where(kept, 0)
        return self.routed(x, ids, weights, kept).to(x.dtype)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None = None) -> Tensor:
        """Do what `forward` does, but answer in the dtype in which the experts answer.

        Args:
            x: [..., D], N rows in all.
            ids: [N, K] the experts of every row.
            weights: [N, K] factors of their outputs.
            kept: [N, K] booleans, False where a choice was dropped; None keeps all.
        """

        def given(_: Tensor) -> Routing:
            # PEFT may come after the conversion, so the question is asked again at the first training step.
            if self.training and not self._adapters_checked:
                self.check()
                self._adapters_checked = True
            return Routing.given(ids, weights, self.num_experts, kept)

        return self._apply_experts(x, given)

    def check(self) -> None:
        """Raise `ConversionError` where PEFT was asked to adapt the experts, which it cannot find any more."""
        super().check()
        model = self.origin.model() if self.origin.model else None
        if model is not None:
            check_adapters(
                model, [(name, self.origin.skeleton) for name, *_, layer in converted(model) if layer is self]
            )

    @property
    def spread(self) -> bool:
        """Whether other ranks hold experts that were here before: not where the model was built expert-parallel."""
        return self.collective.size > 1 and self.origin.spec.held == self.num_experts

    def local_experts(self) -> list[ExpertWeights]:
        """This rank's experts, as views."""
        return [self.experts.expert_weights(i) for i in range(self.experts.experts)]

    def gathered(self) -> list[ExpertWeights]:
        """All E experts, on every rank; collective."""
        parts: list[Tensor | None] = []
        for name, p in self.experts.weights()._asdict().items():
            op = Operation(f"gathering of the experts' {name}")
            # [ranks, m, ...] to [E, ...]: ranks hold consecutive experts
            parts.append(None if p is None else self.collective.all_gather(p.detach(), op=op).flatten(0, 1))
        return [
            ExpertWeights(*(None if p is None else p[e] for p in parts))  # type: ignore[arg-type]
            for e in range(self.num_experts)
        ]

    def packed(self, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        """All of `experts` as the parameters of the module they come from, contiguous."""
        origin = self.origin
        return with_rest(origin.adapter.pack(origin.spec, experts), origin.rest)

    def here(self) -> dict[str, Tensor]:
        """This rank's experts as the parameters of the module they come from."""
        return self.packed(self.local_experts())

    def entries_of(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Translate parameters of the module that the experts come from.

        Args:
            given: Those parameters, by name.

        Returns:
            This rank's experts under the keys that the bank's state dict has.
        """
        spec, bank = self.origin.spec, self.experts
        # A module that held one rank's share numbers its experts from 0, here and in `take`.
        first = bank.first_expert if spec.held == self.num_experts else 0
        found: dict[str, Tensor] = {}
        for local in range(bank.experts):
            found |= bank.as_entries(local, self.origin.adapter.unpack(spec, given, first + local))
        return found

    def originals(self) -> dict[str, Tensor]:
        """The parameters of the module they come from; collective where it held the experts of all ranks."""
        whole = self.origin.spec.held == self.num_experts
        return self.packed(self.gathered() if whole else self.local_experts())

    def adapters(self) -> dict[str, Tensor]:
        """The part of `originals` that PEFT has put on the experts; collective as `originals` is."""
        return {}

    @torch.no_grad()
    def module_of_originals(self) -> nn.Module:
        """The module that the experts come from, with the values they have now; collective as `originals` is."""
        origin, state = self.origin, self.originals()
        experts = origin.skeleton.to_empty(device=self.experts.device)
        for name, p in experts.named_parameters():
            p.copy_(state[name])
            # Stacked experts are frozen all or none: `check_stackable` refused the rest.
            p.requires_grad_(any(q.requires_grad for q in self.experts.parameters()))
            for key, value in origin.attributes.get(name, {}).items():
                setattr(p, key, value)
        # The bank may have been cast since, as by model.bfloat16()
        return experts.to(self.experts.dtype)

    def let_go_of_originals(self) -> None:
        """Free the values of the module that the experts come from; they are in the bank."""
        self.origin.skeleton.to("meta")

    def undo(self) -> None:
        """Give back what the bank took from the originals; a stacked bank took nothing, as it holds copies."""

    @torch.no_grad()
    def take(self, state: dict[str, Tensor]) -> None:
        """Set this rank's experts from the parameters of the module they come from."""
        spec, bank = self.origin.spec, self.experts
        # Rows that no expert reads belong to the loaded values, too
        self.origin.rest = copied_rest(self.origin.adapter, spec, state)
        first = bank.first_expert if spec.held == self.num_experts else 0
        for local in range(bank.experts):
            bank.set_expert_weights(local, self.origin.adapter.unpack(spec, state, first + local))


def copied_rest(adapter: Adapter, spec: ExpertsSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the rows that `Adapter.rest` finds behind those of the experts into the host's memory.

    Args:
        adapter: The one that knows the experts' module.
        spec: Its description.
        state: The module's parameters, by name.
    """
    return {name: rows.detach().to("cpu", copy=True) for name, rows in adapter.rest(spec, state).items()}


def with_rest(packed: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the experts' rows and what stands behind them together into contiguous parameters."""
    return {n: torch.cat((t, rest[n].to(t))) if n in rest else t.contiguous() for n, t in packed.items()}


def block_of(model: nn.Module, name: str, levels: int = 0) -> nn.Module:
    """The module that holds the experts called `name`, or one further up.

    Args:
        model: The model that the name is in.
        name: Of the experts' module.
        levels: How many modules further up.
    """
    path = name.split(".")[:-1]
    return model.get_submodule(".".join(path[: len(path) - levels]))


@contextmanager
def with_originals(model: nn.Module) -> Iterator[None]:
    """Put the modules that held stacked experts in place of the layers, without values, until the `with` block ends.

    For libraries that look at the parameters of a model by name while they write it.
    """
    # Experts in a list keep their names in the layer, so those need no exchange.
    layers = [found for found in converted(model) if found[-1].origin.spec.form == "stacked"]
    try:
        for _, holder, attribute, layer in layers:
            setattr(holder, attribute, layer.origin.skeleton)
        yield
    finally:
        for _, holder, attribute, layer in layers:
            setattr(holder, attribute, layer)


def converted(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, RoutedExperts]]:
    """Name, holding module, attribute and layer of every converted block of `model`."""
    # A list, as callers replace modules while they iterate.
    for name, module in list(model.named_modules()):
        for attribute, layer in module.named_children():
            if isinstance(layer, RoutedExperts):
                yield (f"{name}.{attribute}" if name else attribute), module, attribute, layer


def check_model(model: nn.Module) -> None:
    """Raise `ConversionError` for a model that is wrapped already, or that is converted already."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConversionError("the model is wrapped in DistributedDataParallel: convert it first, wrap it afterwards")
    already = [name for name, *_ in converted(model)]
    if already:
        raise ConversionError(f"{already[0]} has been converted already; prophet.revert(model) first")
