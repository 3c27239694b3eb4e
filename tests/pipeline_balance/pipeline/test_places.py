"""Where whole tensors of a pipeline with replicas lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline_balance.pipeline.move.pipeline_state import layout_over
from pipeline_balance.spec import StageMap
from prophet.state.space import Space, TensorSpec

SPACE = Space(
    (
        TensorSpec(name="w", shape=(2,), layer=0),
        TensorSpec(name="w@exp_avg", shape=(2,), kind="optimizer", layer=0),
        TensorSpec(name="mean", shape=(2,), kind="buffer", layer=1),
        TensorSpec(name="tied", shape=(2,), layer=0),
    )
)


@pytest.mark.parametrize("first", [False, True])
def test_each_kind_lies_where_it_is_used(first: bool) -> None:
    """Two replicas of two stages; the second replica updates all parameters, and a tied one is in both stages."""
    owners: Any = SimpleNamespace(updaters=lambda name, p: (2 + p,))
    stages = StageMap((0, 1, 2), (0, 1))
    layout = layout_over(SPACE, [[0, 1], [2, 3]], stages, owners, {"tied": (0, 1)}, 4, first=first)
    found = {t.name: [r for r in range(4) if any(p.name == t.name for p in layout.on(r))] for t in SPACE.tensors}
    assert found == {"w": [0, 2], "w@exp_avg": [2], "mean": [1] if first else [1, 3], "tied": [0, 1, 2, 3]}
