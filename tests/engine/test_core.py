"""Ranks whose planner has no compiled core, or another one."""

from __future__ import annotations

import threading
import warnings

import pytest

from prophet.errors import ConfigMismatch
from prophet.planner import core
from prophet.ranks.collective import Collective
from prophet.spec import Topology
from tests.helpers.support import FixedPlanner, on_threads
from tests.helpers.training import Case, Run

CASE = Case(ranks=2, shapes=((4,), (4,)), steps=2)


def attached(group: Collective) -> str:
    run = Run(CASE, group, planner="prophet", topology=Topology.uniform(2))
    for s in range(CASE.steps):
        run.whole_step(s)
    run.close()
    return run.engine.planner.name


def test_without_a_core_training_goes_on_without_balancing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "native", core.Missing("nothing was built: `pip install -v -e .` builds it"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert on_threads(2, attached) == ["static", "static"]
    (only,) = [str(w.message) for w in said if "core" in str(w.message) or "balanc" in str(w.message)]
    assert only == "training goes on without balancing: nothing was built: `pip install -v -e .` builds it"


def test_a_planner_that_needs_no_core_is_used_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "native", core.Missing("nothing was built"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = on_threads(2, lambda group: Run(CASE, group, FixedPlanner(())).engine.planner.name)
    assert names == [FixedPlanner(()).name] * 2


def test_ranks_with_different_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(core, "version", lambda: here.version)

    def body(group: Collective) -> str:
        here.version = "none" if group.rank == 1 else "abc"
        with pytest.raises(ConfigMismatch) as raised:
            attached(group)
        return str(raised.value)

    for rank, message in enumerate(on_threads(2, body)):
        assert "engine configuration of rank(s)" in message
        assert f"core={'none' if rank == 1 else 'abc'}" in message
