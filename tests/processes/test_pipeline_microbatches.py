"""Another number of microbatches on real processes: the same loss and gradients, chosen where the clock says so."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeline_balance
from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.release.membership import Membership, released
from pipeline_balance.spec import RankLimits, StageMap
from prophet.errors import SpecError
from prophet.state.checkpoint.folder import DESCRIPTION
from tests.helpers.launch import run_gloo

LAYERS, DIM, ROWS, CLASSES = 8, 6, 16, 5
# parameters, gradients and momentum of a slow layer take 50 KB, and six of them fit on a rank
WIDE, MEMORY = 64, 300_000
TOLERANCE = 1e-6


def classifier(microbatches: int, replicas: int = 1, **options: Any) -> ElasticPipeline:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(LAYERS - 1)]
    return ElasticPipeline.from_modules(
        [*layers, nn.Linear(DIM, CLASSES)],
        nn.CrossEntropyLoss(),
        make_optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        microbatches=microbatches,
        replicas=replicas,
        timeout_s=60.0,
        **options,
    )


def labelled(step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """A batch whose labels count unevenly: none at all in the first rows, and another number in every replica."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    labels[: 3 + 2 * replica + step] = -100
    labels[11] = -100
    return torch.randn(ROWS, DIM, generator=generator), labels


def _cut(rank: int, size: int, replicas: int, numbers: list[int]) -> dict[str, Any]:
    run = classifier(8, replicas)
    losses, gradients = [], []
    for step, number in enumerate(numbers):
        if number != run.config.microbatches:
            run.change_microbatches(number)
        # of two batches, cut into as many parts each
        run.step(*labelled(2 * step, run.replica), update=False)
        losses.append(run.step(*labelled(2 * step + 1, run.replica), max_norm=0.5))
        named = ((n, p.grad) for n, p in run.module.named_parameters())
        # arrays, as tensors would be shared through a process that is about to end
        gradients.append({n: g.numpy().copy() for n, g in named if g is not None})
    return {"losses": losses, "gradients": gradients, "norm": run.grad_norm, "loss": run.evaluate(*labelled(0))}


@pytest.mark.parametrize("replicas", [1, 2])
def test_loss_and_gradients_are_those_of_the_first_number(replicas: int) -> None:
    size = 2 * replicas
    plain = run_gloo(_cut, size, replicas, [8, 8, 8, 8])
    for numbers in ([4, 2, 1, 8], [8, 16, 3, 3]):
        changed = run_gloo(_cut, size, replicas, numbers)
        for before, after in zip(plain, changed, strict=True):
            assert after["losses"] == pytest.approx(before["losses"], rel=TOLERANCE)
            assert after["norm"] == pytest.approx(before["norm"], rel=TOLERANCE)
            assert after["loss"] == pytest.approx(before["loss"], rel=TOLERANCE)
            for here, there in zip(before["gradients"], after["gradients"], strict=True):
                assert here.keys() == there.keys()
                for name, gradient in here.items():
                    np.testing.assert_allclose(there[name], gradient, rtol=TOLERANCE, atol=TOLERANCE)


def _refused(rank: int, size: int) -> None:
    run = classifier(8)
    with pytest.raises(SpecError, match=r"ranks \[1\] were given another number of microbatches.*than rank 0"):
        run.change_microbatches(4 - 2 * rank)
    with pytest.raises(SpecError, match="microbatches must be positive"):
        run.change_microbatches(0)
    first = run.step(*labelled(0), update=False)
    with pytest.raises(SpecError, match="an update is under way"):
        run.change_microbatches(4)
    assert run.config.microbatches == 8
    assert first > 0
    run.step(*labelled(1))


def test_what_cannot_change_stays_as_it_was() -> None:
    run_gloo(_refused, 2)


class Slow(nn.Module):
    """A layer whose forward takes `call_s` and `row_s` for every row; sleeping does not need a core."""

    def __init__(self, index: int, call_s: float, row_s: float) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDE, WIDE)
        self.call_s, self.row_s = call_s, row_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.call_s + self.row_s * x.shape[0])
        return torch.tanh(self.linear(x))


