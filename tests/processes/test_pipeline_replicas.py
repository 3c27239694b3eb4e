"""Replicas of a pipeline on real processes: what they train is what one process trains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_replicas import Outcome, largest_difference, one_process, replicated

TOLERANCE = 1e-10


def compare(results: list[Outcome], first: int, updates: int) -> None:
    expected = one_process(updates)
    for got in results:
        assert largest_difference(got.losses, expected.losses[first:]) < TOLERANCE
        assert largest_difference(got.norms, expected.norms[first:]) < TOLERANCE
        assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
        assert got[:3] == results[0][:3]
    weights = results[0].weights
    expected_names = {*expected.weights, "5.weight"}  # a state dict has a tied weight under both names
    assert weights.keys() == expected_names
    for name, total in expected.weights.items():
        assert weights[name] == pytest.approx(total, rel=1e-9, abs=1e-10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], str]:
    folder = str(tmp_path_factory.mktemp("replicas") / "checkpoint")
    return run_gloo(replicated, 4, 2, 0, 10, folder, {}), folder


def test_two_replicas_of_two_stages_train_as_one_process(saved: tuple[list[Outcome], str]) -> None:
    compare(saved[0], 0, 10)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 4)])
def test_another_grid_goes_on_where_this_one_ended(saved: tuple[list[Outcome], str], ranks: int, replicas: int) -> None:
    compare(run_gloo(replicated, ranks, replicas, 10, 14, saved[1], {}), 10, 14)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_four_replicas_of_two_stages_train_as_one_process(split: bool) -> None:
    options: dict[str, Any] = {"split_backward": split}
    compare(run_gloo(replicated, 8, 4, 0, 50, "", options, timeout_s=280.0), 0, 50)
