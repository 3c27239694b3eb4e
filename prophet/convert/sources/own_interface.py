"""Hugging Face families whose experts are called in a way of their own: Llama-4, Switch, DBRX, LongCat-Flash, Step-3.7.

What their block's forward hands to the experts differs from (tokens [N, D], ids [N, K], weights [N, K]), or the
parameters lie in another order. Where a block's forward is replaced, the new one calls the same router with the same
tensors, so logits, jitter, capacity and losses stay. Families that cannot be served are refused with the reason.

Written for release 5 of transformers, of which nothing is imported; classes are known by their name and module.

Shape legend: B sequences, S tokens of a sequence, N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, check_shapes, child, class_named, integer
from prophet.convert.seen import Seen, tokens_in
from prophet.convert.sources.lists import list_in, list_spec, pack_modules
from prophet.convert.sources.transformers_5 import Layout
from prophet.convert.trials.probe import activation_of
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn import ExpertWeights


@dataclass(frozen=True)
class _Family(Adapter):
    """A family that is known by the class of its block.

    Attributes:
        family: As reports call it.
        block: Name of the class of its block.
        package: Of transformers.models, where that is defined.
    """

    family: str
    block: str
    package: str

    def matches(self, block: nn.Module) -> bool:
        return class_named(block, (self.block,), f"transformers.models.{self.package}")


def _stacked_spec(
    router: nn.Module, act_fn: object, *, num_experts: int, top_k: int, dim: int, hidden: int
) -> ExpertsSpec:
    """Describe gated experts without biases that share their parameters."""
    return ExpertsSpec(
        num_experts=num_experts,
        held=num_experts,
        top_k=top_k,
        dim=dim,
        hidden=hidden,
        activation=activation_of(act_fn, "hidden_act", gated=True),
        form="stacked",
        router=type(router).__name__,
    )


class _Stacked(_Family):
    """A family whose experts are stacked as `layout` says."""

    layout = Layout()

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return self.layout.unpack(state, expert)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return self.layout.pack(experts)


class _Llama4(_Stacked):
    """Every row is scaled by its score before its expert, and answers are summed as they are."""

    layout = Layout(transposed=True)

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts, router = child(block, "experts"), child(block, "router")
        e, dim, hidden = (integer(experts, name) for name in ("num_experts", "hidden_size", "expert_dim"))
        check_shapes(experts, self.layout.shapes(e, dim, hidden))
        return _stacked_spec(
            router, experts.act_fn, num_experts=e, top_k=integer(router, "top_k"), dim=dim, hidden=hidden
        )

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _scores_on_inputs}

    def watch(self, block: nn.Module, experts: nn.Module, seen: Seen) -> None:
        router: Any = child(block, "router")
        seen.after(
            # answer[1]: logits [N, E], as in the block's forward
            router,
            lambda _, values, answer: seen.ids(answer[1].topk(router.top_k, dim=1)[1], tokens_in(values)),
        )


def _scores_on_inputs(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Run the forward of a Llama-4 block: [..., D] to [N, D], and logits [N, E].

    In the original every expert computes all tokens, those that were not chosen as rows of zeros. Their answers and
    gradients are zero.
    """
    tokens = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(tokens)
    # As in the router: scores are sigmoids, which may be equal where logits differ.
    ids = logits.topk(block.router.top_k, dim=1)[1]
    rows = tokens.unsqueeze(1) * scores.gather(1, ids).unsqueeze(2)
    # Every (row, choice) is a row by itself here, with one expert and the weight 1.
    y = block.experts(rows, ids.reshape(-1, 1), rows.new_ones(ids.numel(), 1))
    return block.shared_expert(tokens) + y.sum(dim=1), logits


class _Switch(_Family):
    """Experts in a ModuleDict, of which each token visits one as far as that has room."""

    list_prefix = "expert_"

    def describe(self, block: nn.Module) -> ExpertsSpec:
        router: Any = child(block, "router")
        return list_spec(
            list_in(child(block, "experts"), self.list_prefix),
            total=integer(router, "num_experts"),
            top_k=1,
            dim=integer(child(router, "classifier"), "in_features"),
            router=type(router).__name__,
        )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        names: Any = spec.names
        return names.unpack(state, f"{self.list_prefix}{expert}.")  # type: ignore[no-any-return]

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return pack_modules(spec, experts, self.list_prefix)

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _one_each}

    def watch(self, block: nn.Module, experts: nn.Module, seen: Seen) -> None:
        def count_choices(_: nn.Module, values: Sequence[Any], answer: Any) -> None:
            ids, kept = _choices(answer[0])
            # A number that no expert has counts as dropped
            seen.ids(ids.masked_fill(~kept, -1), tokens_in(values))

        seen.after(child(block, "router"), count_choices)