def slow(call_s: float, row_s: float) -> ElasticPipeline:
    return ElasticPipeline.from_modules(
        [Slow(i, call_s, row_s) for i in range(LAYERS)],
        nn.functional.mse_loss,
        make_optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        microbatches=8,
        timeout_s=60.0,
    )


def _packed(
    rank: int, size: int, choose: bool, call_s: float, row_s: float, beside: bool, by_microbatch: bool
) -> dict[str, Any]:
    run = slow(call_s, row_s)
    config = ControllerConfig(
        every_steps=4,
        # two ranks take 1.2 times as long as three, and one has no memory for all layers
        repack_slowdown=1.0,
        choose_microbatches=choose,
        min_gain=0.05,
        move_cost=MoveCost(fixed_s=1e-3),
        prepare_in_backward=beside,
    )
    balanced = pipeline_balance.attach(run, RankLimits.uniform(size, memory_bytes=MEMORY), config)
    losses, numbers = [], []
    for step in range(24):
        x = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(step))
        parts = x.chunk(8)
        given = (parts, [p.flip(1) for p in parts]) if by_microbatch else (x, x.flip(1))
        losses.append(balanced.step(*given))
        numbers.append(run.config.microbatches)
    report = balanced.report
    state = {n: t.numpy().copy() for n, t in run.state_dict().items()}
    return {
        "losses": losses,
        "numbers": numbers,
        "choices": report.microbatches,
        "said": str(report),
        "used": len(run.stage_map.used_ranks),
        "learned": balanced.learner.microbatches,
        "state": state,
    }


@pytest.mark.parametrize("beside", [False, True])
def test_fewer_microbatches_on_fewer_ranks_where_each_costs_something(beside: bool) -> None:
    plain = run_gloo(_packed, 3, False, 3e-3, 1e-4, beside, False)
    chosen = run_gloo(_packed, 3, True, 3e-3, 1e-4, beside, False)
    assert {r["used"] for r in plain + chosen} == {2}
    assert set(plain[0]["numbers"]) == {8}
    assert plain[0]["choices"] == ()
    (choice,) = chosen[0]["choices"]
    assert choice.after in (2, 4)
    assert choice.gain_s > choice.error_s
    assert chosen[0]["numbers"] == chosen[1]["numbers"] == chosen[2]["numbers"]
    # both numbers were tried, in the order that a drift favours neither in
    tried = [n for i, n in enumerate(chosen[0]["numbers"]) if i == 0 or n != chosen[0]["numbers"][i - 1]]
    assert tried == [8, 4, 8, choice.after]
    assert chosen[0]["learned"] == choice.after
    assert f"step {choice.step}: {choice.after} microbatches in place of 8; gain per step" in chosen[0]["said"]
    for before, after in zip(plain, chosen, strict=True):
        assert after["losses"] == pytest.approx(before["losses"], rel=TOLERANCE)
        for name, values in before["state"].items():
            np.testing.assert_allclose(after["state"][name], values, rtol=1e-5, atol=TOLERANCE)


def test_as_many_microbatches_where_rows_are_all_that_counts() -> None:
    found = run_gloo(_packed, 3, True, 0.0, 2e-3, False, False)
    (choice,) = found[0]["choices"]
    assert choice.after == 8
    assert found[0]["numbers"][-1] == 8
    assert "8 microbatches stay; the best other number is 4" in found[0]["said"]


def test_batches_that_come_by_microbatch_keep_their_number() -> None:
    found = run_gloo(_packed, 3, True, 3e-3, 1e-4, False, True)
    (choice,) = found[0]["choices"]
    assert choice.reason == "8 microbatches stay: batches come by microbatch"
    assert set(found[0]["numbers"]) == {8}


def _attached_anew(rank: int, size: int) -> list[int]:
    """The number of microbatches at every step, with another controller from the middle of a trial on."""
    run = slow(1e-3, 1e-4)
    numbers: list[int] = []

    def train(balanced: Any, until: Callable[[], bool]) -> None:
        while not until():
            x = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(len(numbers)))
            balanced.step(x, x.flip(1))
            numbers.append(run.config.microbatches)

    config = ControllerConfig(every_steps=4, min_gain=0.5)
    balanced = pipeline_balance.attach(run, None, config)
    balanced.choose_microbatches()
    train(balanced, lambda: run.config.microbatches != 8)
    tried = len(numbers)
    train(pipeline_balance.attach(run, None, config), lambda: len(numbers) == tried + 2)
    return numbers[tried - 1 :]


