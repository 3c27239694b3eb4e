"""Sizes from `config.json`, against the models that transformers builds from the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prophet.errors import SpecError
from prophet.machine.config_json import FAMILIES, MAX_CONFIG_BYTES, read_config
from prophet.machine.models import MODELS, model_named
from prophet.machine.sizes import ModelSizes

transformers = pytest.importorskip("transformers")

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
}

# What families are built with where their own defaults leave a size out, or are of one kind of layer alone.
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {"head_dim": 20, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [0, 3], "head_dim": 24},
    "deepseek_v2": {"first_k_dense_replace": 2, "num_experts_per_tok": 2, "q_lora_rank": None},
    "deepseek_v3": {"first_k_dense_replace": 2, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_layer_start_index": 2, "moe_layer_end_index": 4, "moe_layer_interval": 2, "moe_k": 2},
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
    "jamba": {
        "mamba_d_state": 2,
        "mamba_dt_rank": 1,
        "expert_layer_period": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "glm4_moe": {"first_k_dense_replace": 1, "n_shared_experts": 2},
    "gpt_oss": {"head_dim": 16},
    "granitemoeshared": {"shared_intermediate_size": 40},
    "qwen3_next": {"num_experts_per_tok": 2},
}
COMMON = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 4, "vocab_size": 512, "pad_token_id": None}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# What no file says, or what is wrong in the default configuration alone.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    | {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv"] * 20 + ["full_attention"] * 12},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
# Families with experts that are refused, and why these sizes do not describe them.
NOT_KNOWN = {
    "axk2": "attention has a gate with a rank of its own: a seventh of what is not routed",
    "bailing_hybrid": "gates of linear attention: a fifth of what is not routed",
    "dbrx": "sizes in two objects",
    "deepseek_ocr2_text": "no model is built of it alone, to compare with",
    "deepseek_v4": "compressed attention, and streams between blocks",
    "doge": "experts of one row each",
    "dots3_note_text": "two kinds of attention with other ranks",
    "dots3_note_vision_encoder": "no decoder",
    "ernie4_5_vl_moe_text": "two sets of experts, of two sizes",
    "gemma4_text": "experts beside a feed-forward network in every block",
    "glm5_next_text": "streams between blocks",
    "hy_v4": "a gate of attention, and streams between blocks",
    "hy_v4_vl_text": "a gate of attention, and streams between blocks",
    "inkling2_loop_text": "convolutions and gates between blocks",
    "inkling2_text": "convolutions and gates between blocks",
    "inkling_text": "convolutions around attention",
    "jetmoe": "attention is made of experts, too",
    "longcat_flash": "two of attention in every block, and experts that compute nothing",
    "mistral_large4_text": "layers that share keys and values",
    "muse_spark_text": "experts narrower than a token",
    "nemotron_h": "a layer is attention or experts, not both",
    "nllb-moe": "encoder and decoder",
    "openai_privacy_filter": "no decoder",
    "qwen3_omni_moe_talker_text": "no model is built of it alone, to compare with",
    "qwen3_omni_moe_text": "no model is built of it alone, to compare with",
    "qwen4_exp_text": "its defaults build no model",
    "step3p5": "no model is built of it alone, to compare with",
    "switch_transformers": "encoder and decoder",
    "unlimited_ocr_text": "no model is built of it alone, to compare with",
    "vitpose_backbone": "no decoder",
    "zaya": "routers are networks with weights of their own",
}
# By how much of the matrices that are not routed sizes may be off, for gates of one row; and where parts are left out.
CLOSE, LEFT_OUT = 0.0025, 0.05


def config_of(kind: str, **changes: Any) -> Any:
    return transformers.CONFIG_MAPPING[kind](**changes)


def built(config: Any) -> torch.nn.Module:
    """The model on no device."""
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    make = transformers.AutoModelForCausalLM if type(config) in mapping else transformers.AutoModel
    with torch.device("meta"):
        model: torch.nn.Module = make.from_config(config)
    return model


def compare(config: Any, folder: Path, *, within: float = 0.02) -> ModelSizes:
    """Sizes read from what `config` saves, after they were held to the model that it builds."""
    config.save_pretrained(folder)
    model, sizes = built(config), read_config(folder)
    weights = dict(model.named_parameters())
    routed = {n for n in weights if ".experts." in n and "shared" not in n and "router" not in n}
    matrices = sum(p.numel() for n, p in weights.items() if n not in routed and p.ndim == 2)
    found = sizes.parameters()
    if not any("lm_head" in name for name in weights) and not sizes.tied:  # no head was built
        found = found._replace(total=found.total - sizes.vocabulary * sizes.dim)
    assert found.routed == sum(weights[n].numel() for n in routed) > 0
    less = any("mix tokens without" in item or "left out" in item for item in sizes.assumed)
    assert found.total - found.routed == pytest.approx(matrices, rel=LEFT_OUT if less else CLOSE)
    assert found.total == pytest.approx(sum(p.numel() for p in weights.values()), rel=within)
    return sizes


@pytest.mark.parametrize("kind", SMALL)
def test_sizes_are_those_of_the_model_that_is_built(kind: str, tmp_path: Path) -> None:
    known = config_of(kind).to_dict()
    changes = COMMON | {name: 8 for name in EXPERTS if name in known}
    changes |= {"moe_intermediate_size": 40} if "moe_intermediate_size" in known else {}
    sizes = compare(config_of(kind, **changes | SMALL[kind]), tmp_path, within=0.03)  # norms weigh more here
    assert (sizes.layers, sizes.experts, sizes.dim, sizes.heads) == (6, 8, 64, 4)


def has_experts(config: Any) -> bool:
    return any(config.to_dict().get(name) for name in EXPERTS)


def families() -> dict[str, Any]:
    """The configuration of every family of the installed transformers, or of its text part, by `model_type`."""
    found = {}
    for kind in transformers.CONFIG_MAPPING:
        try:
            config = config_of(kind, **DEFAULTS.get(kind, {})).get_text_config(decoder=True)
        except Exception:  # it has no defaults
            continue
        found[config.model_type] = config
    return found


@pytest.mark.slow
def test_every_family_with_experts_is_read_or_refused_by_name(tmp_path: Path) -> None:
    found = {kind: config for kind, config in families().items() if has_experts(config)}
    assert len(found) > 40
    for kind in found.keys() & FAMILIES.keys():
        compare(found[kind], tmp_path / kind)
    assert found.keys() - FAMILIES.keys() <= NOT_KNOWN.keys(), "read them, or say why not"


@pytest.mark.slow
def test_families_without_experts_are_read_too(tmp_path: Path) -> None:
    found = {kind: config for kind, config in families().items() if kind in FAMILIES and not has_experts(config)}
    assert found.keys() >= {"llama", "qwen3", "gemma3_text", "starcoder2"}
    for kind, config in found.items():
        config.save_pretrained(tmp_path / kind)
        weights = sum(p.numel() for p in built(config).parameters())
        assert read_config(tmp_path / kind).parameters().total == pytest.approx(weights, rel=CLOSE), kind


# ------------------------------------------------------------------------------------------------ what a file says


def written(folder: Path, **changes: Any) -> Path:
    """Mixtral's file with other fields; ... leaves one out."""
    fields = {k: v for k, v in {**MIXTRAL, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder / "config.json"


def plain(sizes: ModelSizes) -> ModelSizes:
    """Without what a name and a file put differently."""
    kv_heads = sizes.kv_heads or sizes.heads
    return replace(sizes, name="", element_bytes=None, assumed=(), kv_heads=kv_heads)


def test_a_published_file_and_the_name_are_one_model(tmp_path: Path) -> None:
    file = written(tmp_path)
    for text in (str(file), str(tmp_path)):
        found = model_named(text)
        assert plain(found) == plain(MODELS["Mixtral-8x7B"])
        assert (found.name, found.element_bytes) == (text, 2)
        assert found.assumed == ("sequence 4096: max_position_embeddings is 32768",)
    config_of("deepseek_v3").save_pretrained(tmp_path)
    assert plain(model_named(str(tmp_path))) == plain(MODELS["DeepSeek-V3"])
    qwen = {"hidden_size": 2048, "moe_intermediate_size": 768, "head_dim": 128, "num_experts_per_tok": 8}
    config_of("qwen3_moe", num_hidden_layers=48, num_experts=128, **qwen).save_pretrained(tmp_path)
    assert plain(model_named(str(tmp_path))) == plain(MODELS["Qwen3-30B-A3B"])


def test_a_model_of_several_parts_is_its_text_decoder(tmp_path: Path) -> None:
    text = {k: v for k, v in MIXTRAL.items() if k != "torch_dtype"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "sees", "dtype": "float32", "vision_config": {}, "text_config": text})
    )
    found = read_config(tmp_path)
    assert replace(plain(found), name="") == plain(MODELS["Mixtral-8x7B"])
    assert found.element_bytes == 4
    assert found.assumed[0] == "the text decoder alone: vision and other parts are left out"


