"""Routing that is uneven in one way at a time: eight workloads, each of which follows from (workload, seed, step).

They are those that NVIDIA/Megatron-LM #7488 describes, written anew from the description. Which experts are hot stays
the same from step to step, but for W6 and W7. Every token chooses exactly `top_k` distinct experts.

Shape legend: R ranks, E experts, N tokens, K experts that a token chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.spec import FloatArray, IntArray, check_experts_per_rank
from prophet.traces.npz import RoutingTrace

WORKLOADS = {
    "W0": "even",  # every expert gets the same number of tokens, but for what does not divide
    "W1": "hot experts",  # neighbours, not all of one rank
    "W2": "hot rank",  # all experts of one rank
    "W3": "spread hot experts",  # as many and as hot as in W1, far from one another
    "W4": "ragged sources",  # ranks with few tokens and with many; experts are alike
    "W5": "idle experts and ranks",
    "W6": "moving hot experts",  # others in every step
    "W7": "bursts",  # experts are alike but for one step in every period
}
HOT = 0.5  # chance that a token's first choice is a hot expert
HOT_SET = 8  # one expert in so many is hot
IDLE = 4  # so many ranks for each whose experts nobody chooses; of the others every second expert is chosen
FEWEST = 0.25  # tokens of the rank with fewest, over the mean
PERIOD, BURST = 4, 2  # steps, and the one of every period that has hot experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """tokens: of a rank in a step, in the mean. Raises `SpecError` where these experts do not fit the workloads."""

    ranks: int
    experts: int
    tokens: int
    top_k: int

    def __post_init__(self) -> None:
        own = check_experts_per_rank(self.experts, self.ranks)
        most = (self.ranks - _idle(self.ranks)) * ((own + 1) // 2)  # experts that somebody chooses in W5
        if self.tokens < 1 or not 1 <= self.top_k <= most:
            raise SpecError(f"workloads: expected tokens, and top_k from 1 to {most} for these experts; got {self}")


def trace_of(workload: str, seed: int, steps: int, sizes: Sizes, *, layers: int = 1) -> RoutingTrace:
    """The first steps of a workload as a trace; every step is an iteration."""
    counts = [[counts_at(workload, seed, step, sizes, layer=layer) for layer in range(layers)] for step in range(steps)]
    meta = {"model": f"{workload}, {WORKLOADS[workload]}", "top_k": sizes.top_k, "tokens": sizes.tokens, "seed": seed}
    return RoutingTrace(counts=np.array(counts), iteration=np.arange(steps, dtype=np.int32), meta=meta)


def counts_at(workload: str, seed: int, step: int, sizes: Sizes, *, layer: int = 0) -> IntArray:
    """What every rank chose in one layer of one step, [R, E]."""
    tokens_R = sources(workload, seed, sizes)
    rng = np.random.default_rng((list(WORKLOADS).index(workload), seed, layer, step))
    if workload == "W0":  # in turns
        chosen_NK = (rng.integers(sizes.experts) + np.arange(tokens_R.sum() * sizes.top_k)) % sizes.experts
    else:
        chosen_NK = choices(popularity(workload, seed, step, sizes, layer=layer), int(tokens_R.sum()), sizes.top_k, rng)
    rank = np.repeat(np.arange(sizes.ranks), tokens_R * sizes.top_k)
    cells = np.bincount(rank * sizes.experts + chosen_NK.reshape(-1), minlength=sizes.ranks * sizes.experts)
    return cells.astype(np.int64).reshape(sizes.ranks, sizes.experts)


def choices(weight_E: FloatArray, tokens: int, top_k: int, rng: np.random.Generator) -> IntArray:
    """Distinct experts for every token, [N, K]: drawn by weight one after the other, each among those left."""
    edges = np.cumsum(weight_E)
    edges /= edges[-1]
    chosen_NK = np.empty((tokens, top_k), dtype=np.int64)
    for k in range(top_k):
        again = np.arange(tokens)
        while again.size:  # an expert that a token has is drawn anew
            chosen_NK[again, k] = np.searchsorted(edges, rng.random(again.size), side="right")
            again = again[(chosen_NK[again, :k] == chosen_NK[again, k, None]).any(axis=1)]
    return chosen_NK


def sources(workload: str, seed: int, sizes: Sizes) -> IntArray:
    """Tokens of every rank in a step, [R]; their sum is the same for all workloads."""
    share_R = np.ones(sizes.ranks)
    if workload == "W4":
        share_R = np.random.default_rng(seed).permutation(np.linspace(FEWEST, 2.0 - FEWEST, sizes.ranks))
    ends = np.rint(np.cumsum(share_R) * sizes.tokens).astype(np.int64)
    return np.diff(ends, prepend=0)


def popularity(workload: str, seed: int, step: int, sizes: Sizes, *, layer: int = 0) -> FloatArray:
    """Every expert's chance to be a token's first choice, [E]."""
    ranks, experts, own = sizes.ranks, sizes.experts, sizes.experts // sizes.ranks
    rng = np.random.default_rng((seed, layer))  # for what stays from step to step
    rank = int(rng.integers(ranks))
    if workload == "W5":
        weight_RE = np.ones((ranks, own))
        weight_RE[:, 1::2] = 0.0
        weight_RE[rng.permutation(ranks)[: _idle(ranks)]] = 0.0
        return weight_RE.reshape(-1) / weight_RE.sum()
    many = max(sizes.top_k, experts // HOT_SET)
    first, apart = rank * own + own // 2, 1
    if workload == "W2":
        many, first = own, rank * own
    elif workload == "W3":
        apart = experts // many
    elif workload == "W6":
        first += step * many
    elif workload in ("W0", "W4") or (workload == "W7" and step % PERIOD != BURST):
        return np.full(experts, 1.0 / experts)
    weight_E = np.full(experts, (1.0 - HOT) / (experts - many))
    weight_E[(first + apart * np.arange(many)) % experts] = HOT / many
    return weight_E


def _idle(ranks: int) -> int:
    return max(1, ranks // IDLE)
