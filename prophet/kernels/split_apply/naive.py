"""The definition of split-apply: from an integer split to the order in which rows travel.

Shape legend: A choices (N tokens x K), E experts, D destination ranks, R source ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def regroup(lengths: Tensor) -> Tensor:
    """The order that turns runs laid out as [a, b] into runs laid out as [b, a].

    `lengths` [A, B] integers: run (a, b) has that many consecutive rows, runs ordered by a, then b. Returns indices
    into the rows, [sum of lengths], such that taking them orders the runs by b, then a. Rows keep their order in a run.
    """
    flat = lengths.reshape(-1)
    starts = (flat.cumsum(0) - flat).view_as(lengths).t().reshape(-1)
    turned = lengths.t().reshape(-1)
    offsets = starts - (turned.cumsum(0) - turned)
    total = int(flat.sum())
    return torch.repeat_interleave(offsets, turned, output_size=total) + torch.arange(total, device=lengths.device)


def send_order(ids: Tensor, kept: Tensor | None, split_ED: Tensor) -> Tensor:
    """The order of `op.send_order`, [choices kept] indices into the N*K choices."""
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    if kept is not None:
        order = order[kept.reshape(-1)[order]]
    return order[regroup(split_ED)]
