"""Invariant 1 on real gloo processes: two communicators, asynchronous transfers, the same gradients."""

from __future__ import annotations

import pytest

from tests.helpers.launch import on_processes
from tests.helpers.training import Case, Step, compare, expected, train_in_process, varied_cases


def several(cases: list[Case]) -> list[list[Step]]:
    return [train_in_process(case) for case in cases]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4, 8])
def test_gradients_equal_the_oracle(ranks: int) -> None:
    todo = varied_cases(ranks) if ranks < 8 else varied_cases(ranks)[2:3]
    by_rank = on_processes(ranks, several, todo, timeout_s=90)
    for i, case in enumerate(todo):
        compare(expected(case), [results[i] for results in by_rank])
