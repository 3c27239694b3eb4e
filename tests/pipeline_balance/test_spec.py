"""The values of pipeline_balance are validated and say what they mean."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline_balance.spec import (
    Imbalance,
    LayerCost,
    RankLimits,
    StageMap,
    fits,
    in_flight,
    moved_bytes,
    rank_loads_s,
    rank_memory_bytes,
)
from prophet.errors import SpecError


def test_layer_cost_adds_up() -> None:
    cost = LayerCost(
        forward_s=1.0,
        backward_input_s=2.0,
        backward_weight_s=4.0,
        activation_bytes=8,
        parameter_bytes=16,
        gradient_bytes=32,
        optimizer_bytes=64,
    )
    assert cost.total_s == 7.0
    assert cost.backward_s == 6.0
    assert cost.state_bytes == 112
    assert cost.moved_bytes == 80


@pytest.mark.parametrize("bad", [{"forward_s": -1.0}, {"forward_s": float("nan")}, {"forward_s": float("inf")}])
def test_layer_cost_refuses(bad: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="forward_s"):
        LayerCost(**bad)  # type: ignore[arg-type]


def test_layer_cost_refuses_fractional_bytes() -> None:
    with pytest.raises(SpecError, match="activation_bytes"):
        LayerCost(forward_s=1.0, activation_bytes=1.5)  # type: ignore[arg-type]


def test_rank_limits_refuse() -> None:
    with pytest.raises(SpecError, match="speed"):
        RankLimits(speed=0.0)
    with pytest.raises(SpecError, match="ranks"):
        RankLimits.uniform(0)


def test_stage_map_round_trip() -> None:
    stage_map = StageMap.from_assignment([0, 0, 1, 0, 1])
    assert stage_map == StageMap((0, 2, 3, 4, 5), (0, 1, 0, 1))
    assert stage_map.assignment() == (0, 0, 1, 0, 1)
    assert stage_map.layers_on(0) == (0, 1, 3)
    assert stage_map.used_ranks == (0, 1)


@pytest.mark.parametrize(
    ("boundaries", "ranks", "text"),
    [
        ((0, 2, 2), (0, 1), "stage 1 is empty"),
        ((1, 2), (0,), "start at layer 0"),
        ((0, 2), (0, 1), "one boundary more"),
        ((0, 2), (-1,), "negative"),
        ((0,), (), "one boundary more"),
    ],
)
def test_stage_map_refuses(boundaries: tuple[int, ...], ranks: tuple[int, ...], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        StageMap(boundaries, ranks)


def test_loads_and_memory() -> None:
    costs = [LayerCost(forward_s=float(i), activation_bytes=10, parameter_bytes=100 * i) for i in range(1, 5)]
    stage_map = StageMap.contiguous((0, 1, 4))
    limits = (RankLimits(speed=1.0, memory_bytes=120), RankLimits(speed=2.0, memory_bytes=930))
    assert rank_loads_s(costs, stage_map, limits) == (1.0, 4.5)
    # stage 0 holds two microbatches, the last stage one
    assert rank_memory_bytes(costs, stage_map, limits, 8) == (120, 930)
    assert fits(costs, stage_map, limits, 8)
    assert not fits(costs, stage_map, (RankLimits(memory_bytes=119), limits[1]), 8)
    assert in_flight(0, 4, 2) == 2
    other = StageMap.contiguous((0, 3, 4))
    assert [(m.layer, m.source, m.destination) for m in stage_map.moves_to(other)] == [(1, 1, 0), (2, 1, 0)]
    assert moved_bytes(costs, stage_map, other) == 500


def test_imbalance_reports_both_measures() -> None:
    imbalance = Imbalance.of([1.0, 2.0, 3.0])
    assert imbalance.max_mean == pytest.approx(1.5)
    assert imbalance.max_minus_min_over_mean == pytest.approx(1.0)
    assert Imbalance.of([0.0, 0.0]) == Imbalance(max_mean=1.0, max_minus_min_over_mean=0.0)


def test_import_stays_light() -> None:
    heavy = "('torch', 'numpy')"
    code = f"import sys, pipeline_balance; print(sorted(m for m in {heavy} if m in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
