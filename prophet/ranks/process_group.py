"""The process group as a `Collective`: the one place of the library that calls `torch.distributed`.

Logic is handed a `Collective`: a process group here, ranks as threads of one process (`prophet.ranks.threads`), or a
fake in the tests. Each has two channels that never block one another: "tokens" carries the all-to-alls of dispatch
and combine, "weights" carries Trans and Agg.

Every wait ends: after `timeout_s` a `CollectiveTimeout` names the rank, the layer and the operation, and says where the
other ranks are. A `PeerLost` names those that are gone. For both, ranks ask `prophet.ranks.failures.presence`.

Shape legend: R ranks.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prophet.errors import CollectiveError, CollectiveTimeout, OutOfStep, PeerLost, StageFailed
from prophet.ranks.collective import (
    DEFAULT_TIMEOUT_S,
    Channel,
    Collective,
    Coming,
    Done,
    Messages,
    Pending,
    Rows,
    check_rows,
)
from prophet.ranks.failures.blocked import blocked
from prophet.ranks.failures.first_failure import FailureWatch
from prophet.ranks.failures.presence import Lost, Presence, Pulse, crossed, explained
from prophet.ranks.failures.stuck import Reached, StuckWatch
from prophet.ranks.messages import Frames
from prophet.ranks.operation import Operation
from prophet.ranks.places import known_places, machine, place
from prophet.ranks.threads import ThreadWorld
from prophet.ranks.waiting import Waiter, joined
from prophet.ranks.works import (
    abort,
    abort_on_device,
    all_made,
    at_once,
    beside,
    coming,
    first_calls,
    gathered_at_once,
    host_too,
    in_turns,
    is_short,
    like,
    nothing,
    on_device,
    on_host_in_turns,
    outlast,
    sent_at_once,
)

T = TypeVar("T")
# After so long a rank that waits asks whether the others can come; a little more than a pulse
LOOK_S = 1.2
# Sent in its name: ranks may be in different operations
_MESSAGE = Operation("message")
# Tags of single messages repeat after so many all-to-alls
_TAGS = 1 << 20


# --- a process group ---


# how long ranks that have lost each other wait for the store's word
_SETTLED_S = 2.0
# torch 2.13 renamed it
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _At(NamedTuple):
    """Where this process is: in an operation, or after it."""

    within: bool
    op: Operation
    frames: Frames

    def __str__(self) -> str:
        name = f"{self.op}, {self.frames}" if self.frames.forward else str(self.op)
        return f"in {name}" if self.within else f"after {name}"


class ProcessGroupCollective(Collective):
    """Ranks are processes of a `torch.distributed` group (gloo or NCCL).

    Two communicators over the same ranks are created with the time limit `timeout_s`, so a long limit on the user's
    group does not delay the news of a lost peer. Creation is collective over the members of `group`. Waits on the host
    return in short turns, so that Ctrl-C is seen. Tensors on the host always travel by a backend of the host: the
    communicators have gloo for them, even where the given group knows a device alone. What else they take over from the
    given group is said by `prophet.ranks.works.like`.

    Args:
        group: The members; None for all processes.
        timeout_s: Seconds that one wait may take.
        receive_first: Whether an all-to-all of tensors on the host posts all receives before it sends anything. None:
            where gloo connects several hosts. Within one host, where bytes are copied and not sent, gloo's own
            all-to-all is faster.
        channels: Groups for "tokens" and "weights", of the members of `group` in its order, instead of new ones.

    Attributes:
        watch: Reports failures of other ranks during waits; None where nobody does.

    Raises:
        RuntimeError: Where torch.distributed is not initialised.
    """

    watch: FailureWatch | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        receive_first: bool | None = None,
        channels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
        base = group if group is not None else dist.group.WORLD
        super().__init__(dist.get_rank(base), dist.get_world_size(base), timeout_s)
        ranks = dist.get_process_group_ranks(base)
        limit = timedelta(seconds=timeout_s)
        # Local synchronisation lets the members of a smaller group make it without the other processes. It derives the
        # group's name from how many groups exist, so a name may come back after a group was destroyed and then hang on
        # what the store remembers: hence not where all processes take part, and `collective_for` never destroys.
        local = len(ranks) < dist.get_world_size()

        def new() -> Any:
            given = {**like(base, limit), "backend": host_too(base)}
            return dist.new_group(ranks, use_local_synchronization=local, **given)

        made = channels or all_made([new] * 2)
        self.groups: dict[Channel, Any] = {"tokens": made[0], "weights": made[1]}
        first_calls(made)
        outlast(made, 2 * timeout_s)
        # Weak, or `_shared` below would keep alive the group that its entry hangs on
        self._base, self._ranks = weakref.ref(base), ranks
        self._presence = presence()
        # The device of this thread: another one, which may ask for its streams, starts on the first device
        at = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        self._devices = {torch.device(d.type, at) for group in made for d in on_device(group)}
        if self._devices:
            _stuck[0].renew()
        self._presence.counters[self.groups["tokens"].group_name] = self.frames
        self._broken: CollectiveError | None = None
        # why no decision can be settled any more
        self._unanswered: CollectiveError | None = None
        self._receive_first = receive_first
        if receive_first is None:
            level = dist.get_debug_level()  # type: ignore[attr-defined]
            # At DETAIL torch compares the ranks' message counts, which differ where some rows are empty
            counted = level == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
            over_gloo = "cpu:gloo" in self.backend()
            self._receive_first = not counted and over_gloo and self._on_several_hosts()
        # For posting and for waiting; made by the first all-to-all
        self._threads: dict[Channel, tuple[Waiter, Waiter]] = {}
        self._posted: dict[Channel, int] = dict.fromkeys(self.groups, 0)
        self._single: Waiter | None = None
        # Apart: a wait for a single message may have been left, and ranks go on
        self._gathers: Waiter | None = None
        _made.add(self)

    def backend(self) -> str:
        """Return the backends of its groups as text, such as "cpu:gloo,cuda:nccl"."""
        return str(dist.get_backend_config(self.groups["tokens"]))

    def _on_several_hosts(self) -> bool:
        """Whether the ranks are on more than one host; collective unless all places are known."""
        places = known_places.get(dist.group.WORLD)
        if places is None:
            found = self.all_gather(torch.tensor([place()], device="cpu"), op=Operation("where ranks are"))
            places = dict(zip(self._ranks, found.reshape(-1).tolist(), strict=True))
            if self.size == dist.get_world_size():
                known_places[dist.group.WORLD] = places
        return len({places[r] for r in self._ranks}) > 1

    def guard(self, call: Callable[[], T], op: Operation, peers: Sequence[int] = ()) -> T:
        """Run `call`, turning the backend's failures into errors that name rank, layer and operation.

        Args:
            call: Issues an operation, or waits for one.
            op: The operation, for errors and for other ranks that ask where this one is.
            peers: The ranks that take part where those are not all; they go into the error.

        Raises:
            CollectiveError: When `call` fails, or an earlier operation did.
        """
        # After a failure the ranks' messages no longer match: another operation could receive the wrong one
        if self._broken is not None:
            raise CollectiveError(self.rank, op, f"an earlier operation failed ({self._broken})") from self._broken
        here = self._presence
        here.where = _At(True, op, self.frames)
        try:
            result = call()
        except (OutOfStep, StageFailed) as error:
            self._broken = CollectiveError(self.rank, op, str(error))
            raise
        except RuntimeError as error:
            self._broken = self._failure(str(error) or type(error).__name__, op)
            # by numbers that do not depend on this group: who handles the error may know another one
            self._broken.peers = tuple(self._ranks[p] for p in peers)
            raise self._broken from error
        here.where = _At(False, op, self.frames)
        return result

    def _failure(self, text: str, op: Operation) -> CollectiveError:
        """Turn the text of a backend's error into an error of this library."""
        # torch and gloo raise plain RuntimeErrors: their text is all there is to go by
        first = text.splitlines()[0]
        late = "timed out" in text.lower() or "timeout" in text.lower()
        if not late and not any(part in text for part in ("closed by peer", "reset by peer", "Broken pipe")):
            return CollectiveError(self.rank, op, first)
        reason = f"no answer within {self.timeout_s:g} s" if late else "a connection was closed"
        # The watch knows more, and asks in another thread
        if self.watch is not None:
            return (CollectiveTimeout if late else PeerLost)(self.rank, op, f"{reason} ({first})")
        account = self._presence.account(self._ranks)
        # Time that was up because a process has ended is a lost peer; a closed connection is one in any case
        kind = CollectiveTimeout if late and not account.gone else PeerLost
        return kind(self.rank, op, f"{reason}; {explained(account, self._ranks, late=late)} ({first})")

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        check_rows(x, send_rows, recv_rows, self.size)
        if self.size == 1:
            return Done(x)
        source = x.contiguous()
        out = x.new_empty((sum(recv_rows), *x.shape[1:]))
        # In gloo's own all-to-all a rank that comes late has its data to a peer on the way before it announces that it
        # is ready for the peer's. The peer's then wait on the same connection: the directions of a link take turns.
        if self._receive_first and x.device.type == "cpu":
            return self.guard(lambda: self._post(source.detach(), out, send_rows, recv_rows, channel, op), op)
        work = self.guard(
            lambda: dist.all_to_all_single(
                out, source, list(recv_rows), list(send_rows), group=self.groups[channel], async_op=True
            ),
            op,
        )
        return coming([work], out, source, lambda works: self.guard(lambda: self._wait_on(x)(works), op))

    def _turn(self) -> Callable[[], None]:
        return self.watch.turns(math.inf) if self.watch is not None else nothing

    def _wait_on(self, x: Tensor) -> Callable[[Sequence[Any]], None]:
        return (lambda works: in_turns(works[0], self._turn())) if x.device.type == "cpu" else at_once

    def _beside(self, works: Sequence[Any]) -> None:
        if self._single is None:
            self._single = Waiter("gloo waits for messages")
        beside(works, self._single, self._turn())

    def _post(
        self, source: Tensor, out: Tensor, send_rows: Rows, recv_rows: Rows, channel: Channel, op: Operation
    ) -> Pending:
        """Start an all-to-all of single messages, receives before sends."""
        group, rank = self.groups[channel], self.rank
        if channel not in self._threads:
            self._threads[channel] = Waiter(f"gloo posts {channel}"), Waiter(f"gloo waits for {channel}")
        poster, waiter = self._threads[channel]
        self._posted[channel] += 1
        # Tags keep one all-to-all's messages apart from the next; 0 is that of `exchange`
        tag = self._posted[channel] % _TAGS + 1
        sent, received = source.split(list(send_rows)), out.split(list(recv_rows))
        # Each rank begins with another peer, or all would send to rank 0 first
        peers = [(rank + i) % self.size for i in range(1, self.size)]
        # Posted here and not in the thread, so that peers need not wait until that gets the interpreter
        coming = [dist.irecv(received[p], group=group, group_src=p, tag=tag) for p in peers if recv_rows[p]]

        def post() -> list[Any]:
            going = [dist.isend(sent[p], group=group, group_dst=p, tag=tag) for p in peers if send_rows[p]]
            # Modes belong to a thread: the caller's do not hold here
            with torch.inference_mode(out.is_inference()), torch.no_grad():
                received[rank].copy_(sent[rank])
            return going

        # A send blocks while sockets take bytes: a thread beside the one that waits keeps both directions busy
        posted = poster.submit(post)

        def finish() -> Tensor:
            for work in (*coming, *posted.result()):
                work.wait()
            return out

        done = waiter.submit(finish)
        return Coming(
            lambda: self.guard(lambda: joined(done, self._turn()), op),
            done.done,
            lambda call: done.add_done_callback(lambda _: call()),
        )

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        if self.size == 1:
            return x.unsqueeze(0)
        source = x.contiguous()
        out = x.new_empty((self.size, *x.shape))

        def gather() -> None:
            work = _all_gather_single(out.view(-1), source.view(-1), group=self.groups[channel], async_op=True)
            self._wait_on(x)([work])

        self.guard(gather, op)
        return out

    def gather_at_once(self, x: Tensor, *, op: Operation) -> Tensor:
        if self.size == 1 or not is_short(x, self.groups["tokens"]):
            return self.all_gather(x, op=op)
        return self.guard(lambda: gathered_at_once(x, self.groups["tokens"], op, self._beside), op)

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor:
        """See `Collective`. Raises `OutOfStep` soon where the others cannot come: they wait for this rank elsewhere.

        Ranks that compute, load or write are waited for, whatever they do. On a device the host does not wait here.
        """
        if self.size == 1 or x.device.type != "cpu":
            found = super().gather_messages(x, op=op)
            self.frames.unread = lambda: found
            return found
        group = self.groups["tokens"]
        # Within one host a change of threads costs more than the ring
        if self._receive_first and is_short(x, group):
            return self.guard(lambda: self._gather_messages_at_once(x, group, op), op)
        source = x.contiguous()
        out = x.new_empty((self.size, *x.shape))

        def gather() -> None:
            work = _all_gather_single(out.view(-1), source.view(-1), group=group, async_op=True)

            def read() -> Tensor:
                in_turns(work, self._message_turn(op), self._look_s)
                return out

            self.frames.unread = lambda: self.guard(read, op)
            read()

        self.guard(gather, op)
        return out

    def _gather_messages_at_once(self, x: Tensor, group: dist.ProcessGroup, op: Operation) -> Tensor:
        """Gather short messages between hosts, where each may wait behind a transfer."""
        if self._gathers is None:
            self._gathers = Waiter("gloo waits for gathers")

        def gather() -> Callable[[], Tensor]:
            # Messages say themselves which operation they are of
            works, arrived = sent_at_once(x, group, _MESSAGE)
            at_once(works)
            return arrived

        # Begun in that thread, too: Ctrl-C comes in the main one alone, and would leave some ranks without the message
        done = self._gathers.submit(gather)

        def read() -> Tensor:
            return joined(done, self._message_turn(op), self._look_s)()

        self.frames.unread = lambda: self.guard(read, op)
        return read()

    @property
    def _look_s(self) -> float:
        """Seconds between two looks at the other ranks' pulses."""
        return max(LOOK_S, self.size / 100)

    def _message_turn(self, op: Operation) -> Callable[[], None]:
        """Make the function that a wait for a message calls between its turns; it raises where others cannot come."""
        before: dict[int, Pulse] = {}
        news = self._turn()

        def turn() -> None:
            nonlocal before
            here = self._presence.stuck(self._ranks, self.groups["tokens"].group_name)
            # Twice in a row, in the same call and with a new pulse: the first time it may only have passed through
            again = [r for r, p in here.items() if r in before and before[r].blocked == p.blocked]
            if here and len(again) == len(here) and all(p.count > before[r].count for r, p in here.items()):
                text = crossed({self._ranks.index(r): p for r, p in here.items()}, self.rank)
                raise OutOfStep(f"rank {self.rank}: {op}, {self.frames}: {text}")
            before = here
            news()

        return turn

    def on_host(self, x: Tensor, *, op: Operation, limited: bool = True) -> Tensor:
        """See `Collective`. Raises soon where a rank has ended: the host sees no connection to it that is closed.

        An error gives up all groups of this process on devices. What their streams waited for is undefined then.

        Args:
            x: The tensor.
            op: What it is of, for errors.
            limited: As there.
        """
        if self.size == 1 or x.device.type == "cpu":
            return x.cpu()
        turn, gone, limit_s = self._message_turn(op), False, self.timeout_s if limited else math.inf

        def look() -> None:
            nonlocal gone
            turn()
            # Twice in a row, so that a rank that has failed and ended had the time to say so
            before, gone = gone, self._presence.ended(self._ranks)
            if before and gone:
                raise RuntimeError("a process has ended: connection closed by peer")

        try:
            return self.guard(lambda: on_host_in_turns(x, look, self._look_s, limit_s), op)
        except (CollectiveError, OutOfStep, StageFailed) as error:
            _give_up_on_devices(error)
            raise

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        group = self.groups[channel]
        # Receives first, as in `all_to_all`: a peer's data need not wait behind this rank's
        ops = [dist.P2POp(dist.irecv, t, self._ranks[p], group=group) for p, t in recvs]
        ops += [dist.P2POp(dist.isend, t, self._ranks[p], group=group) for p, t in sends]
        if not ops:
            return Done(torch.empty(0))
        known = sorted({p for p, _ in (*sends, *recvs)})
        works = self.guard(lambda: dist.batch_isend_irecv(ops), op, known)
        wait = self._beside if ops[0].tensor.device.type == "cpu" else at_once
        keep = list(sends), list(recvs)
        return coming(works, ops[0].tensor.new_empty(0), keep, lambda works: self.guard(lambda: wait(works), op, known))

    def watched(self, stages_of: Callable[[int], Sequence[int]]) -> FailureWatch:
        """Watch these ranks for failures during all waits from now on; each of them calls this.

        Args:
            stages_of: See `FailureWatch`.
        """
        self.watch = FailureWatch(self._presence, self._ranks, self.groups["tokens"].group_name, stages_of)
        return self.watch

    def roll_call(self, op: Operation) -> None:
        roll_call(op, self._ranks, patience_s=self.timeout_s)

    def meet(self, op: Operation, *, failed: bool = False) -> list[int]:
        texts = meet(op, "failed" if failed else "", ranks=self._ranks, timeout_s=self.timeout_s)
        return [rank for rank, text in enumerate(texts) if text]

    def settle(self, name: str, word: str) -> str:
        if self._unanswered is not None:
            raise self._unanswered
        # a no follows a failure, maybe that of the process which keeps the store; before a yes nothing has failed
        limit_s = self.timeout_s if word == "yes" else min(self.timeout_s, _SETTLED_S)
        deadline = time.monotonic() + limit_s

        def turn() -> None:
            if time.monotonic() >= deadline:
                raise TimeoutError

        # in a thread: a store whose process is stopped never answers, and torch waits for it without a limit
        asker = Waiter("settles a decision")
        try:
            return joined(asker.submit(lambda: self._presence.settle(f"prophet decision {name}", word)), turn)
        except TimeoutError:
            op = Operation("settling a decision")
            self._unanswered = CollectiveTimeout(self.rank, op, f"the store has not answered within {limit_s:g} s")
            raise self._unanswered from None
        except RuntimeError as error:
            # its process has ended: that one has failed, not this rank
            self._unanswered = PeerLost(self.rank, Operation("settling a decision"), f"the store is gone ({error})")
            raise self._unanswered from error
        finally:
            asker.close()

    def _renewed(self, timeout_s: float) -> Collective:
        base = self._base()
        if base is None:
            raise RuntimeError("the process group of this collective has been destroyed")
        return collective_for(base, timeout_s=timeout_s)

    def abort(self) -> None:
        """Make every wait for this collective fail at once, in any thread; it cannot be used afterwards."""
        self._broken = CollectiveError(self.rank, Operation("abort"), "the collective was given up")
        for group in dict.fromkeys(self.groups.values()):
            abort(group)

    def close(self) -> None:
        self._broken = CollectiveError(self.rank, Operation("close"), "the collective was closed")
        groups = list(dict.fromkeys(self.groups.values()))
        self.groups.clear()
        for waiter in (w for both in self._threads.values() for w in both):
            waiter.close()
        for one in (self._single, self._gathers):
            if one is not None:
                one.close()
        if dist.is_initialized():
            for group in groups:
                self._presence.counters.pop(group.group_name, None)
                dist.destroy_process_group(group)


