"""Invariant 1 on real gloo processes: two communicators, asynchronous transfers, the same gradients."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("variant", [{"refetch": True, "microbatches": 2}, {"uses": 2, "schedule": "look-ahead"}])
def test_all_cards_of_two_hosts_send(variant: dict[str, object]) -> None:
    """Two nodes of four ranks, each with a card of its own: most experts with copies go over relays."""
    shapes = tuple((2 + r % 3,) for r in range(8))
    case = Case(ranks=8, shapes=shapes, ranks_per_node=4, own_cards=True, transfers="spread", steps=2, density=0.5,
                slots=8, seed=5)  # fmt: skip
    case = replace(case, **variant)  # type: ignore[arg-type]
    by_rank = on_processes(8, train_in_process, case, timeout_s=90)
    compare(expected(case), by_rank)
