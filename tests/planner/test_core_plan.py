"""What the core's entry for plans takes, and that it refuses the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prophet.machine.presets import get_preset
from prophet.planner.core import native
from prophet.planner.model.machine import Machine


def arguments() -> list[Any]:
    context = get_preset("h100-ib:Qwen3-30B-A3B").context(4, 8, routed_per_rank=1000, slots_per_rank=2)
    m = Machine.of(context)
    load = np.random.default_rng(0).integers(0, 500, (4, 8))
    options = np.array([0.002, 0.01, 8.0, 0.02, 0.003, 2.5e-5, 0.06])
    none, holds = np.zeros((0, 0), np.bool_), np.zeros((8, 4), np.bool_)
    return [load, m.home, m.node, m.speed, m.seconds_per_token, m.figures, m.limit, none, options, holds]


def test_a_plan_is_written() -> None:
    given = arguments()
    native.plan(*given)
    assert given[-1][np.arange(8), given[1]].all()


@pytest.mark.parametrize("place", range(10))
def test_no_array_is_converted(place: int) -> None:
    for wrong in (
        lambda a: a.astype(np.float32),
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.size else a.astype(np.int8),
        lambda a: a[None],
    ):
        given = arguments()
        given[place] = wrong(given[place])
        with pytest.raises(TypeError):
            native.plan(*given)


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6, 8, 9])
def test_sizes_that_disagree_are_refused(place: int) -> None:
    given = arguments()
    given[place] = np.concatenate([given[place], given[place][-1:]])
    with pytest.raises(ValueError, match=r"must be|must have|options"):
        native.plan(*given)


def test_values_that_would_lead_outside_are_refused() -> None:
    for place, value in ((0, -1), (1, 9), (6, -1)):
        given = arguments()
        given[place] = np.full_like(given[place], value)
        with pytest.raises(ValueError, match=r"negative|name ranks"):
            native.plan(*given)
    given = arguments()
    given[7] = np.zeros((8, 4), np.bool_)
    with pytest.raises(ValueError, match="every home must hold its expert"):
        native.plan(*given)