# All that this process has made: whichever of them a stream waits for, it keeps all that follow from running
_made: weakref.WeakSet[ProcessGroupCollective] = weakref.WeakSet()


def _give_up_on_devices(error: Exception) -> None:
    """Make the streams of this process go on: they wait for what will never come."""
    for watch in _stuck:
        watch.report(error)
    for collective in list(_made):
        groups = [group for group in dict.fromkeys(collective.groups.values()) if on_device(group)]
        if groups and collective._broken is None:
            collective._broken = CollectiveError(collective.rank, Operation("abort"), str(error))
        for group in groups:
            abort_on_device(group)


# --- who is there ---


# At most one: this process among those of the present process group, and what looks whether it is stuck
_present: list[Presence] = []
_stuck: list[StuckWatch] = []


def presence() -> Presence:
    """Return this process's presence among all of the process group; made at the first call."""
    store = dist.distributed_c10d._get_default_store()
    # Weak: the store may keep a port open, which has to close with the group
    kept = weakref.ref(store)

    def find_store() -> Any:
        in_use = dist.is_initialized() and dist.distributed_c10d._get_default_store() is kept()
        return kept() if in_use else None

    if not _present or _present[0].find_store() is not store:
        # A new process group has a new store, in which the old pulse means nothing
        for before in _present:
            before.close()
        _present[:] = [Presence(find_store, dist.get_rank(), machine())]
        _present[0].find_blocked = _find_blocked
        _stuck[:] = [StuckWatch(_present[0], dist.get_world_size(), _mark_devices)]
        _present[0].on_pulse = _stuck[0].look
    return _present[0]


