"""Experts that PEFT has put LoRA on: what its wrappers hold, cut by expert, and put together again.

Since release 5 of transformers a block's experts are one module with stacked parameters. PEFT wraps it once per
parameter, one wrapper in another: `experts.base_layer.base_layer.gate_up_proj`, with `experts.base_layer.lora_A` for
the one and `experts.lora_A` for the other. Nothing of PEFT is imported; classes are known by their name and module.

Shape legend: E experts, R rank of an adapter, I and O inputs and outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, bare, is_wrapper
from prophet.convert.checks import LORA_ADVICE, check_bare
from prophet.convert.sources.transformers_5 import Interface
from prophet.errors import ConversionError
from prophet.experts.lora import LoraExpert, LoraMatrix
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import parts_of

# Names of the parameters in an expert's module, and in a `LoraExpert`
_PARTS = {"gate_up_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
# Any other dtype is quantised
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def for_lora(adapter: Adapter, experts: nn.Module) -> Adapter:
    """Return `adapter`, or one that reads through PEFT's wrappers around `experts`, where there are any."""
    return LoraBlock(adapter) if isinstance(adapter, Interface) and is_wrapper(experts) else adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One parameter of the wrapped experts' module.

    Attributes:
        path: Its name in there.
        name: The share's name in a `LoraExpert`.
        how: How it holds all experts' shares: "stacked" [E, ...], "lora_A" [E·R, I] or "lora_B" [O, R·E].
    """

    path: str
    name: str
    how: str

    @property
    def of_adapter(self) -> bool:
        return self.how != "stacked"

    def share(self, value: Tensor, expert: int, experts: int) -> Tensor:
        """Take one expert's share.

        Args:
            value: The whole parameter, or a tensor of its shape.
            expert: Its number.
            experts: E.

        Returns:
            A view.
        """
        if self.how == "lora_A":
            return value.view(experts, -1, value.shape[1])[expert]
        # PEFT lays the factor out as [O, R, E], so the expert's number varies fastest.
        if self.how == "lora_B":
            return value.view(value.shape[0], -1, experts)[:, :, expert]
        return value[expert]

    def whole(self, shares: Tensor) -> Tensor:
        """Undo `share`: put the shares [E, ...] together."""
        if self.how == "lora_A":
            return shares.flatten(0, 1)
        if self.how == "lora_B":
            return shares.permute(1, 2, 0).flatten(1)
        return shares


class LoraBlock(Adapter):
    """Experts that `inner` knows, with LoRA on them. One for each block.

    Attributes:
        inner: Reads the module under the wrappers.
        name: Of PEFT's adapter, once described.
        pieces: The parameters under and in the wrappers, once described.
    """

    experts_name = Interface.experts_name
    drops_none = Interface.drops_none
    takes_lora = True

    def __init__(self, inner: Interface) -> None:
        self.inner = inner
        self.family = inner.family
        self.name = ""
        self.pieces: tuple[Piece, ...] = ()
        self._scaling: dict[str, float] = {}
        self._spec: ExpertsSpec | None = None

    def matches(self, block: nn.Module) -> bool:
        return self.inner.matches(block)

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts = block
        _check_base(bare(experts))
        spec = self.inner.describe(bare(experts))
        wrappers, at = [], ""
        inside: Any = experts
        # One wrapper in another, the last one outermost
        while is_wrapper(inside):
            wrappers.append((at, inside))
            inside, at = inside.base_layer, f"{at}base_layer."
        pieces = []
        for name, _ in inside.named_parameters():
            part = _PARTS[name.removesuffix("_bias")]
            which = "bias" if name.endswith("_bias") else "weight"
            pieces.append(Piece(path=at + name, name=f"{part}.{which}", how="stacked"))
        for prefix, wrapper in wrappers:
            name, part = _checked(wrapper, spec)
            self.name = self.name or name
            if name != self.name:
                raise ConversionError(f"the experts have two LoRA adapters, {self.name} and {name}: expected one")
            # A number per matrix, alpha / R or what rslora makes of it
            self._scaling[part] = float(wrapper.scaling[name])
            for how in ("lora_A", "lora_B"):
                pieces.append(Piece(path=f"{prefix}{how}.{name}.weight", name=f"{part}.{how}", how=how))
        # Hooks on a wrapper would be lost as those on the experts would
        check_bare(experts)
        self.pieces = tuple(pieces)
        ranks = ", ".join(f"{w.parameter_name} (rank {w.r[self.name]})" for _, w in reversed(wrappers))
        self._spec = replace(spec, bank="modules", why=f"PEFT has put LoRA on {ranks}")
        return self._spec

    def expert(self, params: Mapping[str, nn.Parameter], number: int) -> LoraExpert:
        """Copy one expert with its adapters.

        Args:
            params: Parameters of the wrapped experts' module, by name.
            number: The expert's.
        """
        spec: Any = self._spec
        own: dict[str, dict[str, Any]] = {part: {} for part in _PARTS.values()}
        for piece in self.pieces:
            part, name = piece.name.split(".")
            p = params[piece.path]
            share = piece.share(p.detach(), number, spec.num_experts)
            # Cloned in order: a share of lora_B has strides, which collectives do not take.
            own[part][name] = nn.Parameter(share.clone(memory_format=torch.contiguous_format), p.requires_grad)
        matrices = {
            part: LoraMatrix(**given, scaling=self._scaling.get(part, 1.0), transposed=self.inner.layout.transposed)
            for part, given in own.items()
        }
        interleaved = self.inner.layout.interleaved
        return LoraExpert(matrices["gate_up"], matrices["down"], spec.activation, interleaved=interleaved)

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return self.inner.unpack(spec, state, expert)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return self.inner.pack(spec, experts)

    def call(self, block: nn.Module, x: Tensor) -> Any:
        return self.inner.call(block, x)


def _check_base(experts: nn.Module) -> None:
    """Raise `ConversionError` for a module under the wrappers whose parameters cannot be cut."""
    if type(experts).__module__.split(".")[0] == "peft":
        raise ConversionError(f"PEFT has put {type(experts).__name__} on the experts: {LORA_ADVICE}")
    for name, p in experts.named_parameters():
        if p.dtype not in _DTYPES or type(p.data) is not Tensor:
            kind = str(p.dtype) if type(p.data) is Tensor else type(p.data).__name__
            raise ConversionError(
                f"{name} is quantised ({kind}): LoRA on quantised experts is not served; load the model without "
                f"quantization_config, or keep LoRA off the experts and the experts in bfloat16"
            )
        if name.removesuffix("_bias") not in _PARTS:
            raise ConversionError(f"{type(experts).__name__}.{name} is no parameter that LoRA on experts is served for")


def _checked(wrapper: Any, spec: ExpertsSpec) -> tuple[str, str]:
    """Name of the adapter, and part of an expert that it is on; raises `ConversionError` for what is not served."""
    who = f"LoRA on {wrapper.parameter_name}"
    names = list(wrapper.lora_A)
    active = list(wrapper.active_adapters)
    if len(names) != 1 or active != names:
        raise ConversionError(f"{who}: expected one adapter, and it active; got {names}, of which {active} are active")
    (name,) = names
    if wrapper.merged:
        raise ConversionError(f"{who}: adapter {name} is merged: call unmerge_adapter() first")
    if wrapper.disable_adapters:
        raise ConversionError(f"{who}: adapter {name} is disabled: call enable_adapter_layers() first")
    dropout = wrapper.lora_dropout[name]
    for option, is_set in (
        ("use_dora", wrapper.use_dora.get(name, False)),
        ("lora_bias", wrapper.lora_bias.get(name, False)),
        ("lora_dropout", not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1.0) > 0),
        ("a variant of LoRA", name in getattr(wrapper, "lora_variant", {})),
    ):
        if is_set:
            raise ConversionError(f"{who}: {option} is not served on experts: {LORA_ADVICE}")
    part, e = _PARTS.get(wrapper.parameter_name), spec.num_experts
    rank = wrapper.r[name]
    a, b = wrapper.lora_A[name].weight.shape, wrapper.lora_B[name].weight.shape
    inputs = {"gate_up": spec.dim, "down": spec.hidden}.get(part or "")
    rows = spec.hidden * (2 if parts_of(spec.activation).gated else 1)
    outputs = {"gate_up": rows, "down": spec.dim}.get(part or "")
    # PEFT's shapes tell whether R is per expert, as the cut into shares assumes.
    if part is None or (*a, *b) != (e * rank, inputs, outputs, e * rank):
        raise ConversionError(
            f"{who}: expected {sorted(_PARTS)} with factors of rank {rank} for each of {e} experts, got lora_A "
            f"{list(a)} and lora_B {list(b)}: {LORA_ADVICE}"
        )
    return name, part
