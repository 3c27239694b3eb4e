"""When to plan: what is kept, for how long, and what ends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import prophet
from prophet.engine.config import Experiment
from prophet.engine.history import History
from prophet.engine.replan import EVERY_STEP, KeptPlan, ReplanConfig, next_plan, predicted_gain
from prophet.errors import ConfigMismatch, SpecError
from prophet.planner import get_planner
from prophet.planner.base import Planner
from prophet.ranks.threads import ThreadCollective
from prophet.spec import IntArray, LayerShape, Placement, PlanContext, Topology
from prophet.traces.npz import read_trace
from tests.helpers.support import FixedPlanner, TinyModel, next_id_loss, on_threads

REAL_TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "smartmoe-gpt-32e-dev.npz"


def context(ranks: int = 4, experts: int = 8) -> PlanContext:
    return PlanContext(
        topology=Topology.uniform(ranks, flops_per_s=1e9),
        shape=LayerShape.feed_forward(dim=64, hidden=64),
        home=tuple(e * ranks // experts for e in range(experts)),
        slots_per_rank=2,
    )


def skewed(hot: int, tokens: int = 4000) -> IntArray:
    load = np.full((4, 8), 100, dtype=np.int64)
    load[:, hot] = tokens
    return load


class Counting(Planner):
    """The default planner, counting how often it is asked."""

    name = "counting"

    def __init__(self) -> None:
        self.inner = get_planner("prophet")
        self.placed = 0

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        self.placed += 1
        return self.inner.place(load, context)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> prophet.spec.Split:  # type: ignore[name-defined]
        return self.inner.split(load, placement, context)


def run(loads: list[IntArray], config: ReplanConfig) -> tuple[list[str], int]:
    """Reasons of every plan when each step's load is also the forecast of the next, and plans made."""
    planner, kept, reasons = Counting(), None, []
    for load in loads:
        kept = next_plan(kept, load, load, planner, context(), config)
        reasons.append(kept.reason)
    return reasons, planner.placed


@pytest.mark.parametrize("config", [EVERY_STEP, ReplanConfig(interval=1, gain_loss=None)])
def test_without_conditions_every_step_is_planned(config: ReplanConfig) -> None:
    assert run([skewed(0)] * 4, config) == (["step"] * 4, 4)


def test_a_plan_is_kept_while_its_gain_holds() -> None:
    reasons, placed = run([skewed(0)] * 12, ReplanConfig(interval=3))
    assert reasons == ["first"] + ["kept"] * 11
    assert placed == 1


def test_without_a_gain_to_ask_for_the_interval_ends_a_plan() -> None:
    reasons, _ = run([skewed(0)] * 7, ReplanConfig(interval=3, gain_loss=None))
    assert reasons == ["first", "kept", "kept", "interval", "kept", "kept", "interval"]


def test_a_gain_that_fell_ends_a_plan_at_the_interval_not_before() -> None:
    # the load moves to another expert; drift is not watched
    loads = [skewed(0)] * 2 + [skewed(5)] * 4
    reasons, _ = run(loads, ReplanConfig(interval=4, drift=None))
    assert reasons == ["first", "kept", "kept", "kept", "gain", "kept"]


def test_drift_ends_a_plan_at_once() -> None:
    loads = [skewed(0)] * 3 + [skewed(5)] * 3
    reasons, _ = run(loads, ReplanConfig(interval=100))
    assert reasons == ["first", "kept", "kept", "drift", "kept", "kept"]


def test_drift_right_after_planning_is_seen_too() -> None:
    loads = [skewed(0)] * 3 + [skewed(5), skewed(2)]
    reasons, _ = run(loads, ReplanConfig(interval=100))
    assert reasons[-2:] == ["drift", "drift"]


def test_noise_as_usual_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(8, 0.5))
    loads = [rng.multinomial(200, shares, size=4).astype(np.int64) for _ in range(40)]
    reasons, placed = run(loads, ReplanConfig(interval=100, drift=0.15))
    assert set(reasons[1:]) == {"kept"}
    assert placed == 1


def test_a_layer_that_gained_nothing_is_asked_again_at_every_interval() -> None:
    even = np.full((4, 8), 500, dtype=np.int64)
    reasons, _ = run([even] * 5, ReplanConfig(interval=2))
    assert reasons == ["first", "kept", "gain", "kept", "gain"]


def test_the_gain_is_the_cost_models() -> None:
    c, planner = context(), get_planner("prophet")
    placement = planner.place(skewed(0), c)
    gain = predicted_gain(placement, skewed(0), planner, c)
    assert 0.3 < gain < 1
    assert predicted_gain(placement, skewed(5), planner, c) < gain / 2
    assert predicted_gain(c.homes_only(), skewed(0), planner, c) == 0.0


