"""`tutel.moe.moe_layer`: its gates and its own choice of routes stay, with capacity, noise, priorities and loss.

Experts of the types `ffn` and `llama_ffn` are stacked. A custom module of experts is cut, and so is an `ffn` whose
activation is more than a known function.

Nothing of tutel is imported: what the layer's module calls is taken from that module, which the model has loaded.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, check_shapes, child, class_named, integer
from prophet.convert.seen import Seen, tokens_in
from prophet.convert.sources.cut import check_cuttable
from prophet.convert.trials.probe import activation_of, check_row_wise
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import Bias, bias_of, has_biases, parts_of

NAMES = ("batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias")
# Flat parameters: gate and up [m, D, H], down [m, H, D]
GATED_NAMES = ("W_fc1", "W_fc2", "W_fc3")


class TutelMoE(Adapter):
    """Tutel's layer, with its own experts or custom ones."""

    family = "Tutel"

    def matches(self, block: nn.Module) -> bool:
        return class_named(block, ("MOELayer",), "tutel.impls.moe_layer")

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts: Any = child(block, "experts")
        # Settings by which Tutel computes something that the converted forward does not
        for name, kept in (("is_postscore", True), ("skip_moe", False), ("sharded_count", 1)):
            if getattr(block, name, kept) != kept:
                raise ConversionError(f"{name}: only {kept} is kept, got {getattr(block, name)!r}")
        if getattr(experts, "skip_expert", False):
            raise ConversionError("skip_expert: only False is kept, got True")
        gates: Any = child(block, "gates")
        top_k = [integer(gate, "top_k") for gate in gates]
        common: dict[str, Any] = {
            "num_experts": int(block.num_global_experts),  # type: ignore[arg-type]
            "held": integer(block, "num_local_experts"),
            "top_k": top_k[0],
            "dim": integer(block, "model_dim"),
            "form": "stacked",
            "router": type(gates[0]).__name__,
        }
        # A subclass with the same forward computes the same; one with another forward is custom.
        if type(experts).forward is getattr(_class_of(block, "ffn"), "forward", None):
            return _describe_ffn(experts, common)
        if type(experts).forward is getattr(_class_of(block, "llama_ffn"), "forward", None):
            return _describe_llama(experts, common)
        places = check_cuttable(experts, block, common["held"], common["dim"])
        return ExpertsSpec(**common, bank="modules", places=places, why=f"{type(experts).__name__} is custom")

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        if parts_of(spec.activation).gated:
            # Tutel multiplies rows by [D, H], so its matrices are transposed
            gate, up = (_gated(spec, state[n])[expert] for n in GATED_NAMES[:2])
            down = state[GATED_NAMES[2]].view(spec.held, spec.hidden, spec.dim)[expert]
            return ExpertWeights(torch.cat((gate.t(), up.t())), down.t())
        biases = (state[n][expert] if n in _names(spec.bias) else None for n in NAMES[2:])
        return ExpertWeights(state[NAMES[0]][expert], state[NAMES[1]][expert].t(), *biases)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        if parts_of(spec.activation).gated:
            halves = [w.w_in.chunk(2) for w in experts]
            parts = [[half[i].t() for half in halves] for i in range(2)] + [[w.w_out.t() for w in experts]]
            return {n: torch.stack(each).flatten() for n, each in zip(GATED_NAMES, parts, strict=True)}
        columns: list[tuple[Any, ...]] = [(w.w_in, w.w_out.t(), w.b_in, w.b_out) for w in experts]
        by_name = dict(zip(NAMES, zip(*columns, strict=True), strict=True))
        return {name: torch.stack(by_name[name]) for name in _names(spec.bias)}

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _forward, "_load_from_state_dict": _load_from_state_dict}

    def watch(self, block: nn.Module, experts: nn.Module, seen: Seen) -> None:
        """Count from what the layer keeps: how often each expert was chosen.

        Experts are called with as many rows as have room, so more choices than that were dropped.

        Args:
            block: Tutel's layer.
            experts: Its module of experts.
            seen: Collects the counts.
        """
        # With it the counts that Tutel keeps are not those of this layer's choices.
        if getattr(block, "batch_prioritized_routing", False):
            raise ConversionError(
                "batch_prioritized_routing: Tutel does not tell how many tokens each expert got: expected it to be off"
            )
        room = 0

        def begins(_: nn.Module, __: Sequence[Any]) -> None:
            nonlocal room
            room = 0

        # Called several times where transfers overlap, with a part of the rows each
        def rows(_: nn.Module, values: Sequence[Any]) -> None:
            nonlocal room
            room += values[0].numel() // (seen.experts * integer(block, "model_dim"))

        def ends(_: nn.Module, values: Sequence[Any], __: Any) -> None:
            chosen: Any = block.dispatch_count
            seen.counts(chosen.long().clamp(max=room), tokens_in(values))

        seen.before(block, begins)
        seen.before(experts, rows)
        seen.after(block, ends)


