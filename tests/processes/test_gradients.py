"""Invariant 1 on real gloo processes: two communicators, asynchronous transfers, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.launch import on_processes
from tests.helpers.training import Case, Step, compare, expected, train_in_process

SHAPES = ((3,), (0,), (2,), (5,), (1,), (2,), (4,), (3,))


def cases(ranks: int) -> list[Case]:
    """Some of everything: threads draw it all at random, here it need only cross process boundaries."""
    shapes = SHAPES[:ranks]
    nested = tuple((2, *s) for s in shapes)
    aux: dict[str, Any] = {"aux_loss": "gshard", "aux_loss_weight": 0.3, "z_loss_weight": 0.2}
    return [
        Case(ranks=ranks, top_k=1, experts_per_rank=1, shapes=shapes, seed=1),
        Case(ranks=ranks, top_k=2, experts_per_rank=2, activation="swiglu", bias=False, shapes=nested, seed=2),
        Case(ranks=ranks, top_k=2, favourites=(0, 1), shapes=nested, gate=aux, density=1.0, slots=32, seed=3),
        Case(
            ranks=ranks,
            top_k=2,
            experts_per_rank=4,
            schedule="blocking",
            gate={"score": "sigmoid", "normalize": False, "aux_loss": "switch"},
            shapes=shapes,
            microbatches=2,
            seed=4,
        ),
    ]


def several(cases: list[Case]) -> list[list[Step]]:
    return [train_in_process(case) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gradients_equal_the_oracle(ranks: int) -> None:
    todo = cases(ranks) if ranks < 8 else cases(ranks)[2:3]
    by_rank = on_processes(ranks, several, todo, timeout_s=90)
    for i, case in enumerate(todo):
        compare(expected(case), [results[i] for results in by_rank])
