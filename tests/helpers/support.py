"""Shared by the tests: planners that move things at random, a small model, and ranks to run it on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.planner.base import Planner
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.spec import IntArray, Placement, PlanContext, Split, digest

T = TypeVar("T")


class RandomPlanner(Planner):
    """Any placement within the limits and any split over it; a function of the seed and the load."""

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


class HomesPlanner(Planner):
    """No replicas, ever."""

    name = "static"
    replicates = False

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        return context.homes_only()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        return Split.to_homes(load, placement)


class FixedPlanner(Planner):
    """The same replicas, (expert, rank) pairs, in every step; tokens dealt out evenly, lower ranks first."""

    name = "fixed"

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.pairs = tuple(pairs)

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        return Placement.with_replicas(context.home, context.ranks, self.pairs)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        tokens = np.zeros((*load.shape, load.shape[0]), dtype=np.int64)
        for r, e in np.ndindex(*load.shape):
            holders = np.flatnonzero(placement.holds[e])
            tokens[r, e, holders] = load[r, e] // holders.size
            tokens[r, e, holders[: load[r, e] % holders.size]] += 1
        return Split(tokens)


class Lopsided(FixedPlanner):
    """Deals the remainder out to the highest ranks first: as exact as `FixedPlanner`, and different."""

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        tokens = super().split(load, placement, context).tokens.copy()
        for r, e in np.ndindex(*load.shape):
            holders = np.flatnonzero(placement.holds[e])
            tokens[r, e, holders] = np.sort(tokens[r, e, holders])
        return Split(tokens)


def everywhere(experts: int, ranks: int) -> list[tuple[int, int]]:
    """(expert, rank) pairs that put a replica of every expert on every rank that is not its home."""
    return [(e, r) for e in range(experts) for r in range(ranks) if e // (experts // ranks) != r]


class TinyModel(nn.Module):
    """Embedding, `blocks` residual MoE layers with a linear mix between them, and a read-out.

    uses: how often each MoE layer runs in a forward pass. checkpointing: recompute every MoE layer in the
    backward
    pass, "reentrant" or "non-reentrant".
    """

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
        uses: int = 1,
        checkpointing: str | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        self.uses, self.checkpointing = uses, checkpointing
        with seeded(seed):
            self.embed = nn.Embedding(vocab, dim)
            self.mixes = nn.ModuleList(nn.Linear(dim, dim) for _ in range(blocks))
            self.moes = nn.ModuleList(
                prophet.MoE(dim, hidden, num_experts, top_k, group=group, **options)  # type: ignore[arg-type]
                for _ in range(blocks)
            )
            self.head = nn.Linear(dim, vocab)

    def moe(self, block: int) -> prophet.MoE:
        layer = self.moes[block]
        if not isinstance(layer, prophet.MoE):
            raise TypeError(f"block {block} is a {type(layer).__name__}")
        return layer

    def mix(self, block: int) -> nn.Parameter:
        """The weight of a block's non-MoE layer."""
        return dict(self.mixes.named_parameters())[f"{block}.weight"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mix, moe in zip(self.mixes, self.moes, strict=True):
            x = x + torch.tanh(mix(x))
            for _ in range(self.uses):
                if self.checkpointing is None:
                    y = moe(x)
                else:
                    y = checkpoint(moe, x, use_reentrant=self.checkpointing == "reentrant")
                more = x.shape[-1] - y.shape[-1]  # an output of another size is added as far as it goes
                x = x + (y if more == 0 else nn.functional.pad(y, (0, more)))
        out: Tensor = self.head(x)
        return out


def next_id_loss(out: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Summed cross-entropy, times `scale`, of each id predicting the next, in a circle; 0 for no ids."""
    targets = ids.reshape(-1).roll(-1)
    return nn.functional.cross_entropy(out.flatten(0, -2), targets, reduction="sum") * scale


def random_state(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Another value for every float in the model's state dict, of ordinary size; balancing biases are 0."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, value in model.state_dict().items():
        spread = 0.0 if name.endswith("gate.bias") else 1.0 / np.sqrt(max(value.shape[-1], 1))
        state[name] = torch.from_numpy(rng.normal(0.0, 1.0, tuple(value.shape)) * spread).to(value.dtype)
    return state


def expert_gradients(model: nn.Module, prefix_layers: str = "moes") -> dict[str, Tensor]:
    """Gradients of this rank's home experts, by the name that each has in a state dict."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, prophet.MoE):
            for entry in module.experts.entries():
                p = module.experts.get_parameter(entry.parameter)
                grad = torch.zeros_like(p) if p.grad is None else p.grad.detach()
                found[f"{name}.experts.{entry.key}"] = entry.of(grad).clone()
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator, alone among the threads, and put it back."""
    with _RNG_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


_RNG_LOCK = threading.Lock()


def on_threads(size: int, body: Callable[[ThreadCollective], T], timeout_s: float = 60.0) -> list[T]:
    """Run `body` on `size` thread ranks and return the results by rank."""
    return ThreadWorld(size, timeout_s=timeout_s).run(body)


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that all ranks share, by name."""
    return {n: p for n, p in model.named_parameters() if not getattr(p, "prophet_expert", False)}