def source_names(spec: ExpertsSpec) -> dict[str, str]:
    """Map every parameter of a stacked bank to the name that it, or its first part, had in Tutel's module."""
    if parts_of(spec.activation).gated:
        return {"w_in": GATED_NAMES[0], "w_out": GATED_NAMES[2]}
    return dict(zip(("w_in", "w_out", "bias_in", "bias_out"), NAMES, strict=True))


def _class_of(block: nn.Module, kind: str) -> type | None:
    """Tutel's class of experts of a type, where the program has loaded it."""
    return getattr(sys.modules.get(f"tutel.experts.{kind}"), "ExpertModule", None)


def _describe_ffn(experts: Any, common: dict[str, Any]) -> ExpertsSpec:
    held, hidden, dim = experts.batched_fc1_w.shape
    out, bias = experts.output_dim, bias_of(experts.batched_fc1_bias, experts.batched_fc2_bias)
    shapes = dict(zip(NAMES, ((held, hidden, dim), (held, hidden, out), (held, hidden), (held, out)), strict=True))
    check_shapes(experts, {n: shapes[n] for n in _names(bias)})
    try:
        activation = activation_of(experts.activation_fn, "activation_fn")
    # Such as an activation with dropout: the module itself runs then
    except ConversionError as no:
        check_row_wise(experts.activation_fn, "activation_fn", (hidden,))
        return ExpertsSpec(**common, dim_out=out, bank="modules", places=1, why=str(no))
    return ExpertsSpec(**common, dim_out=out, hidden=hidden, activation=activation, bias=bias)


def _describe_llama(experts: Any, common: dict[str, Any]) -> ExpertsSpec:
    held, dim, hidden = experts.W_fc1_full_shape
    check_shapes(experts, dict.fromkeys(GATED_NAMES, (held * dim * hidden,)))
    try:
        activation = activation_of(experts.activation_fn, "activation_fn", gated=True)
    except ConversionError as no:
        check_row_wise(experts.activation_fn, "activation_fn", (hidden,))
        return ExpertsSpec(**common, bank="modules", places=held, why=str(no))
    return ExpertsSpec(**common, hidden=hidden, activation=activation)


def _gated(spec: ExpertsSpec, flat: Tensor) -> Tensor:
    return flat.view(spec.held, spec.dim, spec.hidden)


def _names(bias: Bias) -> tuple[str, ...]:
    """The parameters that experts with these biases have, in Tutel's order."""
    present = True, True, *has_biases(bias)
    return tuple(name for name, there in zip(NAMES, present, strict=True) if there)


def _load_from_state_dict(block: Any, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
    """Load as any module does, and compare the number of experts as Tutel does.

    Tutel's own method also adds zeros for experts' parameters that it does not find, by names that no converted layer
    has.
    """
    key = f"{prefix}_num_global_experts"
    # Older checkpoints have no such entry
    found = state_dict.setdefault(key, block._num_global_experts)
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
    """Run the forward of Tutel's layer on `input` [..., D]; `l_aux` is set on the layer and on the result, as there.

    `a2a_ffn_overlap_degree` only rounds the capacity here. `adaptive_r` chooses among equal ways to compute, of which
    there is one here.
    """
    if reserve_dims != 1 or megablocks_size > 0:
        raise ValueError("a converted Tutel layer keeps reserve_dims=1 and megablocks_size=0 only")
    tutel = sys.modules[type(block).__module__]
    tokens = input.reshape(-1, input.shape[-1])
    kind = tokens.device.type
    # CUDA's, which alone Tutel asks about
    if torch.is_autocast_enabled():
        tokens = tokens.to(torch.get_autocast_dtype(kind))
    else:
        tokens = tokens.to(block.experts.experts.dtype)
    gate = block.gates[gate_index]
    if a2a_ffn_overlap_degree is not None:
        block.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
    # As Tutel rounds a capacity, so that as many tokens find room as there
    alignment = block.a2a_ffn_overlap_degree
    if alignment > 256:
        alignment = (alignment + 127) // 128 * 128
    # Tutel routes in the gate's own dtype
    with torch.autocast(kind, enabled=False) if kind == "cuda" else nullcontext():
        logits = gate(tokens)
        wanted = tokens.shape[0], block.num_global_experts
        if logits.shape != wanted:
            raise ValueError(f"{type(gate).__name__}: expected logits {list(wanted)}, got {list(logits.shape)}")
        # Two sets of logits, as in Tutel: the load-importance loss takes probabilities without noise.
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
