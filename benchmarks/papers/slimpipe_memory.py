"""Bytes per card for SlimPipe's models: what layers keep, counted by hand, times the units that a schedule holds.

All of a card's bytes but its model states grow with the tokens, so figures here are bytes per token of a sequence.
Tensor- and context-parallel ranks divide what they share. Layers keep what the paper's Section 5 says: norms and the
swish are computed again. Shape legend: P ranks, V stages per rank, N slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.slices.by_hand import FLOAT, Dims, kept_per_token
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.simulate import peak_activation_bytes
from pipeline_balance.slices.options import Recompute

HALF = 2  # bytes of a bfloat16
K = 1024  # tokens
CARD_BYTES = 80e9
VOCABULARY = 128_000
# Weights in half precision and gradients in float32; Adam's two states and its copy of the weights in float32
WEIGHT_BYTES, ADAM_BYTES = HALF + FLOAT, 3 * FLOAT
# A sequence length at which rounding to whole bytes is nothing
_MANY = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One of Table 3: its layers, and one layer's sizes."""

    layers: int
    dims: Dims

    @classmethod
    def of(cls, layers: int, heads: int, kv_heads: int, hidden: int, intermediate: int, experts: int = 0) -> Model:
        """A row of Table 3; two of the experts see a token.

        Args:
            layers: L.
            heads: a.
            kv_heads: g.
            hidden: h.
            intermediate: H.
            experts: Of a layer.
        """
        sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}
        dims = Dims(**sizes, intermediate=intermediate, experts=experts, top_k=2 if experts else 0)
        return cls(layers=layers, dims=dims)

    @property
    def mixers(self) -> int:
        """Parameters of all layers' attention, and of the embedding, which is the head as well."""
        d = self.dims
        return self.layers * 2 * d.hidden * d.head_dim * (d.heads + d.kv_heads) + VOCABULARY * d.hidden

    @property
    def feed_forwards(self) -> int:
        """Parameters of all layers' feed-forward parts, those of all experts."""
        return self.layers * 3 * self.dims.hidden * self.dims.intermediate * max(1, self.dims.experts)

    def forward_flops(self, tokens: int) -> tuple[float, float]:
        """Of a token in one layer on average: products with weights, and attention to what comes before it."""
        d = self.dims
        weights = 2 * d.hidden * d.head_dim * (d.heads + d.kv_heads) + 3 * d.hidden * d.intermediate * max(1, d.top_k)
        return 2.0 * weights, 2.0 * tokens * d.heads * d.head_dim


