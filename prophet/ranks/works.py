"""Waits for torch's works, with Ctrl-C seen in between; making and giving up groups."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prophet.errors import OutOfStep
from prophet.ranks.collective import Coming, Pending
from prophet.ranks.device.side_stream import current_stream
from prophet.ranks.operation import Operation
from prophet.ranks.waiting import TURN_S, Waiter, joined, stay

T = TypeVar("T")
# A tag that no message has, so that a receive with it never ends
_NEVER_SENT = 1 << 30
# The tag of the messages of `gathered_at_once`
_AT_ONCE = _NEVER_SENT - 1
_FEW_RANKS, SHORT_BYTES, _NAME_BYTES = 32, 1 << 12, 8


def nothing() -> None:
    """Do nothing: for waits between whose turns nothing is to be checked."""


def in_turns(work: Any, turn: Callable[[], None] = nothing, turn_s: float = TURN_S) -> None:
    """Wait for a collective on the host in short turns; the time limit of its group ends the wait.

    Args:
        work: torch's handle of the collective.
        turn: Called between turns, and may raise.
        turn_s: Seconds of a turn.
    """
    while True:
        try:
            work.wait(timedelta(seconds=turn_s))
            return
        except RuntimeError:
            # A wait whose turn is over raises the same type as one that has failed; only a failed work has completed
            if work.is_completed():
                break
        stay()
        turn()
    # Raises what the work failed with
    work.wait()


def beside(works: Sequence[Any], waiter: Waiter, turn: Callable[[], None] = nothing) -> None:
    """Wait for point-to-point messages on the host in the thread of `waiter`.

    Args:
        works: torch's handles of the messages.
        waiter: The thread that waits: gloo closes connections where a wait is cut short, so turns cannot.
        turn: Called between turns, and may raise.
    """
    # One call for all of them: a change of threads costs more than a short message does
    joined(waiter.submit(lambda: at_once(works)), turn)


def at_once(works: Sequence[Any]) -> None:
    """Wait for works on an accelerator: its stream waits, not the host."""
    for work in works:
        work.wait()


def on_host_in_turns(x: Tensor, turn: Callable[[], None], turn_s: float, limit_s: float) -> Tensor:
    """Copy a tensor of a device to the host, once the device has come to it; torch's own copy waits for ever.

    Args:
        x: The tensor.
        turn: Called between turns, and may raise.
        turn_s: Seconds of a turn.
        limit_s: Seconds to wait for the device.

    Raises:
        RuntimeError: The device has not come to it in time. It goes on: `abort` ends what it waits for.
    """
    # Pinned, or the copy itself would wait
    found = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda")
    found.copy_(x, non_blocking=True)
    copied = current_stream(x.device).record_event()
    began = time.monotonic()
    turns, pause_s = 1, 0.0
    while not copied.query():
        # At first without a pause: mostly the device is nearly there, and the next kernels wait for this
        time.sleep(pause_s)
        waited_s = time.monotonic() - began
        pause_s = min(waited_s / 20, TURN_S) if waited_s > 1e-3 else 0.0
        if waited_s >= limit_s:
            raise RuntimeError(f"timed out: the device has not come to it within {limit_s:g} s")
        stay()
        if waited_s >= turns * turn_s:
            turns += 1
            turn()
    return found


def is_short(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether `gathered_at_once` can gather `x`; the same on all ranks."""
    few = 0 < x.numel() * x.element_size() <= SHORT_BYTES and group.size() <= _FEW_RANKS
    return few and x.device.type == "cpu" and "cpu:gloo" in str(dist.get_backend_config(group))


def gathered_at_once(
    x: Tensor, group: dist.ProcessGroup, op: Operation, wait: Callable[[Sequence[Any]], None]
) -> Tensor:
    """Gather a short tensor, sent from each rank to all others; collective.

    Args:
        x: This rank's tensor, of one shape and dtype on all ranks; see `is_short`.
        group: The ranks that take part.
        op: Names the exchange in errors.
        wait: Waits for works of messages.

    Returns:
        All ranks' tensors by rank, [R, *x.shape].

    Raises:
        OutOfStep: Where ranks have sent another shape or dtype, or are in another operation.
    """
    works, arrived = sent_at_once(x, group, op)
    wait(works)
    return arrived()


