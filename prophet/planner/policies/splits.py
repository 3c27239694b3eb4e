"""Splits by rule: local tokens stay, or every holder takes an amount that is given.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import numpy as np

from prophet.errors import SpecError
from prophet.spec import IntArray, Placement, Split, check_load


def local_split(load: IntArray, placement: Placement) -> Split:
    """Keep tokens where their expert is held, and send the others home: the split of the published baselines.

    Raises:
        SpecError: Where load and placement have other sizes.
    """
    load = check_load(load)
    ranks, experts = load.shape
    if (ranks, experts) != (placement.ranks, placement.experts):
        raise SpecError(
            f"load is {list(load.shape)}, placement is for {placement.ranks} ranks x {placement.experts} experts"
        )
    tokens = np.zeros((ranks, experts, ranks), dtype=np.int64)
    # One index per source and expert: all their tokens have one target
    rank, expert = np.divmod(np.arange(ranks * experts), experts)
    target = np.where(placement.holds.T.reshape(-1), rank, placement.home[expert])
    tokens[rank, expert, target] = load.reshape(-1)
    return Split.trusted(tokens)


def fill(load: IntArray, amounts: IntArray, placement: Placement, node: IntArray) -> Split:
    """Send tokens so that ranks compute given amounts: local tokens first, then the same node, then the rest.

    Args:
        load: Tokens [R, E].
        amounts: Tokens [E, R] of each expert to compute on each rank.
        placement: The holders.
        node: Node [R] of every rank.
    """
    ranks, experts = load.shape
    tokens = np.zeros((ranks, experts, ranks), dtype=np.int64)
    rank, expert = np.divmod(np.arange(ranks * experts), experts)
    # Experts with one holder leave no choice, and are most of them: all at once
    single = placement.holds.sum(axis=1) == 1
    tokens[rank, expert, placement.home[expert]] = np.where(single[expert], load.reshape(-1), 0)
    same_node = node[:, None] == node[None, :]
    for e in np.flatnonzero(~single):
        left, want = load[:, e].copy(), amounts[e].copy()
        stays = np.minimum(left, want)
        tokens[np.arange(ranks), e, np.arange(ranks)] += stays
        left -= stays
        want -= stays
        for allowed in (same_node, np.ones_like(same_node)):
            for d in np.flatnonzero(want):
                for r in np.flatnonzero(left * allowed[:, d]):
                    part = min(left[r], want[d])
                    tokens[r, e, d] += part
                    left[r] -= part
                    want[d] -= part
    return Split.trusted(tokens)


def even_amounts(load: IntArray, placement: Placement) -> IntArray:
    """Divide every expert's tokens evenly among its holders, [E, R]."""
    total = load.sum(axis=0)
    copies = placement.holds.sum(axis=1)
    # A holder's place among the expert's holders: the first ones take a token more where it does not divide
    order = np.cumsum(placement.holds, axis=1) - 1
    share = (total // copies)[:, None] + (order < (total % copies)[:, None])
    amounts: IntArray = np.where(placement.holds, share, 0).astype(np.int64)
    return amounts
