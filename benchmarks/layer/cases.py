"""What is measured: sizes, and gates whose choices follow a given skew.

Shape legend: N tokens of this rank, K top-k, E experts, R ranks, D model dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.workload import TRACE, trace_counts
from prophet.layer.moe import MoE
from prophet.ranks.threads import ThreadWorld
from prophet.spec import FloatArray

MOST = 0.95  # no expert is visited by more of the tokens: a gate that always chooses it has nothing to learn
_ROUNDS, _SAMPLE = 200, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One layer and one batch; equal for all implementations."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    tokens: int

    def problem(self, ranks: int) -> str | None:
        """What is wrong with these sizes on `ranks` ranks, or None."""
        if min(self.dim, self.hidden, self.experts, self.top_k, self.tokens) < 1:
            return f"expected sizes of at least 1, got {self}"
        if self.dim < 2 or self.dim % 2:
            return f"--dim: expected an even number (Tutel needs one), got {self.dim}"
        if self.top_k >= self.experts:
            return f"--top-k: expected fewer than {self.experts} experts, got {self.top_k}"
        if ranks < 2 or self.experts % ranks:
            return f"--ranks: expected at least 2 that divide {self.experts} experts, got {ranks}"
        return None


def visits_of(skew: str, sizes: Sizes, ranks: int) -> FloatArray | str:
    """How many of the tokens visit each expert [E], as fractions that sum to K; or why there is none."""
    experts, top_k = sizes.experts, sizes.top_k
    if skew == "uniform":
        return np.full(experts, top_k / experts)
    if skew == "one-expert-90%":
        return np.array([0.9] + [(top_k - 0.9) / (experts - 1)] * (experts - 1))
    if not TRACE.exists():
        return "no trace: not measured"
    flat = trace_counts()
    if flat.shape[1] % experts:
        return f"the trace has {flat.shape[1]} experts: not measured with {experts}, which do not divide them"
    return capped(typical(flat, experts, ranks) * top_k)


def typical(counts: FloatArray, experts: int, ranks: int) -> FloatArray:
    """Shares [E] in those of the rows of `counts` whose ranks are skewed as the median row's.

    Neighbouring experts of a row are added where the layer has fewer; they keep their order, so that hot experts are
    at home where they were.
    """
    rows = counts.reshape(len(counts), experts, -1).sum(axis=2)
    homes = rows.reshape(len(rows), ranks, -1).sum(axis=2)
    skew = homes.max(axis=1) / homes.mean(axis=1)
    row = rows[np.argsort(skew, kind="stable")[len(skew) // 2]]
    shares: FloatArray = row / row.sum()
    return shares


def capped(visits: FloatArray) -> FloatArray:
    """The same sum with no entry above `MOST`; what is cut goes to the others in proportion."""
    total, found = visits.sum(), visits.astype(np.float64)
    for _ in range(len(found)):
        over = found > MOST + 1e-12
        if not over.any():
            break
        held = found >= MOST
        found[held] = MOST
        free = found[~held]
        left = total - MOST * held.sum()
        found[~held] = free * left / free.sum() if free.sum() else left / max(1, free.size)
    return found


def inputs(sizes: Sizes, seed: int) -> Tensor:
    """Tokens [N, D]; the first feature is always one, so that the gate has a bias."""
    x = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = 1.0
    return x


def biased_gate(sizes: Sizes, visits: FloatArray) -> Tensor:
    """Gate weights [E, D]: random, but for the bias in the first column, under which tokens visit experts as asked.

    The bias is found by iteration on a sample of tokens: an expert that too few of them visit gets more.
    """
    generator = torch.Generator().manual_seed(7)
    weight: Tensor = torch.randn(sizes.experts, sizes.dim, generator=generator) * (sizes.dim - 1) ** -0.5
    weight[:, 0] = 0.0
    sample = Sizes(dim=sizes.dim, hidden=1, experts=1, top_k=1, tokens=_SAMPLE)
    scores = inputs(sample, seed=11) @ weight.t()
    least = 0.5 / _SAMPLE
    wanted = torch.from_numpy(visits).clamp(least, 1 - least).logit()
    bias = torch.zeros(sizes.experts, dtype=torch.float64)
    for i in range(_ROUNDS):
        seen = visited(scores + bias.float(), sizes.top_k).clamp(least, 1 - least).logit()
        bias += (0.5 if i < _ROUNDS // 2 else 0.1) * (wanted - seen)
    weight[:, 0] = (bias - bias.mean()).float()
    return weight


def visited(scores: Tensor, top_k: int) -> Tensor:
    """Fraction of tokens [E] float64 that visit each expert, given scores [N, E]."""
    chosen = scores.topk(top_k, dim=1).indices.reshape(-1)
    found: Tensor = torch.bincount(chosen, minlength=scores.shape[1]).double() / len(scores)
    return found


def common_state(sizes: Sizes, gate: Tensor) -> Mapping[str, Tensor]:
    """The parameters of one layer with all its experts, by the names of `prophet.MoE`; equal on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = MoE(sizes.dim, sizes.hidden, sizes.experts, sizes.top_k, group=ThreadWorld(1).collective(0))
    return {**whole.state_dict(), "gate.weight": gate}