def test_a_trial_ends_where_another_controller_is_attached() -> None:
    assert run_gloo(_attached_anew, 2) == [[4, 8, 8]] * 2


def _comes_back(rank: int, size: int, path: str) -> list[float]:
    """A rank without a stage leaves after the number was changed; it takes over the number when it comes back."""
    dist.barrier()
    dist.destroy_process_group()
    membership = Membership(dist.FileStore(path, -1), rank, timeout_s=40.0)
    membership.start(range(size))
    run = classifier(8, stage_map=StageMap.contiguous((0, 4, 8)))
    losses = [run.step(*labelled(0))]
    if released(membership, run):
        run.change_microbatches(2)
        losses.append(run.step(*labelled(1)))
        assert membership.switch(run, range(size))
    else:
        assert membership.wait_for_call()
        run.change_group(None, None)
    assert run.config.microbatches == 2
    run.rebuild(StageMap.contiguous((0, 2, 4, 8)))
    losses.append(run.step(*labelled(2)))
    membership.end()
    return losses


def test_a_rank_that_comes_back_takes_the_number_over() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = run_gloo(_comes_back, 3, str(Path(folder) / "members"))
    assert rows[0] == rows[1]
    assert rows[2] == [rows[0][0], rows[0][2]]


def _resumes(rank: int, size: int, folder: str, given: int, before: bool) -> tuple[int, int, list[float], list[str]]:
    """Numbers before and after a step, losses, and what the log says; `before`: a controller is there before."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeline_balance.pipeline.trainer").addHandler(handler)
    run = classifier(given)
    train: Any = run
    if before:
        train = pipeline_balance.attach(run, None, ControllerConfig(every_steps=100))
    run.load(folder)
    loaded = run.config.microbatches
    assert run.settled_microbatches == loaded
    if not before:
        train = pipeline_balance.attach(run, None, ControllerConfig(every_steps=100))
    losses = [train.step(*labelled(step)) for step in (2, 3)]
    return loaded, run.config.microbatches, losses, said


def _saves(rank: int, size: int, folder: str) -> list[float]:
    run = classifier(8)
    run.step(*labelled(0))
    run.change_microbatches(2)
    run.step(*labelled(1))
    run.save(folder)
    return [run.step(*labelled(step)) for step in (2, 3)]


@pytest.mark.parametrize("before", [True, False])
def test_a_run_that_resumes_goes_on_with_the_number(before: bool, tmp_path: Path) -> None:
    wanted = run_gloo(_saves, 2, str(tmp_path))
    found = run_gloo(_resumes, 2, str(tmp_path), 8, before)
    # the same microbatches: the losses have the same bits
    assert found == [(2, 2, losses, []) for losses in wanted]


def test_a_run_of_another_number_keeps_its_own_and_says_so(tmp_path: Path) -> None:
    run_gloo(_saves, 2, str(tmp_path))
    (loaded, now, _, said), (*_, silent) = run_gloo(_resumes, 2, str(tmp_path), 4, True)
    assert (loaded, now) == (4, 4)
    assert said == [f"{tmp_path}: saved with 2 microbatches, this run has 4: it was made with 4"]
    assert silent == []


def _damaged(rank: int, size: int, folder: str, number: Any) -> None:
    description = Path(folder) / DESCRIPTION
    said = json.loads(description.read_text())
    said["run"]["microbatches"] = number
    dist.barrier()
    if rank == 0:
        description.write_text(json.dumps(said))
    dist.barrier()
    run = classifier(8)
    with pytest.raises(SpecError, match=r"run\.microbatches: expected two whole numbers, got"):
        run.load(folder)
    assert run.config.microbatches == 8
    run.step(*labelled(0))


@pytest.mark.parametrize("number", [2, [8], [8, True], [8, -1]])
def test_a_number_that_is_none_is_refused(number: Any, tmp_path: Path) -> None:
    run_gloo(_saves, 1, str(tmp_path))
    run_gloo(_damaged, 1, str(tmp_path), number)
