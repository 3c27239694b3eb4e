"""How torch's works are waited for, so that Ctrl-C is seen in between, and how groups are made and given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from prophet.ranks.waiting import TURN_S, Waiter, joined, stay

T = TypeVar("T")
_NEVER_SENT = 1 << 30  # a tag


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
