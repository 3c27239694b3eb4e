"""A small job whose layers have experts, the same training in one process, and what all processes hold together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import prophet
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.experts import stacks
from prophet.ranks.threads import ThreadWorld
from tests.helpers.elastic_jobs import DIM, MICROBATCHES, ROWS, SEED, VOCABULARY, batches, make_optimizer
from tests.helpers.own_loops import packed, unpacked
from tests.helpers.pipeline_model import plain_step

EXPERTS, TOP_K = 12, 2


class Block(nn.Module):
    """Experts beside a residual; a dense layer in front, with dropout. `options` are of the experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.2)
        kind = options or {"hidden": 8, "activation": "swiglu"}
        alone = ThreadWorld(1).collective(0)
        self.moe = prophet.MoE(DIM, num_experts=EXPERTS, top_k=TOP_K, group=alone, impl="naive", **kind)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(torch.tanh(self.mix(x)))
        y: Tensor = self.moe(x)
        return x + y


def build(**options: Any) -> nn.Sequential:
    """An embedding, blocks with experts, and a head with the embedding's weight, float64."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), *(Block(**options) for _ in range(2)))
    made.append(nn.Linear(DIM, VOCABULARY, bias=False))
    made[-1].weight = made[0].weight
    return made.double()


def build_lopsided() -> nn.Sequential:
    """All tokens go to the first two experts."""
    made = build()
    for module in made.modules():
        if isinstance(module, prophet.MoE):
            nn.init.zeros_(module.gate.weight).requires_grad_(False)
    return made


def build_modules() -> nn.Sequential:
    """Experts that are modules of one's choice."""
    return build(expert=lambda: nn.Linear(DIM, DIM))


def build_on_meta() -> nn.Sequential:
    """As `build`, without memory: every layout draws the same."""
    with torch.device("meta"):
        made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), nn.Linear(DIM, VOCABULARY))
    return made.double()


def start(layout: str, model: Callable[[], Any] = build, **options: Any) -> Job:
    given: dict[str, Any] = {"data": batches(), "loss_fn": nn.functional.cross_entropy, "timeout_s": 60.0}
    given |= {"microbatches": MICROBATCHES, "seed": SEED}
    return Job(model, make_optimizer, Parallelism.parse(layout), **{**given, **options})


def plain_losses(steps: int, make: Callable[[], nn.Sequential] = build) -> list[float]:
    """The same training in one process that has all experts, without a job."""
    model, data = make(), batches()
    optimizer = make_optimizer(list(model.named_parameters()))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        options: dict[str, Any] = {"microbatches": MICROBATCHES, "seed": SEED, "update": step}
        losses.append(plain_step(list(model), *data.read(0, ROWS), nn.functional.cross_entropy, **options))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        data.advance()
    return losses


def whole(job: Job) -> dict[str, Tensor]:
    """All parameters, buffers and moments in the unsplit model's shapes, once their copies were compared."""
    names, stacked = {id(p): n for n, p in job.model.named_parameters()}, stacks(job.model)
    mine: list[tuple[str, int, tuple[int, ...], Tensor]] = []

    def add(name: str, of: str, tensor: Tensor) -> None:
        stack = stacked.get(of)
        if stack is None or not tensor.dim():
            mine.append((name, 0, tuple(tensor.shape), tensor))
        else:
            mine.append((name, stack.first, stack.shape, tensor))

    for n, t in (*job.model.named_parameters(), *job.model.named_buffers()):
        if not t.is_meta:
            add(n, n, t.detach())
    for parameter, entries in job.optimizer.state.items():
        for entry, t in entries.items():
            add(f"{names[id(parameter)]}@{entry}", names[id(parameter)], t)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(*piece, packed(t)) for *piece, t in mine])
    found: dict[str, Tensor] = {}
    for name, first, shape, bits in (piece for row in every for piece in row):
        tensor = unpacked(bits)
        into = found.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
        part = into[first : first + tensor.shape[0]] if shape else into
        if part.isnan().all():
            part.copy_(tensor)
        assert torch.equal(part, tensor), f"copies of {name} differ"
    assert not any(t.isnan().any() for t in found.values())
    return found
