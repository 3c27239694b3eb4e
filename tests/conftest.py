"""For all tests: gradients of replicas said to be zero are checked; garbage is looked for among what is new."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor

from prophet.experts.replica import ReplicaPool
from prophet.ranks.launch import PRELOADED
from tests.helpers import unmeasured  # noqa: F401

PRELOADED[:] = ["tests.helpers.warm_ranks"]  # before the first process is forked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # the longest tests first: none is left for one process alone at the end
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: every full collection would look through all of it


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _gradients_said_to_be_zero_are(monkeypatch: pytest.MonkeyPatch) -> None:
    give = ReplicaPool.give

    def checked(pool: ReplicaPool, params: Tensor, grads: Tensor, *, zeroed: bool = False) -> None:
        assert not (zeroed and grads.any())
        give(pool, params, grads, zeroed=zeroed)

    monkeypatch.setattr(ReplicaPool, "give", checked)