# Llama 7B is in a caption alone
MODELS: Mapping[str, Model] = {
    "Llama-7B": Model.of(32, 32, 32, 4096, 11008),
    "Llama-13B": Model.of(40, 40, 40, 5120, 13824),
    "Llama-70B": Model.of(80, 64, 8, 8192, 28672),
    "Llama-149B": Model.of(96, 96, 8, 12288, 32768),
    "Mixtral-8x7B": Model.of(32, 32, 8, 4096, 14336, 8),
    "Mixtral-8x22B": Model.of(56, 48, 8, 6144, 16384, 8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a model lies on its cards.

    Attributes:
        t, c, e, d: Sizes of tensor, context, expert and data parallelism; experts are of one layer's data and context
            ranks.
        recompute: As of `SliceOptions`; "full" keeps a layer's input alone, and keys and values where slices need them.
        cached: Whether slices need keys and values that are not computed again.
        inner: Numbers per token that a feed-forward part keeps, in units of its size.
        logits: Numbers of float32 that the head keeps for each of a token's words.
        sharded: Whether Adam's states are divided over data and context ranks.
    """

    t: int = 1
    c: int = 1
    e: int = 1
    d: int = 1
    recompute: Recompute = "none"
    cached: bool = True
    inner: int = 3
    logits: int = 1
    sharded: bool = False


def kept_bytes(model: Model, layout: Layout, *, sliced: bool) -> float:
    """What one layer keeps of one token for its backward, before it is divided."""
    dims = model.dims
    if layout.recompute == "full":
        kept = kept_per_token(dims, "full")
        cached = kept["keys and values (chunk)"] if sliced and layout.cached else 0
        return (kept["input of the layer"] + cached) * HALF / FLOAT
    kept = kept_per_token(dims, "selective")
    # the log-sum-exp is of float32
    exact = kept.pop("log-sum-exp")
    inside = layout.inner * dims.intermediate * max(1, dims.top_k) if layout.recompute == "none" else 0
    return exact + sum(kept.values()) * HALF / FLOAT + inside * HALF


def state_bytes(model: Model, layout: Layout, ranks: int) -> float:
    """Weights, gradients and Adam's states on one card, if all P ranks have as much."""
    adam = ADAM_BYTES / (layout.d * layout.c if layout.sharded else 1)
    shares = model.mixers + model.feed_forwards / layout.e
    return (WEIGHT_BYTES + adam) * shares / (layout.t * ranks)


def bytes_by_rank(model: Model, layout: Layout, schedule: Schedule, *, split_head: bool) -> tuple[float, ...]:
    """What a card of every rank holds beside its states, per token of a sequence [P].

    Args:
        model: Whose layers are evenly on the stages.
        layout: Of each stage's cards.
        schedule: How many units ranks hold.
        split_head: Whether all ranks have a part of the logits, and else the last stage's rank all of them.
    """
    share = _MANY / (schedule.slices * layout.t * layout.c)
    sliced, layers = schedule.slices > 1, model.layers / schedule.stages
    unit = round(share * layers * kept_bytes(model, layout, sliced=sliced))
    gradients = round(share * layers * 2 * model.dims.kv_heads * model.dims.head_dim * HALF) if sliced else 0
    held = peak_activation_bytes(schedule, (unit,) * schedule.stages, (gradients,) * schedule.stages)
    # what is computed again is there for one layer of one unit
    again = share * kept_bytes(model, replace(layout, recompute="none"), sliced=sliced)
    logits, ranks = share * layout.logits * VOCABULARY * FLOAT, schedule.ranks
    last = schedule.stage_ranks[-1]
    found = []
    for rank, most in enumerate(held):
        head = logits / ranks if split_head else logits * (rank == last)
        found.append((most + head + (again if layout.recompute != "none" else 0.0)) / _MANY)
    return tuple(found)


def longest(model: Model, layout: Layout, schedule: Schedule, *, split_head: bool) -> float:
    """Tokens of the longest sequence that every card holds."""
    worst = max(bytes_by_rank(model, layout, schedule, split_head=split_head))
    return (CARD_BYTES - state_bytes(model, layout, schedule.ranks)) / worst


def least_card_bytes(
    model: Model, tokens: int, cards: int, sequences: int, *, recompute: Recompute, sliced: bool, spread: bool
) -> float:
    """Bytes of the fullest card in the best layout, by the paper's forms of Table 2; infinite if there is no layout.

    Args:
        model: Which one.
        tokens: Of a sequence.
        cards: Of all ranks.
        sequences: Of a step.
        recompute: As in `Layout`.
        sliced: SlimPipe with four slices per rank; else interleaved 1F1B, which needs as many microbatches as ranks.
        spread: Whether context parallelism may leave a node of eight cards.
    """
    best, layers, experts = math.inf, model.layers, max(1, model.dims.experts)
    for t, c, e, p in product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), range(1, layers + 1)):
        d, left = divmod(cards, t * c * p)
        near = t * (1 if spread else c) <= 8 and t * e <= 8
        if left or not d or not near or e > min(experts, c * d) or sequences % d or model.dims.kv_heads % t:
            continue
        # interleaving needs two stages per rank
        if layers % (p if sliced or p == 1 else 2 * p) or (not sliced and p > 1 and sequences // d < p):
            continue
        layout = Layout(t=t, c=c, e=e, d=d, recompute=recompute, sharded=True)
        n, ahead = (4 * p, 2 * (p - 1) / (4 * layers * p)) if sliced else (1, (p - 1) / layers)
        kept = layers * kept_bytes(model, layout, sliced=sliced)
        first, last = (1 / p + ahead, 1 / p) if sliced else (1 + ahead, 1 - ahead)
        head = VOCABULARY * FLOAT / (n * p if sliced else 1)
        again = kept_bytes(model, replace(layout, recompute="none"), sliced=sliced) / n
        most = again + max(kept * first, kept * last + head)
        best = min(best, state_bytes(model, layout, p) + most * tokens / (t * c))
    return best
