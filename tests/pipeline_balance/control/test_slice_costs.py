"""Costs of slices: a line over them, so late slices are neither dropped nor taken for disturbed."""

from __future__ import annotations

import pickle
import random
from itertools import pairwise

import pytest

from pipeline_balance.pipeline.measure.meter import Meter, local_costs, slice_fit
from pipeline_balance.pipeline.measure.slice_costs import OfSlice, SliceFit, unit_costs
from pipeline_balance.schedules.sliced import slice_starts
from pipeline_balance.spec import LayerCost, RankLimits, StageMap, rank_memory_bytes
from tests.helpers import sliced_layers as own

SLICES = 16


def samples(first: float, more: float, *, steps: int = 3, noise: float = 0.0, seed: int = 0) -> list[OfSlice]:
    draw = random.Random(seed)
    return [
        OfSlice((first + more * s) * (1 + noise * draw.uniform(-1, 1)), s, SLICES)
        for _ in range(steps)
        for s in range(SLICES)
    ]


def test_a_line_is_found_whatever_its_slope() -> None:
    for first, more in ((1.0, 0.0), (1.0, 0.1), (0.1, 1.0), (0.5, 7.0)):
        fit = SliceFit.of(samples(first, more))
        assert (fit.first_s, fit.more_s) == pytest.approx((first, more), abs=1e-9)
        # no slice is dropped: the last one takes twice the median, where attention is all
        assert fit.microbatch_s == pytest.approx(sum(first + more * s for s in range(SLICES)))


def test_disturbed_slices_do_not_count() -> None:
    given = samples(1.0, 0.5, noise=0.02)
    clean = SliceFit.of(given).microbatch_s
    for at in (0, 7, 2 * SLICES - 1):
        given[at] = OfSlice(given[at] * 50, given[at].slice, SLICES)
    assert SliceFit.of(given).microbatch_s == pytest.approx(clean, rel=0.02)
    # one slice was never timed: the layer's bytes were counted on it
    assert SliceFit.of([x for x in samples(1.0, 0.5) if x.slice != 1]).microbatch_s == pytest.approx(76.0)


def test_the_crossover_comes_back() -> None:
    crossover, tokens = 300, 1600
    starts = slice_starts(tokens, SLICES)
    cost = [crossover * (b - a) + (b * b - a * a) / 2 for a, b in pairwise(starts)]
    fit = SliceFit.of([OfSlice(x, s, SLICES) for s, x in enumerate(cost)])
    assert fit.crossover_tokens(tokens // SLICES) == crossover
    assert SliceFit.of(samples(1.0, 0.0)).crossover_tokens(100) is None
    assert pickle.loads(pickle.dumps(OfSlice(1.5, 3, 4))).slice == 3


def test_a_meter_sums_slices_to_microbatches() -> None:
    meter, layers = Meter(), {0: own.layers()[0], 1: own.layers()[1]}
    for _ in range(2):
        for s in range(SLICES):
            meter.working_on = s, SLICES, 1 / SLICES
            for layer, by_layer in ((0, meter.forward), (1, meter.forward), (1, meter.backward)):
                meter.add(by_layer[layer], (1.0 + layer * s) * (2 if by_layer is meter.backward else 1))
    meter.input_grad[1] = True
    found = local_costs(layers, {0: [0, 1]}, meter, {})
    assert found[0].forward_s == pytest.approx(SLICES)
    assert found[1].forward_s == pytest.approx(sum(1 + s for s in range(SLICES)))
    assert found[1].backward_s == pytest.approx(2 * found[1].forward_s)
    fit = slice_fit(meter)
    assert (fit.first_s, fit.more_s) == pytest.approx((4.0, 3.0))


def test_maps_count_the_bytes_of_slices() -> None:
    costs = [LayerCost(forward_s=1.0, activation_bytes=160, parameter_bytes=8, gradient_bytes=8) for _ in range(6)]
    stage_map, limits = StageMap((0, 1, 3, 6), (0, 1, 2)), RankLimits.uniform(3)
    units = unit_costs(costs, SLICES)
    assert rank_memory_bytes(units, stage_map, limits, 4 * SLICES) == rank_memory_bytes(
        costs, stage_map, limits, 4, slices=SLICES
    )
    assert sum(c.moved_bytes for c in units) == sum(c.moved_bytes for c in costs)
    assert sum(c.total_s for c in units) * SLICES == pytest.approx(sum(c.total_s for c in costs))
