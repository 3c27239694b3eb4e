"""Buckets of gradients over gloo: one is gathered while the next one is on its way, in both kinds of all-to-all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prophet.ranks.gradient_means import average_gradients_
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from tests.helpers.launch import on_processes

SHAPES = ((1000, 70), (33,), (500, 3, 9))


def gradient(rank: int, place: int) -> Tensor:
    return torch.randn(SHAPES[place], generator=torch.Generator().manual_seed(10 * rank + place))


def averaged(receive_first: bool) -> list[bool]:
    group = ProcessGroupCollective(timeout_s=30, receive_first=receive_first)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for place, p in enumerate(parameters):
        p.grad = gradient(group.rank, place)
    # 41 buckets
    average_gradients_(parameters, group, op=Operation("mean"), bucket_bytes=1 << 14)
    right = []
    for place, p in enumerate(parameters):
        total = gradient(0, place)
        for rank in range(1, group.size):
            total += gradient(rank, place)
        right.append(p.grad is not None and torch.equal(p.grad, total / group.size))
    return right


@pytest.mark.parametrize("receive_first", [False, True])
def test_many_buckets(receive_first: bool) -> None:
    assert on_processes(3, averaged, receive_first, timeout_s=60) == [[True] * 3] * 3
