"""A user's own schedule trains as one process does, through other maps and layouts; what cannot run begins nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.actions import Action
from pipeline_balance.schedules.classic import gpipe, one_f_one_b
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers import elastic_jobs
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import LAYERS, MICROBATCHES, SEED, batch, build_layer, make_optimizer, plain_step
from tests.helpers.pipeline_schedules import in_pairs, zb_h1

EXACT = 1e-12  # of float64, whose sums over microbatches are taken in another order
MAPS = (StageMap.contiguous((0, 2, 5, LAYERS)), StageMap((0, 1, 3, 4, 6, LAYERS), (0, 0, 2, 0, 2)))


def _layers() -> list[nn.Module]:
    return [build_layer(i).double() for i in range(LAYERS)]


def _pipe(stage_map: StageMap | None = None, **options: Any) -> ElasticPipeline:
    given: dict[str, Any] = {"make_optimizer": make_optimizer, "microbatches": MICROBATCHES, "seed": SEED}
    given |= {"timeout_s": 60.0, **options}
    return ElasticPipeline.from_modules(_layers(), nn.functional.cross_entropy, stage_map, **given)


def _alone(steps: int) -> tuple[list[float], dict[str, Any]]:
    layers = nn.Sequential(*_layers())
    optimizer, losses = make_optimizer(list(layers.named_parameters())), []
    for update in range(steps):
        optimizer.zero_grad()
        options: dict[str, Any] = {"microbatches": MICROBATCHES, "seed": SEED, "update": update}
        losses.append(plain_step(list(layers), *batch(update), nn.functional.cross_entropy, **options))
        optimizer.step()
    return losses, {name: t.numpy() for name, t in layers.state_dict().items()}


def _runs(pipe: ElasticPipeline) -> list[str]:
    """What this rank computes in a step."""
    executor = pipe.stages.executor
    return [str(step) for step in executor.training if isinstance(step, Action)] if executor is not None else []


def _said(call: Callable[[], Any]) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


# --- a schedule that can run ---


def _trains(rank: int, size: int) -> dict[str, Any]:
    asked: list[tuple[tuple[int, ...], int]] = []

    def pairs(stage_ranks: tuple[int, ...], microbatches: int) -> list[list[str]]:
        asked.append((stage_ranks, microbatches))
        return in_pairs(stage_ranks, microbatches)

    pipe, losses, ran = _pipe(MAPS[0], schedule=pairs), [], []
    for update in range(6):
        if update % 2 == 0:
            if update:
                pipe.rebuild(MAPS[update // 2 % 2])
            ran.append(_runs(pipe))
        losses.append(pipe.step(*batch(update)))
    weights = {name: t.numpy() for name, t in pipe.state_dict().items()}
    return {"asked": asked, "ran": ran, "losses": losses, "weights": weights}


def test_an_own_schedule_trains_as_one_process_also_after_moves() -> None:
    results = run_gloo(_trains, 3)
    losses, weights = _alone(6)
    first, second = ((0, 1, 2), MICROBATCHES), ((0, 0, 1, 0, 1), MICROBATCHES)  # the ranks in use, renumbered
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(losses, rel=EXACT)
        assert result["asked"] == [first, second, first]  # also on a rank without a stage, once for every map
        spread = in_pairs(*second)
        assert result["ran"][0] == result["ran"][2] == in_pairs(*first)[rank]
        assert result["ran"][1] == [spread[0], [], spread[1]][rank]
    assert set(results[0]["weights"]) == set(weights)
    for name, array in results[0]["weights"].items():
        assert array == pytest.approx(weights[name], abs=1e-9)


def _named(rank: int, size: int) -> dict[str, Any]:
    split = [_pipe(split_backward=True, schedule=s) for s in (lambda r, m: zb_h1(len(r), m), in_pairs)]
    pipes = [_pipe(schedule=name) for name in (None, "flexible", "1f1b", "gpipe", "interleaved")] + split
    return {"ran": [_runs(p) for p in pipes], "losses": [[p.step(*batch(u)) for u in range(2)] for p in pipes]}


def test_names_and_halves_train_as_one_process() -> None:
    losses = _alone(2)[0]
    for rank, result in enumerate(run_gloo(_named, 2)):
        assert all(found == pytest.approx(losses, rel=EXACT) for found in result["losses"])
        every, forward = one_f_one_b(2, MICROBATCHES), gpipe(2, MICROBATCHES)
        rows = [every, every, every, forward, every, zb_h1(2, MICROBATCHES)]
        assert result["ran"] == [*([str(a) for a in s.actions[rank]] for s in rows), in_pairs((0, 1), 4)[rank]]


LAYOUTS = ("pp2,dp2", "pp3", "dp2,zero1", "pp2,v2")


def _switches(rank: int, size: int, folder: str) -> dict[str, Any]:
    asked: list[tuple[tuple[int, ...], int]] = []
    broken = {"how": ""}

    def pairs(stage_ranks: tuple[int, ...], microbatches: int) -> Any:
        asked.append((stage_ranks, microbatches))
        if broken["how"] == "raises" and rank == 1:
            raise LookupError("not today")
        if broken["how"] == "differs" and rank == 1:
            return [[f"{stage_ranks.index(r)}{kind}{m}" for kind in "FB" for m in range(microbatches)] for r in (0, 1)]
        return in_pairs(stage_ranks, microbatches)

    job, losses, said = elastic_jobs.start(LAYOUTS[0], schedule=pairs), [], []
    rates = torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)
    for text in LAYOUTS:
        before = elastic_jobs.whole(job)
        if str(job.layout) != text:
            job.switch(Parallelism.parse(text))
        assert elastic_jobs.same(elastic_jobs.whole(job), before)
        losses += elastic_jobs.train(job, 2, rates)
    seen, before = list(asked), elastic_jobs.whole(job)
    for broken["how"], other in (("raises", "pp2"), ("differs", "pp2"), ("", "pp2,slices2")):
        said.append(_said(partial(job.switch, Parallelism.parse(other))))
        assert str(job.layout) == LAYOUTS[-1]
        assert elastic_jobs.same(elastic_jobs.whole(job), before)
    losses += elastic_jobs.train(job, 1, rates)
    job.switch(Parallelism(pp=2))
    job.save(folder)
    broken["how"] = "differs"
    job.load(folder)  # the schedule is asked for again, and compared before a step
    said.append(_said(job.step))
    broken["how"] = ""
    job.load(folder)
    losses += elastic_jobs.train(job, 1, rates)
    job.close()
    return {"asked": seen, "losses": losses, "said": said}


def test_a_job_keeps_an_own_schedule_through_switches(tmp_path: Path) -> None:
    results = run_gloo(_switches, 4, str(tmp_path), timeout_s=120.0)
    parts = elastic_jobs.MICROBATCHES
    wanted = [((0, 1), parts // 2), ((0, 1, 2), parts), ((0,), parts // 2), ((0, 1, 0, 1), parts)]
    for result in results:
        assert result["asked"] == wanted
        assert result["losses"] == pytest.approx(elastic_jobs.plain_losses(10), abs=1e-9)
        raises, differs, sliced, later = result["said"]
        assert raises.startswith("rank 1: schedule pairs raised LookupError: not today; ")
        assert differs == later == "ranks [1] follow another schedule than rank 0"
        assert "slices bring their schedule: leave out schedule=" in sliced


# --- schedules that cannot run ---


def _circle(stage_ranks: Sequence[int], microbatches: int) -> list[list[str]]:
    """The last stage wants its second microbatch first, which the first one sends once it has the first one back."""
    first, second = range(microbatches), [1, 0, *range(2, microbatches)]
    return [[f"0{k}{m}" for m in first for k in "FB"], [f"1{k}{m}" for m in second for k in "FB"]]


def _leaves_out(stage_ranks: Sequence[int], microbatches: int) -> list[list[str]]:
    return [[a for a in row if not a.endswith("2")] for row in in_pairs(stage_ranks, microbatches)]


def _refused(rank: int, size: int) -> dict[str, str]:
    def fails_here(stage_ranks: Sequence[int], microbatches: int) -> Any:
        if rank == 1:
            raise OSError("no such file")
        return in_pairs(stage_ranks, microbatches)

    sliced = SliceOptions(2)
    said = {
        "circle": _said(lambda: _pipe(schedule=_circle)),
        "leaves out": _said(lambda: _pipe(schedule=_leaves_out)),
        "raises": _said(lambda: _pipe(schedule=fails_here)),
        "one circle": _said(lambda: _pipe(schedule=_circle if rank else in_pairs)),
        "differ": _said(lambda: _pipe(schedule="gpipe" if rank else "1f1b")),
        "name": _said(lambda: _pipe(schedule="gpip")),
        "slices": _said(lambda: _pipe(schedule="flexible", slices=sliced)),
        "map": _said(lambda: _pipe(StageMap((0, 2, 4, LAYERS), (0, 1, 0)), schedule="1f1b")),
    }
    now: list[Callable[..., Any]] = [in_pairs]

    def mine(stage_ranks: Sequence[int], microbatches: int) -> Any:
        return now[0](stage_ranks, microbatches)

    pipe = _pipe(schedule=mine)
    losses = [pipe.step(*batch(0))]
    before = {n: p.detach().clone() for n, p in pipe.module.named_parameters()}
    old, other = pipe.stage_map, StageMap.contiguous((0, 1, LAYERS))
    for what, now[0] in (("move raises", fails_here), ("move circle", _circle), ("move", _apart(rank))):
        said[what] = _said(lambda: pipe.rebuild(other))
        assert pipe.stage_map == old
        after = dict(pipe.module.named_parameters())
        assert all(after[n].is_meta if p.is_meta else torch.equal(after[n], p) for n, p in before.items())
    now[0] = in_pairs
    losses.append(pipe.step(*batch(1)))
    pipe.rebuild(other)
    losses.append(pipe.step(*batch(2)))
    assert losses == pytest.approx(_alone(3)[0], rel=EXACT)
    return said


def _apart(rank: int) -> Callable[..., Any]:
    return (lambda r, m: gpipe(len(r), m)) if rank else in_pairs


def test_what_cannot_run_is_one_error_on_all_ranks_and_all_is_as_before() -> None:
    first, second = run_gloo(_refused, 2, timeout_s=120.0)
    assert first == second
    assert first["circle"].endswith("the schedule waits for itself at rank 0: 0B0, rank 1: 1F1")
    assert first["leaves out"].endswith("microbatch 2 in stage 0 runs nothing, expected F and B, or F, I and W")
    assert first["raises"] == "rank 1: schedule fails_here raised OSError: no such file"
    assert first["one circle"].startswith("rank 1: schedule _circle for stages on ranks [0, 1] and 4 microbatches: ")
    assert first["differ"] == "ranks [1] follow another schedule than the first"
    assert first["name"].startswith("there is no schedule 'gpip'; did you mean 'gpipe'?")
    assert first["slices"] == "slices bring their schedule: leave out schedule="
    assert first["map"].startswith("schedule '1f1b' needs one stage on each rank")
    whole = "the state from before the move is whole"
    assert first["move raises"] == f"rank 1: schedule mine raised OSError: no such file; {whole}"
    assert "the schedule waits for itself" in first["move circle"]
    assert first["move"] == "ranks [1] follow another schedule than rank 0"
