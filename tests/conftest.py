"""For all tests: gradients of replicas that are said to be zero are checked."""

from __future__ import annotations

import pytest
from torch import Tensor

from prophet.experts.replica import ReplicaPool


@pytest.fixture(autouse=True)
def _gradients_said_to_be_zero_are(monkeypatch: pytest.MonkeyPatch) -> None:
    give = ReplicaPool.give

    def checked(pool: ReplicaPool, params: Tensor, grads: Tensor, *, zeroed: bool = False) -> None:
        assert not (zeroed and grads.any())
        give(pool, params, grads, zeroed=zeroed)

    monkeypatch.setattr(ReplicaPool, "give", checked)
