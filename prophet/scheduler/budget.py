"""Which of the planned replicas fit into memory: planned layer by layer, they share one budget; pure.

Shape legend: L layers, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prophet.spec import Placement


def within_budget(
    placements: Sequence[Placement],
    param_bytes: Sequence[int],
    grad_bytes: Sequence[int],
    budget_bytes: int,
    order: Sequence[int],
    *,
    span: int | None = None,
) -> list[Placement]:
    """Drop replicas until every rank is within the budget.

    param_bytes, grad_bytes: [L] of one replica. order: the layers, those that come first keep theirs. span: how many
    layers in a row have their parameters there at a time; None is all of them (nothing is dropped before the step
    ends). Gradients stay until they have gone home, so those of all layers count.
    """
    layers, ranks = len(placements), placements[0].ranks
    params = np.zeros((layers, ranks), dtype=np.int64)
    grads = np.zeros(ranks, dtype=np.int64)
    found = list(placements)

    def peak(rank: int) -> int:
        if span is None:
            return int(params[:, rank].sum() + grads[rank])
        together = [int(params[i : i + span, rank].sum()) for i in range(max(1, layers - span + 1))]
        return max(together) + int(grads[rank])

    for i in order:
        kept = []
        for expert, rank in placements[i].replicas():
            params[i, rank] += param_bytes[i]
            grads[rank] += grad_bytes[i]
            if peak(rank) <= budget_bytes:
                kept.append((expert, rank))
            else:
                params[i, rank] -= param_bytes[i]
                grads[rank] -= grad_bytes[i]
        if len(kept) < len(placements[i].replicas()):
            found[i] = Placement.with_replicas(placements[i].home, ranks, kept)
    return found
