"""How a transformers configuration is made small: one table of field names, and what it does not say of a family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

VOCABULARY = 48
LAYERS = 2

# field of a configuration: its value, in whatever family the field appears
SIZES: dict[str, Any] = {
    # widths
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "dense_intermediate_size": 24,
    "prefix_dense_intermediate_size": 24,
    "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 16,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "d_ff": 24,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "share_expert_dim": 16,
    "router_hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    # layers
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layers": LAYERS,
    "depth": LAYERS,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_dense_layers": 0,
    "first_k_dense_replace": 0,
    "num_sparse_encoder_layers": LAYERS,
    "num_sparse_decoder_layers": LAYERS,
    "encoder_sparse_step": 1,
    "decoder_sparse_step": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "moe_layer_start_index": 0,
    "max_window_layers": LAYERS,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "mlp_layer_types": ["sparse"] * LAYERS,
    "mlp_only_layers": [],
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "swa_head_dim": 8,
    "kv_channels": 8,
    "d_kv": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "d_rel": 8,
    "rel_extent": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "sliding_window": 4,
    "sliding_window_size": 4,
    "attention_chunk_size": 4,
    "max_position_embeddings": 64,
    "max_seq_len": 64,
    # states of recurrent layers
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "ssm_state_size": 4,
    "mamba_dt_rank": 4,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    "block_size": 4,
    "use_mamba_kernels": False,
    # experts
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "zero_expert_num": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "aux_loss_coef": 0.1,
    # what would make logits small at this width
    "logit_scale": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "output_multiplier": 1.0,
    # the towers of models that also see and hear
    "image_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "out_hidden_size": 32,
    "text_hidden_size": 32,
    "output_dim": 32,
    "projector_hidden_size": 32,
    "projection_intermediate_size": 32,
    "projection_hidden_dim": 32,
    "deepstack_visual_indexes": [0],
    "output_channels": 8,
    "downsample_channels": [8, 8],
    "downsample_hidden_size": 8,
    "mlp_dim": 32,
    "max_image_size": 16,
    "num_mel_bins": 16,
    # tokens that end, begin and fill
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_token_id": 0,
    "video_token_id": 0,
    "audio_token_id": 0,
    "image_token_index": 0,
    "video_token_index": 0,
    "use_cache": False,
    "tie_word_embeddings": False,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
RANDOM = ("dropout", "_pdrop", "layerdrop", "jitter_noise", "jitter_eps", "dropout_rate")

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

# what the table does not say: fields of a family's configuration; those of a part of it in a mapping of their own
OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
    },
    "diffusion_gemma": {  # encoder and decoder have the same layers
        "canvas_length": 8,
        "tie_word_embeddings": True,
        "text_config": {"global_head_dim": 8, "tie_word_embeddings": True},
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
    },
    "gemma4": {"enable_moe_block": True, "global_head_dim": 8},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
    },
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "index_kpool": 2}},
    "hy_v4_vl": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0]}}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "muse_spark": {"audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1]}},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "moe"]},
    "switch_transformers": {"decoder_start_token_id": 0},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "zaya": {"num_experts_per_tok": 1},
}
# experts that compute in float32, whatever the model's dtype
SINGLE = {"inkling2", "inkling2_loop", "openai_privacy_filter"}
# the class that is trained, where another comes first
WANTED: dict[str, str] = {"diffusion_gemma": "DiffusionGemmaForBlockDiffusion"}


def shrunk(config_class: Any, experts: int, overrides: Mapping[str, Any]) -> Any:
    """A configuration of `config_class` with the sizes of the table, its parts likewise.

    overrides: fields that have other values; of a part, in a mapping under its name.
    """
    fields = {f.name: f.default for f in dataclasses.fields(config_class)}
    values = {name: value for name, value in SIZES.items() if name in fields}
    values |= {name: experts for name in EXPERTS if name in fields}
    values |= {name: 0.0 for name, default in fields.items() if name.endswith(RANDOM) and isinstance(default, float)}
    if "kv_lora_rank" in fields:  # every head has keys of its own, made of the latent
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    values |= overrides
    for name, kind in config_class.sub_configs.items():
        values[name] = shrunk(_part(config_class, name, kind), experts, overrides.get(name, {}))
    return config_class(**values)


def _part(config_class: Any, name: str, kind: Any) -> Any:
    """The class of a part's configuration, also where any may be given: then that of the family's own type."""
    if dataclasses.is_dataclass(kind):
        return kind
    part = config_class.sub_configs_defaults[name]
    return part.get_config_class(part.model_type)
