"""Experts with LoRA in the layer that runs them, and PEFT's view of them.

PEFT finds what it adapts by walking over the model, so the bank is one of its layers: it obeys `disable_adapter()`, and
refuses what would leave the experts out. To write and read adapters PEFT gets its own wrappers back for a while.

Shape legend: m experts of this rank, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.layers.routed import Origin, RoutedExperts, converted, with_originals
from prophet.convert.sources.lora import LoraBlock, Piece
from prophet.errors import CheckpointError, ConversionError
from prophet.experts.lora import LoraMatrix
from prophet.experts.modules import ModulesBank
from prophet.kernels.choice import Impl
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.trials import trying


class LoraBank(ModulesBank):
    """This rank's experts; a subclass makes it a `BaseTunerLayer` of PEFT's.

    Attributes:
        adapter: PEFT's name of the adapter.
    """

    adapter: str

    _disable_adapters = False

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapter on or off, in replicas too, as `PeftModel.disable_adapter` asks."""
        for module in (*self.modules(), *(m for s in self._skeletons.values() for m in s.modules())):
            if isinstance(module, LoraMatrix):
                module.adapted = enabled
        # PEFT's `BaseTunerLayer` reports this field as `disable_adapters`
        self._disable_adapters = not enabled
        self.called = range(self.total_experts) if enabled else ()

    def set_adapter(self, adapter_names: str | Sequence[str], inference_mode: bool = False) -> None:
        """Make an adapter the active one, and freeze or unfreeze it.

        Raises:
            ConversionError: For another than the one that was there when the model was converted.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if names != [self.adapter]:
            raise ConversionError(f"adapter {names} on converted experts: expected {[self.adapter]}. {_REVERT}")
        for name, p in self.named_parameters():
            if name.rpartition(".")[2] in ("lora_A", "lora_B"):
                p.requires_grad_(not inference_mode)

    def merge(self, *_: Any, **__: Any) -> None:
        """Raises `ConversionError`, as do the methods below: an expert that lives elsewhere would not be merged."""
        raise ConversionError(
            f"adapter {self.adapter} cannot be merged, unloaded or deleted while the experts are converted. {_REVERT}"
        )

    unmerge = merge
    unload_and_optionally_merge_module = merge
    delete_adapter = merge


_REVERT = "Call engine.close() and prophet.revert(model) first, or load the saved adapter in plain PEFT"


# Cached, so that all layers have one class
@functools.cache
def _for_peft(tuner: type) -> type[LoraBank]:
    """`LoraBank` as a subclass of PEFT's class of layers, which is not imported here."""
    return type("LoraBank", (LoraBank, tuner), {"__module__": __name__})


