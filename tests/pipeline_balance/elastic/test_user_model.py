"""A model of somebody's own loop is compared with what is said of it, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.user_model import UserModel
from prophet.errors import SpecError


def _net(*more: nn.Module, width: int = 3, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Linear(3, 2, bias=bias), *more)


def _live(model: nn.Module) -> UserModel:
    return UserModel(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))


@pytest.mark.parametrize(
    ("built", "text"),
    [
        (lambda: _net(bias=False), r"^1\.bias is a parameter that the model has, and build\(\) has not$"),
        (lambda: _net(nn.Linear(1, 1)), r"^2\.bias is a parameter that build\(\) has, and the model has not$"),
        (lambda: _net(width=4), r"^0\.weight is \[3, 2\] in the model and \[4, 2\] in build\(\)$"),
    ],
)
def test_another_model_than_build_makes_is_named(built: Callable[[], nn.Module], text: str) -> None:
    _live(_net()).match(_net())
    with pytest.raises(SpecError, match=text):
        _live(_net()).match(built())


@pytest.mark.parametrize(
    ("layout", "rank", "device", "text"),
    [
        ("tp2", 0, "cpu", r"tp2: no parameter is cut over the tp ranks \[0, 1\]$"),
        ("dp2,zero2", 1, "cpu", r"0\.weight: it is not cut over the dp ranks \[0, 1\]; 0\.bias"),
        ("dp1", 0, "meta", r"0\.weight: it has no memory"),
        ("dp1", 1, "cpu", r"0\.weight: rank 1 has no place, so it must be on meta"),
    ],
)
def test_a_model_in_another_layout_is_named(layout: str, rank: int, device: str, text: str) -> None:
    with pytest.raises(SpecError, match=f"the model is not in the layout .*{text}"):
        _live(_net().to(device)).compare(Parallelism.parse(layout), rank)
    _live(_net()).compare(Parallelism(), 0)


def test_a_wrapper_that_is_no_ddp_is_named() -> None:
    with pytest.raises(SpecError, match=r"^2 is a DataParallel, .* resharded: use DistributedDataParallel"):
        _live(_net(nn.DataParallel(nn.Linear(2, 2))))
