"""What every policy trains: MoE-GPT on real text, from one checkpoint, on the same tokens.

Shape legend: R ranks, E experts, N tokens of this rank, K top-k.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prophet.demo.model import ModelConfig, MoEGPT
from prophet.demo.text import Corpus, load_corpus, rank_batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sizes of the model and of a step; equal for all policies and hosts.

    sequences_per_host: rows of text of one step. learning_rate: of AdamW, whose moments every policy starts anew.
    """

    dim: int = 64
    heads: int = 4
    blocks: int = 3
    hidden: int = 1024
    experts: int = 16
    top_k: int = 2
    length: int = 128
    sequences_per_host: int = 8
    learning_rate: float = 1e-3
    seed: int = 0

    def model_config(self) -> ModelConfig:
        names = {f.name for f in dataclasses.fields(ModelConfig)}
        return ModelConfig(**{k: v for k, v in dataclasses.asdict(self).items() if k in names})

    def tokens_per_host(self) -> int:
        return self.sequences_per_host * self.length


def build(workload: Workload) -> MoEGPT:
    """The model, with equal parameters at any number of ranks; collective, it makes the communicators."""
    torch.manual_seed(workload.seed)
    return MoEGPT(workload.model_config())


def optimizer_of(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, weight_decay=0.0)


def batches(workload: Workload, corpus: Corpus, *, rank: int, ranks: int, first_step: int) -> Iterator[Tensor]:
    """This rank's rows, step by step, [b, T + 1]; the same for every policy."""
    step = first_step
    while True:
        rows = rank_batch(
            corpus.train,
            seed=workload.seed,
            step=step,
            sequences=workload.sequences_per_host * ranks,
            length=workload.length,
            rank=rank,
            ranks=ranks,
        )
        yield torch.from_numpy(rows)
        step += 1


def is_expert(p: nn.Parameter) -> bool:
    """Whether a parameter belongs to one rank's experts, in our model and in the peers'."""
    return bool(getattr(p, "prophet_expert", False)) or not getattr(p, "allreduce", True)


def average_dense(model: nn.Module, loss: Tensor) -> float:
    """Average over ranks the gradients of what all ranks share, and the loss, in one message."""
    grads = [p.grad for p in model.parameters() if p.grad is not None and not is_expert(p)]
    flat = torch.cat([g.reshape(-1) for g in grads] + [loss.detach().reshape(1)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, piece in zip(grads, flat.split([g.numel() for g in grads] + [1]), strict=False):
        g.copy_(piece.view_as(g))
    return float(flat[-1])


def train_step(
    model: MoEGPT, optimizer: torch.optim.Optimizer, rows: Tensor, *, on_edge: Any = None
) -> tuple[float, float]:
    """One optimizer step; returns (seconds, loss averaged over ranks).

    on_edge, when given, is called before the backward pass and after it.
    """
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = model.loss(rows)
    if on_edge is not None:
        on_edge()
    loss.backward()
    if on_edge is not None:
        on_edge()
    shown = average_dense(model, loss)
    optimizer.step()
    return time.perf_counter() - began, shown


# --- the common checkpoint ---


def checkpoint_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def warm_up(workload: Workload, *, steps: int, rank: int, ranks: int, folder: Path) -> list[float]:
    """Train without balancing until the router has a skew of its own, and save this rank's part. Returns the losses."""
    model, corpus = build(workload), load_corpus()
    optimizer = optimizer_of(model, workload)
    rows = batches(workload, corpus, rank=rank, ranks=ranks, first_step=0)
    losses = [train_step(model, optimizer, next(rows))[1] for _ in range(steps)]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({k: v.clone() for k, v in model.state_dict().items()}, checkpoint_file(folder, rank))
    return losses


def load_checkpoint(folder: Path, rank: int) -> dict[str, Tensor]:
    """This rank's part of the common checkpoint: all shared parameters, and its own experts."""
    state: dict[str, Tensor] = torch.load(checkpoint_file(folder, rank), weights_only=True)
    return state
