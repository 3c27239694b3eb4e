"""Split-apply as operators: index building from integer counts, on the device, without host synchronisation.

Shape legend: A choices sent (N tokens x K, less those dropped), E experts, D destination ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prophet.kernels.choice import Impl, choose
from prophet.kernels.split_apply import naive


class SendOrder(NamedTuple):
    """The order of the choices, and where each is in it.

    Attributes:
        order: Indices into the N*K choices, in the order in which they are sent, [A].
        position: Its inverse, [N, K]: where in the order a choice is, or -1 where it is not sent.
    """

    order: Tensor
    position: Tensor


def send_order(
    ids: Tensor, kept: Tensor | None, split_ED: Tensor, rows: int | None = None, *, impl: Impl = "auto"
) -> SendOrder:
    """Return the order in which this rank's choices are sent: by destination rank, expert, position in the batch.

    Args:
        ids: Expert of every choice, [N, K].
        kept: Which choices are sent, [N, K] booleans; None where all are.
        split_ED: How many of this rank's choices of expert e go to rank d, [E, D]; an expert's earlier choices go to
            the lower ranks.
        rows: A, the sum of `split_ED`, where the host knows it; without it and with `kept`, finding it costs a
            synchronisation.
        impl: Which implementation runs, see `prophet.kernels.choice`.

    Raises:
        ValueError: Shapes or the number of choices do not fit.
    """
    if ids.ndim != 2 or split_ED.ndim != 2 or (kept is not None and kept.shape != ids.shape):
        raise ValueError(
            f"expected ids [N, K], kept like it and split [E, D], got shapes {list(ids.shape)}, "
            f"{None if kept is None else list(kept.shape)} and {list(split_ED.shape)}"
        )
    if rows is None:
        # with all choices sent the host knows their number; it asks the device only where some are dropped
        rows = ids.numel() if kept is None else int(split_ED.sum())
    if kept is None and rows != ids.numel():
        raise ValueError(f"a split of {rows} choices does not match ids of shape {list(ids.shape)}")
    chosen = choose(impl, ids, indices=True)
    if chosen == "naive":
        order = naive.send_order(ids, kept, split_ED)
        return SendOrder(order, inverse(order, ids.numel()).view(ids.shape))
    order, position = _send_order_op(ids, kept, split_ED, rows, chosen)
    return SendOrder(order, position)


def regroup(lengths: Tensor, rows: int | None = None) -> Tensor:
    """Return the order that turns runs of rows laid out as [a, b] into runs laid out as [b, a]; as in the definition.

    Args:
        lengths: [A, B] integers.
        rows: Their sum, where the host knows it; without it, finding it synchronises a device.
    """
    flat = lengths.reshape(-1)
    total = int(flat.sum()) if rows is None else rows
    starts = (flat.cumsum(0) - flat).view_as(lengths).t().reshape(-1)
    turned = lengths.t().reshape(-1)
    offsets = starts - (turned.cumsum(0) - turned)
    # `output_size` spares the host from waiting for the sum
    spread = torch.repeat_interleave(offsets, turned, output_size=total)
    return spread.add_(torch.arange(total, device=lengths.device))


def order_of_runs(runs: Tensor, rows: int, *, impl: Impl = "auto") -> SendOrder:
    """Return the order that takes runs of consecutive rows one after the other, and its inverse [rows].

    Args:
        runs: Where each run begins, how many rows it has, and how many those before it have, [3, runs] int64. Every row
            is in one of them.
        rows: How many rows there are.
        impl: Which implementation runs, see `prophet.kernels.choice`.
    """
    if choose(impl, runs, indices=True) == "triton":
        from prophet.kernels.split_apply import kernel

        return SendOrder(*kernel.order_of_runs(runs, rows))
    begins, lengths, ahead = runs
    every = torch.arange(rows, device=runs.device)
    # all rows of a run move equally far; `output_size` spares the host from waiting for the sum
    order = torch.repeat_interleave(begins - ahead, lengths, output_size=rows).add_(every)
    position = torch.empty_like(order)
    position[order] = every
    return SendOrder(order, position)


def inverse(order: Tensor, size: int) -> Tensor:
    """Return where each of 0..size-1 is in `order` [A], or -1 where it is not in it; [size] int64."""
    found = torch.full((size,), -1, dtype=torch.int64, device=order.device)
    # each choice is in the order once at most, so no two writes meet
    found[order] = torch.arange(order.shape[0], device=order.device)
    return found


def _by_expert(ids: Tensor, experts: int) -> Tensor:
    """Return a stable order of the flat `ids` by expert."""
    # keys of few bits sort several times faster than those of 64
    key = torch.uint8 if experts <= 256 else torch.int16 if experts <= 32767 else ids.dtype
    return ids.to(key).argsort(stable=True)


@torch.library.custom_op("prophet::send_order", mutates_args=())
def _send_order_op(ids: Tensor, kept: Tensor | None, split_ED: Tensor, rows: int, impl: str) -> tuple[Tensor, Tensor]:
    if impl == "triton":
        from prophet.kernels.split_apply import kernel

        return kernel.send_order(ids, kept, split_ED, rows)
    experts, ranks = split_ED.shape
    flat = ids.reshape(-1)
    if kept is None:
        order = _by_expert(flat, experts)
    else:  # those not sent are sorted behind the last expert and cut off
        order = _by_expert(flat.masked_fill(~kept.reshape(-1), experts), experts + 1)[:rows]
    if order.shape[0] != rows:
        raise ValueError(f"a split of {rows} choices does not match {order.shape[0]} choices")
    # by expert alone is the order already where all goes to one rank
    if ranks > 1:
        order = order[regroup(split_ED, rows)]
    return order, inverse(order, flat.shape[0]).view(ids.shape)


@_send_order_op.register_fake
def _(ids: Tensor, kept: Tensor | None, split_ED: Tensor, rows: int, impl: str) -> tuple[Tensor, Tensor]:
    return ids.new_empty((rows,), dtype=torch.int64), ids.new_empty(ids.shape, dtype=torch.int64)