class LoraExperts(RoutedExperts):
    """The layer in the place of PEFT's wrappers, called as the experts' module in them was.

    Args:
        bank: This rank's experts with their adapters.
        origin: The wrapped module that they come from.
        collective: The expert-parallel group.
        impl: Which kernels run the experts, as for `prophet.MoE`.
    """

    experts: LoraBank  # type: ignore[assignment]

    def __init__(self, bank: Any, origin: Origin, collective: Collective, impl: Impl = "auto") -> None:
        super().__init__(bank, origin, collective, impl)
        adapter: Any = origin.adapter
        self._pieces: tuple[Piece, ...] = adapter.pieces

    def keys_prefix(self, name: str) -> str:
        """As any layer's: the bank's parameters are found where PEFT looks for them."""
        return MoE.keys_prefix(self, name)

    def check(self) -> None:
        """Raise `ConversionError` where PEFT was given another adapter after the conversion."""
        # Past `RoutedExperts.check`, which refuses experts among PEFT's targets: here they are meant to be.
        MoE.check(self)
        model: Any = self.origin.model() if self.origin.model else None
        names = list(getattr(model, "peft_config", None) or [self.experts.adapter])
        if names != [self.experts.adapter]:
            raise ConversionError(f"the experts were converted with adapter {self.experts.adapter}, got {names}")

    # --- as PEFT names and stacks them ---

    def originals(self) -> dict[str, Tensor]:
        return self._gather(self._pieces)

    def adapters(self) -> dict[str, Tensor]:
        return self._gather([piece for piece in self._pieces if piece.of_adapter])

    def _gather(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in pieces:
            op = Operation(f"gathering of the experts' {piece.name}")
            mine = torch.stack([home.get_parameter(piece.name).detach() for home in self.experts.home_experts()])
            # [ranks, m, ...] to [E, ...]: ranks hold consecutive experts
            everybody = self.collective.all_gather(mine, op=op).flatten(0, 1)
            found[piece.path] = piece.whole(everybody).contiguous()
        return found

    @torch.no_grad()
    def take(self, state: dict[str, Tensor]) -> None:
        """Set this rank's experts from all that are in `state`, by the names of the module they come from."""
        for piece in self._pieces:
            # PEFT's own files have the adapters only.
            if piece.path not in state:
                continue
            for e, home in enumerate(self.experts.home_experts(), self.experts.first_expert):
                home.get_parameter(piece.name).copy_(piece.share(state[piece.path], e, self.num_experts))

    @torch.no_grad()
    def module_of_originals(self) -> nn.Module:
        state = self.originals()
        first = self.experts.home_experts()[0]
        for piece in self._pieces:
            requires_grad = first.get_parameter(piece.name).requires_grad
            attributes = self.origin.attributes.get(piece.path, {})
            self._put(piece.path, state[piece.path].clone(), requires_grad, attributes)
        return self.origin.skeleton

    def _put(self, path: str, value: Tensor, requires_grad: bool, attributes: dict[str, Any] | None = None) -> None:
        holder, _, name = path.rpartition(".")
        p = nn.Parameter(value, requires_grad)
        vars(p).update(attributes or {})
        setattr(self.origin.skeleton.get_submodule(holder), name, p)

    # --- for PEFT to read into ---

    def open(self) -> nn.Module:
        """Prepare the wrapped module for PEFT to read adapters into.

        Returns:
            The module that the experts come from, its adapters filled with NaN, by which `lacking` finds what was not
            read.
        """
        bank, skeleton = self.experts, self.origin.skeleton
        for piece in self._pieces:
            if piece.of_adapter:
                like, own = skeleton.get_parameter(piece.path), bank.home_experts()[0].get_parameter(piece.name)
                empty = torch.full(like.shape, torch.nan, dtype=own.dtype, device=own.device)
                self._put(piece.path, empty, own.requires_grad)
        return skeleton

    def lacking(self) -> list[str]:
        """Names of the adapters that were not read since `open`."""
        skeleton = self.origin.skeleton
        own = [piece.path for piece in self._pieces if piece.of_adapter]
        return [path for path in own if bool(skeleton.get_parameter(path).isnan().any())]

    def shut(self) -> None:
        """End what `open` began: the wrapped module gives up its values again."""
        self.origin.skeleton.to("meta")


def lora_layer(
    adapter: LoraBlock, experts: nn.Module, origin: Origin, collective: Collective, impl: Impl
) -> LoraExperts:
    """Make a layer of copies of this rank's share of wrapped experts.

    Args:
        adapter: Knows the wrappers; has described them.
        experts: The outermost wrapper.
        origin: Of the experts, for putting them back.
        collective: The expert-parallel group.
        impl: Which kernels run the experts, as for `prophet.MoE`.
    """
    spec, params = origin.spec, dict(experts.named_parameters())
    m = spec.num_experts // collective.size
    first = collective.rank * m
    tuner = next(kind for kind in type(experts).__mro__ if kind.__name__ == "BaseTunerLayer")
    given = {e: adapter.expert(params, e) for e in range(first, first + m)}
    # The bank runs an expert to learn its output's size.
    with trying():
        bank = _for_peft(tuner)(
            given,
            dim=spec.dim,
            first_expert=first,
            held=m,
            total_experts=spec.num_experts,
            ep_size=collective.size,
        )
    bank.adapter = adapter.name
    # as PEFT's stacked factors: an optimizer passes over a parameter without a gradient, and decays one with zeros
    bank.called = range(spec.num_experts)
    return LoraExperts(bank, origin, collective, impl)


def lora_layers(model: nn.Module) -> list[tuple[str, nn.Module, str, LoraExperts]]:
    """Name, holding module, attribute and layer of every block with LoRA on its experts."""
    return [(n, holder, at, layer) for n, holder, at, layer in converted(model) if isinstance(layer, LoraExperts)]


@contextmanager
def reading_adapters(model: nn.Module, source: object) -> Iterator[None]:
    """Let PEFT read adapters into its wrappers; afterwards every rank keeps those of its experts.

    Args:
        model: A converted model.
        source: Where PEFT reads from, for messages.

    Raises:
        CheckpointError: Where `source` lacks some. The experts stay as they were.
    """
    layers = lora_layers(model)
    for *_, layer in layers:
        layer.open()
    try:
        with with_originals(model):
            yield
        lacking = [f"{name}.{path}" for name, _, _, layer in layers for path in layer.lacking()]
        if lacking:
            raise CheckpointError(f"{source} lacks {lacking[0]} ({len(lacking)} in all), or has NaN in it")
        for *_, layer in layers:
            layer.take({p.path: layer.origin.skeleton.get_parameter(p.path) for p in layer._pieces if p.of_adapter})
    finally:
        for *_, layer in layers:
            layer.shut()
