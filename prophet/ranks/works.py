"""How torch's works are waited for, so that Ctrl-C is seen in between, and how groups are made and given up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prophet.errors import OutOfStep
from prophet.ranks.collective import Coming, Pending
from prophet.ranks.operation import Operation
from prophet.ranks.waiting import TURN_S, Waiter, joined, stay

T = TypeVar("T")
_NEVER_SENT = 1 << 30  # a tag
_AT_ONCE = _NEVER_SENT - 1  # the tag of what `gathered_at_once` sends
_FEW_RANKS, SHORT_BYTES, _NAME_BYTES = 32, 1 << 12, 8


def nothing() -> None:
    """What a wait calls in between where nobody is to be heard."""


def in_turns(work: Any, turn: Callable[[], None] = nothing, turn_s: float = TURN_S) -> None:
    """Wait for a collective on the host; its group's limit ends that. turn: called in between, and may raise."""
    while True:
        try:
            work.wait(timedelta(seconds=turn_s))
            return
        except RuntimeError:
            if work.is_completed():
                break
        stay()
        turn()
    work.wait()


def beside(works: Sequence[Any], waiter: Waiter, turn: Callable[[], None] = nothing) -> None:
    """Wait for single messages on the host: in a thread, as gloo closes connections where a wait is cut short.

    The thread takes all of them in turn: to and from it costs more than a short message does.
    """
    joined(waiter.submit(lambda: at_once(works)), turn)


def at_once(works: Sequence[Any]) -> None:
    """Wait on a device that works behind the host's back."""
    for work in works:
        work.wait()


def is_short(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether `gathered_at_once` takes it; the same on all ranks."""
    few = 0 < x.numel() * x.element_size() <= SHORT_BYTES and group.size() <= _FEW_RANKS
    return few and x.device.type == "cpu" and "cpu:gloo" in str(dist.get_backend_config(group))


def gathered_at_once(
    x: Tensor, group: dist.ProcessGroup, op: Operation, wait: Callable[[Sequence[Any]], None]
) -> Tensor:
    """All ranks' short `x`, [R, *x.shape]. Raises `OutOfStep` where ranks have sent another shape, or in another `op`.

    gloo's all-gather passes everything around a ring, so what is short waits for R - 1 ranks in a row. Among few ranks
    it goes from each to all others; no link carries more bytes for that. Every message has one length, as gloo ends a
    process that gets more than it asked for; its tag keeps it apart from all others.
    """
    about = hashlib.blake2b(f"{op.name} {x.dtype} {tuple(x.shape)}".encode(), digest_size=_NAME_BYTES).digest()
    end = _NAME_BYTES + x.numel() * x.element_size()
    mine = torch.zeros(_NAME_BYTES + SHORT_BYTES, dtype=torch.uint8)
    mine[:_NAME_BYTES] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    mine[_NAME_BYTES:end] = x.reshape(-1).view(torch.uint8)
    every = mine.repeat(group.size(), 1)
    others = [(group.rank() + i) % group.size() for i in range(1, group.size())]
    works = [dist.irecv(every[r], group=group, group_src=r, tag=_AT_ONCE) for r in others]
    wait([*works, *(dist.isend(mine, group=group, group_dst=r, tag=_AT_ONCE) for r in others)])
    apart = (every[:, :_NAME_BYTES] != mine[:_NAME_BYTES]).any(1).nonzero().reshape(-1).tolist()
    if apart:
        raise OutOfStep(f"rank {group.rank()}: ranks {apart} are not in {op}")
    return every[:, _NAME_BYTES:end].contiguous().view(x.dtype).reshape(-1, *x.shape)


def coming(works: Sequence[Any], result: Tensor, keep: Any, wait: Callable[[Sequence[Any]], None]) -> Pending:
    """torch's own `works` under way. keep: inputs, which stay alive until the transfer is over."""

    def finish(keep: Any = keep) -> Tensor:
        wait(works)
        return result

    def notify(call: Callable[[], None]) -> None:
        torch.futures.collect_all([work.get_future() for work in works]).then(lambda _: call())

    return Coming(finish, lambda: all(work.is_completed() for work in works), notify)


def abort(group: dist.ProcessGroup) -> None:
    """Let whatever waits for this group in this process fail at once, in any thread; peers' waits may fail, too."""
    if "cpu:gloo" not in str(dist.get_backend_config(group)):
        with suppress(RuntimeError):
            group.abort()
        return
    # gloo has no way to give up a wait; but where one takes too long, it closes all connections that are waited for
    works: list[Any] = []
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            works.append(dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT))
    for work in works[:1]:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


def all_made(makes: Sequence[Callable[[], T]]) -> list[T]:
    """The groups that these make. Where one fails the others are tried, too, and then its failure is raised.

    torch names groups by how many a process has tried to make. One that tried fewer would meet others under the names
    of other groups from then on, without an error.
    """
    made: list[T] = []
    failed: list[Exception] = []
    for make in makes:
        try:
            made.append(make())
        except (RuntimeError, ValueError) as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return made
