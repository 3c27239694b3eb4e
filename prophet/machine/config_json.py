"""A model's sizes from its Hugging Face `config.json`, read as it is: no transformers, and nothing in it is run.

Families write the same sizes under different names. Which fields a family has is read off its file. What is not in the
file is in `FAMILIES`, which tests compare with the models that transformers builds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prophet.errors import SpecError
from prophet.files import is_number, read_json, shown
from prophet.machine.sizes import MOST, ModelSizes
from prophet.spec import ACTIVATIONS, Activation, Bias, parts_of

# Bounds on a file from outside; layers are looped over
MAX_CONFIG_BYTES = 1 << 22
_MOST_LAYERS = 1 << 12
# Tokens of a sequence that are assumed where a model takes more
_SEQUENCE = 4096
_INSTEAD = "give --layers, --experts, --top-k, --dim, --hidden and --heads in place of --model"
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Names from configurations: three of them are the tanh approximation of gelu, computed in different orders
_FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a family's files leave out.

    Attributes:
        gated: Feed-forward networks have three matrices.
        activation: Of experts, where no field names it.
        bias: Of experts; no field names it.
        tied: The head is the embedding, where no field gives it.
        shared: Shared experts as wide as a routed one, where no field gives them.
        output_gate: Attention has one more projection, of the queries' size.
        left_out: Parts that are not counted, in words.
    """

    gated: bool = True
    activation: Activation | None = None
    bias: Bias = False
    tied: bool = False
    shared: int = 0
    output_gate: bool = False
    left_out: str = ""


