"""`deepspeed.moe.layer.MoE`: its gate keeps routing, with its capacity, noise, random token selection and loss.

What is converted is the `MOELayer` inside, so residual MoE and the returned triple (output, loss, counts) stay.
Nothing of deepspeed is imported.

Shape legend: N tokens, K top-k, E experts, D model dim.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, child, class_named, integer
from prophet.convert.seen import Seen, tokens_in
from prophet.convert.sources.lists import list_spec, pack_modules
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights

# Where DeepSpeed's `Experts` keeps its list
PREFIX = "deepspeed_experts."


class DeepSpeedMoE(Adapter):
    """DeepSpeed's layer, with any experts: those that are no plain feed-forward modules stay as they are."""

    family = "DeepSpeed"
    list_prefix = PREFIX

    def matches(self, block: nn.Module) -> bool:
        return class_named(block, ("MOELayer",), "deepspeed.moe.sharded_moe")

    def describe(self, block: nn.Module) -> ExpertsSpec:
        gate: Any = child(block, "gate")
        if getattr(block, "use_tutel", False):
            raise ConversionError("use_tutel: Tutel's dispatch is not kept, build the layer with use_tutel=False")
        # With it the gate returns ids and weights, instead of masks [N, E, capacity].
        if "sparse_routes" not in inspect.signature(gate.forward).parameters:
            raise ConversionError("this release's TopKGate does not give its routes; deepspeed 0.19 does")
        # Taken from the module that the model has loaded, as nothing of deepspeed is imported
        groups = getattr(sys.modules.get(type(block).__module__), "groups", None)
        if getattr(groups, "mpu", None) is not None:
            raise ConversionError("mpu: tensor parallelism of the experts or around them is not kept")
        experts = child(child(block, "experts"), PREFIX.rstrip("."))
        if not isinstance(experts, nn.ModuleList):
            raise ConversionError(f"deepspeed_experts: expected a ModuleList, got {type(experts).__name__}")
        total, top_k, router = len(experts) * integer(block, "ep_size"), integer(gate, "k"), type(gate).__name__
        dim: Any = child(gate, "wg").in_features
        spec = list_spec(experts, total=total, top_k=top_k, dim=dim, router=router)
        # DeepSpeed calls each expert with as many rows as it has capacity, zeros if need be.
        return replace(spec, idle_called=True)

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        names: Any = spec.names
        return names.unpack(state, f"{PREFIX}{expert}.")  # type: ignore[no-any-return]

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return pack_modules(spec, experts, PREFIX)

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _forward}

    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x, None)

    def watch(self, block: nn.Module, experts: nn.Module, seen: Seen) -> None:
        def count_routes(_: nn.Module, values: Sequence[Any], routes: Any) -> None:
            # [K, N] with -1 where a token found no room
            seen.ids(routes[3], tokens_in(values))

        seen.after(child(block, "gate"), count_routes)


def _forward(block: Any, x: Tensor, used_token: Tensor | None = None, **_: Any) -> Tensor:
    """Run `MOELayer`'s forward on `x` [..., D]; sets `l_aux` and `exp_counts` as the original does."""
    tokens = x.reshape(-1, x.shape[-1])
    block.l_aux, _, _, ids, _, weights, block.exp_counts = block.gate(tokens, used_token, True)
    # [K, N] with -1 where a token found no room
    ids = ids.t()
    y: Tensor = block.experts(tokens, ids.clamp(min=0), weights.t().contiguous(), ids >= 0)
    return y.reshape(x.shape)
