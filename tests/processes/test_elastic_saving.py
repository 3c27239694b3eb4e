"""A job in files: written in one layout, read in another by processes that start from nothing, as if it never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.parallelism import Parallelism
from prophet.errors import SpecError, StageFailed, TransitionError
from prophet.state.checkpoint_folder import DESCRIPTION
from tests.helpers import elastic_experts
from tests.helpers.elastic_jobs import broken, check_held, dataset, plain_losses, same, start, train, whole
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import adam, batch_of, model_of
from tests.helpers.support import RandomPlanner

EXACT = 1e-9


def _gathered(job: Job) -> dict[str, Tensor]:
    """All parameters and moments of all processes by name, shards put together by torch."""
    names = {id(p): n for n, p in job.model.named_parameters()}
    mine: dict[str, Any] = {n: p.detach() for n, p in job.model.named_parameters()}
    for p, entries in job.optimizer.state.items():
        mine |= {f"{names[id(p)]}@{e}": t for e, t in entries.items()}
    mine = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in sorted(mine.items())}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {n: t for n, t in mine.items() if not t.is_meta})
    found: dict[str, Tensor] = {}
    for row in every:
        for name, tensor in row.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return found


def _schedule(job: Job) -> Any:
    return torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)


# --- layers in a row, through pp, zero 1 and zero 3 ---

ROW = (("pp2,dp2,zero1", 4), ("dp3,zero3", 3), ("dp1", 1), ("pp2", 3), ("dp2,zero2", 2), ("pp2,dp2", 4))


def _row(rank: int, size: int, layout: str, folder: str, number: int) -> tuple[list[float], dict[str, Tensor]]:
    """Load what the run before has saved, train two steps, save; one step more shows that saving changes nothing."""
    job = start(layout)
    schedule = _schedule(job)
    if number:
        job.load(folder, also={"schedule": schedule})
        expected = torch.load(Path(folder) / "truth.pt")
        assert same(_gathered(job), expected)
        assert job.steps == 2 * number
        assert job.data.position == 24 * 2 * number
        assert job.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    losses = train(job, 2, schedule)
    saved = _gathered(job)
    job.save(folder, also={"schedule": schedule})
    assert same(_gathered(job), saved)
    if rank == 0:
        torch.save(saved, Path(folder) / "truth.pt")
    inputs, labels = dataset().tensors
    seen = job.evaluate(inputs, labels)
    train(job, 1, schedule)
    job.load(folder, also={"schedule": schedule})  # back again, in the same job
    assert same(_gathered(job), saved)
    assert job.evaluate(inputs, labels) == pytest.approx(seen, abs=1e-12)
    losses += train(job, 1, schedule)
    job.close()
    return losses, {}


def test_layers_in_a_row_go_on_in_any_layout(tmp_path: Path) -> None:
    expected = plain_losses(2 * len(ROW) + 1)
    for number, (layout, size) in enumerate(ROW):
        for losses, _ in run_gloo(_row, size, layout, str(tmp_path), number):
            assert losses == pytest.approx(expected[2 * number : 2 * number + 3], abs=EXACT), layout
