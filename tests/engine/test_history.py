"""Routing history: bounded memory, integer predictions, similarity between steps."""

from __future__ import annotations

import numpy as np
import pytest

from prophet.engine.history import History, expert_shares, similarity
from prophet.errors import SpecError


def test_last_repeats_the_newest_step() -> None:
    history = History(2, 3, window=2)
    assert history.predict().tolist() == [[0, 0, 0], [0, 0, 0]]
    for step in range(5):
        history.observe(np.full((2, 3), step))
    assert history.predict().tolist() == np.full((2, 3), 4).tolist()
    assert history.predict().dtype == np.int64
    assert history.observed == 5
    assert history.predict("mean").tolist() == np.full((2, 3), 4).tolist(), "of 3 and 4, rounded: the rest is forgotten"


def test_ema_agrees_with_the_naive_moving_average() -> None:
    rng = np.random.default_rng(0)
    history = History(4, 8)
    naive = np.zeros((4, 8))
    for t in range(50):
        load = rng.integers(0, 5000, (4, 8))
        history.observe(load)
        naive = load.astype(float) if t == 0 else naive + (load - naive) * 0.25
        assert np.abs(history.predict("ema") - naive).max() <= 0.5 + 0.01
    assert history.predict("ema").dtype == np.int64


def test_ema_of_a_constant_is_the_constant_and_never_negative() -> None:
    history = History(1, 2)
    for _ in range(1000):
        history.observe(np.array([[7, 0]]))
    assert history.predict("ema").tolist() == [[7, 0]]
    for _ in range(5000):
        history.observe(np.array([[0, 1]]))
        assert history.predict("ema").min() >= 0
    assert history.predict("ema").tolist() == [[0, 1]]


def test_memory_does_not_grow() -> None:
    history = History(4, 8, window=4)
    before = {name: value.nbytes for name, value in history.arrays().items()}
    for _ in range(100):
        history.observe(np.ones((4, 8), np.int64))
    assert {name: value.nbytes for name, value in history.arrays().items()} == before
    assert history.observed == 100


def test_a_prediction_is_a_copy() -> None:
    history = History(1, 1)
    history.observe(np.array([[3]]))
    for mode in ("last", "ema"):
        history.predict(mode)[0, 0] = 99  # type: ignore[arg-type]
        assert history.predict(mode)[0, 0] == 3  # type: ignore[arg-type]


def test_similarity_by_hand() -> None:
    assert similarity(np.array([1, 0]), np.array([0, 5])) == 0.0
    assert similarity(np.array([1, 1]), np.array([50, 50])) == 1.0
    assert similarity(np.array([3, 1]), np.array([1, 1])) == pytest.approx(0.75)
    # Only the experts' totals count, not which rank routed them.
    assert similarity(np.array([[2, 0], [0, 2]]), np.array([[0, 2], [2, 0]])) == 1.0


def test_no_tokens_are_even_shares() -> None:
    assert expert_shares(np.zeros((2, 4), np.int64)).tolist() == [0.25] * 4
    assert similarity(np.zeros(4, np.int64), np.ones(4, np.int64)) == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: h.observe(np.ones((3, 2), np.int64)), r"shape \[2, 3\], got \[3, 2\]"),
        (lambda h: h.observe(-np.ones((2, 3), np.int64)), "not be negative"),
        (lambda h: h.observe(np.ones((2, 3))), "integers"),
        (lambda h: h.observe(np.full((2, 3), 1 << 31)), "below 2"),
        (lambda h: h.predict("median"), "'mean', 'best', got 'median'"),
        (lambda h: similarity(np.ones(3), np.ones(4)), "same number of experts"),
        (lambda h: similarity(np.ones(()), np.ones(())), "experts as its last dimension"),
        (lambda h: History(0, 1), "ranks must be at least 1"),
    ],
)
def test_errors(call: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        call(History(2, 3))  # type: ignore[operator]


def test_the_mean_is_of_the_kept_steps() -> None:
    history = History(1, 2, window=3)
    for first in (1, 2, 3, 9):
        history.observe(np.array([[first, 0]]))
    assert history.predict("mean").tolist() == [[5, 0]]  # (2 + 3 + 9) / 3, rounded
    assert History(1, 2).predict("mean").tolist() == [[0, 0]]


def test_the_best_forecaster_is_the_one_that_was_right() -> None:
    """A steady trend is foretold best by the last step, noise around a mean by an average; the choice changes."""
    rng = np.random.default_rng(0)
    trend = [np.array([[10_000 - 300 * t, 300 * t]]) for t in range(30)]
    noise = [rng.multinomial(40, [0.3, 0.7], size=1) for _ in range(60)]
    history = History(1, 2, adaptive=True)
    for load in trend:
        history.observe(load)
    np.testing.assert_array_equal(history.predict("best"), trend[-1])
    history = History(1, 2, adaptive=True)
    slow = noise[0].astype(float)
    for load in noise:
        history.observe(load)
        slow += (load - slow) / 8
    best = history.predict("best")
    assert any(np.abs(best - average).max() <= 0.51 for average in (history.predict("mean"), slow))


def test_the_best_must_be_asked_for_beforehand() -> None:
    with pytest.raises(SpecError, match=r"'best' needs History\(adaptive=True\)"):
        History(1, 2).predict("best")
    with pytest.raises(SpecError, match="mode must be one of 'last', 'ema', 'mean', 'best', got 'oracle'"):
        History(1, 2).forecast(np.array([[1, 2]]), "oracle")  # type: ignore[arg-type]