_TIED, _GATED_OUTPUT = Family(tied=True), Family(output_gate=True)
# Families whose files leave nothing out: those with experts first, then dense ones
_PLAIN = """
    aria_text axk1 cohere2_moe deepseek_v2 deepseek_v3 dots1 exaone_moe flex_olmo flint glm4_moe glm4_moe_lite
    glm4v_moe_text granitemoe granitemoe_swa granitemoehybrid granitemoeshared hy_v3 jamba kolibri1 laguna mellum
    minimax minimax_m2 minimax_m3_vl_text mistral4 mixtral olmoe phimoe qwen2_moe qwen3_moe qwen3_vl_moe_text
    sarvam_mla sarvam_moe solar_open

    cwm exaone4 glm glm4 granite helium hyperclovax iquestcoder llama ministral3 mistral olmo olmo2 olmo3 phi3 qwen2
    qwen3 seed_oss stablelm
"""
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_PLAIN.split(), Family()),
    **dict.fromkeys(("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3_text"), _TIED),
    **dict.fromkeys(("lara_mini", "lfm2_moe", "smollm3"), _TIED),
    **dict.fromkeys(("arcee", "gpt_neox", "jais2", "phi"), Family(gated=False)),
    **dict.fromkeys(("afmoe", "beam", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"), _GATED_OUTPUT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), Family(left_out="the indexer of sparse attention")),
    "kimi_linear": Family(left_out="gates of linear attention"),
    "gpt_oss": Family(activation="swiglu_clamped", bias=True),
    "hunyuan_v1_moe": Family(shared=1),
    "llama4_text": Family(shared=1),
    "mimo_v2_flash": Family(left_out="the other heads of layers with windows"),
    "starcoder2": Family(gated=False, tied=True),
}


class _Fields:
    """The fields of one file, checked as they are read; a refusal names file and field."""

    def __init__(self, file: str, found: Mapping[str, Any]) -> None:
        self.file, self._found = file, found

    def get(self, name: str) -> Any:
        return self._found.get(name)

    def refused(self, name: str, expected: str) -> SpecError:
        return SpecError(f"{self.file}: {name}: expected {expected}, got {shown(self.get(name))}")

    def whole(self, *names: str, least: int = 0, most: int = MOST) -> int | None:
        """Read the number under `names`, which may not differ; None where none of them has one."""
        there = {name: self._number(name, least, most) for name in names if self.get(name) is not None}
        (first, value), *others = there.items() or ((None, None),)
        for name, other in others:
            if other != value:
                raise SpecError(f"{self.file}: expected {first} and {name} to be the same, got {value} and {other}")
        return value

    def _number(self, name: str, least: int, most: int) -> int:
        value = self.get(name)
        # A number by layer, all alike
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if not is_number(value) or value != int(value) or not least <= value <= most:
            raise self.refused(name, f"a whole number from {least} to {most}")
        return int(value)

    def needed(self, *names: str, most: int = MOST) -> int:
        """Read a number as `whole` does, where there has to be one."""
        found = self.whole(*names, least=1, most=most)
        if found is None:
            raise SpecError(f"{self.file}: expected a field {' or '.join(names)}")
        return found

    def by_layer(self, name: str, layers: int) -> list[Any] | None:
        """Read a list with an entry for every layer; None where there is none."""
        value = self.get(name)
        if not isinstance(value, list):
            return None
        if len(value) != layers:
            raise SpecError(f"{self.file}: {name} has {len(value)} entries, the model has {layers} layers")
        return value

    def numbers(self, name: str, layers: int) -> Sequence[int] | None:
        """Read numbers of layers; None where there is no such list."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(n, int) and 0 <= n < layers for n in value):
            raise self.refused(name, f"numbers of layers from 0 to {layers - 1}")
        return value


def read_config(text: str | os.PathLike[str]) -> ModelSizes:
    """Read the sizes that a `config.json`, or the one in a folder, describes.

    Of a model of several parts they are those of its text decoder.

    Raises:
        SpecError: For no such file, no JSON, a family that is not known, or a size that is missing or contradicts
            another. It is one sentence with file and field.
    """
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise SpecError(f"{path}: expected a folder with a config.json")
        path /= "config.json"
    found = read_json(path, most_bytes=MAX_CONFIG_BYTES, expected="a model's configuration", error=SpecError)
    if not isinstance(found, dict):
        raise SpecError(f"{path}: expected a model's configuration, an object, got {shown(found)}")
    whole, assumed = found, []
    # A text part may hold another one; its model_type names the family.
    while isinstance(found.get("text_config"), dict):
        found = {"model_type": found.get("model_type"), **found["text_config"]}
    if found is not whole:
        assumed.append("the text decoder alone: vision and other parts are left out")
    # Given once for all parts
    for name in ("dtype", "torch_dtype", "tie_word_embeddings"):
        if whole.get(name) is not None:
            found = {name: whole[name], **{k: v for k, v in found.items() if v is not None}}
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = f"model_type: {shown(kind)} is no family that is known here" if kind else "expected a field model_type"
        raise SpecError(f"{path}: {what}: {_INSTEAD}")
    return _sizes(_Fields(str(path), found), FAMILIES[kind], str(text), assumed)


def _sizes(c: _Fields, family: Family, name: str, assumed: list[str]) -> ModelSizes:
    layers = c.needed("num_hidden_layers", "num_layers", most=_MOST_LAYERS)
    dim, width = c.needed("hidden_size"), c.whole("intermediate_size", least=1)
    heads = c.needed("num_attention_heads")
    kv_heads = c.whole("num_key_value_heads", least=1) or heads
    if heads % kv_heads:
        raise c.refused("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    experts = c.whole("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    # Without experts the fields about them mean nothing
    sparse = _blocks_with_experts(c, layers) if experts else 0
    top_k, hidden, shared, dense = 1, width, 0, 0
    if experts:
        names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
        top_k = c.needed(*names)
        if top_k > experts:
            raise c.refused(next(n for n in names if c.get(n) is not None), f"at most the {experts} experts")
        hidden = c.whole("moe_intermediate_size", least=1) or width
        if sparse < layers:
            dense = c.whole("intermediate_size_mlp", "dense_intermediate_size", least=1) or width or 0
    if hidden is None or (sparse < layers and experts and not dense):
        raise SpecError(f"{c.file}: expected a field intermediate_size")
    if experts:
        shared = _shared(c, family, hidden)
    else:
        # Granite calls its networks so where it has no experts
        hidden = c.whole("shared_intermediate_size", least=1) or hidden
    element_bytes = _ELEMENT_BYTES.get(str(c.get("dtype") or c.get("torch_dtype")))
    if element_bytes is None:
        assumed.append(f"elements of the machine's usual size: dtype is none of {', '.join(_ELEMENT_BYTES)}")
    positions = c.whole("max_position_embeddings", least=1)
    if positions is None or positions > _SEQUENCE:
        state = "is not there" if positions is None else f"is {positions}"
        assumed.append(f"sequence {_SEQUENCE}: max_position_embeddings {state}")
    sequence = min(positions or _SEQUENCE, _SEQUENCE)
    # A window saves compute that predictions still count, so `assumed` names it.
    window = c.whole("sliding_window") or sequence
    if window < sequence and c.get("use_sliding_window") is not False:
        assumed.append(f"attention over the whole sequence: sliding_window is {window}")
    if family.left_out:
        assumed.append(f"left out: {family.left_out}")
    return ModelSizes(
        name=name,
        dim=dim,
        hidden=hidden,
        layers=layers,
        experts=experts,
        top_k=top_k,
        moe_layers=sparse if experts and sparse < layers else None,
        dense_hidden=dense,
        shared_hidden=shared,
        activation=_activation(c, family),
        bias=family.bias,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=c.whole("vocab_size") or 0,
        tied=_tied(c, family),
        sequence=sequence,
        element_bytes=element_bytes,
        **_attention(c, family, layers, dim, heads, kv_heads, assumed),
        assumed=tuple(assumed),
    )


def _tied(c: _Fields, family: Family) -> bool:
    value = c.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise c.refused("tie_word_embeddings", "true or false")
    return family.tied if value is None else value


def _blocks_with_experts(c: _Fields, layers: int) -> int:
    """Count the layers with experts by the field that gives it, in the order in which transformers asks."""
    kinds, freq = c.by_layer("mlp_layer_types", layers), c.by_layer("moe_layer_freq", layers)
    if kinds is not None:
        return sum(kind != "dense" for kind in kinds)
    if freq is not None:
        return sum(map(bool, freq))
    named = c.numbers("moe_layers", layers)
    if named is not None:
        return len(set(named))
    every = range(layers)
    first = c.whole("first_k_dense_replace", "num_dense_layers", most=layers)
    if first is not None:
        step = c.whole("moe_layer_freq", least=1) or 1
        return sum(k >= first and k % step == 0 for k in every)
    start = c.whole("moe_layer_start_index", most=layers)
    if start is not None:
        end, step = c.get("moe_layer_end_index"), c.whole("moe_layer_interval", least=1) or 1
        end = layers - 1 if end in (None, -1) else c.needed("moe_layer_end_index")
        return sum(start <= k <= end and (k + 1) % step == 0 for k in every)
    period = c.whole("expert_layer_period", least=1)
    if period is not None:
        offset = c.whole("expert_layer_offset") or 0
        return sum(k % period == offset for k in every)
    # The last resort: no field at all makes every layer one with experts.
    step = c.whole("decoder_sparse_step", "interleave_moe_layer_step", least=1) or 1
    dense = set(c.numbers("mlp_only_layers", layers) or ())
    return sum((k + 1) % step == 0 and k not in dense for k in every)


def _shared(c: _Fields, family: Family, hidden: int) -> int:
    """The width of all shared experts of a block together."""
    width = c.whole("shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size")
    if width is not None:
        return width
    many = c.whole("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return hidden * (family.shared if many is None else many)


def _attention(
    c: _Fields, family: Family, layers: int, dim: int, heads: int, kv_heads: int, assumed: list[str]
) -> dict[str, int | None]:
    """Size of a head, and attention's weights and cost where it is not four projections in every layer."""
    rank, size = c.whole("kv_lora_rank", least=1), c.whole("head_dim", least=1) or dim // heads
    if rank is not None:
        nope, rope = c.needed("qk_nope_head_dim"), c.needed("qk_rope_head_dim")
        query, value = nope + rope, c.needed("v_head_dim")
        down = c.whole("q_lora_rank", least=1)
        # Multi-head latent attention: keys and values come from one vector of `rank`, plus a shared rotary key.
        weights = dim * (rank + rope) + rank * heads * (nope + value) + heads * value * dim
        weights += heads * query * dim if down is None else down * (dim + heads * query)
        size, cost = value, heads * (query + value) // 2
    else:
        value = c.whole("v_head_dim", least=1) or size
        weights, cost = dim * (heads + kv_heads) * (size + value), heads * (size + value) // 2
    if family.output_gate:
        weights += dim * heads * value
    usual = rank is None and value == size and not family.output_gate
    other = _without_attention(c, layers)
    if other:
        # Sizes have one figure for all layers, so it is the mean over both kinds.
        weights = ((layers - other) * weights + other * _mixer(c, dim, heads * size)) // layers
        cost = cost * (layers - other) // layers
        assumed.append(f"{other} of {layers} layers mix tokens without attention, at no cost by position")
        usual = False
    return {
        "head_dim": None if size * heads == dim else size,
        "attention_params": None if usual else weights,
        "attention_dim": None if usual else cost,
    }


def _without_attention(c: _Fields, layers: int) -> int:
    """Count layers with linear attention, a state space or a convolution in place of attention."""
    kinds = c.by_layer("layer_types", layers)
    if kinds is not None:
        return sum(kind in ("linear_attention", "conv") for kind in kinds)
    period, offset = c.whole("attn_layer_period", least=1), c.whole("attn_layer_offset") or 0
    return 0 if period is None else sum(k % period != offset for k in range(layers))


def _mixer(c: _Fields, dim: int, width: int) -> int:
    """The weights of the matrices of a layer without attention.

    Args:
        c: The fields.
        dim: D.
        width: Of all heads of an attention layer together.
    """
    values = c.whole("linear_num_value_heads")
    # Gated delta rule: queries, keys, values, gate, output
    if values is not None:
        value = values * c.needed("linear_value_head_dim")
        key = c.needed("linear_num_key_heads") * c.needed("linear_key_head_dim")
        return dim * (2 * key + 3 * value + 2 * values)
    many, expand = c.whole("linear_num_heads"), c.whole("mamba_expand")
    # The same, with as many heads of each
    if many is not None:
        return 4 * dim * many * c.needed("linear_head_dim")
    # Mamba: two matrices in, one out
    if expand is not None:
        return 3 * expand * dim * dim
    # A gated convolution: three matrices in, one out
    if c.get("conv_L_cache") is not None:
        return 4 * dim * dim
    # Lightning attention: queries, keys, values, gate, output
    return 5 * dim * width


def _activation(c: _Fields, family: Family) -> Activation:
    if family.activation is not None:
        return family.activation
    name = next((n for n in ("hidden_act", "hidden_activation") if c.get(n) is not None), None)
    function = "silu" if name is None else _FUNCTIONS.get(str(c.get(name)))
    for activation in ACTIVATIONS:
        parts = parts_of(activation)
        if (parts.function, parts.gated, parts.limit) == (function, family.gated, None):
            return activation
    raise c.refused(str(name), f"one of {', '.join(_FUNCTIONS)}")