def _mark_devices() -> Reached:
    """Mark the default streams of the devices that this process has groups on."""
    devices = set().union(*(collective._devices for collective in list(_made) if collective.groups))
    streams = [getattr(torch.get_device_module(d), "default_stream", None) for d in devices]
    events = [make(d).record_event() for d, make in zip(devices, streams, strict=True) if make is not None]
    return lambda: all(event.query() for event in events)


def _find_blocked() -> tuple[str, list[int]]:
    """Find the call of the user's in which this process waits for others, and for which of all processes."""
    found = blocked()
    if found is None:
        return "", []
    group = dist.group.WORLD if found.group is None else found.group
    with suppress(RuntimeError, ValueError, KeyError):  # the group may be gone by now
        return str(found), dist.get_process_group_ranks(group)
    return "", []


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Report that this process is at work on `what`: no limit ends the wait of others while the context lasts."""
    here = presence() if processes() > 1 else None
    if here is not None:
        here.begin(what)
    try:
        yield
    finally:
        if here is not None:
            here.end()


def meet(
    op: Operation,
    text: str = "",
    *,
    ranks: Sequence[int] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    hint: str = "",
    beside: bool = False,
) -> list[str]:
    """Exchange texts between processes, once all of them have called this; collective.

    Nothing is sent between ranks: they leave notes in the process group's store, so a call that fails breaks no
    communicator.

    Args:
        op: Names the meeting in errors; the same on all ranks.
        text: This process's text for the others.
        ranks: Those that take part; None for all processes.
        timeout_s: Seconds to wait for ranks that are not `at_work`.
        hint: Ends the message where ranks do not come although they live.
        beside: Whether it is called beside the main thread, which goes on: what that is at says nothing of who comes.

    Returns:
        All texts, in the order of the ranks.

    Raises:
        PeerLost: Soon, on all that wait, where a rank that is missing has ended.
        CollectiveTimeout: After `timeout_s` in which no rank that is missing was `at_work`, or soon where one has gone
            on without the meeting.
    """
    if processes() == 1:
        return [text]
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    here = presence()
    if not beside:
        here.where = f"in {op}"
    try:
        texts = here.meet(str(op), members, text, limit_s=timeout_s, hint=hint, beside=beside)
    except Lost as lost:
        kind = PeerLost if lost.ended else CollectiveTimeout
        raise kind(dist.get_rank(), op, str(lost)) from None
    if not beside:
        here.where = f"after {op}"
    return texts


def roll_call(op: Operation, ranks: Sequence[int] | None = None, *, patience_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Return once all `ranks` (None: all processes) have called this; see `meet`.

    A rank that goes on instead is noticed with the next message that it begins, as in its next forward pass. Where it
    begins none, the first of the ranks waits `ROLL_CALL_S`, the others `patience_s`.

    Args:
        op: Names the call in errors.
        ranks: Those that take part; None for all processes.
        patience_s: Seconds that ranks wait for the first one.
    """
    first = ranks[0] if ranks is not None else 0
    # `if rank == 0:` is how one rank comes to be alone, so the first gives up soon. The others are patient: the first
    # may be writing a file before.
    limit_s = ROLL_CALL_S if process_rank() == first else patience_s
    hint = "; every rank must call it, not one under `if rank == 0:`"
    meet(op, ranks=ranks, timeout_s=limit_s, hint=hint)


