"""A job whose stages follow the load while its layout changes, equal to one process that does neither."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="one of the models is of transformers'")

from pipeline_balance import ControllerConfig, attach
from pipeline_balance.control.decide import MoveCost
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.spec import RankLimits
from prophet.errors import SpecError
from tests.helpers import elastic_jobs
from tests.helpers.elastic_jobs import MICROBATCHES, SEED, batches, check_held, plain_losses, same, train, whole
from tests.helpers.elastic_sliced import llama_job
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import plain_step
from tests.helpers.releases import needs_orders
from tests.helpers.sliced_models import alone, model_of

SLOW_S = 6e-3
_sleeps: dict[int, float] = {}


class _Timed(nn.Module):
    """A layer that takes as long as `_sleeps` says; sleeping does not need a core."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.index, self.layer = index, layer

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_sleeps.get(self.index, 0.0))
        return self.layer(x)


def build() -> nn.Sequential:
    return nn.Sequential(*(_Timed(i, layer) for i, layer in enumerate(elastic_jobs.build())))


def slow(*layers: int, seconds: float = SLOW_S) -> None:
    _sleeps.clear()
    _sleeps.update(dict.fromkeys(layers, seconds))


def start(layout: str, **options: Any) -> Job:
    config = ControllerConfig(
        every_steps=3, measure_steps=2, min_gain=0.1, horizon_steps=40, move_cost=MoveCost(fixed_s=0.0)
    )
    given: dict[str, Any] = {
        "data": batches(),
        "loss_fn": nn.functional.cross_entropy,
        "timeout_s": 60.0,
        "microbatches": MICROBATCHES,
        "seed": SEED,
        "balance_stages": config,
    }
    return Job(build, elastic_jobs.make_optimizer, Parallelism.parse(layout), **{**given, **options})


def _tour(rank: int, size: int, folder: str) -> dict[str, Any]:
    job = start("pp2,dp2")
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)
    losses, layouts, kept = [], [], []

    def steps(count: int) -> None:
        for _ in range(count):
            losses.extend(train(job, 1, schedule))
            layouts.append(str(job.layout))
            check_held(job)
            assert job.layout.stage_map(len(job.pipeline.model.units)) == job.pipeline.stage_map

    slow(0, 1, 2)
    steps(8)
    job.prepare(Parallelism(pp=2, dp=2, zero=1))
    slow(3, 4, 5)
    steps(7)  # what was prepared stays so while stages move
    for layout in (None, Parallelism(pp=2, dp=2, order=(3, 2, 1, 0)), Parallelism(pp=3)):
        before = whole(job)
        job.switch(layout)
        kept.append(same(before, whole(job)))
        steps(4)
    assert job.controller is not None
    job.save(folder, also={"schedule": schedule})
    moves = len(job.controller.report.moves)
    before = whole(job)
    job.close()

    job = start("pp4")
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)
    job.load(folder, also={"schedule": schedule})
    kept.append(same(before, whole(job)))
    steps(4)
    job.close()
    return {"losses": losses, "layouts": layouts, "kept": kept, "moves": moves}


@needs_orders
def test_stages_follow_the_load_in_every_layout(tmp_path: Path) -> None:
    results = run_gloo(_tour, 4, str(tmp_path))
    first = results[0]
    for result in results:
        assert result["losses"] == pytest.approx(plain_losses(31), rel=1e-10)
        assert result["kept"] == [True] * 4
        assert result["layouts"] == first["layouts"]
    layouts = first["layouts"]
    assert layouts[0] == "pp2,dp2"
    assert layouts[7] == "pp2,dp2,stages2:4"
    assert layouts[14].startswith("pp2,dp2,stages4:2")
    # a layout without stages begins with those that suit the last costs, from when it was prepared
    assert layouts[15] == "pp2,dp2,zero1,stages2:4"
    assert layouts[18] == "pp2,dp2,zero1,stages4:2"
    assert layouts[19] == "pp2,dp2,stages4:2,order3:2:1:0"
    assert layouts[23].startswith("pp3,stages")
    assert first["moves"] >= 2


def _packed(rank: int, size: int) -> dict[str, Any]:
    """Layers get so cheap that fewer stages do, and then slow enough that all are needed."""
    config = ControllerConfig(
        every_steps=3,
        measure_steps=2,
        min_gain=0.1,
        horizon_steps=40,
        move_cost=MoveCost(fixed_s=0.0),
        repack_slowdown=0.4,
    )
    job = start("pp2,dp2", balance_stages=config)
    losses, layouts = [], []
    for step in range(24):
        # one slow layer keeps one stage busy, whatever the other has
        slow(*([1] if step < 12 else range(6)), seconds=3 * SLOW_S if step < 12 else SLOW_S)
        losses += train(job, 1)
        layouts.append(str(job.layout))
        check_held(job)
    job.close()
    return {"losses": losses, "layouts": layouts}


