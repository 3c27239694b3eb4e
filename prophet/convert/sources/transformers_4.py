"""Hugging Face models before release 5 of transformers: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2, V3, GPT-OSS.

There a block held a list of experts and looped over them itself: the one method with the loop is replaced. GPT-OSS
stacked its experts already, and called them with weights for all. Since release 5
`prophet.convert.sources.transformers_5` knows the experts of all families.

Nothing of transformers is imported; classes are known by their name and module.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, check_shapes, child, class_named, integer
from prophet.convert.sources.lists import modules_spec, pack_modules
from prophet.convert.sources.transformers_5 import Interface, Layout
from prophet.convert.trials.probe import calls_idle
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.kernels.grouped_ffn.naive import QUICK_SLOPE
from prophet.spec import ActivationParts, activation_named

# --- what replaces the loops of the old form ---


def _softmax_then_top_k(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE blocks: [B, S, D] to the same, and logits [N, E]."""
    jitter = getattr(block, "jitter_noise", 0.0)
    if block.training and jitter > 0:
        # in place, as these blocks do: a caller that kept the input sees the noise there, too
        hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - jitter, 1.0 + jitter)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = block.gate(tokens)
    # In float32 whatever the model's dtype, as the original does
    weights, ids = F.softmax(logits, dim=1, dtype=torch.float).topk(block.top_k, dim=-1)
    # Mixtral has no such field and always does
    if getattr(block, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    y = block.experts(tokens, ids, weights.to(tokens.dtype))
    if hasattr(block, "shared_expert"):
        y = y + torch.sigmoid(block.shared_expert_gate(tokens)) * block.shared_expert(tokens)
    return y.view(hidden_states.shape), logits


def _experts_of_deepseek(block: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Replace the method `moe` of DeepSeek blocks, [N, D] to the same: only the loop, as routing is in the router."""
    return block.experts(hidden_states, ids, weights)  # type: ignore[no-any-return]


def _gpt_oss_dense_weights(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of a GPT-OSS block whose router gives weights for all experts, [N, E], zero for those not chosen."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, ids = block.router(tokens)
    return block.experts(tokens, ids, scores.gather(1, ids)).view(hidden_states.shape), scores


# --- the families ---


@dataclass(frozen=True)
class GatedBlock(Adapter):
    """Blocks with a list of experts: all the families but GPT-OSS.

    Attributes:
        family: The family's name in reports.
        classes: Names of the block's class.
        package: Of transformers.models, where they are defined.
        loop: Name of the method with the loop over experts, and what replaces it.
    """

    family: str
    classes: tuple[str, ...]
    package: str
    loop: tuple[str, Callable[..., Any]] = ("forward", _softmax_then_top_k)

    def matches(self, block: nn.Module) -> bool:
        known = class_named(block, self.classes, f"transformers.models.{self.package}")
        # Since release 5 of transformers these experts are stacked, and `Interface` reads them.
        return known and isinstance(getattr(block, "experts", None), nn.ModuleList)

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts: Any = child(block, "experts")
        router = child(block, "gate")
        top_k = integer(router if hasattr(router, "top_k") else block, "top_k")
        spec = modules_spec(experts, num_experts=len(experts), top_k=top_k, router=type(router).__name__)
        return replace(spec, idle_called=calls_idle(block, spec, experts, self.call))

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        names: Any = spec.names
        return names.unpack(state, f"{expert}.")  # type: ignore[no-any-return]

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return pack_modules(spec, experts, "")

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return dict([self.loop])


class GptOssBlock(Adapter):
    """GPT-OSS, whose router gives weights for all experts: zero for those that are not chosen."""

    family = "GPT-OSS"
    _layout = Layout(transposed=True, interleaved=True, bias=True)

    def matches(self, block: nn.Module) -> bool:
        known = class_named(block, ("GptOssMLP",), "transformers.models.gpt_oss")
        # Since release 5 of transformers its experts describe themselves
        return known and not Interface().matches(child(block, "experts"))

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts, router = child(block, "experts"), child(block, "router")
        slope, limit = (getattr(experts, name, None) for name in ("alpha", "limit"))
        # The kernels know GPT-OSS's clamped SwiGLU with this slope only
        if slope != QUICK_SLOPE:
            raise ConversionError(f"swiglu_alpha: the clamped SwiGLU has {QUICK_SLOPE}, got {slope!r}")
        parts = ActivationParts(function="quick_gelu", gated=True, limit=limit, plus_one=True)
        e, dim, hidden = (integer(experts, name) for name in ("num_experts", "hidden_size", "intermediate_size"))
        check_shapes(experts, self._layout.shapes(e, dim, hidden))
        return ExpertsSpec(
            num_experts=e,
            held=e,
            top_k=integer(router, "top_k"),
            dim=dim,
            hidden=hidden,
            activation=activation_named(parts),
            bias=True,
            form="stacked",
            router=type(router).__name__,
        )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return self._layout.unpack(state, expert)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return self._layout.pack(experts)

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _gpt_oss_dense_weights}


def adapters() -> tuple[Adapter, ...]:
    """One adapter per family, for releases of transformers before 5."""
    return (
        GatedBlock("Mixtral", ("MixtralSparseMoeBlock",), "mixtral"),
        GatedBlock("Qwen2-MoE", ("Qwen2MoeSparseMoeBlock",), "qwen2_moe"),
        GatedBlock("Qwen3-MoE", ("Qwen3MoeSparseMoeBlock",), "qwen3_moe"),
        GatedBlock("OLMoE", ("OlmoeSparseMoeBlock",), "olmoe"),
        GatedBlock("DeepSeek-V2", ("DeepseekV2Moe", "DeepseekV2MoE"), "deepseek_v2", ("moe", _experts_of_deepseek)),
        GatedBlock("DeepSeek-V3", ("DeepseekV3MoE",), "deepseek_v3", ("moe", _experts_of_deepseek)),
        GptOssBlock(),
    )
