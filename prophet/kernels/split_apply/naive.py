"""The definition of split-apply: from an integer split to the order in which rows travel.

Shape legend: A choices (N tokens x K), E experts, D destination ranks, R source ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def regroup(lengths: Tensor) -> Tensor:
    """Return the order that turns runs laid out as [a, b] into runs laid out as [b, a].

    Args:
        lengths: Rows of run (a, b), [A, B] integers; runs are ordered by a, then b.

    Returns:
        Indices into the rows, [sum of lengths], such that taking them orders the runs by b, then a. Rows keep their
        order in a run.
    """
    flat = lengths.reshape(-1)
    starts = (flat.cumsum(0) - flat).view_as(lengths).t().reshape(-1)
    turned = lengths.t().reshape(-1)
    # how far each run moves: all its rows by the same number
    offsets = starts - (turned.cumsum(0) - turned)
    total = int(flat.sum())
    return torch.repeat_interleave(offsets, turned, output_size=total) + torch.arange(total, device=lengths.device)


def send_order(ids: Tensor, kept: Tensor | None, split_ED: Tensor) -> Tensor:
    """Return the order of `op.send_order`, [choices kept] indices into the N*K choices.

    Args:
        ids: Expert of every choice, [N, K].
        kept: Which choices are sent, [N, K] booleans; None for all.
        split_ED: Choices of expert e for rank d, [E, D].
    """
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    if kept is not None:
        order = order[kept.reshape(-1)[order]]
    # sorted by expert the choices are runs (expert, rank): an expert's earlier ones go to the lower ranks
    return order[regroup(split_ED)]
