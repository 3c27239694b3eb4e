"""What must hold for diffusion and re-packing on any case."""

from __future__ import annotations

import itertools
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.maps.diffusion import diffuse
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.maps.repack import repack
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, fits, rank_loads_s
from tests.helpers.pipeline_first_fit import first_fit
from tests.helpers.pipeline_naive import partition_by_time_naive, squared_deviations


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[LayerCost], list[RankLimits], StageMap, int]:
    ranks = draw(st.integers(1, 5))
    count = draw(st.integers(ranks, 10))
    costs = [
        LayerCost(
            forward_s=draw(st.integers(0, 12)) / 4,
            activation_bytes=draw(st.integers(0, 4)),
            parameter_bytes=draw(st.integers(0, 20)),
        )
        for _ in range(count)
    ]
    limits = [
        RankLimits(memory_bytes=draw(st.sampled_from([30, 60, 120, 1000])), speed=draw(st.sampled_from([1.0, 2.0])))
        for _ in range(ranks)
    ]
    cuts = sorted(draw(st.permutations(range(1, count)))[: ranks - 1])
    return costs, limits, StageMap.contiguous((0, *cuts, count)), draw(st.integers(1, 4))


@given(cases(), st.sampled_from(["time", "parameters"]))
@settings(max_examples=200, deadline=None)
def test_diffusion_only_improves_and_always_fits(case, load) -> None:  # type: ignore[no-untyped-def]
    costs, limits, start, microbatches = case
    if not fits(costs, start, limits, microbatches):
        return
    maps = diffuse(costs, limits, start, microbatches=microbatches, load=load)
    assert maps[0] == start
    seen = costs if load == "time" else [LayerCost(forward_s=float(c.parameter_bytes)) for c in costs]
    ranks = limits if load == "time" else RankLimits.uniform(len(limits))
    deviations = [squared_deviations(seen, ranks, m) for m in maps]
    assert all(later < earlier for earlier, later in pairwise(deviations))
    assert all(fits(costs, m, limits, microbatches) for m in maps)
    assert all(len(before.moves_to(after)) == 1 for before, after in pairwise(maps))
    if load == "time":
        best = partition_by_time(costs, limits, microbatches=microbatches)
        assert max(rank_loads_s(costs, best, limits)) <= max(rank_loads_s(costs, maps[-1], limits))


def _fewest_naive(costs: list[LayerCost], limits: list[RankLimits], microbatches: int) -> int | None:
    for size in range(1, len(limits) + 1):
        for kept in itertools.combinations(range(len(limits)), size):
            try:
                partition_by_time_naive(costs, [limits[r] for r in kept], microbatches=microbatches)
            except PartitionError:
                continue
            return size
    return None


@given(cases())
@settings(max_examples=200, deadline=None)
def test_fewest_ranks_equals_brute_force(case) -> None:  # type: ignore[no-untyped-def]
    costs, limits, start, microbatches = case
    expected = _fewest_naive(costs, limits, microbatches)
    found = None
    for size in range(1, len(limits) + 1):
        try:
            packed = repack(costs, limits, start, microbatches=microbatches, target_ranks=size)
        except PartitionError:
            continue
        assert len(packed.stage_map.used_ranks) == size
        assert fits(costs, packed.stage_map, limits, microbatches)
        found = found or size
    assert found == expected


@given(cases(), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_first_fit_fits_and_never_overshoots(case, target) -> None:  # type: ignore[no-untyped-def]
    costs, limits, start, microbatches = case
    if not fits(costs, start, limits, microbatches):
        return
    packed = first_fit(costs, limits, start, microbatches=microbatches, target_ranks=target)
    assert fits(costs, packed, limits, microbatches)
    assert len(packed.used_ranks) >= min(target, len(start.used_ranks))
