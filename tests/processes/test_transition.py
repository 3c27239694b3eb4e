"""Transitions between real processes: bit exact for odd and even group sizes, and a named error when one dies."""

from __future__ import annotations

import os

import numpy as np
import pytest

from prophet.errors import TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.state.route import route
from prophet.state.transition import transition, transition_naive
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_support import (
    missing_bytes,
    random_layout,
    random_space,
    random_values,
    same_bits,
    states_of,
)

ROUNDS = 12


def _move(rank: int, size: int) -> tuple[int, int]:
    collective = ProcessGroupCollective(timeout_s=30.0)
    sent = expected = 0
    for seed in range(ROUNDS):
        rng = np.random.default_rng(1000 * size + seed)
        space = random_space(rng)
        before = random_layout(rng, space, size, complete=True)
        after = random_layout(rng, space, size, complete=False)
        states = states_of(before, {t.name: random_values(rng, t) for t in space.tensors})
        moved = transition(
            route(before, after),
            states[rank],
            collective,
            budget_bytes=int(rng.integers(64, 3000)) + rank,
            chunk_bytes=64 + rank,
        )
        for piece, tensor in moved.state.items():
            assert same_bits(tensor, transition_naive(states, after)[rank][piece])
        sent += moved.sent_bytes
        expected += missing_bytes(before, after)
    return sent, expected


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bit_exact_over_gloo(size: int) -> None:
    results = run_gloo(_move, size)
    assert sum(sent for sent, _ in results) == results[0][1] > 0


class _DiesAtSecondRound:
    """A collective whose process is gone when the second round begins."""

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.exchanges = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def exchange(self, *args: object, **options: object) -> object:
        self.exchanges += 1
        if self.exchanges == 2:
            os._exit(1)
        return self.inner.exchange(*args, **options)  # type: ignore[arg-type]


def _lose_one(rank: int, size: int) -> str:
    rng = np.random.default_rng(7)
    space = random_space(rng, max_tensors=2)
    every = [(t.name, t.box) for t in space.tensors]
    from prophet.state.layout import layout_from

    before = layout_from(space, size, {0: every})
    after = layout_from(space, size, dict.fromkeys(range(1, size), every))
    states = states_of(before, {t.name: random_values(rng, t) for t in space.tensors})
    kept = {p: t.clone() for p, t in states[rank].items()}
    collective: Collective = ProcessGroupCollective(timeout_s=5.0)
    if rank == size - 1:
        collective = _DiesAtSecondRound(collective)  # type: ignore[assignment]
    try:
        transition(route(before, after), states[rank], collective, budget_bytes=64)
    except TransitionError as error:
        assert all(same_bits(states[rank][p], t) for p, t in kept.items())
        return str(error)
    return "moved"


def test_a_process_that_dies_is_a_named_error() -> None:
    answers = run_gloo(_lose_one, 3, silent=frozenset({2}))
    assert "of a transition failed" in answers[0]
    assert "the state from before the move is whole" in answers[0]
