"""Layers of one's own that attend over slices, and a naive run of them: keys and values joined in one graph."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline_balance.pipeline.run.generators import unit_seed
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.sliced import slice_starts
from pipeline_balance.slices import SliceOptions, attend

DIM, HEADS, VOCABULARY, BLOCKS, SEED = 16, 4, 13, 2, 5
TOKENS, ROWS, PARTS = 12, 2, 4  # tokens of a sequence, rows of a microbatch, microbatches of all replicas in a call
MAX_NORM = 0.3


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = self.words(ids) + self.places(positions)
        return found


class Block(nn.Module):
    """Attention with half as many heads for keys and values, and dropout; fails if asked to in a slice."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.attention, self.fails = layer, attend, False
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.out, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, dim=1)
        mixed = self.attention(q, k, v, layer=self.layer)
        if self.fails and not isinstance(mixed, torch._subclasses.FakeTensor):
            raise RuntimeError("asked to fail")
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(torch.tanh(x))


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Embed(), *(Block(i) for i in range(BLOCKS)), nn.Linear(DIM, VOCABULARY)).double()


def without_dropout(module: nn.Module) -> None:
    """Have outputs not depend on who runs which tokens."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def pipe(model: nn.Module, slices: Any, *, replicas: int = 1, **options: Any) -> ElasticPipeline:
    """A pipeline of such layers, which is given `batch`.

    Args:
        model: The layers in a row.
        slices: How sequences are cut.
        replicas: How many share the microbatches.
        **options: Those of `from_modules`, in place of these.
    """
    given: dict[str, Any] = {"make_optimizer": adam, "microbatches": PARTS // replicas, "timeout_s": 60.0, **options}
    return ElasticPipeline.from_modules(model, loss_fn, counted=counted, slices=slices, replicas=replicas, **given)


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def counted(labels: Tensor | None) -> int:
    return int((labels != -100).sum()) if labels is not None else 0


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for _, p in named), lr=1e-2)


def batch(update: int, call: int) -> tuple[dict[str, Tensor], Tensor]:
    """The batch of all replicas; the last third of every second row does not count."""
    generator = torch.Generator().manual_seed(10 * update + call)
    ids = torch.randint(VOCABULARY, (PARTS * ROWS, TOKENS), generator=generator)
    labels = (ids * 3 + 1) % VOCABULARY
    labels[::2, TOKENS * 2 // 3 :] = -100
    return {"ids": ids, "positions": torch.arange(TOKENS).expand(len(ids), -1)}, labels


def starts_of(options: SliceOptions) -> tuple[int, ...]:
    """Where the slices of a batch begin."""
    return slice_starts(TOKENS, options.slices, options.crossover_tokens)


class _Joined:
    """Attention to all keys and values of a microbatch so far, by the definition."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        self.seen[layer].append((k, v))
        group = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(t, dim=2).repeat_interleave(group, 1) for t in zip(*self.seen[layer], strict=True))
        later = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - q.shape[2] + 1)
        scores = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
        return scores.softmax(-1) @ values


Slices = int | tuple[int, ...]


def one_process(
    updates: int, slices: Slices | list[Slices], calls: int, model: nn.Sequential | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights at the end, with the slices' random numbers and one backward per microbatch.

    `slices` is how many of equal length, or where they start and the last one ends; a list has those of every update.
    """
    model = layers() if model is None else model
    optimizer, losses = adam(model.named_parameters()), []
    for update in range(updates):
        here = slices[update] if isinstance(slices, list) else slices
        cuts = list(pairwise(here if isinstance(here, tuple) else range(0, TOKENS + 1, TOKENS // here)))
        optimizer.zero_grad()
        given = [batch(update, call) for call in range(calls)]
        count, total, number = sum(counted(labels) for _, labels in given), 0.0, 0
        for inputs, labels in given:
            for rows in torch.arange(len(labels)).chunk(PARTS):
                loss, joined = torch.zeros((), dtype=torch.float64), _Joined()
                for block in model:
                    if isinstance(block, Block):
                        block.attention = joined  # type: ignore[assignment]
                for at, (start, stop) in enumerate(cuts):
                    part = slice(start, stop)
                    x: Any = None
                    for unit, layer in enumerate(model):
                        torch.manual_seed(unit_seed(SEED, unit, update, number, at if len(cuts) > 1 else None))
                        x = layer(**{n: t[rows, part] for n, t in inputs.items()}) if not unit else layer(x)
                    if counted(labels[rows, part]):
                        loss = loss + loss_fn(x, labels[rows, part]) * counted(labels[rows, part]) / count
                loss.backward()
                total, number = total + float(loss.detach()), number + 1
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(total)
    return losses, {n: p.detach() for n, p in model.state_dict().items()}


class Recurrent(nn.Module):
    """A state goes from token to token."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(DIM, DIM, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.cell(x)[0]
        return found
