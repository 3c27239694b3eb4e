"""Small transformers models of seven families, and their pipelines played in one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.layers import Activations, Microbatch

LAYERS, VOCABULARY = 3, 48
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
_ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SIZES),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SIZES),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_SIZES, "head_dim": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_SIZES, "head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_SIZES, **_ROUTER, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_SIZES, **_ROUTER, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    ),
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_SIZES, **_ROUTER, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SIZES, "head_dim": 8, "sliding_window": 4}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_SIZES, "head_dim": 8}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_SIZES, "head_dim": 8, "num_local_experts": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_SIZES, "sliding_window": 6}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_SIZES, "ffn_dim": 40, "word_embed_proj_dim": 16}),
    "bert": ("BertConfig", "BertForMaskedLM", _SIZES),
    "mamba": ("MambaConfig", "MambaForCausalLM", {**_SIZES, "state_size": 4}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
        | {"topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    ),
}


def small(family: str, *, tied: bool = False, seed: int = 0, **options: Any) -> nn.Module:
    """A model of `family` with three layers, in training mode, without dropout unless `options` ask for it."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning)
    config, model, sizes = {**FAMILIES, **OTHERS}[family]
    still: dict[str, Any] = {}
    if family == "gpt2":
        still = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    if family in ("bert", "opt"):
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0}
    torch.manual_seed(seed)
    made: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(**{**sizes, **still, "tie_word_embeddings": tied, **options})
    )
    with torch.no_grad():  # larger weights, so that attention and routers are far from uniform
        for p in made.parameters():
            if p.dim() > 1:
                p.mul_(4.0)
    return made.train()


def batch(kind: str = "plain", rows: int = 4, tokens: int = 12) -> tuple[dict[str, Tensor], Tensor]:
    """Token ids and labels, some of which do not count; `kind` is plain, packed (by position ids) or padded (right)."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    inputs = {"input_ids": ids}
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(5), torch.arange(tokens - 5)]).expand(rows, -1)
    if kind == "padded":
        mask = torch.ones(rows, tokens, dtype=torch.long)
        mask[1, tokens - 4 :] = 0
        mask[-1, tokens - 2 :] = 0
        inputs["attention_mask"] = mask
        labels = labels.masked_fill(mask == 0, -100)
    return inputs, labels


def without_others(model: TransformersModel, units: Sequence[int]) -> None:
    """Put all parameters on `meta` that none of these units holds, as on a rank that runs only them."""
    mine = {id(p) for u in units for p in model.units[u].parameters()}
    for parameter in model.root.parameters():
        if id(parameter) not in mine:
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to("meta")))


def train_over(stages: Sequence[tuple[TransformersModel, Sequence[int]]], parts: Sequence[Microbatch]) -> Tensor:
    """Forward and backward of all microbatches, stage after stage; gradients are left in the stages' models."""
    count = sum(stages[0][0].counted(part) for part in parts)
    total = torch.zeros(())
    for part in parts:
        own = [Microbatch(part.number, part.inputs, part.labels) for _ in stages]
        before: list[Activations] = []
        after: list[Activations] = []
        for (model, units), its in zip(stages, own, strict=True):
            entered = tuple(t.detach().requires_grad_(t.requires_grad) for t in after[-1]) if after else ()
            before.append(entered)
            said = model.activations(its)
            for unit in units:
                entered = model.run(unit, entered, its)
                assert [(t.shape, t.dtype, t.requires_grad) for t in entered] == [
                    (t.shape, t.dtype, t.requires_grad) for t in said[unit + 1]
                ]
            after.append(entered)
        loss = stages[-1][0].loss(after[-1], own[-1]) / count
        total += loss.detach()
        loss.backward()
        for s in range(len(stages) - 2, -1, -1):
            sent = [(t, b.grad) for t, b in zip(after[s], before[s + 1], strict=True) if t.requires_grad]
            torch.autograd.backward([t for t, _ in sent], [g for _, g in sent])
    return total


def train_whole(model: nn.Module, counting: TransformersModel, parts: Sequence[Microbatch]) -> Tensor:
    """The same by the model's own forward: every microbatch's own loss, weighted by the labels that count in it."""
    count = sum(counting.counted(part) for part in parts)
    total = torch.zeros(())
    for part in parts:
        loss = model(**part.inputs, labels=part.labels, use_cache=False).loss * counting.counted(part) / count
        loss.backward()
        total += loss.detach()
    return total


def gradients_of(stages: Sequence[tuple[TransformersModel, Sequence[int]]]) -> dict[str, Tensor]:
    """Gradients by name, summed over the stages that hold a parameter."""
    found: dict[str, Tensor] = {}
    for model, _ in stages:
        for name, p in model.root.named_parameters():
            if p.grad is not None:
                found[name] = found[name] + p.grad if name in found else p.grad
    return found