def test_what_a_file_does_not_say_is_said(tmp_path: Path) -> None:
    found = read_config(written(tmp_path, torch_dtype=..., max_position_embeddings=..., sliding_window=512))
    assert found.assumed == (
        "elements of the machine's usual size: dtype is none of float32, bfloat16, float16",
        "sequence 4096: max_position_embeddings is not there",
        "attention over the whole sequence: sliding_window is 512",
    )
    assert read_config(written(tmp_path, max_position_embeddings=1000)).sequence == 1000
    assert read_config(written(tmp_path, head_dim=100)).head_dim == 100
    assert read_config(written(tmp_path, num_key_value_heads=...)).kv_heads == 32


def test_a_file_without_experts_is_read(tmp_path: Path) -> None:
    found = read_config(written(tmp_path, model_type="llama", num_local_experts=..., num_experts_per_tok=...))
    assert (found.experts, found.hidden, found.blocks_with_experts) == (0, 14336, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "elephant"}, "model_type: 'elephant' is no family that is known here: give --layers"),
        ({"model_type": ...}, "expected a field model_type: give --layers"),
        ({"model_type": ["mixtral"]}, "model_type: a list of 1 is no family"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most the 8 experts, got 9"),
        ({"num_experts_per_tok": ...}, "expected a field num_experts_per_tok or"),
        ({"num_experts": 16}, "expected num_local_experts and num_experts to be the same, got 8 and 16"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of num_attention_heads = 32, got 5"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types has 2 entries, the model has 32 layers"),
        ({"mlp_only_layers": [40]}, "mlp_only_layers: expected numbers of layers from 0 to 31, got a list of 1"),
        ({"first_k_dense_replace": 33}, "first_k_dense_replace: expected a whole number from 0 to 32, got 33"),
        ({"hidden_size": "4096"}, "hidden_size: expected a whole number from 1 to 16777216, got '4096'"),
        ({"hidden_size": True}, "hidden_size: expected a whole number"),
        ({"hidden_size": 4096.5}, "hidden_size: expected a whole number"),
        ({"hidden_size": ...}, "expected a field hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected a whole number from 1 to 4096"),
        ({"intermediate_size": ...}, "expected a field intermediate_size"),
        ({"intermediate_size": [1, 2]}, "intermediate_size: expected a whole number .* got a list of 2"),
        ({"hidden_act": "sine"}, "hidden_act: expected one of silu, .* got 'sine'"),
        ({"kv_lora_rank": 512}, "expected a field qk_nope_head_dim"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_with_file_and_field(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(SpecError, match=words) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(SpecError, match=f"{tmp_path}: expected a folder with a config.json"):
        model_named(str(tmp_path))
    for text, words in (("{", "expected JSON"), ("[]", "an object, got a list of 0"), ('"x"', "an object, got 'x'")):
        file.write_text(text)
        with pytest.raises(SpecError, match=f"{file}: .*{words}"):
            model_named(str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(SpecError, match="expected JSON"):
        model_named(str(file))
    file.write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(SpecError, match=f"expected at most {MAX_CONFIG_BYTES} bytes"):
        model_named(str(file))
