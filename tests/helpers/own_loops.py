"""A small model in a training loop of one's own, the same training in one process, and what all processes hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_balance.elastic.layouts.parallelism import Parallelism

DIM, VOCABULARY, BLOCKS, ROWS = 6, 11, 3, 24


class _Block(nn.Module):
    """Residual; `norm` is whole on every tp rank, `scale` a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks and a head; with `tied`, the head has the embedding's weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def build_tied() -> Net:
    torch.manual_seed(0)
    return Net(tied=True).double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-2, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=5e-2, momentum=0.9)


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 3 + 1) % VOCABULARY


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Parallelism, step: int) -> float:
    """One update on this replica's part of the batch; the mean loss of all replicas, on every process."""
    place = layout.place(dist.get_rank()) if dist.is_initialized() else layout.place(0)
    loss = None
    if place is not None:
        ids, labels = (part.chunk(layout.dp)[place.dp] for part in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
    if not dist.is_initialized():
        return float(loss)  # type: ignore[arg-type]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, None if place is None else (place.dp, float(loss.detach())))  # type: ignore[union-attr]
    losses = dict(said for said in every if said is not None)
    return sum(losses.values()) / len(losses)


def alone(steps: int, make: Callable[[Any], torch.optim.Optimizer], made: Callable[[], Net] = build) -> list[float]:
    """The losses of one process."""
    model = made()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    losses = []
    for step in range(steps):
        ids, labels = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor gathered by torch, put together from all processes once copies were compared."""
    root = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    names = {id(p): n for n, p in root.named_parameters()}
    mine: dict[str, Tensor] = {n: p.detach() for n, p in (*root.named_parameters(), *root.named_buffers())}
    for p, entries in optimizer.state.items():
        mine |= {f"{names[id(p)]}@{e}": t for e, t in entries.items() if t is not None}
    return gathered(mine)


def gathered(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors, put together from all processes once copies were compared; those on `meta` are elsewhere."""
    mine = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in sorted(mine.items())}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {n: packed(t) for n, t in mine.items() if not t.is_meta})
    found: dict[str, Packed] = {}
    for row in every:
        for name, tensor in row.items():
            assert found.setdefault(name, tensor) == tensor, f"copies of {name} differ"
    return {name: unpacked(tensor) for name, tensor in found.items()}


Packed = tuple[bytes, torch.dtype, torch.Size]


def packed(t: Tensor) -> Packed:
    """A tensor as bytes: pickled as it is, each would be an archive by itself, which takes twenty times as long."""
    copy = t.detach().clone(memory_format=torch.contiguous_format)  # `numpy` leaves memory that cannot be given back
    return copy.flatten().view(torch.uint8).numpy().tobytes(), t.dtype, t.shape


def unpacked(given: Packed) -> Tensor:
    bits, dtype, shape = given
    return torch.from_numpy(np.frombuffer(bytearray(bits), np.uint8)).view(dtype).view(shape)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
