"""In bfloat16 slices lose no more than whole sequences do: losses and sums of gradients are in float32."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.slices.store import Line
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import alone, apart, batch_of, model_of, no_update, pipe_of

TOKENS, SLICES, ROWS = 64, 32, 4


def _model(dtype: torch.dtype) -> torch.nn.Module:
    """Weights that both types hold alike."""
    made: torch.nn.Module = model_of("llama", torch.float32).to(torch.bfloat16).to(dtype)
    return made


def _in_slices(rank: int, size: int, how: dict[str, Any]) -> tuple[float, dict[str, Tensor], set[torch.dtype]]:
    pipe = pipe_of(model := _model(torch.bfloat16), SLICES, make_optimizer=no_update, **how)
    seen: set[torch.dtype] = set()
    executor = pipe.stages.executor
    assert executor is not None
    losses, gradients = pipe.model.loss, Line.gradients
    pipe.model.loss = lambda b, part: (found := losses(b, part), seen.add(found.dtype))[0]  # type: ignore[method-assign]

    def noted(line: Line, start: int, stop: int) -> tuple[Tensor, ...]:
        found = gradients(line, start, stop)
        seen.update(t.dtype for t in found)
        return found

    with patch.object(Line, "gradients", noted):
        loss = pipe.step(*batch_of(tokens=TOKENS, rows=ROWS))
    return loss, {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}, seen


EXCHANGE: dict[str, Any] = {"order": "aligned", "balance": "exchange"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, EXCHANGE, {**EXCHANGE, "keep_bytes": 1 << 20}])
def test_slices_in_bf16_are_as_near_to_float32_as_the_whole(how: dict[str, Any]) -> None:
    exact, want, _ = alone(_model(torch.float32), ["plain"], make=no_update, tokens=TOKENS)
    whole, found, _ = alone(copy.deepcopy(_model(torch.bfloat16)), ["plain"], make=no_update, tokens=TOKENS)
    by_whole = {n: apart({n: g.float()}, want) for n, g in found.items()}
    results = run_gloo(_in_slices, 2, how)
    assert {n for _, grads, _ in results for n in grads} == want.keys()
    for loss, grads, types in results:
        assert types == {torch.float32}
        assert abs(loss - exact[0]) <= 2 * abs(whole[0] - exact[0]) + 1e-3 * exact[0]
        by_slices = {n: apart({n: g}, want) for n, g in grads.items()}
        mean = sum(by_slices.values()) / sum(by_whole[n] for n in by_slices)
        print("error of slices over that of the whole", mean, max(by_slices[n] / by_whole[n] for n in by_slices))
        assert mean <= 1.2
