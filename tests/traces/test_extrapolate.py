"""Bigger machines from small ones, runs that are planned as the engine plans, and error bars from measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prophet.traces.extrapolate as ex
from prophet.engine.history import similarity
from prophet.errors import SpecError
from prophet.planner import PLANNER_NAMES, Planner, get_planner
from prophet.scheduler.schedules import schedule_named
from prophet.scheduler.simulate import predicted_durations, simulate
from prophet.spec import IntArray, LayerShape, Link, Placement, PlanContext, Split, Topology, Windows

ROOT = Path(__file__).resolve().parents[2]
SMALL = Topology.uniform(
    4, ranks_per_node=2, flops_per_s=1e12, intra=Link(bytes_per_s=1e11), inter=Link(bytes_per_s=1e10)
)
CONTEXT = PlanContext(
    topology=ex.stretched(SMALL, 8),
    shape=LayerShape.feed_forward(dim=64, hidden=256),
    home=tuple(e // 2 for e in range(16)),
    windows=Windows(fnec_s=1e-3),
)
SCENARIO = ex.Scenario(context=CONTEXT, layers=2, routed_per_rank=1000, skew=0.8, steps=12)
EXACT = ex.ErrorBar(errors=(0.25, -0.2), source="two cases")


def test_a_stretched_topology_repeats_what_was_measured() -> None:
    four = Topology(
        ranks=4,
        ranks_per_node=2,
        intra=SMALL.intra,
        inter=SMALL.inter,
        flops_per_s=(1.0, 2.0, 3.0, 4.0),
        free_bytes=(1, 2, 3, 4),
    )
    ten = ex.stretched(four, 10)
    assert ten.flops_per_s == (1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0)
    assert (ten.nodes, ten.free_bytes[9]) == (5, 2)
    one_node = ex.stretched(Topology.uniform(4), 8)
    assert one_node.nodes == 2, "a machine of one node grows by nodes"
    assert ex.stretched(four, 4) == four


def test_the_balanced_routing_is_even() -> None:
    load = ex.even_load(SCENARIO)
    assert (load.sum(axis=1) == 1000).all()
    assert np.ptp(load) <= 1
    assert np.ptp(load.sum(axis=0)) <= 8


def test_popular_experts_stay_popular_and_counts_differ() -> None:
    one, other = (ex.load_of(SCENARIO, 0, 1, step) for step in (3, 4))
    assert (one.sum(axis=1) == 1000).all()
    assert (one != other).any()
    assert similarity(one, other) > 0.95 > similarity(one, ex.load_of(SCENARIO, 0, 0, 3))
    assert (one != ex.load_of(SCENARIO, 1, 1, 3)).any()
    assert (one == ex.load_of(SCENARIO, 0, 1, 3)).all()


class Remembers(Planner):
    """Notes every call; its placements say which call made them."""

    name = "remembers"
    goes_on = True

    def __init__(self) -> None:
        self.calls: list[tuple[IntArray, Placement | None]] = []

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        self.calls.append((load, context.previous))
        return Placement.with_replicas(context.home, context.ranks, [(0, len(self.calls))])

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        raise NotImplementedError


class PlansAnew(Remembers):
    """One whose plans do not depend on the placement in force."""

    goes_on = False


def test_a_run_is_planned_step_by_step_from_the_step_before_and_the_placement_in_force() -> None:
    scenario = replace(SCENARIO, steps=5)
    planner = Remembers()
    last = ex.placed(scenario, planner, CONTEXT, 0, 1)
    assert len(planner.calls) == 4
    for step, (load, previous) in enumerate(planner.calls, start=1):
        assert (load == ex.load_of(scenario, 0, 1, step)).all()
        assert (None if previous is None else previous.replicas()) == ([(0, step - 1)] if step > 1 else None)
    assert last.replicas() == [(0, 4)]
    once = PlansAnew()  # earlier steps change nothing
    ex.placed(scenario, once, CONTEXT, 0, 1)
    assert [(load == ex.load_of(scenario, 0, 1, 4)).all() for load, _ in once.calls] == [True]
    assert ex.placed(replace(scenario, steps=1), planner, CONTEXT, 0, 1).is_static, "a first step has no replicas yet"


@pytest.mark.parametrize("name", PLANNER_NAMES)
def test_only_planners_that_go_on_read_the_placement_in_force(name: str) -> None:
    planner = get_planner(name)
    one, other = (ex.load_of(SCENARIO, 0, 0, step) for step in (1, 2))
    previous = planner.place(ex.load_of(SCENARIO, 0, 1, 1), CONTEXT)  # of another layer
    if not planner.goes_on:
        assert planner.place(one, replace(CONTEXT, previous=previous)) == planner.place(one, CONTEXT)
    else:
        kept = planner.place(one, CONTEXT)
        assert planner.place(other, replace(CONTEXT, previous=kept)) != planner.place(other, CONTEXT)


def test_order_of_policies_and_the_bar_around_a_step() -> None:
    found = {p: ex.extrapolate(SCENARIO, p, EXACT) for p in ("static", "prophet", ex.BALANCED)}
    assert max(found[ex.BALANCED].step_s, found["prophet"].step_s) <= found["static"].step_s
    # Copies keep tokens on their ranks, which even routing without copies cannot: one per cent, no more.
    assert found[ex.BALANCED].step_s <= 1.01 * found["prophet"].step_s
    assert found[ex.BALANCED].max_mean == pytest.approx(1.0, abs=0.01)
    static, ours = found["static"], found["prophet"]
    assert static.copies_per_rank == static.replica_bytes == 0 < ours.copies_per_rank
    assert ours.replica_bytes >= ours.copies_per_rank * CONTEXT.shape.replica_bytes
    assert [static.low_s, static.high_s] == pytest.approx([static.step_s / 1.25, static.step_s / 0.8])
    assert ex.extrapolate(SCENARIO, "prophet", EXACT) == ours, "equal from run to run"


def test_the_slowest_of_more_groups_counts() -> None:
    one, four, many = (ex.extrapolate(replace(SCENARIO, groups=groups), "static", EXACT) for groups in (1, 4, 512))
    without = [step.step_s - step.parts_s["average"] for step in (one, four, many)]
    assert without[0] < without[1] == pytest.approx(without[2]), "four groups stand for all"
    assert (one.ranks, four.ranks, many.ranks) == (8, 32, 4096)


def test_gradients_are_averaged() -> None:
    def average_s(**job: Any) -> float:
        return ex.extrapolate(replace(SCENARIO, **job), "static", EXACT).parts_s["average"]

    assert average_s() == 0, "one group has nobody to average its experts with"
    assert average_s(dense_bytes=10**9) == pytest.approx(2 * 1e9 * 7 / 8 / 1e10)
    expert_bytes = 2 * 2 * CONTEXT.shape.expert_grad_bytes  # layers x experts of a rank
    assert average_s(groups=8) == pytest.approx(2 * expert_bytes * 7 / 8 / 1e10)
    assert average_s(groups=8, dense_bytes=10**9) == pytest.approx(average_s(groups=8) + 2 * 1e9 * 63 / 64 / 1e10)
    in_a_node = average_s(groups=8, ranks_per_node=64)
    assert in_a_node == pytest.approx(average_s(groups=8) / 10), "the link within the node is ten times as fast"
    assert average_s(groups=8, stages=2) == pytest.approx(average_s(groups=8) / 2), "a stage has half of the layers"


def test_stages_and_microbatches() -> None:
    def step(**job: Any) -> ex.Extrapolated:
        return ex.extrapolate(replace(SCENARIO, layers=4, **job), "static", EXACT)

    one = step()
    assert step(microbatches=3).step_s == pytest.approx(3 * one.step_s)
    stage = max(_stage_seconds(layers) for layers in ((0, 1), (2, 3)))
    found = step(stages=2, microbatches=8)
    assert found.ranks == 16
    assert found.step_s == pytest.approx(9 * stage), "eight passes and one to fill the pipeline"
    assert found.parts_s["bubble"] == pytest.approx(stage)
    ours, often = (ex.extrapolate(replace(SCENARIO, microbatches=m), "prophet", EXACT) for m in (1, 4))
    assert often.step_s < 4 * ours.step_s, "Trans and Agg come once a step"
    assert [list(r) for r in ex._stages(replace(SCENARIO, layers=5, stages=2))] == [[0, 1], [2, 3, 4]]


def _stage_seconds(layers: tuple[int, int]) -> float:
    """A microbatch of two layers with the loads that those layers of a model of four have, by the simulator itself."""
    contexts = [replace(CONTEXT, windows=replace(CONTEXT.windows, experts=False)), CONTEXT]
    placements = [CONTEXT.homes_only()] * 2
    splits = [Split.to_homes(ex.load_of(SCENARIO, 0, layer, 12), CONTEXT.homes_only()) for layer in layers]
    durations = predicted_durations(
        placements, splits, contexts, start_s=1e-3, counts_s=8 * 16 * 7 / 1e10, end_s=CONTEXT.windows.bnec_s
    )
    return simulate(schedule_named("block-wise", 2), durations).makespan_s


def test_what_a_step_consists_of() -> None:
    static = ex.extrapolate(replace(SCENARIO, dense_s=0.5e-3, dense_bytes=10**8), "static", EXACT)
    parts = static.parts_s
    assert parts["transfers"] == parts["bubble"] == 0
    # all ranks wait for the busiest one in every layer, so that the parts of a step without transfers are all of it
    assert sum(parts.values()) == pytest.approx(static.step_s, rel=0.02)
    assert parts["dense"] == pytest.approx(3 * 1e-3 + 3 * 0.5e-3 + 0, rel=0.01)
    assert parts["host"] == pytest.approx(2 * 8 * 16 * 7 / 1e10), "no plan, no split: only counts"
    assert static.limited_by == max(parts, key=lambda part: parts[part])
    ours = ex.extrapolate(SCENARIO, "prophet", EXACT)
    assert ours.parts_s["host"] > parts["host"]
    assert ours.plan_s > 0 == static.plan_s
    slow = replace(CONTEXT, topology=replace(CONTEXT.topology, inter=Link(bytes_per_s=1e7)))
    assert ex.extrapolate(replace(SCENARIO, context=slow), "static", EXACT).limited_by == "all-to-all"


def test_what_a_scenario_refuses() -> None:
    for wrong in ({"groups": 0}, {"stages": 3}, {"steps": 0}, {"skew": -1.0}, {"microbatches": 0}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            replace(SCENARIO, **wrong)


def test_error_bars_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [{"simulated_error": 0.1, "hosts": 4}, {"simulated_error": None, "hosts": 4}]
    file.write_text(json.dumps({"rows": [*rows, {"simulated_error": -0.05, "hosts": 8}]}))
    bar = ex.read_error_bar(file)
    assert bar.errors == (0.1, -0.05)
    assert bar.mean == pytest.approx(0.075)
    assert "2 policies on [4, 8] hosts" in bar.source
    for text in ("", "[]", "{}", '{"rows": [{}]}', '{"rows": []}', '{"rows": [{"simulated_error": -2, "hosts": 1}]}'):
        file.write_text(text)
        with pytest.raises(SpecError, match=r"rows\.json.*: expected"):
            ex.read_error_bar(file)
    with pytest.raises(SpecError, match="expected rows of the cluster benchmark"):
        ex.read_error_bar(tmp_path / "none")


def test_the_built_in_error_bar_is_what_was_measured() -> None:
    page = (ROOT / "benchmarks/results/2026-11-30-cluster-steered.md").read_text()
    by_category = page.partition("## Where the simulator is off, by category")[2].partition("| four, second run |")
    rows = "".join(by_category[1:]).partition("\n\n")[0].splitlines()
    shown = [row.split("|")[-2].strip() for row in rows if "forced-balance" not in row]
    assert [f"{100 * e:+.1f} %" for e in ex.MEASURED.errors] == shown
