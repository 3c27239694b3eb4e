"""Updates of several calls, layers that change in between, and replicas: right, or a named error on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo

DIM = 4


class _Layer(nn.Module):
    """Leaves itself out by Python's random numbers, or where it is told to; `beside` is put in later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM).double()
        self.odds, self.beside = 0.0, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.beside(x if random.random() < self.odds else self.linear(x))
        return out


def _pipe(*, tied: bool = False, stage_map: StageMap | None = None, **options: Any) -> ElasticPipeline:
    torch.manual_seed(0)
    layers: list[Any] = [_Layer() for _ in range(4)]
    if tied:
        layers[3].linear.weight = layers[0].linear.weight
    given = {"make_optimizer": lambda named: torch.optim.Adam([p for _, p in named], lr=0.01), "timeout_s": 30.0}
    return ElasticPipeline.from_modules(
        nn.Sequential(*layers), nn.functional.mse_loss, stage_map, microbatches=2, **{**given, **options}
    )


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, DIM, generator=generator, dtype=torch.float64)
    return x, y


def _refused(call: Callable[[], Any]) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


def _loops(rank: int, size: int) -> dict[str, Any]:
    said = {}
    pipe = _pipe()
    plain = [pipe.step(*_batch(0)), pipe.step(*_batch(1))]
    # given up, and then as if it had not been
    pipe = _pipe()
    found = [pipe.step(*_batch(0))]
    pipe.step(*_batch(9), update=False)
    pipe.optimizer.zero_grad()
    said["zeroed"] = _refused(lambda: pipe.step(*_batch(1)))
    pipe.drop_gradients()
    found.append(pipe.step(*_batch(1)))
    assert found == plain
    pipe.step(*_batch(2), update=False)
    pipe.layers[min(pipe.layers)].requires_grad_(True)
    pipe.module[0].requires_grad_(False)  # type: ignore[index]
    said["frozen"] = _refused(lambda: pipe.step(*_batch(3)))
    pipe.module[0].requires_grad_(True)  # type: ignore[index]
    pipe.step(*_batch(3))
    # a rate, or a map, that only one rank has
    pipe.optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
    said["rate"] = _refused(lambda: pipe.step(*_batch(4)))
    pipe.optimizer.param_groups[0]["lr"] = 0.01
    said["map"] = _refused(lambda: pipe.rebuild(StageMap((0, 1 + rank, 4), (0, 1))))
    said["no map"] = _refused(lambda: pipe.rebuild(StageMap((0, 1, 4 - rank), (0, 1))))
    said["nowhere"] = _refused(lambda: pipe.state_dict(rank=2))
    # a layer that is taken out of the model is out of it
    last = _batch(5)
    before = pipe.evaluate(*last)
    pipe.module[1] = nn.Identity()  # type: ignore[index, operator]
    assert pipe.evaluate(*last) != before
    tied = _pipe(tied=True, stage_map=StageMap((0, 4), (0,)))
    tied.step(*_batch(0), update=False)
    said["tied"] = _refused(lambda: tied.rebuild(StageMap((0, 2, 4), (0, 1))))
    return said


def test_updates_and_changes_are_right_or_refused_on_all_ranks() -> None:
    results = run_gloo(_loops, 2)
    assert results[0] == results[1]
    for key, words in {
        "zeroed": "gradients of the update under way are gone",
        "frozen": "in mid-update",
        "rate": "ranks [1] have other options",
        "map": "ranks [1] were given another stage map",
        "no map": "rank 1: the stage map is of 3 layers",
        "nowhere": "rank 2 of 2",
        "tied": "tied parameters have parts of a gradient",
    }.items():
        assert words in results[0][key]


def _python_draws(rank: int, size: int, moves: bool) -> list[float]:
    pipe = _pipe()
    for layer in pipe.module.children():
        layer.odds = 0.5  # type: ignore[assignment]
    random.seed(rank)
    losses = []
    for update in range(6):
        if moves and update % 2:
            pipe.rebuild(StageMap((0, update % 3 + 1, 4), (1, 0)))
        losses.append(pipe.step(*_batch(update)))
    return losses


def test_pythons_random_numbers_do_not_notice_moves() -> None:
    assert run_gloo(_python_draws, 2, True) == run_gloo(_python_draws, 2, False)


def _replicas(rank: int, size: int) -> dict[str, float]:
    pipe = _pipe(replicas=2)
    pipe.step(*_batch(pipe.replica))
    # put in on every rank, but drawn apart
    torch.manual_seed(100 + rank)
    made = []
    for layer in pipe.module.children():
        layer.beside = nn.Linear(DIM, DIM, device=layer.linear.weight.device).double()  # type: ignore[union-attr, arg-type]
        made += list(layer.beside.parameters())
    pipe.optimizer.add_param_group({"params": made})
    # a layer that only one replica has used so far moves in mid-update
    pipe.module[2].odds = float(pipe.replica)  # type: ignore[index, union-attr]
    pipe.step(*_batch(2 + pipe.replica), update=False)
    pipe.rebuild(StageMap((0, 3, 4), (1, 0)))
    pipe.step(*_batch(4 + pipe.replica))
    said = _refused(lambda: pipe.rebuild(StageMap((0, 1 + pipe.replica, 4), (0, 1))))
    assert "ranks [2, 3] were given another stage map" in said
    return {n: float(p.sum()) for n, p in pipe.module.named_parameters() if not p.is_meta}


def test_replicas_stay_equal_when_layers_are_added_and_move() -> None:
    results = run_gloo(_replicas, 4)
    assert results[:2] == results[2:]
