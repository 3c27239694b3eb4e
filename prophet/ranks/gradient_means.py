"""Means of gradients over ranks in buckets of bounded size, each added in rank order.

    bucket k      all-to-all: rank r gets the r-th shard of it from every rank
                  sum of the R shards, in rank order
    bucket k + 1  all-to-all, under way while
    bucket k      all-gather: every rank gets all R means, and writes them into its gradients

Shape legend: R ranks, N elements of a bucket, S = N / R elements of a shard (rounded up).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from prophet.errors import OutOfStep
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.operation import Operation
from prophet.ranks.stretches import stretches

# Bytes that a rank takes for the messages of one bucket, those that it sends and those that it gets
BUCKET_BYTES = 64 << 20
# Few gradients get smaller buckets, and this is the smallest: more messages would cost time
_LEAST_BYTES = 128 << 10
# Buckets that exist at the same time: one is gathered while the next one is on its way
_UNDER_WAY = 2


@torch.no_grad()
def average_gradients_(
    parameters: Sequence[nn.Parameter], ranks: Collective, *, op: Operation, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Average gradients over ranks in place, with the same bits on all of them; collective.

    A parameter without a gradient on this rank counts as zeros, and gets the mean of all. Where no rank has one there
    is none afterwards. Memory beside the gradients: at most two buckets, and where the gradients take more than 256
    KiB at most as much as they do.

    Args:
        parameters: The same on all ranks, in the same order; of a `DTensor` the shard that lies here.
        ranks: The R ranks. Nothing else may use their channel "weights" meanwhile.
        op: What errors call it; its layer must be the same on all ranks.
        bucket_bytes: Bytes of a bucket at most, in messages sent and received.

    Raises:
        OutOfStep: Ranks average different layers.
    """
    if ranks.size == 1:
        return
    # Sorted, as all ranks must send the buckets in one order
    for dtype in sorted({_dtype(p) for p in parameters}, key=str):
        _Buckets([p for p in parameters if _dtype(p) == dtype], dtype, ranks, op, bucket_bytes).average()


def _dtype(p: nn.Parameter) -> torch.dtype:
    """The type of a parameter's gradient, also where there is none: torch lets users set it apart from its own."""
    return getattr(p, "grad_dtype", None) or p.dtype


class _Buckets:
    """Gradients of one dtype, laid end to end and cut; other arguments as of `average_gradients_`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        ranks: Collective,
        op: Operation,
        bucket_bytes: int,
    ) -> None:
        self._parameters, self._ranks, self._op = parameters, ranks, op
        shards = [_here(p) for p in parameters]
        # Of the dtype and on the device of all messages
        self._like = shards[0].new_empty(0, dtype=dtype)
        self._sizes = [shard.numel() for shard in shards]
        self._ends = list(accumulate(self._sizes))
        self._total = self._ends[-1]
        item = self._like.element_size()
        most_bytes = min(bucket_bytes, max(_LEAST_BYTES, self._total * item // _UNDER_WAY))
        # What is sent exists beside what has come, which is as much
        self._each = max(1, most_bytes // 2 // item)

    def average(self) -> None:
        if not self._total:
            return
        # A queue, which lets go of a message once it has been waited for
        under_way = deque([self._launch(0)])
        for start in range(0, self._total, self._each):
            mean = self._mean_of_shard(under_way.popleft(), first=start == 0)
            if start + self._each < self._total:
                under_way.append(self._launch(start + self._each))
            self._write(start, self._ranks.all_gather(mean, op=self._op, channel="weights").view(-1))

    def _head(self) -> Tensor:
        """What travels before the first bucket: the layer, and which parameters have a gradient here."""
        # Below 128, which half precisions hold exactly, too
        numbers = [float((self._op.layer or 0) % 128), *(float(p.grad is not None) for p in self._parameters)]
        return torch.tensor(numbers, dtype=self._like.dtype).to(self._like.device, non_blocking=True)

    def _launch(self, start: int) -> Pending:
        """Send every rank its shard of the bucket from element `start` on."""
        size, stop = self._ranks.size, min(start + self._each, self._total)
        shard = -(-(stop - start) // size)
        head = self._head() if start == 0 else self._like.new_empty(0)
        # Zeros, for gradients that are not there and where the last shard is shorter
        message = self._like.new_zeros((size, len(head) + shard))  # [R, head + S]
        message[:, : len(head)] = head
        for rank, row in enumerate(message):
            first = min(start + rank * shard, stop)
            for own, beside in self._pairs(first, row[len(head) : len(head) + stop - first]):
                beside.copy_(own)
        ones = [1] * size
        return self._ranks.all_to_all(message, ones, ones, op=self._op, channel="weights")

    def _mean_of_shard(self, pending: Pending, *, first: bool) -> Tensor:
        """Wait for all ranks' parts of this rank's shard of a bucket, and average them."""
        came, head = pending.wait(), 0
        if first:
            head = 1 + len(self._parameters)
            self._read_head(self._ranks.on_host(came[:, :head], op=self._op))
        # A copy, so that the memory of what came is free while means are gathered
        mean = came[0, head:].clone()
        # One after the other: a sum in another order would have other bits
        for part in came[1:, head:]:
            mean += part
        mean /= self._ranks.size
        return mean

    def _read_head(self, heads: Tensor) -> None:
        layers = [int(n) for n in heads[:, 0].tolist()]
        if len(set(layers)) > 1:
            raise OutOfStep(f"rank {self._ranks.rank}: {self._op}: other replicas average another layer: {layers}")
        for p, somewhere in zip(self._parameters, heads[:, 1:].amax(dim=0).tolist(), strict=True):
            if somewhere and p.grad is None:
                p.grad = torch.zeros_like(p, dtype=self._like.dtype)

    def _write(self, start: int, mean: Tensor) -> None:
        for own, beside in self._pairs(start, mean[: min(self._each, self._total - start)]):
            own.copy_(beside)

    def _pairs(self, start: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the gradients from element `start` on, each with as many elements of `flat` in its shape.

        Elements of parameters without a gradient are passed over.
        """
        place, at = bisect_right(self._ends, start), 0
        while at < flat.numel():
            first = start + at - (self._ends[place] - self._sizes[place])
            n = min(self._sizes[place] - first, flat.numel() - at)
            grad = self._parameters[place].grad
            for view in () if grad is None else stretches(_here(grad), first, first + n):
                yield view, flat[at : at + view.numel()].view(view.shape)
                at += view.numel()
            at += n if grad is None else 0
            place += 1


def _here(tensor: Tensor) -> Tensor:
    """What lies here of a tensor: of a `DTensor` its shard."""
    shard: Any = tensor
    found: Tensor = shard.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()
