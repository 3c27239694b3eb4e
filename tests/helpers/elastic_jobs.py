"""A small job that switches layouts, the same training in one process, and what all processes hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline_balance import elastic
from pipeline_balance.elastic.groups import Groups
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.boxes import layout_of
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.held_shards import held
from pipeline_balance.elastic.shards.job_state import describe
from pipeline_balance.pipeline.move import pipeline_state
from pipeline_balance.pipeline.move.stage_map import Change
from pipeline_balance.pipeline.run.stages import StageBuilder
from prophet.state import transition
from tests.helpers.own_loops import gathered
from tests.helpers.pipeline_model import plain_step

DIM, VOCABULARY, UNITS, SEED = 6, 11, 6, 3
MICROBATCHES, ROWS, SAMPLES = 12, 24, 60


class _Block(nn.Module):
    """Residual, with dropout and a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.2)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.drop(torch.tanh(self.up(x))))


def build() -> nn.Sequential:
    """An embedding, blocks and a head with the embedding's weight, float64."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *(_Block() for _ in range(UNITS - 2)))
    made.append(nn.Linear(DIM, VOCABULARY, bias=False))
    made[-1].weight = made[0].weight
    return made.double()


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=2e-2, weight_decay=0.1)


def dataset() -> TensorDataset:
    ids = torch.randint(VOCABULARY, (SAMPLES,), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids, (ids * 3 + 1) % VOCABULARY)


def batches() -> elastic.Batches:
    return elastic.Batches(dataset(), ROWS, seed=SEED)


def start(layout: str, **options: Any) -> Job:
    given: dict[str, Any] = {"data": batches(), "loss_fn": nn.functional.cross_entropy, "timeout_s": 60.0}
    given |= {"microbatches": MICROBATCHES, "seed": SEED}
    return Job(build, make_optimizer, Parallelism.parse(layout), **{**given, **options})


def plain_losses(steps: int, microbatches: int = MICROBATCHES, *, training: bool = True) -> list[float]:
    """The same training in one process, without a job; without `training`, dropout is off."""
    model, data = build().train(training), batches()
    optimizer = make_optimizer(list(model.named_parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        options: dict[str, Any] = {"microbatches": microbatches, "seed": SEED, "update": step}
        losses.append(plain_step(list(model), *data.read(0, ROWS), nn.functional.cross_entropy, **options))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        data.advance()
    return losses


def train(job: Job, steps: int, schedule: Any = None) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(job.step(max_norm=0.5))
        if schedule is not None:
            schedule.step()
    return losses


def whole(job: Job) -> dict[str, Tensor]:
    """All parameters, buffers and moments of all processes by name, once their copies were compared.

    Shards are put together by torch: every process of a mesh gathers the same tensors in the same order.
    """
    names = {id(p): n for n, p in job.model.named_parameters()}
    mine: dict[str, Tensor] = {n: t.detach() for n, t in (*job.model.named_parameters(), *job.model.named_buffers())}
    for parameter, entries in job.optimizer.state.items():
        mine |= {f"{names[id(parameter)]}@{e}": t for e, t in entries.items()}
    return gathered(mine)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def check_held(job: Job) -> None:
    """What this process has memory for is what the layout gives it, found from the layout and the model alone."""
    described = describe(job.pipeline.owned, job._switching.rules)
    layout, buffers = layout_of(described, job.layout, ranks=dist.get_world_size()), dict(job.model.named_buffers())
    found = {piece for piece in held(job.model, job.optimizer) if piece.name not in buffers}
    assert found == set(layout.on(dist.get_rank()))


def losing(make: Callable[..., Any]) -> Callable[..., Any]:
    """What calls `make` and then fails."""

    def made_and_lost(*given: Any, **options: Any) -> Any:
        make(*given, **options)
        raise RuntimeError("broken in group")

    return made_and_lost


@contextmanager
def broken(job: Job, place: str) -> Iterator[None]:
    """Where a switch fails on this rank."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"broken in {place}")

    owner, name = {
        "collect": (pipeline_state, "items"),
        "group": (Groups, "_one"),
        "allocate": (job.pipeline.mover, "allocate"),
        "pack": (transition._Mover, "_pack"),
        "unpack": (transition._Mover, "_unpack"),
        "build": (StageBuilder, "build"),
        "assemble": (job.pipeline.mover, "change"),
        "decide": (Change, "check"),
    }[place]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, losing(Groups._one) if place == "group" else fails)
        yield
