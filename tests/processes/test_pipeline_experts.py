"""Replicas of a pipeline that share experts, on real processes: what they train is what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_experts import UNITS, batch, layers, one_process, pipeline, shared_experts
from tests.helpers.pipeline_replicas import largest_difference

TOLERANCE = 1e-10


# with owners, a replica's part of the experts is nobody else's to update
@pytest.mark.parametrize(("balanced", "split", "zero"), [(False, True, 0), (True, False, 0), (True, False, 1)])
def test_two_replicas_of_two_stages_train_as_one_process(balanced: bool, split: bool, zero: int) -> None:
    expected = one_process(8)
    for got in run_gloo(shared_experts, 4, 2, 8, balanced, split, zero):
        assert largest_difference(got.losses, expected.losses) < TOLERANCE
        assert largest_difference(got.norms, expected.norms) < TOLERANCE
        assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
        assert (got.copies > 0) == balanced


def _refuse(rank: int, size: int, folder: str) -> list[str]:
    """What a pipeline that shares experts says to what it cannot do, on this rank."""
    pipe = pipeline(size, 2)
    x, y = (t.chunk(2)[pipe.replica] for t in batch(0))
    pipe.step(x, y)
    told: list[str] = []

    def refused(call: Any) -> None:
        with pytest.raises(SpecError) as caught:
            call()
        told.append(str(caught.value))

    refused(lambda: pipe.rebuild(StageMap((0, 2, UNITS), (0, 1))))
    refused(pipe.state_dict)
    refused(lambda: pipe.save(folder, step=1))
    rows = 10 if pipe.replica else 5
    refused(lambda: pipe.evaluate(x[:rows], y[:rows]))
    pipe.step(x, y)
    moe = layers(pipe.collective)  # shared by all processes, not by those of a stage
    refused(
        lambda: type(pipe).from_modules(moe, nn.functional.mse_loss, make_optimizer=_sgd, microbatches=2, replicas=2)
    )
    return told


def _sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_what_cannot_be_done_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for move, state, saved, evaluate, group in run_gloo(_refuse, 4, str(tmp_path)):
        assert "cannot move layers while the replicas of layers [1, 4] share their experts" in move
        assert "cannot gather or save a model while the replicas of layers [1, 4] share" in state
        assert "cannot save or load a checkpoint while the replicas of layers [1, 4] share" in saved
        assert not list(tmp_path.iterdir())
        assert (
            evaluate == "ranks [2, 3] would run the stages that share experts in another order, or on other "
            "microbatches, than rank 0"
        )
        assert "layer 1 () shares its experts over processes [0, 1, 2, 3], but the replicas of its stage are" in group
