"""`EngineConfig`: few fields, each checked; names of the past; what ranks have to share."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

import prophet
from prophet.engine.config import Experiment, signature
from prophet.errors import ConfigMismatch
from prophet.planner import PLANNER_NAMES, get_planner, planner_with
from prophet.ranks.threads import ThreadCollective
from tests.helpers.support import TinyModel, on_threads


def test_it_has_nine_fields_at_most() -> None:
    names = [f.name for f in fields(prophet.EngineConfig)]
    assert len(names) <= 9
    assert "effort" in names
    assert list(inspect.signature(prophet.EngineConfig).parameters) == names


def test_it_is_a_value() -> None:
    config = prophet.EngineConfig(effort=0.5, slots_per_rank=1)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config, refetch=False)):
        assert same == config
    with pytest.raises(TypeError, match=r"EngineConfig\.replan"):
        replace(config, replan=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("effort", [-0.1, 1.5, float("nan"), float("inf"), "0.1", None, True])
def test_an_effort_that_is_no_share(effort: Any) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.effort must be a share of the step, from 0 to 1, got"):
        prophet.EngineConfig(effort=effort)


@pytest.mark.parametrize("name", PLANNER_NAMES)
def test_effort_is_for_the_planner_that_searches(name: str) -> None:
    assert getattr(planner_with(name, effort=0.25), "effort", "none") == (0.25 if name == "prophet" else "none")


def test_the_engines_planner_has_the_effort() -> None:
    def body(group: ThreadCollective) -> list[Any]:
        found = []
        for config in (
            prophet.EngineConfig(),
            prophet.EngineConfig(effort=0.25),
            prophet.EngineConfig(effort=0.25, planner=get_planner("prophet", effort=0.5)),
        ):
            engine = prophet.attach(TinyModel(seed=1, group=group, blocks=1), config=config)
            found.append(engine.planner.effort)  # type: ignore[attr-defined]
            engine.close()
        return found

    assert on_threads(2, body) == [[0.003, 0.25, 0.5]] * 2


@pytest.mark.parametrize("inside", [False, True], ids=["field", "planner"])
def test_ranks_share_the_effort(inside: bool) -> None:
    def body(group: ThreadCollective) -> None:
        effort = 0.1 + 0.1 * group.rank
        planner = get_planner("prophet", effort=effort)
        config = prophet.EngineConfig(planner=planner) if inside else prophet.EngineConfig(effort=effort)
        with pytest.raises(ConfigMismatch, match=rf"engine configuration of rank\(s\).*effort={effort}"):
            prophet.attach(TinyModel(seed=1, group=group, blocks=1), config=config)

    on_threads(2, body)


def test_a_signature_has_every_field_and_the_core() -> None:
    text = signature(prophet.EngineConfig(), Experiment())
    for f in (*fields(prophet.EngineConfig), *fields(Experiment)):
        assert f" {f.name}=" in f" {text}"
    assert " core=" in text
