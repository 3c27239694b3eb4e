"""Experts and replicas inside the stages of a pipeline over slices, on real processes: as one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="one of the models is transformers'")

import prophet
import prophet.parallel
from pipeline_balance.schedules.sliced import slice_starts
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_experts import MOE, SLICES, TOP_K, one_process, trained
from tests.helpers.sliced_models import alone, apart, batch_of, model_of, no_update, pipe_of

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


def _mixtral(rank: int, size: int) -> tuple[float, dict[str, Tensor]]:
    """A converted Mixtral, whose experts the two replicas share."""
    model = model_of("mixtral", torch.float32, output_router_logits=False)
    prophet.convert(model, group=prophet.parallel.expert_groups(size // 2, timeout_s=60.0)[1])
    pipe = pipe_of(model, 4, balance="uneven", make_optimizer=no_update, microbatches=1, replicas=2)
    inputs, labels = batch_of("packed", tokens=19)
    mine = {n: t.chunk(2)[pipe.replica] for n, t in inputs.items()}
    loss = pipe.step(mine, labels.chunk(2)[pipe.replica])
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}
    return loss, grads


@pytest.mark.slow
def test_a_converted_mixtral_trains_as_the_model_does() -> None:
    model = model_of("mixtral", torch.float32, output_router_logits=False)
    losses, want, _ = alone(model, ["packed"], make=no_update, tokens=19)
    for loss, grads in run_gloo(_mixtral, 4):
        assert loss == pytest.approx(losses[0], rel=1e-5)
        shared = {n: g for n, g in grads.items() if n in want and g.shape == want[n].shape}
        assert any("self_attn" in n for n in shared)
        assert apart(shared, want) <= 1e-4