def test_a_plan_is_a_value() -> None:
    kept = KeptPlan(placement=context().homes_only(), load=skewed(0))
    before = replace(kept)
    next_plan(kept, skewed(0), skewed(0), get_planner("prophet"), context(), ReplanConfig(interval=1))
    assert all(getattr(kept, f) is getattr(before, f) for f in kept.__slots__)


@pytest.mark.parametrize(
    "wrong", [{"interval": 0}, {"gain_loss": 0.0}, {"gain_loss": 1.5}, {"drift": -0.1}, {"predict": 3}]
)
def test_a_config_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SpecError, match=f"ReplanConfig.{next(iter(wrong))} must be"):
        ReplanConfig(**wrong)  # type: ignore[arg-type]


# --- on real routing ----------------------------------------------------------------------------------------------


def iterations(layer: int, n: int) -> IntArray:
    """[n, R, E]: one layer's loads by iteration."""
    trace = read_trace(REAL_TRACE)
    return np.stack([trace.counts[s, layer].astype(np.int64).sum(axis=0) for s in list(trace.iteration_slices())[:n]])


def errors(loads: IntArray, modes: tuple[str, ...]) -> dict[str, float]:
    """Mean fraction of tokens foretold for the wrong expert, one step ahead."""
    history = History(*loads.shape[1:], adaptive=True)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for step, load in enumerate(loads):
        for mode in modes if step else ():
            foretold = history.predict(mode).sum(axis=0)  # type: ignore[arg-type]
            found[mode].append(float(np.abs(foretold - load.sum(axis=0)).sum() / load.sum()))
        history.observe(load)
    return {mode: float(np.mean(values)) for mode, values in found.items()}


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the shared routing traces are not beside this checkout")
@pytest.mark.parametrize("layer", [0, 4, 9, 15])
def test_the_best_forecaster_is_about_as_good_as_the_best_fixed_one(layer: int) -> None:
    found = errors(iterations(layer, 120), ("last", "ema", "mean", "best"))
    assert found["best"] <= 1.03 * min(found["last"], found["ema"], found["mean"])


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the shared routing traces are not beside this checkout")
def test_a_switch_of_routing_re_plans_at_once_and_little_else_does() -> None:
    before, after = iterations(3, 100)[60:], iterations(11, 100)[60:]
    c = PlanContext(
        topology=Topology.uniform(16, flops_per_s=1e12),
        shape=LayerShape.feed_forward(dim=512, hidden=1024),
        home=tuple(e // 2 for e in range(32)),
    )
    planner, kept, reasons = get_planner("prophet"), None, []
    for load in (*before, *after):
        kept = next_plan(kept, load, load, planner, c, ReplanConfig(interval=10))
        reasons.append(kept.reason)
    assert reasons[len(before)] == "drift"
    assert reasons.count("kept") > 0.7 * len(reasons)


# --- in the engine ------------------------------------------------------------------------------------------------


def test_the_engine_keeps_and_reports_what_it_planned() -> None:
    """The same placements on all ranks, for as long as the configuration says."""

    def body(c: ThreadCollective) -> list[tuple[str, ...]]:
        model = TinyModel(seed=1, group=c, blocks=2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = prophet.EngineConfig(planner=FixedPlanner([(0, 1), (7, 0)]))
        kept = ReplanConfig(predict="best", interval=3, gain_loss=None, drift=None)
        engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(replan=kept))
        planned = []
        for _ in range(6):
            ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(c.rank))
            for part in (ids[:2], ids[2:]):  # two microbatches share a placement
                next_id_loss(model(part), part, 1.0).backward()
            optimizer.step()
            assert engine.last_step is not None
            planned.append(engine.last_step.planned)
            assert (engine.last_step.copies.sum(axis=1) == (2 if len(planned) > 1 else 0)).all()
        engine.close()
        return planned

    found = on_threads(2, body)
    assert found[0] == found[1]
    assert found[0] == [()] + [(r, r) for r in ("first", "kept", "kept", "interval", "kept")]


def test_ranks_must_agree_on_when_to_plan() -> None:
    def body(c: ThreadCollective) -> None:
        model = TinyModel(seed=1, group=c, blocks=1)
        experiment = Experiment(replan=ReplanConfig(interval=2 + c.rank))
        with pytest.raises(ConfigMismatch, match="engine configuration"):
            prophet.attach(model, experiment=experiment)

    on_threads(2, body)
