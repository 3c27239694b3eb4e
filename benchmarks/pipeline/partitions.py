"""How fast and how good the partitioner is, beside DeepSpeed's function in the same process where that is installed.

Shape legend: L layers, P stages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.measure import seconds_of
from benchmarks.tables import words
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.spec import LayerCost, RankLimits

SIZES = ((24, 4), (48, 8), (96, 16), (256, 32))
REPETITIONS = 7


def deepspeed_function() -> tuple[Callable[[Sequence[float], int], list[int]] | None, str]:
    """DeepSpeed's `partition_balanced` and its version, or None and why."""
    try:
        import deepspeed  # type: ignore[import-not-found, unused-ignore]
        from deepspeed.runtime.utils import partition_balanced  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        return None, f"not installed ({error})"
    return partition_balanced, str(deepspeed.__version__)


def compare() -> dict[str, Any]:
    """Time both on the same random layers; prints as it goes."""
    peer, version = deepspeed_function()
    print(f"deepspeed: {version}", flush=True)
    rows: list[dict[str, Any]] = []
    for layers, stages in SIZES:
        rng = np.random.default_rng((layers, stages))
        # milliseconds, as layers take them
        times_s = rng.lognormal(0.0, 0.6, size=layers) * 1e-3
        costs = [LayerCost(forward_s=float(t)) for t in times_s]
        limits = RankLimits.uniform(stages)
        ours, ours_s = _timed(partial(_ours, costs, limits))
        row: dict[str, Any] = {
            "layers": layers,
            "stages": stages,
            "seconds": ours_s,
            "bottleneck_over_mean": _bottleneck(ours, times_s) * stages / float(times_s.sum()),
        }
        if peer is not None:
            theirs, theirs_s = _timed(partial(peer, times_s.tolist(), stages), repetitions=1 if layers > 100 else 3)
            row["deepspeed_seconds"] = theirs_s
            row["deepspeed_bottleneck_over_ours"] = _bottleneck(theirs, times_s) / _bottleneck(ours, times_s)
            row["deepspeed_empty_stages"] = sum(int(b <= a) for a, b in pairwise(theirs))
        rows.append(row)
        print(words(row, 5), flush=True)
    return {"deepspeed": version, "partition": rows}


def _ours(costs: Sequence[LayerCost], limits: Sequence[RankLimits]) -> Sequence[int]:
    return partition_by_time(costs, limits, microbatches=8).boundaries


def _timed(run: Callable[[], Sequence[int]], repetitions: int = REPETITIONS) -> tuple[Sequence[int], float]:
    """(result, median seconds), after one run that is not counted."""
    return run(), statistics.median(seconds_of(run) for _ in range(repetitions))


def _bottleneck(boundaries: Sequence[int], times_s: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    ends = np.concatenate([[0.0], np.cumsum(times_s)])
    return float(max(ends[b] - ends[a] for a, b in pairwise(boundaries)))
