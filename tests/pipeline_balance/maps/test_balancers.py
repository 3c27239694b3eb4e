"""Diffusion, re-packing and the comparison of maps, on cases small enough to follow."""

from __future__ import annotations

import pytest

from pipeline_balance.maps.compare import best_map, dense_ranks, predicted_makespan_s
from pipeline_balance.maps.diffusion import diffuse
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.maps.repack import fill_contiguously, repack
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, rank_loads_s
from prophet.errors import SpecError
from tests.helpers.pipeline_first_fit import first_fit
from tests.helpers.pipeline_naive import squared_deviations


def layers(*times_s: float, size: int = 8) -> list[LayerCost]:
    return [LayerCost(forward_s=t, parameter_bytes=size) for t in times_s]


def test_diffusion_moves_boundaries() -> None:
    costs = layers(1, 1, 1, 1, 1, 1, 1, 1)
    limits = RankLimits.uniform(2)
    maps = diffuse(costs, limits, StageMap.contiguous((0, 7, 8)), microbatches=4)
    assert [m.boundaries for m in maps] == [(0, 7, 8), (0, 6, 8), (0, 5, 8), (0, 4, 8)]
    assert [squared_deviations(costs, limits, m) for m in maps] == [18.0, 8.0, 2.0, 0.0]


def test_diffusion_can_stop_short_of_the_optimum() -> None:
    # every single boundary shift makes it worse, two at once would not: no optimality is claimed
    costs = layers(3, 3, 2, 2, 2)
    start = StageMap.contiguous((0, 1, 3, 5))
    limits = RankLimits.uniform(3)
    stuck = diffuse(costs, limits, start, microbatches=1)[-1]
    assert max(rank_loads_s(costs, stuck, limits)) >= max(
        rank_loads_s(costs, partition_by_time(costs, limits, microbatches=1), limits)
    )
    assert squared_deviations(costs, limits, stuck) <= squared_deviations(costs, limits, start)


def test_diffusion_by_parameters_ignores_time() -> None:
    costs = [LayerCost(forward_s=t, parameter_bytes=b) for t, b in ((9, 1), (1, 1), (1, 1), (1, 1))]
    maps = diffuse(costs, RankLimits.uniform(2), StageMap.contiguous((0, 1, 4)), microbatches=1, load="parameters")
    assert maps[-1].boundaries == (0, 2, 4)


def test_diffusion_respects_memory() -> None:
    costs = layers(1, 1, 1, 1)
    limits = (RankLimits(), RankLimits(memory_bytes=8))
    start = StageMap.contiguous((0, 3, 4))
    assert diffuse(costs, limits, start, microbatches=1) == [start]
    with pytest.raises(PartitionError, match="starts from"):
        diffuse(costs, limits, StageMap.contiguous((0, 2, 4)), microbatches=1)
    with pytest.raises(SpecError, match="stage k on rank k"):
        diffuse(costs, limits, StageMap((0, 2, 4), (1, 0)), microbatches=1)


def test_five_ranks_at_60_percent() -> None:
    # merging whole ranks frees nothing; filling contiguously needs three ranks
    costs = [LayerCost(forward_s=1.0, parameter_bytes=20) for _ in range(15)]
    limits = RankLimits.uniform(5, memory_bytes=100)
    current = StageMap.contiguous((0, 3, 6, 9, 12, 15))
    assert len(first_fit(costs, limits, current, microbatches=4).used_ranks) == 5
    for too_few in (1, 2):
        with pytest.raises(PartitionError, match="does not fit"):
            repack(costs, limits, current, microbatches=4, target_ranks=too_few)
    packed = repack(costs, limits, current, microbatches=4, target_ranks=3)
    assert packed.stage_map.boundaries == (0, 5, 10, 15)
    assert len(packed.stage_map.used_ranks) == 3


def test_first_fit_moves_one_rank_to_one_rank() -> None:
    costs = layers(1, 1, 1, 1, size=10)
    limits = RankLimits.uniform(4, memory_bytes=20)
    packed = first_fit(costs, limits, StageMap.contiguous((0, 1, 2, 3, 4)), microbatches=1)
    assert packed.assignment() == (1, 1, 3, 3)
    to_three = first_fit(costs, limits, StageMap.contiguous((0, 1, 2, 3, 4)), microbatches=1, target_ranks=3)
    assert to_three.assignment() == (1, 1, 2, 3)


def test_repack_skips_a_rank_that_is_too_small() -> None:
    costs = layers(1, 1, 1, 1, size=10)
    limits = (RankLimits(memory_bytes=20), RankLimits(memory_bytes=5), RankLimits(memory_bytes=20))
    assert fill_contiguously(costs, limits, 2, 1) == (0, 2)
    packed = repack(costs, limits, StageMap((0, 2, 4), (0, 2)), microbatches=1, target_ranks=2)
    assert packed.stage_map == StageMap((0, 2, 4), (0, 2))
    assert packed.moved_bytes == 0


def test_repack_meets_its_target_or_says_what_is_missing() -> None:
    costs = layers(1, 1, 1, 1)
    limits = RankLimits.uniform(4)
    current = StageMap.contiguous((0, 1, 2, 3, 4))
    for ranks in (1, 2, 3):
        packed = repack(costs, limits, current, microbatches=4, target_ranks=ranks)
        assert (packed.stage_map.stages, len(packed.stage_map.used_ranks)) == (ranks, ranks)
    with pytest.raises(PartitionError, match="does not fit on 1 ranks"):
        repack(costs, RankLimits.uniform(4, memory_bytes=8), current, microbatches=4, target_ranks=1)
    with pytest.raises(SpecError, match="target_ranks"):
        repack(costs, limits, current, microbatches=4, target_ranks=5)


def test_repack_keeps_the_ranks_that_move_least() -> None:
    costs = [LayerCost(forward_s=1.0, parameter_bytes=b) for b in (1, 1, 50, 50)]
    current = StageMap.contiguous((0, 1, 2, 4))
    packed = repack(costs, RankLimits.uniform(3), current, microbatches=2, target_ranks=2)
    assert packed.stage_map.boundaries == (0, 2, 4)
    assert packed.stage_map.ranks[1] == 2
    assert packed.moved_bytes == 1


def test_ties_go_to_makespan_then_to_bytes() -> None:
    costs = layers(4, 1, 1, 1, 1)
    limits = RankLimits.uniform(3)
    even = StageMap.contiguous((0, 1, 3, 5))
    lopsided = StageMap.contiguous((0, 1, 4, 5))
    assert predicted_makespan_s(costs, even, limits, microbatches=4) == predicted_makespan_s(
        costs, lopsided, limits, microbatches=4
    )
    best = best_map([even, lopsided], costs, limits, microbatches=4, current=lopsided)
    assert best.stage_map == lopsided
    assert best.moved_bytes == 0
    # by rank loads these tie, but the second one passes every microbatch to and fro over a slow link
    ladder = StageMap((0, 1, 2, 3, 4, 5), (0, 1, 2, 1, 2))
    slow = best_map([ladder, even], costs, limits, microbatches=4, current=ladder, transfer_s=10.0)
    assert slow.stage_map == even
    assert slow.moved_bytes == 16
    with pytest.raises(PartitionError, match="none of the stage maps"):
        best_map([even], costs, RankLimits.uniform(3, memory_bytes=1), microbatches=1, current=even)


def test_dense_ranks() -> None:
    assert dense_ranks(StageMap((0, 1, 2), (5, 2))) == StageMap((0, 1, 2), (1, 0))
