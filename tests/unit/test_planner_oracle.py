"""The oracle bounds every planner from below, and its own placement reaches its bound where tokens are many."""

from __future__ import annotations

import numpy as np
import pytest

from prophet.planner import get_planner
from prophet.planner.cost import step_cost
from prophet.planner.presets import PRESET_NAMES, get_preset
from prophet.spec import SpecError

pytest.importorskip("scipy")


@pytest.mark.parametrize("name", ["hpwnv:MoE-GPT-L", "h100-nvlink:Mixtral-8x7B", "gloo-loopback"])
def test_no_planner_beats_the_oracle(name: str) -> None:
    from prophet.planner.oracle import lower_bound, solve_exactly

    rng = np.random.default_rng(3)
    load = rng.multinomial(4096, rng.dirichlet(np.full(4, 0.4)), size=4).astype(np.int64)
    context = get_preset(name).context(4, 4, routed_per_rank=4096, slots_per_rank=2)
    best = solve_exactly(load, context, time_limit_s=20)
    assert best.bound <= best.seconds * (1 + 1e-3)
    assert lower_bound(load, context) <= best.bound * (1 + 1e-6)
    for policy in ("prophet", "static", "top2", "pro-prophet", "eplb"):
        planner = get_planner(policy)
        placement = planner.place(load, context)
        seconds = step_cost(planner.split(load, placement, context), placement, context).total_s
        assert seconds >= best.bound * (1 - 1e-6)


def test_presets_build_and_unknown_ones_are_refused() -> None:
    for name in PRESET_NAMES:
        context = get_preset(name).context(16, 32, routed_per_rank=4096)
        assert context.windows.bnec_s == pytest.approx(2 * context.windows.fnec_s)
        assert get_preset(name).name == name
    with pytest.raises(SpecError, match="no preset"):
        get_preset("tpu")
    with pytest.raises(SpecError, match="no model"):
        get_preset("hpwnv:Llama")
