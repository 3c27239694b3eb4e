"""Another number of ranks through a checkpoint: 3 -> 2 -> 4, each time with processes that start from nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline_balance.pipeline.move.files import read_checkpoint
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.state.checkpoint.folder import DESCRIPTION
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import LAYERS, TOLERANCE, batch, pipeline, plain_losses

STEPS = 5


def _spread(ranks: int) -> StageMap:
    return StageMap.contiguous([k * LAYERS // ranks for k in range(ranks + 1)])


def _train(rank: int, size: int, folder: str, following: int) -> list[float]:
    path = Path(folder)
    first = 0
    if (path / DESCRIPTION).exists():
        run = pipeline(read_checkpoint(path).stage_map)
        first = run.load(path).step
    else:
        run = pipeline(_spread(size))
    losses = [run.step(*batch(step)) for step in range(first, first + STEPS)]
    run.save(path, step=first + STEPS, stage_map=_spread(following))
    # saving changes nothing
    losses.append(run.step(*batch(first + STEPS)))
    return losses


def test_three_two_four(tmp_path: Path) -> None:
    losses: list[float] = []
    for size, following in ((3, 2), (2, 4), (4, 1)):
        rows = run_gloo(_train, size, str(tmp_path), following)
        got = rows[0]
        assert all(row == got for row in rows)
        if losses:
            assert losses.pop() == pytest.approx(got[0], rel=TOLERANCE)
        losses += got
    assert losses == pytest.approx(plain_losses(3 * STEPS + 1)[0], rel=TOLERANCE)
    assert read_checkpoint(tmp_path).stage_map == _spread(1)


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="expected a finished checkpoint"):
        read_checkpoint(tmp_path)
    (tmp_path / DESCRIPTION).write_text("[]")
    with pytest.raises(SpecError, match=r"written by pipe\.save or job\.save"):
        read_checkpoint(tmp_path)
    (tmp_path / DESCRIPTION).write_text(json.dumps({"step": 1, "boundaries": [0, 0], "ranks": [0]}))
    with pytest.raises(SpecError, match="stage 0 is empty"):
        read_checkpoint(tmp_path)


def _noted(rank: int, size: int, folder: str) -> str:
    run = pipeline(_spread(size))
    run.step(*batch(0))
    for entries in run.optimizer.state.values():
        entries["note"] = ["no tensor, and no number"]
    with pytest.raises(SpecError, match="optimizer state 'note' is a list, cannot be moved"):
        run.save(Path(folder))
    return "whole" if run.state_dict() or rank else "empty"


def test_what_an_optimizer_keeps_is_no_part_of_the_state_dict(tmp_path: Path) -> None:
    assert run_gloo(_noted, 2, str(tmp_path)) == ["whole"] * 2


def _taken(rank: int, size: int) -> bool:
    run = pipeline(_spread(size))
    run.step(*batch(0))
    state = run.state_dict()
    then = {name: t.clone() for name, t in state.items()}
    run.step(*batch(1))
    return all(torch.equal(t, then[name]) for name, t in state.items())


def test_a_state_dict_that_was_taken_does_not_train_on() -> None:
    assert run_gloo(_taken, 2) == [True] * 2


def _other_model(rank: int, size: int, folder: str) -> str:
    run = pipeline(_spread(size))
    run.save(Path(folder), step=0)
    description = Path(folder) / DESCRIPTION
    said = json.loads(description.read_text())
    said["tensors"] = [[n, [3], *rest] if n == "0.table.weight" else [n, s, *rest] for n, s, *rest in said["tensors"]]
    description.write_text(json.dumps(said))
    before = run.step(*batch(0))
    with pytest.raises(
        SpecError, match=r"the model needs 0.table.weight of shape \[11, 12\], the checkpoint has \[3\]"
    ):
        run.load(Path(folder))
    assert run.step(*batch(1)) is not None
    return "refused" if before is not None else ""


def test_another_model_is_refused(tmp_path: Path) -> None:
    assert run_gloo(_other_model, 1, str(tmp_path)) == ["refused"]


def _numbers(pipe: ElasticPipeline) -> dict[str, tuple[str, float]]:
    """What the optimizer of this rank has in single numbers, by name, with their types."""
    return {
        f"{name}@{field}": (str(value.dtype), value.item())
        for name, p in pipe.module.named_parameters()
        for field, value in pipe.optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    }


def _in_half_precision(rank: int, size: int, folder: str, name: str) -> list[dict[str, tuple[str, float]]]:
    def made() -> ElasticPipeline:
        torch.manual_seed(0)
        return ElasticPipeline.from_modules(
            [nn.Linear(6, 6).bfloat16() for _ in range(4)],
            nn.functional.mse_loss,
            StageMap.contiguous((0, 2, 4)),
            make_optimizer=lambda named: getattr(torch.optim, name)(named, lr=0.01),
            microbatches=2,
            timeout_s=30.0,
        )

    pipe, x = made(), torch.ones(4, 6).bfloat16()
    for _ in range(3):
        pipe.step(x, x)
    found = [_numbers(pipe)]
    pipe.rebuild(StageMap.contiguous((0, 1, 4)))
    found.append(_numbers(pipe))
    pipe.save(folder)
    again = made()
    again.load(folder)
    return [*found, _numbers(again)]


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_an_optimizers_numbers_keep_their_bits_in_half_precision(name: str, tmp_path: Path) -> None:
    """torch's own `load_state_dict` rounds all but the step to the type of the parameters."""
    both = zip(*run_gloo(_in_half_precision, 2, str(tmp_path), name), strict=True)
    first, moved, loaded = (here | there for here, there in both)
    assert first == moved == loaded
    assert any(torch.tensor(value).bfloat16().item() != value for _, value in first.values())
    assert {dtype for dtype, _ in first.values()} == {"torch.float32"}
