"""Steps for the tests of `prophet.scheduler`: durations that are alike everywhere, actions as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast, get_args

import numpy as np

from prophet.scheduler.actions import A2A_NAMES, TRANSFERS, WINDOWS, Action, ActionKind, OtherKind, Window, WindowKind
from prophet.scheduler.simulate import StepDurations
from prophet.spec import FloatArray

_KINDS = "|".join((*TRANSFERS, *WINDOWS, *get_args(OtherKind)))
_PATTERN = re.compile(
    rf"^({_KINDS})(?:\((\d+)(?:,(\d+|{'|'.join(A2A_NAMES)}))?\))?(?:@({'|'.join(WINDOWS)})(?:\((\d+)\))?)?$"
)


def parse_action(text: str) -> Action:
    """Read what `str` wrote."""
    match = _PATTERN.match(text.strip())
    if match is None:
        raise ValueError(
            f"not an action: {text!r}; expected like 'FEC(1)', 'A2A(1,combine)' or 'TRANS(2,1)@FEC(1)', "
            f"of {_KINDS} and windows {'|'.join(WINDOWS)}"
        )
    kind, block, chunk, window, at = match.groups()
    if chunk is not None and chunk.isdigit() == (kind == "A2A"):
        raise ValueError(f"not an action: {text!r}; chunks are numbers, all-to-alls one of {A2A_NAMES}")
    number = None if chunk is None else int(chunk) if chunk.isdigit() else A2A_NAMES.index(chunk)
    where = None if window is None else Window(cast(WindowKind, window), None if at is None else int(at))
    return Action(cast(ActionKind, kind), None if block is None else int(block), number, where)


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
) -> StepDurations:
    """All blocks and ranks alike; trans_s and agg_s give seconds by chunk."""

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
    )


def compute_s(d: StepDurations) -> FloatArray:
    """Compute of every rank in a step, [R]."""
    blocks: FloatArray = (d.fec_s + d.fnec_s + d.bnec_s + d.bec_s).sum(axis=0)
    return blocks + d.start_s + d.end_s + d.update_s
