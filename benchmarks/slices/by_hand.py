"""What one layer of a transformers model keeps of one slice for its backward, counted by hand from the layer's code.

For layers built as Llama's and Mixtral's in float32: RMSNorm, rotary attention, SwiGLU or experts of it (transformers'
`eager` ones, in which each expert takes its own rows). Figures are per token of a slice. Two names for one piece of
memory count once: the output projection reads attention's output in place, and both hold one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline_balance.slices.options import Recompute

FLOAT, INTEGER = 4, 8  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """A layer's sizes; `experts` 0 is a dense layer, `intermediate` is then that of its feed-forward part."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, config: object) -> Dims:
        """Those of a transformers configuration."""

        def said(*names: str) -> int:
            return next((int(found) for n in names if (found := getattr(config, n, None)) is not None), 0)

        hidden, heads = said("hidden_size"), said("num_attention_heads")
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=said("num_key_value_heads"),
            head_dim=said("head_dim") or hidden // heads,
            intermediate=said("moe_intermediate_size", "intermediate_size"),
            experts=said("num_local_experts", "num_experts"),
            top_k=said("num_experts_per_tok"),
        )


def kept_per_token(dims: Dims, recompute: Recompute = "none", *, router_loss: bool = False) -> dict[str, int]:
    """Bytes of one token in one layer, by what is kept. `router_loss` adds what the carried router loss keeps."""
    hidden, query = dims.hidden * FLOAT, dims.heads * dims.head_dim * FLOAT
    key = dims.kv_heads * dims.head_dim * FLOAT
    kept = {"input of the layer": hidden, "keys and values (chunk)": 2 * key}
    kept |= {"output of attention": query, "log-sum-exp": dims.heads * FLOAT}
    if recompute != "full":
        kept |= {"output of the first norm": hidden, "queries": query}
        kept |= {"input of the second norm": hidden, "output of the second norm": hidden}
    if recompute == "none":
        kept |= {"norms, before their weight": 2 * hidden, "norms, inverse root mean square": 2 * FLOAT}
        kept |= _of_experts(dims) if dims.experts else {"gate, swish, up, product": 4 * dims.intermediate * FLOAT}
    if router_loss:
        kept["router loss: probabilities"] = dims.experts * FLOAT
    return kept


def _of_experts(dims: Dims) -> Mapping[str, int]:
    """A token has a row in each of its `top_k` experts."""
    row = {"input": dims.hidden, "gate, up, swish, product": 4 * dims.intermediate}
    # the product with the weight keeps both factors, the sum over a token's rows keeps what it adds
    row |= {"output, before and after its weight": 2 * dims.hidden, "weight": 1}
    kept = {f"rows of experts: {name}": dims.top_k * n * FLOAT for name, n in row.items()}
    kept["rows of experts: token and choice"] = dims.top_k * 2 * INTEGER
    kept["router: probabilities"] = dims.experts * FLOAT
    kept["router: weights before their sum, the sum"] = (dims.top_k + 1) * FLOAT
    kept["router: choices"] = dims.top_k * INTEGER
    return kept


def unit_bytes(
    dims: Dims, rows: int, tokens: int, layers: int, recompute: Recompute = "none", *, router_loss: bool = False
) -> int:
    """Form 4's a: bytes that a unit of `rows` sequences and `tokens` tokens of each keeps in `layers` layers."""
    return rows * tokens * layers * sum(kept_per_token(dims, recompute, router_loss=router_loss).values())


def chunk_gradient_bytes(dims: Dims, rows: int, tokens: int, layers: int) -> int:
    """Form 4's g: bytes of the gradients of a unit's keys and values."""
    return rows * tokens * layers * 2 * dims.kv_heads * dims.head_dim * FLOAT
