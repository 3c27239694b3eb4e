"""`tutel.moe.moe_layer`: its gates and its own choice of routes stay, with capacity, noise, priorities and loss.

Nothing of tutel is imported: what the layer's module calls is taken from that module, which the model has loaded.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, check_shapes, child, class_named, integer
from prophet.convert.probe import activation_of
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import Bias, bias_of, has_biases

NAMES = ("batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias")


class TutelMoE(Adapter):
    """Tutel's layer with its own feed-forward experts."""

    family = "Tutel"

    def matches(self, block: nn.Module) -> bool:
        return class_named(block, ("MOELayer",), "tutel.impls.moe_layer")

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts: Any = child(block, "experts")
        if not class_named(experts, ("FusedExpertsNetwork",), "tutel.experts.ffn"):
            raise ConversionError(f"experts: expected Tutel's type 'ffn', got {type(experts).__name__}")
        for name, kept in (("is_postscore", True), ("skip_moe", False), ("sharded_count", 1)):
            if getattr(block, name, kept) != kept:
                raise ConversionError(f"{name}: only {kept} is kept, got {getattr(block, name)!r}")
        held, hidden, dim = experts.batched_fc1_w.shape
        out, bias = experts.output_dim, bias_of(experts.batched_fc1_bias, experts.batched_fc2_bias)
        shapes = dict(zip(NAMES, ((held, hidden, dim), (held, hidden, out), (held, hidden), (held, out)), strict=True))
        check_shapes(experts, {n: shapes[n] for n in _names(bias)})
        gates: Any = child(block, "gates")
        return ExpertsSpec(
            num_experts=int(block.num_global_experts),  # type: ignore[arg-type]
            held=held,
            top_k=integer(gates[0], "top_k"),
            dim=dim,
            hidden=hidden,
            activation=activation_of(experts.activation_fn, "activation_fn"),
            bias=bias,
            form="stacked",
            router=type(gates[0]).__name__,
            dim_out=out,
        )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        biases = (state[n][expert] if n in _names(spec.bias) else None for n in NAMES[2:])
        return ExpertWeights(state[NAMES[0]][expert], state[NAMES[1]][expert].t(), *biases)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        columns: list[tuple[Any, ...]] = [(w.w_in, w.w_out.t(), w.b_in, w.b_out) for w in experts]
        by_name = dict(zip(NAMES, zip(*columns, strict=True), strict=True))
        return {name: torch.stack(by_name[name]) for name in _names(spec.bias)}

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _forward, "_load_from_state_dict": _load_from_state_dict}


def _names(bias: Bias) -> tuple[str, ...]:
    """The parameters that experts with these biases have."""
    present = True, True, *has_biases(bias)
    return tuple(name for name, there in zip(NAMES, present, strict=True) if there)


def _load_from_state_dict(block: Any, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
    """As of any module, and the number of experts is compared as Tutel does.

    Tutel's own method also adds zeros for experts' parameters that it does not find, by names that no state dict has.
    """
    key = f"{prefix}_num_global_experts"
    found = state_dict.setdefault(key, block._num_global_experts)  # older checkpoints have none
    if int(found) != block.num_global_experts:
        raise ValueError(f"{key}: the checkpoint has {int(found)} experts, this layer {block.num_global_experts}")
    nn.Module._load_from_state_dict(block, state_dict, prefix, *rest, **named)


def _forward(
    block: Any,
    input: Tensor,
    gate_index: int = 0,
    capacity_factor: float | None = None,
    top_k: int | None = None,
    a2a_ffn_overlap_degree: int | None = None,
    reserve_dims: int = 1,
    inequivalent_tokens: bool = False,
    adaptive_r: int | None = None,
    megablocks_size: int = 0,
) -> Tensor:
    """The forward of Tutel's layer on `input` [..., D]; `l_aux` is set on the layer and on the result, as there.

    a2a_ffn_overlap_degree only rounds the capacity here, and adaptive_r, which chooses among equal ways to compute,
    has nothing to choose.
    """
    if reserve_dims != 1 or megablocks_size > 0:
        raise ValueError("a converted Tutel layer keeps reserve_dims=1 and megablocks_size=0 only")
    tutel = sys.modules[type(block).__module__]
    tokens = input.reshape(-1, input.shape[-1]).to(block.experts.experts.dtype)
    gate = block.gates[gate_index]
    if a2a_ffn_overlap_degree is not None:
        block.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
    alignment = block.a2a_ffn_overlap_degree
    if alignment > 256:
        alignment = (alignment + 127) // 128 * 128
    with torch.autocast(tokens.device.type, enabled=False):
        logits = gate(tokens)
        noisy = logits
        if block.training and gate.gate_noise > 0:
            noisy = logits + gate.gate_noise * torch.randn_like(logits) / block.num_global_experts

        def loss(scores: Tensor, ids: Tensor) -> Any:
            if block.is_gshard_loss:
                return tutel.losses.gshard_loss(scores, ids)
            return tutel.losses.load_importance_loss(
                F.softmax(logits, dim=1), noisy.gather(index=ids, dim=1), block.num_global_experts, gate.gate_noise
            )

        (_, ids, places, weights, capacity, _), l_aux = tutel.extract_critical(
            F.softmax(noisy, dim=1),
            top_k=top_k or gate.top_k,
            loss_fn=loss,
            capacity_factor=capacity_factor or gate.capacity_factor,
            batch_prioritized_routing=block.batch_prioritized_routing,
            normalize_gate=block.normalize_gate,
            group=block.group,
            alignment=alignment,
            inequivalent_tokens=inequivalent_tokens,
        )
    kept = torch.stack(places, dim=1) < capacity
    y = block.experts(tokens, torch.stack(ids, dim=1), torch.stack(weights, dim=1), kept)
    y = y.view(*input.shape[:-1], y.shape[-1]).to(input.dtype)
    block.l_aux = y.l_aux = l_aux
    result: Tensor = y if block.result_func is None else block.result_func(y)
    return result
