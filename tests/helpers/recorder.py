"""A collective without peers that remembers what was asked of it: for tests of what is sent, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from prophet.engine.identical_experts import COMPARISON
from prophet.ranks.collective import Channel, Collective, Done, Pending, check_rows
from prophet.ranks.messages import HEAD
from prophet.ranks.operation import Operation


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call made on a `RecordingCollective`; bytes are counted by destination rank."""

    kind: Literal["all_to_all", "all_gather", "exchange"]
    op: Operation
    channel: Channel
    sent_bytes: tuple[int, ...] = field(default=())


class RecordingCollective(Collective):
    """Remembers every call. Peers are imagined: they route as this rank does, have other experts, and send zeros."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, timeout_s=1.0)
        self.calls: list[Recorded] = []

    def _renewed(self, timeout_s: float) -> Collective:
        self.timeout_s = timeout_s
        return self

    def all_to_all(
        self,
        x: Tensor,
        send_rows: Sequence[int],
        recv_rows: Sequence[int],
        *,
        op: Operation,
        channel: Channel = "tokens",
    ) -> Pending:
        check_rows(x, send_rows, recv_rows, self.size)
        row_bytes = x[0].numel() * x.element_size() if x.shape[0] else 0
        self.calls.append(Recorded("all_to_all", op, channel, tuple(n * row_bytes for n in send_rows)))
        out = x.new_zeros((sum(recv_rows), *x.shape[1:]))
        mine = sum(send_rows[: self.rank])
        start = sum(recv_rows[: self.rank])
        kept = min(send_rows[self.rank], recv_rows[self.rank])
        out[start : start + kept] = x[mine : mine + kept]
        return Done(out)

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        self.calls.append(Recorded("all_gather", op, channel, (x.numel() * x.element_size(),) * self.size))
        rows = torch.stack([x] * self.size)
        if op.name == COMPARISON:  # peers have other experts
            rows[:, HEAD:] += torch.arange(self.size).unsqueeze(1)
        return rows

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        op: Operation,
        channel: Channel = "weights",
    ) -> Pending:
        sent = [0] * self.size
        for peer, x in sends:
            sent[peer] += x.numel() * x.element_size()
        self.calls.append(Recorded("exchange", op, channel, tuple(sent)))
        for _, out in recvs:
            out.zero_()
        return Done(torch.empty(0))