ROLL_CALL_S = 4.0


def cut_like(whole: Tensor, own: Tensor) -> Tensor:
    """Cut `whole`, which every rank has, over ranks as `own` is where that is a DTensor. Nothing is sent."""
    if not hasattr(own, "full_tensor") or hasattr(whole, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    like: Any = own
    # No source rank: every rank has the whole tensor and takes its part of it
    return distribute_tensor(whole.to(own.device), like.device_mesh, like.placements, src_data_rank=None)


def figures_of_parts(x: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Measure a tensor where it lies; collective over the ranks of a `DTensor`.

    Args:
        x: A tensor, or a `DTensor` whose parts are measured by the ranks that hold them.
        measure: Returns a scalar.

    Returns:
        The figures of all parts, in the order of their ranks, once each; the same on all ranks.
    """
    if not hasattr(x, "full_tensor"):
        return measure(x).view(1)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    cut: Any = x
    if any(placement.is_partial() for placement in cut.placements):
        cut = cut.redistribute(placements=[Replicate() if p.is_partial() else p for p in cut.placements])
    own = measure(cut.to_local()).view(1)
    along = [placement if placement.is_replicate() else Shard(0) for placement in cut.placements]
    every: Tensor = DTensor.from_local(own, cut.device_mesh, along, run_check=False).full_tensor()
    return every


# --- which collective a layer gets ---


def processes() -> int:
    """Count the processes of `torch.distributed`; 1 where it is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def expert_groups(ep_size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[Collective, Collective]:
    """Make the (EP, expert-data-parallel) collectives of this process; collective over all processes.

    Consecutive processes form an EP group: process r is rank r mod P of group r // P, and shares its experts with the
    processes of the same rank in the other groups.

    Args:
        ep_size: P, the ranks of an EP group.
        timeout_s: Seconds that one wait may take.

    Raises:
        ValueError: Where the processes do not divide into groups of `ep_size`.
    """
    world = processes()
    if ep_size < 1 or world % ep_size:
        raise ValueError(f"{world} processes cannot be divided into expert-parallel groups of {ep_size}")
    if world == 1:
        return ThreadWorld(1).collective(0), ThreadWorld(1).collective(0)
    rank = dist.get_rank()
    mine: list[Collective] = []
    along = [list(range(start, start + ep_size)) for start in range(0, world, ep_size)]
    across = [list(range(start, world, ep_size)) for start in range(ep_size)]
    for ranks_of_groups in (along, across):
        # torch names groups by how many were made, so every process makes every group, in the same order
        limit = timedelta(seconds=timeout_s)
        groups = [(ranks, dist.new_group(ranks, **like(None, limit))) for ranks in ranks_of_groups]
        mine += [collective_for(group, timeout_s=timeout_s) for ranks, group in groups if rank in ranks]
    return mine[0], mine[1]


def process_rank() -> int:
    """Return this process's rank among all of `torch.distributed`; 0 where it is not initialised."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# Communicators belong to a process, as torch.distributed's own registry does; layers over one group share them.
_shared: weakref.WeakKeyDictionary[Any, dict[float, ProcessGroupCollective]] = weakref.WeakKeyDictionary()


def collective_for(group: dist.ProcessGroup | Collective | None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Collective:
    """Return the collective for `group`; collective over its members at the first call.

    Calls with the same group and time limit share one pair of communicators, for the life of the group.

    Args:
        group: A process group. A `Collective` is returned as it is. None means all processes, or a single rank where
            `torch.distributed` is not initialised.
        timeout_s: Seconds that one wait may take.

    Raises:
        TypeError: For a group of another type.
        ValueError: Where this process is not a member.
    """
    if isinstance(group, Collective):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return ThreadWorld(1).collective(0)
    # `new_group` returns a number to processes that it leaves out; the next check refuses it with a better text
    if group is not None and not isinstance(group, dist.ProcessGroup | int):
        raise TypeError(f"group must be a process group, a Collective or None, got {type(group).__name__}")
    base = group if group is not None else dist.group.WORLD
    if dist.get_rank(base) < 0:
        raise ValueError("this process is not a member of the group it was given")
    if dist.get_world_size(base) == 1:
        return ThreadWorld(1).collective(0)
    known = _shared.setdefault(base, {})
    found = known.get(timeout_s)
    # Without groups it was closed by its user, and the next one needs new communicators
    if found is None or not found.groups:
        found = known[timeout_s] = ProcessGroupCollective(base, timeout_s=timeout_s)
    return found