def _choices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Read ids and whether they are kept, [N, 1] each, from [B, S, E] zeros and at most a one for each token."""
    rows = mask.reshape(-1, mask.shape[-1])
    # argmax of a row of zeros is 0, which `any` tells from expert 0
    return rows.argmax(dim=1, keepdim=True), rows.any(dim=1, keepdim=True)


def _one_each(block: Any, hidden_states: Tensor) -> Tensor:
    """Run the forward of a Switch block: [B, S, D] to the same, zeros for tokens that found no room."""
    mask, weights, _ = block.router(hidden_states)
    ids, kept = _choices(mask)
    return block.experts(hidden_states, ids, weights.reshape(-1, 1), kept)  # type: ignore[no-any-return]


class _Dbrx(_Family):
    """All experts' rows one below the other: w1 (gate), v1 (up) and w2 (down, transposed), [E·H, D] each."""

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts, router = child(block, "experts"), child(block, "router")
        e, dim, hidden = (integer(experts, name) for name in ("num_experts", "hidden_size", "ffn_hidden_size"))
        check_shapes(experts, dict.fromkeys(("mlp.w1", "mlp.v1", "mlp.w2"), (e * hidden, dim)))
        act_fn = child(experts, "mlp").activation_fn
        return _stacked_spec(router, act_fn, num_experts=e, top_k=integer(block, "top_k"), dim=dim, hidden=hidden)

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        # v1 and w1 lie [H, D] as in the library; w2 lies the same, so it is transposed.
        rows = slice(expert * spec.hidden, (expert + 1) * spec.hidden)
        return ExpertWeights(torch.cat((state["mlp.w1"][rows], state["mlp.v1"][rows])), state["mlp.w2"][rows].t())

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        parts = zip(*((*w.w_in.chunk(2), w.w_out.t()) for w in experts), strict=True)
        return {f"mlp.{name}": torch.cat(part) for name, part in zip(("w1", "v1", "w2"), parts, strict=True)}


class _LongcatFlash(_Stacked):
    """Ids from E on are of identity experts, which answer with their input.

    They have rows in gate_up_proj, which nothing reads.
    """

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts, router = child(block, "experts"), child(block, "router")
        names = ("num_routed_experts", "total_experts", "hidden_size", "intermediate_size")
        e, total, dim, hidden = (integer(experts, name) for name in names)
        shapes = self.layout.shapes(e, dim, hidden)
        # Identity experts have rows in this matrix only
        check_shapes(experts, {**shapes, "gate_up_proj": (total, 2 * hidden, dim)})
        return _stacked_spec(
            router, experts.act_fn, num_experts=e, top_k=integer(router, "top_k"), dim=dim, hidden=hidden
        )

    def rest(self, spec: ExpertsSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"gate_up_proj": state["gate_up_proj"][spec.num_experts :]}

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"forward": _with_identity_experts}


def _with_identity_experts(block: Any, hidden_states: Tensor) -> Tensor:
    """Run the forward of a LongCat-Flash block, [..., D] to the same; a choice of an identity expert goes nowhere."""
    _, weights, ids = block.router(hidden_states)
    experts = block.experts.num_experts
    real = ids < experts
    # The clamped id is any real expert's: `real` drops the choice
    y = block.experts(hidden_states, ids.clamp(max=experts - 1), weights, real)
    stays = weights.masked_fill(real, 0.0).sum(dim=1).view(*hidden_states.shape[:-1], 1)
    return y + (hidden_states * stays).to(y.dtype)  # type: ignore[no-any-return]


class _Step3p7(_Stacked):
    """SwiGLU, with a limit on the activated gate in some layers of some models."""

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts, router = child(block, "experts"), child(block, "gate")
        # Some layers of some models clamp; those without a clamp have infinity.
        limit = getattr(experts, "limit", None)
        if limit != math.inf:
            raise ConversionError(
                f"{type(experts).__name__}.limit: only inf is served, got {limit!r}: this clamp stands behind the "
                f"activation, and that of swiglu_clamped before it"
            )
        e, dim, hidden = (integer(experts, name) for name in ("num_experts", "hidden_dim", "intermediate_dim"))
        check_shapes(experts, self.layout.shapes(e, dim, hidden))
        return _stacked_spec(
            router, experts.act_fn, num_experts=e, top_k=integer(router, "top_k"), dim=dim, hidden=hidden
        )


# --- what is refused ---


@dataclass(frozen=True)
class Refused(_Stacked):
    """A family whose experts would not be kept.

    Attributes:
        why: A sentence for the message.
        experts_name: A module that holds some of them.
    """

    why: str
    experts_name: str = "experts"

    def describe(self, block: nn.Module) -> ExpertsSpec:
        held = type(child(block, self.experts_name)).__name__
        raise ConversionError(f"{type(block).__name__}.{self.experts_name} is a {held}: {self.why}")


# Both are true of release 5 of transformers
_NLLB = (
    "transformers 5 takes the zeros and ones of the router's mask for experts' numbers, so that experts 0 and 1 "
    "compute every token and no other is called"
)
_JETMOE = (
    "an expert's two matrices are in two modules, input_linear and output_linear, and those of the attention's experts "
    "are used before and after the attention: there is no one module that maps rows to rows"
)


def adapters() -> tuple[Adapter, ...]:
    """One adapter per family, those that are refused included."""
    return (
        _Llama4("Llama-4", "Llama4TextMoe", "llama4"),
        _Switch("Switch Transformers", "SwitchTransformersSparseMLP", "switch_transformers"),
        _Dbrx("DBRX", "DbrxFFN", "dbrx"),
        _LongcatFlash("LongCat-Flash", "LongcatFlashMoE", "longcat_flash"),
        _Step3p7("Step-3.7", "Step3p7SparseMoeBlock", "step3p7"),
        Refused("NLLB-MoE", "NllbMoeSparseMLP", "nllb_moe", _NLLB),
        Refused("JetMoE", "JetMoeMoE", "jetmoe", _JETMOE, "input_linear"),
    )
