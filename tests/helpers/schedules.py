"""Steps for the tests of `prophet.scheduler`: durations that are alike everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prophet.scheduler.simulate import StepDurations
from prophet.spec import FloatArray


def uniform_durations(
    blocks: int,
    ranks: int,
    *,
    a2a_s: float = 0.0,
    fec_s: float = 0.0,
    fnec_s: float = 0.0,
    bnec_s: float = 0.0,
    bec_s: float = 0.0,
    trans_s: Sequence[float] = (0.0, 0.0),
    agg_s: Sequence[float] = (0.0, 0.0),
    plan_s: float = 0.0,
    start_s: float = 0.0,
    end_s: float = 0.0,
    counts_s: float = 0.0,
    update_s: float = 0.0,
    overlap_cost: float = 0.0,
    **of_machine: Any,
) -> StepDurations:
    """All blocks and ranks alike; trans_s and agg_s give seconds by chunk; of_machine: as `StepDurations`' fields."""

    def per_rank(seconds: float) -> FloatArray:
        return np.full((blocks, ranks), seconds)

    def chunks(seconds: Sequence[float]) -> FloatArray:
        return np.broadcast_to(np.array(seconds, dtype=np.float64)[None, :, None], (blocks, len(seconds), ranks))

    return StepDurations(
        a2a_s=np.full((blocks, 4, ranks), a2a_s),
        fec_s=per_rank(fec_s),
        fnec_s=per_rank(fnec_s),
        bnec_s=per_rank(bnec_s),
        bec_s=per_rank(bec_s),
        trans_s=chunks(trans_s),
        agg_s=chunks(agg_s),
        plan_s=np.full(blocks, plan_s),
        start_s=np.full(ranks, start_s),
        end_s=np.full(ranks, end_s),
        counts_s=counts_s,
        update_s=np.full(ranks, update_s),
        overlap_cost=overlap_cost,
        **of_machine,
    )


def compute_s(d: StepDurations) -> FloatArray:
    """Compute of every rank in a step, [R]."""
    blocks: FloatArray = (d.fec_s + d.fnec_s + d.bnec_s + d.bec_s).sum(axis=0)
    return blocks + d.start_s + d.end_s + d.update_s
