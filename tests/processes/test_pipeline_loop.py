"""Ordinary loops while layers move: schedulers, groups, clipping, accumulation, ties, fourteen optimizers."""

from __future__ import annotations

import pytest

from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_loop import EXACT, LOOPS, alone, piped

BROAD = ["step", "cosine, groups", "one cycle, clip", "plateau, accumulated, clip", "recomputed", "tied", "fused"]


def _train(rank: int, size: int, names: list[str], updates: int, every: int) -> dict[str, list[float]]:
    return {name: piped(LOOPS[name], updates, size, every=every) for name in names}


def _compare(size: int, names: list[str], updates: int, every: int) -> None:
    results = run_gloo(_train, size, names, updates, every)
    assert all(r == results[0] for r in results)
    for name in names:
        expected = alone(LOOPS[name], updates)
        assert results[0][name] == pytest.approx(expected, rel=EXACT), name
        assert expected[-1] != expected[0]


def test_loops_do_not_notice_moves() -> None:
    _compare(2, [*BROAD, "two optimizers", "Adagrad", "Adafactor"], 5, 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_fifty_updates_of_every_loop(size: int) -> None:
    _compare(size, list(LOOPS), 50, 5)
