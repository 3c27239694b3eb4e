"""Shared by the tests: planners that move things at random, and a model small enough for float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

import prophet
from prophet.comm import Collective, ThreadCollective, ThreadWorld
from prophet.spec import IntArray, Placement, PlanContext, Split, digest


class RandomPlanner:
    """Any placement within the limits and any split over it; equal on all ranks, different in every call's load."""

    name = "random"

    def __init__(self, seed: int = 0, density: float = 0.5) -> None:
        self.seed = seed
        self.density = density

    def _rng(self, load: IntArray, salt: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, salt, digest(load)])

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        rng = self._rng(load, 1)
        limits = context.slot_limits()
        pairs = []
        for rank in range(context.ranks):
            foreign = [e for e in range(context.experts) if context.home[e] != rank]
            wanted = rng.permutation(foreign)[: int(limits[rank])]
            pairs += [(int(e), rank) for e in wanted if rng.random() < self.density]
        return Placement.with_replicas(context.home, context.ranks, pairs)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        rng = self._rng(load, 2)
        ranks, experts = load.shape
        tokens = np.zeros((ranks, experts, ranks), dtype=np.int64)
        for r in range(ranks):
            for e in range(experts):
                holders = np.flatnonzero(placement.holds[e])
                tokens[r, e, holders] = rng.multinomial(load[r, e], rng.dirichlet(np.full(holders.size, 0.5)))
        return Split(tokens)


class TinyModel(nn.Module):
    """Embedding, `blocks` residual MoE layers with a linear mix between them, and a read-out."""

    def __init__(
        self,
        *,
        blocks: int = 2,
        dim: int = 8,
        hidden: int = 12,
        num_experts: int = 8,
        top_k: int = 2,
        vocab: int = 11,
        group: Collective | None = None,
        seed: int = 0,
        **options: object,
    ) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(vocab, dim)
            self.mixes = nn.ModuleList(nn.Linear(dim, dim) for _ in range(blocks))
            self.moes = nn.ModuleList(
                prophet.MoE(dim, hidden, num_experts, top_k, group=group, **options)  # type: ignore[arg-type]
                for _ in range(blocks)
            )
            self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mix, moe in zip(self.mixes, self.moes, strict=True):
            x = x + torch.tanh(mix(x))
            x = x + moe(x)
        out: Tensor = self.head(x)
        return out


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator, alone among the threads, and put it back."""
    with _RNG_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


import threading  # noqa: E402

_RNG_LOCK = threading.Lock()


def on_threads(size: int, body: Callable[[ThreadCollective], object], timeout_s: float = 60.0) -> list[object]:
    """Run `body` on `size` thread ranks and return the results by rank."""
    return ThreadWorld(size, timeout_s=timeout_s).run(body)


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that all ranks share, by name."""
    return {n: p for n, p in model.named_parameters() if not getattr(p, "prophet_expert", False)}
