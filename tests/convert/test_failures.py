"""A rank that fails while it converts, as for lack of memory: every rank has an error, and the model that it had."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch

import prophet
from prophet.convert.optimizer import Carried
from prophet.convert.trials.verify import Trial
from prophet.errors import ConversionError, OutOfStep
from prophet.ranks.collective import Collective
from tests.helpers.expert_lists import DeepseekV3MoE, Net, net_loss
from tests.helpers.moe_models import batches
from tests.helpers.support import on_threads

convert: Any = importlib.import_module("prophet.convert")  # whose name in `prophet` is the function's
FULL = "not enough memory: you tried to allocate a lot"


def failing(inner: Any, at: int) -> Any:
    """Stands for `inner`, and fails on rank 1, at its call number `at` there."""
    calls: list[int] = []

    def call(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rank-1":
            calls.append(1)
            if len(calls) == at:
                raise MemoryError(FULL)
        return inner(*args, **options)

    return call


def in_checking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(convert, "check_by_trying", failing(convert.check_by_trying, 1))


def in_a_first_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "__init__", failing(Trial.__init__, 2))


def in_replacing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(convert, "replace", failing(convert.replace, 2))


def in_an_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "_answer", failing(Trial._answer, 4))  # the second block's second


def in_moving_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Carried, "moved", failing(Carried.moved, 2))


@pytest.mark.parametrize(
    "where", [in_checking, in_a_first_answer, in_replacing, in_an_answer, in_moving_states], ids=lambda f: f.__name__
)
def test_a_rank_that_fails_leaves_all_ranks_what_they_had(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Net(DeepseekV3MoE) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        net_loss(model, batches(1)[0])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [{n: t.clone() for n, t in model.state_dict().items()} for model in models]
    kinds = [[type(m) for m in model.modules()] for model in models]
    held = [{id(p) for p in optimizer.param_groups[0]["params"]} for optimizer in optimizers]

    def body(group: Collective) -> Exception:
        with pytest.raises((ConversionError, MemoryError, OutOfStep)) as caught:
            prophet.convert(models[group.rank], optimizer=optimizers[group.rank], group=group)
        return caught.value

    with monkeypatch.context() as patch:
        where(patch)
        errors = on_threads(2, body)
    assert FULL in str(errors[1])
    assert "rank(s) [1]" in str(errors[0])
    for rank, model in enumerate(models):
        assert [type(m) for m in model.modules()] == kinds[rank]
        state = model.state_dict()
        assert state.keys() == states[rank].keys()
        assert all(torch.equal(state[n], t) for n, t in states[rank].items())
        assert {id(p) for p in model.parameters()} == held[rank] == {id(p) for p in optimizers[rank].state}

    def again(group: Collective) -> int:
        return len(prophet.convert(models[group.rank], optimizer=optimizers[group.rank], group=group).replaced)

    assert on_threads(2, again) == [2, 2]
