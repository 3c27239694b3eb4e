"""Models by name: what `--model` takes besides a configuration.

Sizes are those of the published `config.json` files (LLaMA-2, Mixtral, Qwen3) and of GPT-3's paper, Table 2.1 (its
vocabulary padded to 50,304). LLaMA-32B is DynaTran's; its sizes are LLaMA-30B's. DeepSeek-V3: technical report,
section 4.2. MoE-GPT: Pro-Prophet, Table III, which prints no heads and no sequence length: 64 elements a head and
1024 tokens are assumed.
"""

from __future__ import annotations

import os
from pathlib import Path

from prophet.errors import SpecError, no_such
from prophet.machine.config_json import read_config
from prophet.machine.sizes import ModelSizes


def _moe_gpt(name: str, layers: int, dim: int, hidden: int) -> ModelSizes:
    # The number of experts is that of the ranks (section VI); 16 stands for it where no option gives another.
    return ModelSizes(
        name=name,
        layers=layers,
        dim=dim,
        hidden=hidden,
        experts=16,
        top_k=2,
        activation="gelu",
        bias=True,
        heads=dim // 64,
        vocabulary=50304,
        sequence=1024,
    )


def _gpt3(name: str, layers: int, dim: int, heads: int) -> ModelSizes:
    # Padded from 50,257, as trainers do for even matrices
    hidden, vocabulary = 4 * dim, 50304
    return ModelSizes(
        name=name,
        layers=layers,
        dim=dim,
        hidden=hidden,
        activation="gelu",
        bias=True,
        heads=heads,
        vocabulary=vocabulary,
        sequence=2048,
    )


def _llama(name: str, layers: int, dim: int, hidden: int, heads: int, kv_heads: int) -> ModelSizes:
    return ModelSizes(
        name=name, layers=layers, dim=dim, hidden=hidden, heads=heads, kv_heads=kv_heads, vocabulary=32000
    )


def _qwen3(name: str, layers: int, dim: int, hidden: int, heads: int) -> ModelSizes:
    return ModelSizes(
        name=name,
        layers=layers,
        dim=dim,
        hidden=hidden,
        experts=128,
        top_k=8,
        heads=heads,
        kv_heads=4,
        # A field of these configurations: it is not dim / heads
        head_dim=128,
        vocabulary=151936,
    )


# MLA with 128 heads of 128 + 64, query rank 1536, key-value rank 512. A score costs 192 elements and a value 128.
_MLA_PARAMS = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168

_MODELS = (
    _moe_gpt("MoE-GPT-S", 12, 512, 1024),
    _moe_gpt("MoE-GPT-M", 12, 1024, 2048),
    _moe_gpt("MoE-GPT-L", 12, 2048, 4096),
    _moe_gpt("MoE-GPT-DS", 24, 512, 1024),
    _moe_gpt("MoE-GPT-DM", 24, 1024, 2048),
    ModelSizes(
        name="Mixtral-8x7B",
        layers=32,
        dim=4096,
        hidden=14336,
        experts=8,
        top_k=2,
        heads=32,
        kv_heads=8,
        vocabulary=32000,
    ),
    _qwen3("Qwen3-30B-A3B", 48, 2048, 768, 32),
    _qwen3("Qwen3-235B-A22B", 94, 4096, 1536, 64),
    ModelSizes(
        name="DeepSeek-V3",
        layers=61,
        dim=7168,
        hidden=2048,
        experts=256,
        top_k=8,
        moe_layers=58,
        dense_hidden=18432,
        shared_hidden=2048,
        heads=128,
        head_dim=128,
        attention_params=_MLA_PARAMS,
        attention_dim=128 * 160,
        vocabulary=129280,
    ),
    _llama("LLaMA2-7B", 32, 4096, 11008, 32, 32),
    _llama("LLaMA2-13B", 40, 5120, 13824, 40, 40),
    _llama("LLaMA-32B", 60, 6656, 17920, 52, 52),
    _llama("LLaMA2-70B", 80, 8192, 28672, 64, 8),
    _gpt3("GPT3-1.3B", 24, 2048, 16),
    _gpt3("GPT3-2.7B", 32, 2560, 32),
    _gpt3("GPT3-6.7B", 32, 4096, 32),
)
MODELS: dict[str, ModelSizes] = {m.name: m for m in _MODELS}


def model_named(text: str) -> ModelSizes:
    """The sizes of a model: one of `MODELS`, in any capitals, or a Hugging Face `config.json` or its folder.

    A name wins over a folder of that name.

    Raises:
        SpecError: For what is neither, and for a configuration that cannot be read; it names the file, the field and
            what was expected.
    """
    found = {known.lower(): sizes for known, sizes in MODELS.items()}.get(text.lower())
    if found is not None:
        return found
    # It is meant as a path even where nothing is there: the message then speaks of a file.
    if text.endswith(".json") or os.sep in text or Path(text).exists():
        return read_config(text)
    raise SpecError(f"{no_such('model', text, list(MODELS))}, or give a Hugging Face config.json or its folder")
