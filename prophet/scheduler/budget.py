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

    Gradients stay until they have gone home, so those of all layers count.

    Args:
        placements: By layer, [L].
        param_bytes: Bytes of the parameters of one replica, by layer, [L].
        grad_bytes: Bytes of the gradients of one replica, by layer, [L].
        budget_bytes: Bytes of replicas that a rank may hold at a time.
        order: The layers; those that come first keep theirs.
        span: How many layers in a row have their parameters there at a time; None is all of them (nothing is dropped
            before the step ends).

    Returns:
        Placements by layer; those that lost nothing are the given objects.
    """
    layers, ranks = len(placements), placements[0].ranks
    params = np.zeros((layers, ranks), dtype=np.int64)
    grads = np.zeros(ranks, dtype=np.int64)
    found = list(placements)

    def peak(rank: int) -> int:
        if span is None:
            return int(params[:, rank].sum() + grads[rank])
        # the fullest stretch of `span` layers decides
        together = [int(params[i : i + span, rank].sum()) for i in range(max(1, layers - span + 1))]
        return max(together) + int(grads[rank])

    for i in order:
        kept = []
        # one by one in a fixed order, so that every rank drops the same ones
        for expert, rank in placements[i].replicas():
            params[i, rank] += param_bytes[i]
            grads[rank] += grad_bytes[i]
            if peak(rank) <= budget_bytes:
                kept.append((expert, rank))
            else:
                params[i, rank] -= param_bytes[i]
                grads[rank] -= grad_bytes[i]
        # the same object where nothing was dropped: caches, as of `FormChooser`, know placements by identity
        if len(kept) < len(placements[i].replicas()):
            found[i] = Placement.with_replicas(placements[i].home, ranks, kept)
    return found
