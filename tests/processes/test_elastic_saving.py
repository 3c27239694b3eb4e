"""A job in files: written in one layout, read in another by processes that start from nothing, and goes on exactly."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import prophet
from pipeline_balance.elastic import switching as job_module
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import SpecError, StageFailed
from prophet.state.checkpoint.folder import DESCRIPTION
from tests.helpers import elastic_experts
from tests.helpers.disk_faults import Disk
from tests.helpers.elastic_jobs import broken, build, check_held, dataset, plain_losses, same, start, train, whole
from tests.helpers.fuzzing import Payload
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import gathered
from tests.helpers.sliced_models import adam, batch_of, model_of
from tests.helpers.support import RandomPlanner

EXACT = 1e-9


def _gathered(job: Job) -> dict[str, Tensor]:
    """All parameters and moments of all processes by name, shards put together by torch."""
    names = {id(p): n for n, p in job.model.named_parameters()}
    mine: dict[str, Any] = {n: p.detach() for n, p in job.model.named_parameters()}
    for p, entries in job.optimizer.state.items():
        mine |= {f"{names[id(p)]}@{e}": t for e, t in entries.items()}
    return gathered(mine)


def _schedule(job: Job) -> Any:
    return torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)


# --- layers in a row, through pp, zero 1 and zero 3 ---

ROW = (("pp2,dp2,zero1", 4), ("dp3,zero3", 3), ("pp2", 3), ("dp1", 1))


def _row(rank: int, size: int, layout: str, folder: str, number: int) -> list[float]:
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
    return losses


def test_layers_in_a_row_go_on_in_any_layout(tmp_path: Path) -> None:
    expected = plain_losses(2 * len(ROW) + 1)
    for number, (layout, size) in enumerate(ROW):
        for losses in run_gloo(_row, size, layout, str(tmp_path), number):
            assert losses == pytest.approx(expected[2 * number : 2 * number + 3], abs=EXACT), layout


# --- a transformers model, through tensor parallelism ---

DENSE = (("pp2", 2), ("tp2", 2), ("dp2,zero3", 2), ("pp2,dp2", 4))
KINDS = ("plain", "packed", "padded")
LLAMA = {"family": "llama", "tied": True}


def _dense(rank: int, size: int, layout: str, folder: str, number: int) -> list[float]:
    data = [batch_of(kind) for kind in KINDS]
    parallel = Parallelism.parse(layout)
    # another seed for weights and draws: both come from the checkpoint
    job = Job(lambda: model_of(**LLAMA), adam, parallel, data=data, microbatches=4, seed=3 + number, timeout_s=60.0)
    if number:
        job.load(folder)
        assert same(_gathered(job), torch.load(Path(folder) / "truth.pt"))
    losses = [job.step(max_norm=0.5) for _ in range(2)]
    saved = _gathered(job)
    job.save(folder)
    if rank == 0:
        torch.save(saved, Path(folder) / "truth.pt")
    job.close()
    return losses


def _dense_alone(steps: int) -> list[float]:
    model = model_of(**LLAMA)
    optimizer = adam(model.named_parameters())
    losses = []
    for step in range(steps):
        inputs, labels = batch_of(KINDS[step % 3])
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_a_dense_model_goes_from_stages_to_shards_and_back(tmp_path: Path) -> None:
    expected = _dense_alone(2 * len(DENSE))
    for number, (layout, size) in enumerate(DENSE):
        for losses in run_gloo(_dense, size, layout, str(tmp_path), number):
            assert losses == pytest.approx(expected[2 * number : 2 * number + 2], rel=EXACT), layout


# --- experts ---

EXPERTS = (("dp2,ep2", 2), ("dp4,ep4,zero1", 4), ("pp2", 2))


def _experts(rank: int, size: int, layout: str, folder: str, number: int, balanced: bool) -> list[float]:
    config = prophet.EngineConfig(planner=RandomPlanner(5, 0.8), slots_per_rank=4) if balanced else None
    job = elastic_experts.start(layout, balance_experts=config)
    if number:
        job.load(folder)
        assert same(elastic_experts.whole(job), torch.load(Path(folder) / "truth.pt"))
        assert job.engine is None or job.engine.step > 0
    losses = train(job, 2)
    check_held(job)
    assert job.engine is None or not number or int(job.engine.last_step.copies.sum()) > 0  # type: ignore[union-attr]
    saved = elastic_experts.whole(job)
    job.save(folder)
    assert same(elastic_experts.whole(job), saved)
    if rank == 0:
        torch.save(saved, Path(folder) / "truth.pt")
    job.close()
    return losses


@pytest.mark.parametrize("balanced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_go_to_other_homes_with_what_balancing_remembers(balanced: bool, tmp_path: Path) -> None:
    rows = EXPERTS if not balanced else EXPERTS[:2]
    expected = elastic_experts.plain_losses(2 * len(rows))
    for number, (layout, size) in enumerate(rows):
        for losses in run_gloo(_experts, size, layout, str(tmp_path), number, balanced):
            assert losses == pytest.approx(expected[2 * number : 2 * number + 2], abs=EXACT), layout


# --- after failures ---


def _lost(rank: int, size: int, folder: str) -> list[float]:
    """State is lost in place, and a forward fails on one rank: the same job goes on from its files, twice."""
    job = start("pp2,dp2,zero1")
    optimizer, schedule = job.optimizer, _schedule(job)
    parameters = list(job.model.parameters())
    losses = train(job, 2, schedule)
    job.save(folder, also={"schedule": schedule})
    saved = whole(job)
    train(job, 1, schedule)
    job.prepare(Parallelism(pp=4))
    with broken(job, "unpack") if rank == 2 else nullcontext(), pytest.raises(StageFailed):
        job.switch(mode="in-place")
    assert all(p.is_meta for p in parameters)
    job.load(folder, also={"schedule": schedule})
    assert str(job.layout) == "pp2,dp2,zero1"
    assert same(whole(job), saved)
    check_held(job)
    losses += train(job, 1, schedule)
    hook = job.model[2].register_forward_pre_hook(_fails) if rank == 1 else None
    with pytest.raises(StageFailed, match="a fault of this test"):
        job.step()
    if hook is not None:
        hook.remove()
    job.load(folder, also={"schedule": schedule})
    losses += train(job, 1, schedule)
    job.switch(Parallelism(pp=4))  # and goes elsewhere as ever
    losses += train(job, 1, schedule)
    job.save(folder, also={"schedule": schedule})
    job.load(folder)
    assert job.optimizer is optimizer
    assert all(p is q for p, q in zip(parameters, job.model.parameters(), strict=True))
    job.close()
    return losses


def _fails(*_: Any) -> None:
    raise RuntimeError("a fault of this test")


def test_a_job_goes_on_from_files_after_failures(tmp_path: Path) -> None:
    expected = plain_losses(4)
    for losses in run_gloo(_lost, 4, str(tmp_path)):
        assert losses == pytest.approx([*expected[:3], expected[2], expected[3]], abs=EXACT)


@contextmanager
def _late(here: bool) -> Iterator[None]:
    """Preparing a switch takes longer on this process."""
    inner = job_module.ordered

    def late(*given: Any, **options: Any) -> Parallelism:
        time.sleep(2.0 if here else 0.0)
        return inner(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "ordered", late)
        yield


def _lost_meanwhile(rank: int, size: int, folder: str) -> list[float]:
    """A step fails while a switch is being prepared, which one rank is late with. Groups fail, too, at first."""
    job = start("pp2,dp2,zero1", timeout_s=20.0)
    losses = train(job, 1)
    job.save(folder)
    with _late(rank == 1):
        job.prepare(Parallelism(pp=4))
        hook = job.model[2].register_forward_pre_hook(_fails) if rank == 1 else None
        with pytest.raises(StageFailed, match="a fault of this test"):
            job.step()
        if hook is not None:
            hook.remove()
        with broken(job, "group") if rank == 2 else nullcontext(), pytest.raises(SpecError, match="broken in group"):
            job.load(folder)
        with pytest.raises(StageFailed, match="a fault of this test"):
            job.step()
        job.load(folder)
    losses += train(job, 1)
    job.switch(Parallelism(pp=4))
    check_held(job)
    return losses + train(job, 1)


def test_groups_that_are_being_made_when_a_step_fails_cross_with_no_others(tmp_path: Path) -> None:
    for losses in run_gloo(_lost_meanwhile, 4, str(tmp_path)):
        assert losses == pytest.approx(plain_losses(3), abs=EXACT)


def _lost_experts(rank: int, size: int, folder: str, balanced: bool) -> list[float]:
    config = prophet.EngineConfig(planner=RandomPlanner(5, 0.8), slots_per_rank=4) if balanced else None
    job = elastic_experts.start("dp2,ep2", balance_experts=config)
    losses = train(job, 1)
    job.save(folder)
    hook = job.model[2].register_forward_pre_hook(_fails) if rank == 1 else None
    with pytest.raises(StageFailed, match="a fault of this test"):
        job.step()
    if hook is not None:
        hook.remove()
    job.load(folder)
    losses += train(job, 1)
    with _late(rank == 1):
        job.prepare(Parallelism(dp=2))
        job.load(folder)
    job.switch()
    return losses + train(job, 1)


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True])
def test_a_job_with_experts_goes_on_from_files_after_a_failure(balanced: bool, tmp_path: Path) -> None:
    for losses in run_gloo(_lost_experts, 2, str(tmp_path), balanced):
        first, second = elastic_experts.plain_losses(2)
        assert losses == pytest.approx([first, second, second], abs=EXACT)


# --- mistakes ---


def _refused(call: Callable[[], Any]) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


class _Fails:
    """Saved and loaded well until it is told to fail."""

    def __init__(self) -> None:
        self.state, self.fails = 1, False

    def state_dict(self) -> Any:
        return {"at": self.state}

    def load_state_dict(self, state: Any) -> None:
        if self.fails:
            raise OSError("no such state")
        self.state = state["at"]


def _rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> Any:
    """A function that puts the description back, once `change` was made to it by the first process."""
    path = folder / DESCRIPTION
    text = path.read_text()
    dist.barrier()
    if dist.get_rank() == 0:
        said = json.loads(text)
        change(said)
        path.write_text(json.dumps(said))
    dist.barrier()

    def back() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_text(text)
        dist.barrier()

    return back


def _sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def _two_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p]} for _, p in named], lr=0.1)


def _mistakes(rank: int, size: int, folder: str) -> dict[str, str]:
    path, said = Path(folder), dict[str, str]()
    job, beside = start("pp2"), _Fails()
    train(job, 1)
    job.save(path, also={"it": beside})
    train(job, 1)
    state, position, generator = whole(job), job.data.position, torch.get_rng_state()

    def load(what: str, where: Path = path, **also: Any) -> None:
        text = _refused(lambda: job.load(where, also=also or {"it": beside}))
        said[what] = re.sub(rf"{re.escape(str(path))}(/(0|1|none|pipeline))?", "FOLDER", text)
        assert same(whole(job), state), what
        assert (job.data.position, job.steps, beside.state) == (position, 2, 2), what
        assert torch.equal(torch.get_rng_state(), generator)

    beside.state = 2
    load("no folder on one rank", path / "none" if rank == 1 else path)
    load("nothing saved under that name", other=_Fails())
    beside.fails = rank == 1
    load("restored")
    beside.fails = False

    def shorter(row: list[Any]) -> list[Any]:
        return [row[0], [3], *row[2:]] if row[0] == "1.up.weight" else row

    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "shape": lambda d: d.update(tensors=[shorter(row) for row in d["tensors"]]),
        "dtype": lambda d: d.update(tensors=[[n, s, "float32", *r] for n, s, _, *r in d["tensors"]]),
        "strange": lambda d: d["tensors"].append(["9.weight", [1], "float64", "parameter", 0]),
        "kind": lambda d: d.update(tensors=[[n, s, t, "buffer", u] for n, s, t, _, u in d["tensors"]]),
        "lacks": lambda d: d.update(tensors=[row for row in d["tensors"] if row[0] != "1.scale"]),
        "moments": lambda d: d["tensors"].append(["1.up.bias@more", [12], "float64", "optimizer", 1]),
        "position": lambda d: d["run"].update(position=-1),
        "seed": lambda d: d["run"].update(seed=1 << 63),
        "balancing": lambda d: d["run"].update(balancing={"1": [{"step": "x"}]}),
        "progress": lambda d: d["progress"].update(updates="x"),
        "option": lambda d: d["options"][0][0]["options"].update(lr="fast"),
        "files": lambda d: d.update(files="../elsewhere"),
    }
    for what, change in changes.items():
        back = _rewritten(path, change)
        load(what)
        back()
    mine = path / str(rank)  # files are missing or damaged on one process
    shutil.copytree(path, mine, ignore=shutil.ignore_patterns("0", "1"))
    (file, *_) = sorted(mine.rglob("*.distcp"))
    data = file.read_bytes()
    if rank == 1:
        file.write_bytes(data[: len(data) // 2])
    load("cut short", mine)
    if rank == 1:
        file.unlink()
    load("missing", mine)
    file.write_bytes(data if rank == 0 else b"?" * len(data))
    load("rubbish", mine)
    if rank == 1:
        (file.parent / ".metadata").write_bytes(pickle.dumps(Payload(path / "ran")))
    load("payload", mine)
    assert not (path / "ran").exists()
    for what, other in (("optimizer", _sgd), ("groups", _two_groups)):
        options: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "microbatches": 4}
        theirs = Job(build, other, Parallelism(), **options)
        said[what] = _refused(lambda theirs=theirs: theirs.load(path))  # type: ignore[misc]
    job.pipeline.save(path / "pipeline", step=2, also={"it": beside})
    load("of a pipeline", path / "pipeline")
    assert job.pipeline.load(path).step == job.steps == 1  # a pipeline reads a job's
    job.load(path, also={"it": beside})
    assert (job.steps, job.data.position, beside.state) == (1, 24, 1)
    return said


EXPECTED = {
    "no folder on one rank": r"^rank 1: .*/training.json: expected a finished checkpoint",
    "nothing saved under that name": r"holds no state of \['other'\], only of \['it'\]",
    "restored": "^rank 1: OSError: no such state$",
    "shape": r"the model needs 1.up.weight of shape \[12, 6\], the checkpoint has \[3\]",
    "dtype": "the model needs 0.weight of torch.float64, the checkpoint has float32",
    "strange": "holds 9.weight, which the model does not have",
    "kind": "tensors: .* cannot be of kind 'buffer'",
    "lacks": "the model needs 1.scale of shape",
    "moments": "expected 1.up.bias@more of torch.float64",
    "position": "run.position: expected a whole number, as job.save writes it, got -1",
    "seed": "run.seed: expected a whole number, as job.save writes it, got 9223372036854775808",
    "balancing": "what balancing remembers of 1: expected",
    "progress": "progress: updates: expected a whole number",
    "option": "lr of group 0 of optimizer 0: expected a value like 0.02",
    "files": "files: expected the name of a folder of tensors",
    "cut short": "^rank 1: .*distcp: expected at least [0-9]+ bytes, got",
    "missing": "^rank 1: .*distcp: cannot be read",
    "rubbish": "^FOLDER: rank 1: UnpicklingError: a stored tensor is damaged$",
    "payload": "^rank 1: .*an index has no os.makedirs; it was not run",
    "of a pipeline": "run.position: expected a whole number, as job.save writes it, got None",
    "optimizer": r"expected the state of \['SGD'\], the checkpoint has that of \['AdamW'\]",
    "groups": "groups",
}


def test_what_does_not_fit_is_one_error_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    first, second = run_gloo(_mistakes, 2, str(tmp_path))
    assert first == second
    assert first.keys() == EXPECTED.keys()
    for what, words in EXPECTED.items():
        assert re.search(words, first[what]), f"{what}: {first[what]}"


def _not_saved(rank: int, size: int, folder: str) -> dict[str, str]:
    """What cannot be saved, and a disk that fills up, leave the checkpoint before."""
    path, said = Path(folder), dict[str, str]()
    job = start("dp2,zero3")
    train(job, 1)
    job.save(path)
    saved = _gathered(job)
    train(job, 1)
    beside = _Fails()
    beside.state = {1} if rank == 1 else 1  # type: ignore[assignment]
    said["words"] = _refused(lambda: job.save(path, also={"it": beside}))
    said["folder"] = _refused(lambda: job.save(path / str(rank)))
    with Disk(2 if rank == 1 else None).inserted():
        said["disk"] = _refused(lambda: job.save(path))
    assert len(list(path.glob("tensors-*"))) == 1
    job.switch(Parallelism(dp=2))
    weight = job.model[1].up.weight
    with torch.no_grad():
        weight[0, 0] += 1e-9 if rank == 1 else 0
    said["apart"] = _refused(lambda: job.save(path))
    job.load(path)
    assert same(_gathered(job), saved)
    return said


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = run_gloo(_not_saved, 2, str(tmp_path))
    assert first == second
    assert "rank 1: it['at'] is a set; expected numbers" in first["words"]
    assert "another folder" in first["folder"]
    assert "rank 1: OSError: [Errno 28] No space left" in first["disk"]
    assert "replicas have come apart: '1.up.weight' differs on rank(s) [1] from rank 0" in first["apart"]
