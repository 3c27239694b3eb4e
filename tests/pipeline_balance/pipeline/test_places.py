"""Where whole tensors of a pipeline with replicas lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.pipeline.model.layers import ModuleChain
from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.move.state import Held, layout_over, without_replica
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.pipeline.run.zero1 import Owners
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


def test_rows_of_a_vocabulary_lie_in_every_column_and_a_replica_has_its_own() -> None:
    owners: Any = SimpleNamespace(updaters=lambda name, p: (2 + p,))
    words = [("w of replica 1", "parameter"), ("w#grad of replica 0", "gradient"), ("w@exp_avg", "optimizer")]
    specs = [TensorSpec(name=name, shape=(6, 2), kind=kind, layer=0) for name, kind in words]  # type: ignore[arg-type]
    layout = layout_over(
        Space(tuple(specs)), [[0, 1], [2, 3]], StageMap((0, 1, 2), (0, 1)), owners, {}, 4, cut={"w": 6}
    )
    found = {(p.name, r): (p.box.start[0], p.box.stop[0]) for r in range(4) for p in layout.on(r)}
    first, second = (0, 3), (3, 6)
    assert found == {
        ("w of replica 1", 2): first,
        ("w of replica 1", 3): second,
        ("w#grad of replica 0", 0): first,
        ("w#grad of replica 0", 1): second,
        ("w@exp_avg", 2): first,
        ("w@exp_avg", 3): second,
    }


def test_what_a_replica_has_for_itself_is_named_after_it_and_lies_there() -> None:
    """The second replica updates the weight; each one updates its part of the experts."""
    owners: Any = SimpleNamespace(
        updates=lambda name, p, replica: name == "experts" or replica == 1,
        updaters=lambda name, p: (2 + p,),
        parted=lambda name: name == "experts",
    )
    kinds = {"w": "parameter", "w#grad": "gradient", "w@sum": "optimizer", "mean": "buffer", "experts@sum": "optimizer"}
    specs = [TensorSpec(name=name, shape=(2,), kind=kind, layer=0) for name, kind in kinds.items()]  # type: ignore[arg-type]
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(kinds)}
    held = Held(specs=specs, tensors=tensors, scalars={"w@count": 3, "experts@count": 4})
    first, second = (held.of_replica(owners, 0, replica) for replica in (0, 1))
    own = ["w of replica 1", "w#grad of replica 1", "mean of replica 1", "experts@sum of replica 1"]
    assert sorted(second.tensors) == sorted([*own, "w@sum"])
    # what it keeps of another's moments is no state of the run
    assert sorted(first.tensors) == sorted(name[:-1] + "0" for name in own)
    assert (first.scalars, second.scalars) == (
        {"experts@count of replica 0": 4},
        {"w@count": 3, "experts@count of replica 1": 4},
    )
    for described in (first, second):
        assert [spec.name for spec in described.specs] == list(described.tensors)
        for name, tensor in described.tensors.items():
            assert tensor is tensors[without_replica(name)[0]]
    space = Space((*first.specs, *second.specs))
    layout = layout_over(space, [[0, 1], [2, 3]], StageMap((0, 1), (1,)), owners, {}, 4)
    assert layout.names_on(1) == set(first.tensors)
    assert layout.names_on(3) == set(second.tensors)


@pytest.mark.parametrize("zero", [0, 1])
def test_one_replica_has_no_owners(zero: int) -> None:
    owned = Ownership(ModuleChain(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss))
    stages = StageMap((0, 1), (0,))
    assert [Owners(owned, Grid.of(2, replicas), stages, zero).zero for replicas in (1, 2)] == [0, zero]
