"""Models by name, as descriptions: what `prophet switch --model` and the benchmark of plans take.

Sizes are those of the published `config.json` files (LLaMA-2, Qwen3) and of GPT-3's paper, Table 2.1 (its vocabulary
padded to 50,304). LLaMA-32B is DynaTran's; its sizes are LLaMA-30B's (60 layers, 6,656 wide, 52 heads). Training keeps
bf16 parameters, float32 master weights and two moments: 14 bytes a parameter.
"""

from __future__ import annotations

from functools import cache

from pipeline_balance.elastic.layouts import MIXED_ADAMW, Block, Entry, ModelDescription, Parameter
from prophet.errors import SpecError, no_such


def _column(
    name: str, rows: int, columns: int, layer: int, units: int | None = None, repeated: bool = False
) -> Parameter:
    blocks = (Block(length=rows, units=units, repeated=repeated),)
    return Parameter(name=name, shape=(rows, columns), layers=(layer,), dim=0, blocks=blocks)


def _row(name: str, rows: int, columns: int, layer: int, units: int | None = None) -> Parameter:
    return Parameter(
        name=name, shape=(rows, columns), layers=(layer,), dim=1, blocks=(Block(length=columns, units=units),)
    )


def _attention(prefix: str, layer: int, dim: int, heads: int, kv_heads: int, head_dim: int) -> list[Parameter]:
    return [
        _column(f"{prefix}.q_proj", heads * head_dim, dim, layer, heads),
        _column(f"{prefix}.k_proj", kv_heads * head_dim, dim, layer, kv_heads, True),
        _column(f"{prefix}.v_proj", kv_heads * head_dim, dim, layer, kv_heads, True),
        _row(f"{prefix}.o_proj", dim, heads * head_dim, layer, heads),
    ]


def _whole(name: str, shape: tuple[int, ...], layer: int) -> Parameter:
    return Parameter(name=name, shape=shape, layers=(layer,))


def _around(layers: int, dim: int, vocabulary: int, inner: list[Parameter]) -> tuple[Parameter, ...]:
    first, last = _column("embed", vocabulary, dim, 0), _column("head", vocabulary, dim, layers - 1)
    return (first, *inner, _whole("norm", (dim,), layers - 1), last)


def llama(
    name: str, *, layers: int, dim: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, gated: bool
) -> ModelDescription:
    """A dense decoder; without `gated`, a GPT's feed-forward part (biases and positions left out)."""
    inner = []
    for n in range(layers):
        at = f"layers.{n}"
        inner += _attention(f"{at}.attention", n, dim, heads, kv_heads, dim // heads)
        inner += [_column(f"{at}.mlp.up", hidden, dim, n), _row(f"{at}.mlp.down", dim, hidden, n)]
        inner += [_whole(f"{at}.{norm}", (dim,), n) for norm in ("input_norm", "post_norm")]
        inner += [_column(f"{at}.mlp.gate", hidden, dim, n)] if gated else []
    parameters = _around(layers, dim, vocabulary, inner)
    return ModelDescription(name=name, layers=layers, parameters=parameters, entries=MIXED_ADAMW)


def qwen_moe(
    name: str, *, layers: int, dim: int, hidden: int, heads: int, experts: int, vocabulary: int = 151936
) -> ModelDescription:
    """A Qwen3 mixture of experts: 4 heads of keys and values, 128 a head, each layer's experts stacked."""
    inner = []
    for n in range(layers):
        at = f"layers.{n}"
        inner += _attention(f"{at}.attention", n, dim, heads, 4, 128)
        inner += [_whole(f"{at}.router", (experts, dim), n)]
        inner += [_whole(f"{at}.{norm}", (dim,), n) for norm in ("input_norm", "post_norm")]
        for part, shape in (("gate_up", (experts, 2 * hidden, dim)), ("down", (experts, dim, hidden))):
            inner.append(Parameter(name=f"{at}.experts.{part}", shape=shape, layers=(n,), experts=True))
    parameters = _around(layers, dim, vocabulary, inner)
    return ModelDescription(name=name, layers=layers, parameters=parameters, entries=MIXED_ADAMW)


_LLAMA: dict[str, dict[str, int]] = {
    "llama2-7b": {"layers": 32, "dim": 4096, "hidden": 11008, "heads": 32, "kv_heads": 32, "vocabulary": 32000},
    "llama2-13b": {"layers": 40, "dim": 5120, "hidden": 13824, "heads": 40, "kv_heads": 40, "vocabulary": 32000},
    "llama-32b": {"layers": 60, "dim": 6656, "hidden": 17920, "heads": 52, "kv_heads": 52, "vocabulary": 32000},
    "llama2-70b": {"layers": 80, "dim": 8192, "hidden": 28672, "heads": 64, "kv_heads": 8, "vocabulary": 32000},
}
_GPT = {
    "gpt3-1.3b": {"layers": 24, "dim": 2048, "hidden": 8192, "heads": 16, "kv_heads": 16, "vocabulary": 50304},
    "gpt3-2.7b": {"layers": 32, "dim": 2560, "hidden": 10240, "heads": 32, "kv_heads": 32, "vocabulary": 50304},
    "gpt3-6.7b": {"layers": 32, "dim": 4096, "hidden": 16384, "heads": 32, "kv_heads": 32, "vocabulary": 50304},
}
_QWEN = {
    "qwen3-30b-a3b": {"layers": 48, "dim": 2048, "hidden": 768, "heads": 32, "experts": 128},
    "qwen3-235b-a22b": {"layers": 94, "dim": 4096, "hidden": 1536, "heads": 64, "experts": 128},
}
NAMES = (*_LLAMA, *_GPT, *_QWEN)


@cache
def model_named(name: str) -> ModelDescription:
    """The description of a model in `NAMES`; `SpecError` for others."""
    if name in _LLAMA:
        return llama(name, gated=True, **_LLAMA[name])
    if name in _GPT:
        return llama(name, gated=False, **_GPT[name])
    if name in _QWEN:
        return qwen_moe(name, **_QWEN[name])
    raise SpecError(no_such("model", name, NAMES))


def parameters_only(model: ModelDescription) -> ModelDescription:
    """The same model without optimizer state."""
    entries: tuple[Entry, ...] = ()
    return ModelDescription(name=model.name, layers=model.layers, parameters=model.parameters, entries=entries)
