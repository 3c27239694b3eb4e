"""Small models with Mixture-of-Experts blocks that others wrote, and how they train on one rank and on several.

Shape legend: R ranks, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import RoutedExperts, converted
from prophet.engine.config import Experiment
from prophet.planner.base import Planner
from prophet.ranks.collective import Collective
from tests.helpers.support import RandomPlanner, dense_parameters, seeded

VOCAB = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
}
GQA: dict[str, Any] = {"num_key_value_heads": 1}
# family: (config class, model class, what differs from COMMON)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GQA, "intermediate_size": 12, "num_local_experts": 8, "output_router_logits": True},
    ),
    "qwen2": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **GQA,
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 14,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
    ),
    "qwen3": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **GQA,
            "head_dim": 8,
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "output_router_logits": True,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {**GQA, "intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 4, "output_router_logits": True},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**DEEPSEEK, "norm_topk_prob": True}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GQA,
            "head_dim": 8,
            "intermediate_size": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
}


def transformers() -> Any:
    """The library, or a skip."""
    return pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")


def hugging_face(family: str, **changes: Any) -> nn.Module:
    """A model of a family with random parameters, in training mode, float32."""
    library = transformers()
    config_name, model_name, options = FAMILIES[family]
    config = getattr(library, config_name)(**{**COMMON, **options, **changes})
    with seeded(7):
        model: nn.Module = getattr(library, model_name)(config)
        for name, p in model.named_parameters():
            if p.requires_grad and (name.endswith("bias") or not p.any()):
                with torch.no_grad():
                    p.normal_(std=0.5)
            if name.endswith("gate_up_proj") and family == "gpt_oss":
                with torch.no_grad():
                    p.mul_(4)  # some pre-activations pass the clamp at 7
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.normal_(std=0.3)
    return model.train()


def batches(ranks: int, seed: int = 0, rows: int = 2, length: int = 7) -> list[Tensor]:
    """One [B, S] batch of token ids per rank."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, VOCAB, (rows, length))) for _ in range(ranks)]


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Loss (auxiliary losses included) and logits of a language model on `ids` [B, S]."""
    out = model(input_ids=ids, labels=ids)
    return out.loss, out.logits


@dataclass
class Seen:
    """What one rank saw: its logits by step, and all gradients by their original names after the last step."""

    logits: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    extra: Any = None

    def mapped(self, function: Callable[[Any], Any]) -> Seen:
        """The same with every tensor passed through `function`: tensors do not travel through pipes, arrays do."""
        gradients = {n: function(g) for n, g in self.gradients.items()}
        return Seen([function(x) for x in self.logits], self.losses, gradients, self.extra)


LossFn = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]


def alone(
    model: nn.Module, steps: Sequence[Sequence[Tensor]], loss_fn: LossFn = loss_of, lr: float = 0.05
) -> list[Seen]:
    """The unconverted model on all ranks' batches, one process: what each rank should see."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    ranks = len(steps[0])
    seen = [Seen() for _ in range(ranks)]
    for at, by_rank in enumerate(steps):
        optimizer.zero_grad()
        for rank, ids in enumerate(by_rank):
            loss, logits = loss_fn(model, ids)
            (loss / ranks).backward()
            seen[rank].logits.append(logits.detach().clone())
            seen[rank].losses.append(float(loss.detach()))
        if at < len(steps) - 1:
            optimizer.step()
    for s in seen:
        s.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return seen


def original_gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients of a converted model under their original names; collective."""
    found = {n: p.grad.clone() for n, p in dense_parameters(model).items() if p.grad is not None}
    for name, _, _, layer in converted(model):
        twin = copy.deepcopy(layer)
        twin.origin.rest = {part: torch.zeros_like(t) for part, t in layer.origin.rest.items()}  # which nothing reads
        with torch.no_grad():
            for (_, q), (_, p) in zip(twin.experts.named_parameters(), layer.experts.named_parameters(), strict=True):
                q.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        found |= {f"{name}.{part}": t.clone() for part, t in twin.originals().items()}
    return found


def together(
    model: nn.Module,
    steps: Sequence[Sequence[Tensor]],
    group: Collective,
    loss_fn: LossFn = loss_of,
    planner: Planner | None = None,
    lr: float = 0.05,
    **options: Any,
) -> Seen:
    """Convert `model` on one rank of `group`, and train it with placements at random."""
    prophet.convert(model, group=group, **options)
    return trained(model, steps, group, loss_fn, planner, lr)


def trained(
    model: nn.Module,
    steps: Sequence[Sequence[Tensor]],
    group: Collective,
    loss_fn: LossFn = loss_of,
    planner: Planner | None = None,
    lr: float = 0.05,
    gradients: Callable[[nn.Module], dict[str, Tensor]] = original_gradients,
) -> Seen:
    """Train a converted model on one rank of `group`, with placements at random; `extra` counts the last's replicas."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = prophet.EngineConfig(planner=planner or RandomPlanner(3, 0.7), slots_per_rank=4)
    engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    seen = Seen()
    for at, by_rank in enumerate(steps):
        optimizer.zero_grad()
        loss, logits = loss_fn(model, by_rank[group.rank])
        loss.backward()
        group.all_reduce_mean_([p.grad for p in dense_parameters(model).values() if p.grad is not None])
        seen.logits.append(logits.detach().clone())
        seen.losses.append(float(loss.detach()))
        if at < len(steps) - 1:
            optimizer.step()
    seen.gradients = gradients(model)
    step = engine.runtime.step
    copies = 0 if step is None else sum(a.kind == "AGG" for a in step.actions)
    seen.extra = copies
    engine.close()
    return seen


def compare(wanted: Sequence[Seen], found: Sequence[Seen], tolerance: float = 1e-4) -> None:
    """Raise unless logits and gradients agree up to what a re-ordered float32 sum may change."""
    for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
        for at, (a, b) in enumerate(zip(want.logits, got.logits, strict=True)):
            close(b, a, tolerance, f"logits of rank {rank}, step {at}")
        np.testing.assert_allclose(got.losses, want.losses, rtol=tolerance)
        missing = set(want.gradients) - set(got.gradients)
        if missing:
            raise AssertionError(f"rank {rank}: there are no gradients of {sorted(missing)}")
        for name, b in got.gradients.items():
            # a module of its own has no gradient where no token visited it, an expert among others has zeros
            a = want.gradients.get(name, torch.zeros_like(b))
            close(b, a, tolerance, f"gradient of {name}, rank {rank}")


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Raise unless the largest difference is below `tolerance` times the largest value (at least 1e-3)."""
    gap = float((got - want).abs().max())
    limit = tolerance * max(float(want.abs().max()), 1e-3)
    if not gap <= limit:
        raise AssertionError(f"{what}: differs by {gap:.3g}, allowed {limit:.3g}")


def layers_of(model: nn.Module) -> list[RoutedExperts]:
    """The converted experts of a model."""
    return [layer for *_, layer in converted(model)]
