"""Transitions between real processes: bit exact for odd and even group sizes, and a named error when one dies."""

from __future__ import annotations

import os

import numpy as np
import pytest

from prophet.errors import TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.state.layout import layout_from
from prophet.state.route import route
from prophet.state.space import Space, TensorSpec
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
        values = {t.name: random_values(rng, t) for t in space.tensors}
        states = states_of(before, values)
        moved = transition(
            route(before, after),
            states_of(before, values)[rank],
            collective,
            budget_bytes=int(rng.integers(400, 3000)) + rank + (seed % 2 << 16),
            chunk_bytes=64 + rank,
            mode="in-place" if seed % 2 else "safe",
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


def _spread(rank: int, size: int) -> tuple[int, int, bool]:
    """Rank 0 holds all, and every rank gets it: in place, so that what was there before goes."""
    collective = ProcessGroupCollective(timeout_s=30.0)
    rng = np.random.default_rng(3)
    space = Space(tuple(TensorSpec(name=f"t{i}", shape=(97, 13 + i), dtype="float64") for i in range(5)))
    every = [(t.name, t.box) for t in space.tensors]
    before = layout_from(space, size, {0: every})
    after = layout_from(space, size, dict.fromkeys(range(size), every))
    values = {t.name: random_values(rng, t) for t in space.tensors}
    moved = transition(
        route(before, after),
        states_of(before, values)[rank],
        collective,
        budget_bytes=1 << 20,
        chunk_bytes=512,
        mode="in-place",
    )
    right = all(same_bits(tensor, values[piece.name]) for piece, tensor in moved.state.items())
    return moved.sent_bytes, int(after.table.rank_bytes()[0]), right and len(moved.state) == 5


def test_a_state_that_one_process_holds_leaves_it_once() -> None:
    results = run_gloo(_spread, 4)
    for sent, held, right in results:
        assert right
        assert sent <= 1.02 * held
    assert sum(sent for sent, _, _ in results) == 3 * results[0][1]


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
