"""DynMo's rule for re-packing, to compare `pipeline_balance.maps.repack` with.

The rule (Algorithm 2) merges whole ranks. Its faults are put right here: it stops for a source once that found a place,
forgets the memory it freed, skips ranks that are empty, and ends at the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipeline_balance.spec import LayerCost, RankLimits, StageMap, fits


def first_fit(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    *,
    microbatches: int,
    target_ranks: int = 1,
) -> StageMap:
    """Merge whole ranks, first fit, until `target_ranks` are left or none can be merged.

    Layers keep their new rank wherever they stand in the model, so the result may have several stages per
    rank. It may keep more than `target_ranks`: five ranks at 60 % memory cannot be merged at all.
    """
    assignment = list(current.assignment())
    active = set(assignment)
    for source, destination in itertools.permutations(range(len(limits)), 2):
        if len(active) <= target_ranks:
            break
        # the paper merges towards higher ranks only
        if destination < source or source not in active or destination not in active:
            continue
        merged = [destination if r == source else r for r in assignment]
        stage_map = StageMap.from_assignment(merged)
        if fits(costs, stage_map, limits, microbatches):
            assignment = merged
            active.discard(source)
    return StageMap.from_assignment(assignment)
