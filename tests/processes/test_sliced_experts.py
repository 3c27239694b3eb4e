"""Experts and replicas inside the stages of a pipeline over slices, on real processes: as one process trains."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline_balance.schedules.sliced import slice_starts
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_experts import MOE, SLICES, TOP_K, one_process, trained
from tests.helpers.sliced_models import apart

UPDATES = 4


@pytest.mark.parametrize(
    ("balanced", "balance"),
    [
        (True, "none"),
        pytest.param(False, "none", marks=pytest.mark.slow),
        pytest.param(True, "uneven", marks=pytest.mark.slow),
    ],
)
def test_replicas_that_share_experts_train_as_one_process(balanced: bool, balance: Any) -> None:
    starts = slice_starts(own.TOKENS, SLICES, 4 if balance == "uneven" else None)
    losses, weights = one_process(UPDATES, starts)
    results = run_gloo(trained, 4, SLICES, balanced, balance, UPDATES, timeout_s=180.0)
    for rank, got in enumerate(results):
        assert got.losses == pytest.approx(losses, rel=1e-10)
        assert apart(got.weights, weights) <= 1e-8  # Adam divides by what may be nearly zero
        # dispatch and combine of every unit, forward and backward: slices make them as many times as many
        microbatches = own.PARTS // 2
        assert got.all_to_alls == 4 * microbatches * SLICES
        if balanced:
            assert got.copies > 0
            tokens = own.PARTS * own.ROWS * own.TOKENS
            held = sum(unit in MOE for unit in ((0, 1, 2), (3, 4, 5))[rank % 2])
            assert got.choices == [tokens * TOP_K * held] * UPDATES  # of all slices of all microbatches