def sent_at_once(x: Tensor, group: dist.ProcessGroup, op: Operation) -> tuple[list[Any], Callable[[], Tensor]]:
    """Begin to gather a short tensor, sent from each rank to all others.

    gloo's all-gather passes everything around a ring, so a short message waits for R - 1 ranks in a row, and on every
    link behind what is queued there. Among few ranks each sends to all others; no link carries more bytes for that.

    Args:
        x: This rank's tensor, of one shape and dtype on all ranks; see `is_short`.
        group: The ranks that take part.
        op: Names the exchange in errors, and is the same on all ranks.

    Returns:
        The works, and what returns all ranks' tensors by rank [R, *x.shape] after them. That raises `OutOfStep` as
        `gathered_at_once` does.
    """
    # A digest of all that has to agree; it fits where the names and shapes do not
    about = hashlib.blake2b(f"{op.name} {x.dtype} {tuple(x.shape)}".encode(), digest_size=_NAME_BYTES).digest()
    end = _NAME_BYTES + x.numel() * x.element_size()
    # One length whatever is sent, since gloo ends a process that gets more than it asked for
    mine = torch.zeros(_NAME_BYTES + SHORT_BYTES, dtype=torch.uint8)
    mine[:_NAME_BYTES] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    mine[_NAME_BYTES:end] = x.reshape(-1).view(torch.uint8)
    every = mine.repeat(group.size(), 1)
    others = [(group.rank() + i) % group.size() for i in range(1, group.size())]
    works = [dist.irecv(every[r], group=group, group_src=r, tag=_AT_ONCE) for r in others]
    works += [dist.isend(mine, group=group, group_dst=r, tag=_AT_ONCE) for r in others]

    def arrived() -> Tensor:
        apart = (every[:, :_NAME_BYTES] != mine[:_NAME_BYTES]).any(1).nonzero().reshape(-1).tolist()
        if apart:
            raise OutOfStep(f"rank {group.rank()}: ranks {apart} are not in {op}")
        return every[:, _NAME_BYTES:end].contiguous().view(x.dtype).reshape(-1, *x.shape)

    return works, arrived


def coming(works: Sequence[Any], result: Tensor, keep: Any, wait: Callable[[Sequence[Any]], None]) -> Pending:
    """Wrap torch's `works` as a `Pending`.

    Args:
        works: The handles.
        result: The tensor that they fill.
        keep: Inputs, which stay alive until the transfer is over.
        wait: Waits for works.
    """

    # A default argument holds the inputs: `Coming` drops this function once the result is there
    def finish(keep: Any = keep) -> Tensor:
        wait(works)
        return result

    def notify(call: Callable[[], None]) -> None:
        torch.futures.collect_all([work.get_future() for work in works]).then(lambda _: call())

    def ended() -> bool:
        # A wait for a device makes its stream wait, and returns at once. Ranks must see that alike: by whether works
        # are completed they would launch what follows at different places of their streams.
        return result.device.type != "cpu" or all(work.is_completed() for work in works)

    return Coming(finish, ended, notify)


def host_too(group: dist.ProcessGroup | None = None) -> str | None:
    """Name the backends of new groups: those of `group` (None: the world's), and gloo for the host if that has none.

    Ranks agree by tensors on the host: a wait for one ends at its time limit, and no stream of a device waits for it.

    Returns:
        As `new_group` takes it; None where torch's default is the same.
    """
    config = str(dist.get_backend_config(group))
    if "cpu:" not in config:
        return f"cpu:gloo,{config}"
    return None if config == str(dist.get_backend_config()) else config


