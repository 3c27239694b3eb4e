"""The exact partition equals brute force on random cases, with and without memory limits and
unequal speeds.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.maps.partition import partition_by_parameters, partition_by_time, partition_near
from pipeline_balance.schedules.links import message_s
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, fits, moved_bytes, rank_loads_s
from tests.helpers.pipeline_naive import partition_by_time_naive


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[LayerCost], list[RankLimits], int]:
    layers = draw(st.integers(1, 14))
    stages = draw(st.integers(1, min(layers, 6)))
    # few distinct values give many ties; multiples of 1/8 make every sum exact
    top = draw(st.sampled_from([2, 16, 4096]))
    costs = [
        LayerCost(
            forward_s=draw(st.integers(0, top)) / 8,
            backward_input_s=draw(st.integers(0, top)) / 8,
            activation_bytes=draw(st.integers(0, 20)),
            parameter_bytes=draw(st.integers(0, 40)),
            optimizer_bytes=draw(st.integers(0, 40)),
        )
        for _ in range(layers)
    ]
    tight = draw(st.booleans())
    limits = [
        RankLimits(
            memory_bytes=draw(st.integers(20, 500)) if tight else 1 << 40,
            speed=draw(st.sampled_from([0.5, 1.0, 2.0])),
        )
        for _ in range(stages)
    ]
    return costs, limits, draw(st.integers(1, 8))


@given(cases())
@settings(max_examples=400, deadline=None)
def test_equals_brute_force(case: tuple[list[LayerCost], list[RankLimits], int]) -> None:
    costs, limits, microbatches = case
    try:
        best, _ = partition_by_time_naive(costs, limits, microbatches=microbatches)
    except PartitionError:
        with pytest.raises(PartitionError):
            partition_by_time(costs, limits, microbatches=microbatches)
        return
    found = partition_by_time(costs, limits, microbatches=microbatches)
    assert found.ranks == tuple(range(len(limits)))
    assert fits(costs, found, limits, microbatches)
    assert max(rank_loads_s(costs, found, limits)) == best


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_equals_brute_force_with_links(
    case: tuple[list[LayerCost], list[RankLimits], int], data: st.DataObject
) -> None:
    costs, limits, microbatches = case
    ranks = len(limits)
    # multiples of 1/8, as the layers' times
    eighths = data.draw(st.lists(st.integers(0, 40), min_size=ranks * ranks, max_size=ranks * ranks))
    links = np.array(eighths, dtype=np.float64).reshape(ranks, ranks) / 8
    transfer_s = links + links.T
    try:
        best, _ = partition_by_time_naive(costs, limits, microbatches=microbatches, transfer_s=transfer_s)
    except PartitionError:
        return
    found = partition_by_time(costs, limits, microbatches=microbatches, transfer_s=transfer_s)
    assert fits(costs, found, limits, microbatches)
    if sum(c.total_s for c in costs):
        loads = np.array(rank_loads_s(costs, found, limits)) + message_s(transfer_s, ranks)
        assert loads.max() == best


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_near_moves_least(case: tuple[list[LayerCost], list[RankLimits], int], data: st.DataObject) -> None:
    costs, limits, microbatches = case
    previous = StageMap.from_assignment([data.draw(st.integers(0, len(limits) - 1)) for _ in costs])
    try:
        best = partition_by_time(costs, limits, microbatches=microbatches)
    except PartitionError:
        return
    bound = max(rank_loads_s(costs, best, limits))
    near = partition_near(costs, limits, previous, microbatches=microbatches)
    assert max(rank_loads_s(costs, near, limits)) == bound
    assert fits(costs, near, limits, microbatches)
    assert moved_bytes(costs, previous, near) <= moved_bytes(costs, previous, best)


@given(st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=2, max_size=12), st.data())
@settings(max_examples=150, deadline=None)
def test_arbitrary_floats_within_rounding(times: list[float], data: st.DataObject) -> None:
    costs = [LayerCost(forward_s=t) for t in times]
    limits = RankLimits.uniform(data.draw(st.integers(1, min(5, len(times)))))
    best, _ = partition_by_time_naive(costs, limits, microbatches=1)
    found = max(rank_loads_s(costs, partition_by_time(costs, limits, microbatches=1), limits))
    assert best <= found <= best + 1e-12 * sum(times)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_parameters_ignore_time(case: tuple[list[LayerCost], list[RankLimits], int]) -> None:
    costs, limits, microbatches = case
    as_time = [
        LayerCost(
            forward_s=float(c.parameter_bytes),
            activation_bytes=c.activation_bytes,
            parameter_bytes=c.parameter_bytes,
            optimizer_bytes=c.optimizer_bytes,
        )
        for c in costs
    ]
    even = [RankLimits(memory_bytes=r.memory_bytes) for r in limits]
    try:
        expected = partition_by_time(as_time, even, microbatches=microbatches)
    except PartitionError:
        return
    assert partition_by_parameters(costs, limits, microbatches=microbatches) == expected
