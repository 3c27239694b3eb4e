"""Split-apply in Triton: a counting sort of choices by destination and expert, from integers alone.

Shape legend: C = N*K choices, A of them sent, E experts, D destination ranks, B blocks of choices.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (arguments of a kernel have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prophet.kernels.choice import on_its_device

BLOCK = 128
# where one program goes through all cells
_WIDE = 1024


@triton.jit(do_not_specialize=["choices"])  # counts change from step to step
def _count_kernel(ids, kept, counts, choices, experts, HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Fill counts[b, e]: choices of expert e in block b. Integer additions: their order does not matter."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < choices
    if HAS_KEPT:
        live = live & (tl.load(kept + at, mask=live, other=0) != 0)
    expert = tl.load(ids + at, mask=live, other=0)
    tl.atomic_add(counts + block.to(tl.int64) * experts + expert, 1, mask=live)


@triton.jit
def _begins_kernel(split, shares, starts, experts, ranks, BLOCK: tl.constexpr):
    """Sums of what is before each cell of split[e, d]: program 0 fills `shares`, program 1 `starts`, as used below."""
    lane = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        for first in range(0, experts, BLOCK):
            row = (first + lane).to(tl.int64) * ranks
            live = first + lane < experts
            total = tl.zeros((BLOCK,), tl.int64)
            for d in range(0, ranks):
                tl.store(shares + row + d, total, mask=live)
                total += tl.load(split + row + d, mask=live, other=0)
    else:
        carried = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, experts * ranks, BLOCK):
            at = first + lane
            live = at < experts * ranks
            cell = (at % experts).to(tl.int64) * ranks + at // experts
            number = tl.load(split + cell, mask=live, other=0)
            tl.store(starts + cell, carried + tl.cumsum(number, axis=0) - number, mask=live)
            carried += tl.sum(number, axis=0)


@triton.jit(do_not_specialize=["choices", "rows"])  # counts change from step to step
def _place_kernel(
    ids, kept, upto, shares, starts, order, position, choices, experts, ranks, rows,
    HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where every choice goes.

    upto: [B, E], choices of the expert up to and with the block. shares: [E, D], first place of a rank's share among
    an expert's choices. starts: [E, D], where the run (rank, expert) begins in the order.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < choices
    live = inside
    if HAS_KEPT:
        live = live & (tl.load(kept + at, mask=inside, other=0) != 0)
    expert = tl.load(ids + at, mask=live, other=-1)
    other_at = block * BLOCK + lane
    other = tl.load(ids + other_at, mask=inside, other=-2)
    if HAS_KEPT:
        other_kept = tl.load(kept + other_at, mask=inside, other=0) != 0
        other = tl.where(other_kept, other, -2)
    # place within the block: choices of the same expert before it; all pairs, in registers
    earlier = (expert[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
    place = tl.load(upto + (block.to(tl.int64) - 1) * experts + expert, mask=live & (at >= BLOCK), other=0)
    place += tl.sum(earlier.to(tl.int64), axis=1)
    # the rank in whose share the place falls; ranks are few, so a loop over boundaries does
    rank = tl.zeros((BLOCK,), tl.int64)
    for d in range(1, ranks):
        rank += (place >= tl.load(shares + expert * ranks + d, mask=live, other=0)).to(tl.int64)
    cell = expert * ranks + rank
    first = tl.load(shares + cell, mask=live, other=0)
    target = tl.load(starts + cell, mask=live, other=0) + place - first
    tl.store(position + at, tl.where(live, target, -1), mask=inside)
    # a split that does not fit the ids must not write past the end
    tl.store(order + target, at.to(tl.int64), mask=live & (target < rows))


@triton.jit(do_not_specialize=["number"])  # counts change from step to step
def _runs_kernel(runs, order, position, number, BLOCK: tl.constexpr):
    """Fill the order of rows and its inverse, a run for each program."""
    run = runs + tl.program_id(0)
    begin, length, target = tl.load(run), tl.load(run + number), tl.load(run + 2 * number)
    lane = tl.arange(0, BLOCK)
    for first in range(0, length, BLOCK):
        at = first + lane
        tl.store(order + target + at, begin + at, mask=at < length)
        tl.store(position + begin + at, target + at, mask=at < length)


@on_its_device
def order_of_runs(runs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order [rows] that takes `runs` one after the other, and its inverse [rows].

    Args:
        runs: Where each run begins, how many rows it has, and how many those before it have, [3, runs].
        rows: How many rows there are.
    """
    order, position = (torch.empty(rows, dtype=torch.int64, device=runs.device) for _ in range(2))
    if rows:
        number = runs.shape[1]
        _runs_kernel[(number,)](runs.contiguous(), order, position, number, BLOCK=BLOCK)
    return order, position


@on_its_device
def send_order(ids: Tensor, kept: Tensor | None, split_ED: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order [A] of the choices by destination rank, expert and position, and its inverse [N, K].

    The inverse is -1 where a choice is not sent.

    Args:
        ids: Expert of every choice, [N, K].
        kept: Which choices are sent, [N, K] booleans; None for all.
        split_ED: Choices of expert e for rank d, [E, D].
        rows: A, the sum of `split_ED`.
    """
    experts, ranks = split_ED.shape
    choices = ids.numel()
    position = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    order = torch.empty(rows, dtype=torch.int64, device=ids.device)
    if choices == 0:
        return order, position
    flat = ids.contiguous()
    flags = flat if kept is None else kept.contiguous().to(torch.int8)
    blocks = triton.cdiv(choices, BLOCK)
    counts = torch.zeros((blocks, experts), dtype=torch.int64, device=ids.device)
    has_kept = kept is not None
    _count_kernel[(blocks,)](flat, flags, counts, choices, experts, HAS_KEPT=has_kept, BLOCK=BLOCK)
    shares, starts = (torch.empty((experts, ranks), dtype=torch.int64, device=ids.device) for _ in range(2))
    _begins_kernel[(2,)](split_ED.to(torch.int64).contiguous(), shares, starts, experts, ranks, BLOCK=_WIDE)
    # with sums over blocks, counting and placing make a stable counting sort, without atomics on places
    _place_kernel[(blocks,)](
        flat, flags, counts.cumsum(0), shares, starts, order, position, choices, experts, ranks, rows,
        HAS_KEPT=has_kept, BLOCK=BLOCK,
    )  # fmt: skip
    return order, position