def test_columns_that_were_emptied_are_taken_back() -> None:
    results = run_gloo(_packed, 4)
    layouts = results[0]["layouts"]
    assert all(r == results[0] for r in results)
    assert layouts[11].startswith("dp2")
    assert layouts[-1].startswith("pp2,dp2")


def _refused(rank: int, size: int) -> list[str]:
    found = []
    limits = RankLimits.uniform(3)
    for options in (
        {"limits": limits},
        {"balance_stages": True},
        {"balance_stages": None, "limits": limits[:2]},
        {"limits": [1 << 30] * 2},
    ):
        try:
            start("pp2", **options)
        except SpecError as error:
            found.append(str(error))
    with pytest.raises(SpecError, match=r"a job's, which counts the data: give Job\(balance_stages=\.\.\.\)"):
        attach(start("pp2").pipeline)
    return found


def test_bad_limits_are_refused_on_every_process() -> None:
    for said in run_gloo(_refused, 2):
        assert len(said) == 4
        assert "limits: expected one entry for each of 2 processes, got 3" in said[0]
        assert "balance_stages: expected a pipeline_balance.ControllerConfig, got True" in said[1]
        assert "give balance_stages, too" in said[2]
        assert "limits: expected a pipeline_balance.spec.RankLimits for each process, got [1073741824" in said[3]


def _accumulated(rank: int, size: int) -> list[float]:
    job = start("pp2,dp2", balance_stages=None)
    losses = [job.step(update=False), job.step()]
    assert all(cost.forward_s > 0 for cost in job.pipeline.measure())  # where nothing is balanced, too
    position, _ = job.data.position, job.step(update=False)
    assert job.data.position != position
    with pytest.raises(SpecError, match=r"under way: switch after step\(update=True\)"):
        job.switch(Parallelism(pp=4))
    job.drop_gradients()
    assert job.data.position == position
    job.switch(Parallelism(pp=4))
    losses += [job.step(update=False), job.step()]
    job.close()
    return losses


def _accumulated_alone() -> list[float]:
    model, data = elastic_jobs.build(), batches()
    optimizer, losses = elastic_jobs.make_optimizer(list(model.named_parameters())), []
    for update in range(2):
        optimizer.zero_grad()
        means = []
        for part in range(2):
            given: dict[str, Any] = {"microbatches": MICROBATCHES, "seed": SEED, "update": update, "share": 0.5}
            read = data.read(0, elastic_jobs.ROWS)
            cross_entropy = nn.functional.cross_entropy
            means.append(plain_step(list(model), *read, cross_entropy, first=part * MICROBATCHES, **given))
            data.advance()
            losses.append(sum(means) / len(means))
        optimizer.step()
    return losses


def test_a_job_adds_up_gradients_over_global_batches() -> None:
    for losses in run_gloo(_accumulated, 4):
        assert losses == pytest.approx(_accumulated_alone(), rel=1e-10)


def _ahead(rank: int, size: int) -> dict[str, Any]:
    config = ControllerConfig(
        every_steps=1,
        measure_steps=1,
        min_gain=0.1,
        horizon_steps=20,
        move_cost=MoveCost(fixed_s=0.0),
        prepare_in_backward=True,
    )
    job = start("pp2,dp2", balance_stages=config)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)
    losses, layouts = [], []
    for step in range(12):
        slow(*((0, 1, 2) if step < 6 else (3, 4, 5)))
        losses += train(job, 1, schedule)
        layouts.append(str(job.layout))
        if step == 8:
            job.switch(Parallelism(pp=3))
    assert job.controller is not None
    # within the step that has decided it
    assert all(move.early > 0 for move in job.controller.report.moves)
    job.close()
    return {"losses": losses, "layouts": layouts}


def test_decisions_beside_the_backward_pass() -> None:
    """With a spare process, too, which has no backward pass."""
    for result in run_gloo(_ahead, 4):
        assert result["losses"] == pytest.approx(plain_losses(12), rel=1e-10)
        assert "pp2,dp2,stages2:4" in result["layouts"][:7]


def _shards(rank: int, size: int) -> dict[str, Any]:
    config = ControllerConfig(
        every_steps=2, measure_steps=2, min_gain=0.0, horizon_steps=99, move_cost=MoveCost(fixed_s=0.0)
    )
    job = llama_job("pp2,tp2,stages1:4", ["plain"] * 5, balance_stages=config)
    losses = [job.step(max_norm=0.5) for _ in range(5)]
    layout = str(job.layout)
    job.close()
    return {"losses": losses, "layout": layout}


def test_stages_of_shards_rest() -> None:
    """Nobody times the layers of shards."""
    losses, *_ = alone(model_of("llama", tied=True), ["plain"] * 5, max_norm=0.5)
    for result in run_gloo(_shards, 4):
        assert result["losses"] == pytest.approx(losses, rel=1e-9)
        assert result["layout"] == "tp2,pp2,stages1:4"