def like(group: dist.ProcessGroup | None, limit: timedelta) -> dict[str, Any]:
    """Take over from `group` (None: the world's) what `new_group` is to be given: its backends and `pg_options`.

    torch shows options where they were used, and gives one object to all backends of a group. So they are those of the
    first backend beside gloo: of NCCL the priority of its stream and its `config`, of one that was registered in Python
    a copy of its `options`, if it has any. Not taken over, since torch does not show it or ignores it: options of gloo,
    MPI, UCC and XCCL, `group_desc`, `device_id`, and what a group was split from.

    Args:
        group: What the new groups are to be like.
        limit: Their time limit, instead of that of `group`.
    """
    config = str(dist.get_backend_config(group))
    same = config == str(dist.get_backend_config())
    return {"timeout": limit, "backend": None if same else config, "pg_options": _options_like(group, limit)}


def _options_like(group: dist.ProcessGroup | None, limit: timedelta) -> Any:
    of: Any = group if group is not None else dist.group.WORLD
    found = [of._get_backend(device) for device in on_device(of)]
    given: Any = next((o for backend in found if (o := getattr(backend, "options", None)) is not None), None)
    # A copy: torch writes a group's members, name and limit into the options that it gets
    if not hasattr(given, "is_high_priority_stream"):
        with suppress(TypeError):  # nothing that can be copied
            return copy.copy(given)
        return None
    # NCCL's by its parts, as the rest is of the group that it was made for
    made = type(given)()
    made.is_high_priority_stream = given.is_high_priority_stream
    # Versions of torch before NCCL 2.17 have none
    if hasattr(given, "config"):
        made.config = given.config
    # torch warns where it differs
    made._timeout = limit
    return made


def first_calls(groups: Iterable[dist.ProcessGroup]) -> None:
    """Use new groups once on the device; collective.

    NCCL connects a group's ranks at its first call, and waits for all of them. Messages go between some of the ranks
    alone, so they must not be the first.
    """
    if not torch.accelerator.is_available():
        return
    device = torch.accelerator.current_accelerator()
    assert device is not None
    stream = torch.Stream(device)
    # In a separate stream: groups are also made in threads, beside training
    with stream:
        for group in dict.fromkeys(groups):
            if f"{device.type}:" in str(dist.get_backend_config(group)):
                dist.all_reduce(torch.zeros(1, device=device), group=group)
    stream.synchronize()


def on_device(group: dist.ProcessGroup) -> list[torch.device]:
    """List the devices that the group's messages may lie on, but those of gloo, which are on the host."""
    backends = [part.split(":") for part in str(dist.get_backend_config(group)).split(",")]
    return [torch.device(device) for device, backend in backends if backend != "gloo"]


def outlast(groups: Iterable[dist.ProcessGroup], limit_s: float) -> None:
    """Give groups' messages on a device a limit of `limit_s`, longer than that of the waits of this library.

    NCCL watches its own limit in a thread, and ends the process without a word on ranks, layers and operations.
    """
    for group in dict.fromkeys(groups):
        for device in on_device(group):
            group._get_backend(device).set_timeout(timedelta(seconds=limit_s))


def abort_on_device(group: dist.ProcessGroup) -> None:
    """Make a device's stream go on that waits for this group; what it waited for stays undefined."""
    # gloo's own does nothing
    if on_device(group):
        with suppress(RuntimeError):
            group.abort()


def abort(group: dist.ProcessGroup) -> None:
    """Make every wait for this group in this process fail at once, in any thread; peers' waits may fail, too."""
    abort_on_device(group)
    if "cpu:gloo" not in str(dist.get_backend_config(group)):
        return
    # gloo has no way to give up a wait, but one that takes too long closes all connections that are waited for. So
    # wait for a message from every peer that nobody sends, for a millisecond.
    works: list[Any] = []
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            works.append(dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT))
    for work in works[:1]:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


def all_made(makes: Sequence[Callable[[], T]]) -> list[T]:
    """Make groups. Where one fails the others are made as well, and then the first failure is raised.

    torch names groups by how many a process has tried to make. A process that tried fewer would meet the others under
    the names of other groups from then on, without an error.
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
