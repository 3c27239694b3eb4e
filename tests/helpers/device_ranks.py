"""Ranks that are threads, each with a device that runs behind its host, as CUDA does with NCCL.

The host launches work and goes on. A rank has streams, of which all its threads share the default one, and each of its
communicators has one queue of collectives: they run in the order in which they were launched. A collective runs once
all ranks have launched it, and on each of them all is over that was launched before it in its stream and its queue.
`wait` makes the stream wait, not the host. The host waits where it reads a value of a tensor on the device.

Work runs as late as it can, see `tests.helpers.device_queues`. Ranks that wait for each other in a circle raise
`DeviceDeadlock`, with the circle.

Tensors have to be on `torch.device(NAME)`; those on the host go beside the device, as over gloo.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from prophet.errors import CollectiveError
from prophet.ranks.collective import Channel, Collective, Done, Messages, Pending, Rows, check_rows
from prophet.ranks.operation import Operation
from tests.helpers.device_queues import BESIDE, DeviceDeadlock, DeviceHazard, Meeting, Part, Queues, Used, Work
from tests.helpers.late_operators import Late, poison
from tests.helpers.pretend_device import OnDevice, on_pretended_device

__all__ = ["DeviceCollective", "DeviceDeadlock", "DeviceHazard", "DevicePending", "DeviceWorld", "OwnStream", "stream"]
T = TypeVar("T")
_here = threading.local()


def _swap(op: Operation, parts: list[Part]) -> None:
    for d, part in enumerate(parts):
        pieces = [p.used.values.split(list(p.send_rows))[d] for p in parts]
        if [len(piece) for piece in pieces] != list(part.recv_rows):
            raise CollectiveError(d, op, f"{[len(p) for p in pieces]} rows were sent, expected {list(part.recv_rows)}")
        assert part.out is not None
        part.out.copy_(torch.cat(pieces))


def _gather(op: Operation, parts: list[Part]) -> None:
    for part in parts:
        assert part.out is not None
        part.out.copy_(torch.stack([p.used.values for p in parts]))


def _deliver(op: Operation, parts: list[Part]) -> None:
    memory = parts[1].used.memory()
    memory.copy_(parts[0].used.values)
    parts[1].used.values = memory


class DeviceWorld(Queues):
    """R ranks as threads, each with a device. If one of them fails, the others are woken.

    Args:
        size: R, the number of ranks.
        one_queue: Whether a rank has one queue for all its communicators, as with CUDA_DEVICE_MAX_CONNECTIONS=1.
        timeout_s: Seconds that a host waits at most, where it waits for a host that waits beside the device.
        side: See `Queues`.
    """

    def __init__(
        self,
        size: int,
        *,
        one_queue: bool = False,
        timeout_s: float = 60.0,
        side: Literal["early", "late"] | int = "early",
    ) -> None:
        super().__init__(size, timeout_s, side)
        self.one_queue = one_queue
        self.counts: dict[Hashable, int] = defaultdict(int)
        self.waits: dict[int, list[str]] = {rank: [] for rank in range(size)}

    def collective(self, rank: int, name: str = "world", members: Sequence[int] | None = None) -> DeviceCollective:
        """Make a rank's collective over `members`, with communicators of this name."""
        return DeviceCollective(self, rank, name, list(range(self.size)) if members is None else list(members))

    def run(self, body: Callable[[DeviceCollective], T]) -> list[T]:
        """Call `body(collective)` on R threads at once; all that was launched has run when it returns.

        Returns:
            The results, by rank.

        Raises:
            BaseException: The first failure.
        """
        results: dict[int, T] = {}

        def on_rank(rank: int) -> None:
            try:
                results[rank] = body(self.collective(rank))
                with self.changed:
                    ends = [work for (r, _), work in self.last.items() if r == rank]
                for work in ends:
                    self.read(work)
            except BaseException as error:
                self.fail(error)

        threads = [threading.Thread(target=on_rank, args=(r,), name=f"rank-{r}", daemon=True) for r in self.threads]
        with _passed_on():
            for rank, thread in enumerate(threads):
                self._put(rank, thread)
            for thread in threads:
                threading.Thread.start(thread)
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        return [results[r] for r in range(self.size)]

    def _put(self, rank: int, thread: threading.Thread) -> None:
        """Make `thread`, which has not begun, one of the rank's."""
        inner = thread.run
        self.threads[rank].add(thread)

        def run() -> None:
            stream = _here.stream = CurrentStream(self, rank)
            try:
                with on_pretended_device(Late(stream)) as watch:
                    inner()
            finally:
                with self.changed:
                    self.waits[rank] += watch.waits
                    self.threads[rank].discard(thread)
                    self.changed.notify_all()

        thread.run = run  # type: ignore[method-assign]


@contextmanager
def _passed_on() -> Iterator[None]:
    """Threads that a rank starts are the rank's, too: they see its device."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        stream = getattr(_here, "stream", None)
        if stream is not None:
            stream.world._put(stream.rank, thread)
        start(thread)

    threading.Thread.start = started  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


class CurrentStream:
    """The stream that a thread launches into."""

    def __init__(self, world: DeviceWorld, rank: int) -> None:
        self.world, self.rank, self.name = world, rank, "default stream"

    def launch(self, name: str, run: Callable[[], None] | None, *needs: Work, operators: int = 0) -> Work:
        return self.world.launch(Work(name, self.rank, self.name, list(needs), run, operators=operators))

    def timed_event(self, waits: list[str]) -> TimedEvent:
        """An event that notes how many operators have run in this stream."""
        return TimedEvent(self, waits)

    def record_event(self) -> Work | None:
        """What is at its end now, as `torch.Stream` does it."""
        return self.world.last.get((self.rank, self.name))

    def wait_event(self, event: Work | None) -> None:
        self.launch("wait for an event", None, *([] if event is None else [event]))

    def beside(self) -> OwnStream:
        """Another stream of this rank."""
        return OwnStream()

    def synchronize(self) -> None:
        """Wait on the host for all that was launched into it."""
        last = self.world.last.get((self.rank, self.name))
        if last is not None:
            self.world.read(last)

    def synchronize_all(self) -> None:
        """Wait on the host for all that was launched on this rank."""
        with self.world.changed:
            ends = [work for (rank, _), work in self.world.last.items() if rank == self.rank]
        for work in ends:
            self.world.read(work)


class TimedEvent:
    """An event of a stream that notes the device's time, when the device comes to it.

    waits: Where the host had to wait; it has to if it asks too early.
    """

    def __init__(self, stream: CurrentStream, waits: list[str]) -> None:
        self.world, self.waits, self.operators = stream.world, waits, 0
        self._place = (stream.rank, stream.name)
        self._work = stream.launch("timed event", self._note)

    def _note(self) -> None:
        self.operators = self.world.operators[self._place]

    def query(self) -> bool:
        return self._work.over

    def synchronize(self) -> None:
        if not self._work.over:
            self.waits.append("a time of the device that it has not come to")
            self.world.read(self._work)

    def elapsed_time(self, later: TimedEvent) -> float:
        assert self._place == later._place, "times of two streams"
        assert self._work.over
        assert later._work.over
        return float(later.operators - self.operators)


class OwnStream(CurrentStream):
    """A stream of the rank whose thread makes it, as `torch.Stream`; `with` it a thread launches into it."""

    def __init__(self) -> None:
        super().__init__(_here.stream.world, _here.stream.rank)
        self.name = f"stream {id(self)}"
        self._inside = ExitStack()

    def __enter__(self) -> None:
        self._inside.enter_context(stream(self.name.removeprefix("stream ")))

    def __exit__(self, *_: object) -> None:
        self._inside.close()


@contextmanager
def stream(name: str) -> Iterator[CurrentStream]:
    """Another stream than the default one for what this thread launches; it waits for nothing that came before."""
    current: CurrentStream = _here.stream
    before, current.name = current.name, f"stream {name}"
    try:
        yield current
    finally:
        current.name = before


class DevicePending(Pending):
    """A collective in a queue of the device. `keep`: its tensors, alive until somebody waits."""

    def __init__(self, work: Work, used: list[Used], result: Tensor, keep: Any, *, beside: bool) -> None:
        self._work, self._used, self._result, self._keep, self._beside = work, used, result, keep, beside

    def ended(self) -> bool:
        # as with a process group, where a wait for a device returns at once
        return not self._beside or self._work.over

    def wait(self) -> Tensor:
        current: CurrentStream = _here.stream
        if self._beside:
            current.world.read(self._work)
        else:
            current.launch(f"wait for {self._work.name}", None, self._work)
        for used in self._used:
            used.hold()
        self._keep = None
        return self._result


class DeviceCollective(Collective):
    """One rank of a `DeviceWorld`."""

    def __init__(self, world: DeviceWorld, rank: int, name: str, members: list[int]) -> None:
        super().__init__(members.index(rank), len(members), world.timeout_s)
        self._world, self._name, self._members = world, name, members

    def _renewed(self, timeout_s: float) -> Collective:
        self.timeout_s = timeout_s
        return self

    def synchronize(self) -> None:
        """Wait on the host for all that this thread's stream has."""
        _here.stream.synchronize()

    def _launch(
        self,
        op: Operation,
        communicator: str,
        meetings: list[Meeting],
        places: list[int],
        used: list[Used],
        beside: bool,
    ) -> Work:
        """Launch the work that takes part in `meetings`; called under the world's lock."""
        rank = self._members[self.rank]
        needs = []
        if beside:
            for u in used:
                u.take()
            communicator = BESIDE
        else:
            # An event: the work starts after all that is in the stream now, and the inputs are those of this moment
            needs = [_here.stream.launch(f"event of {op}", lambda: [u.take() for u in used])]
            communicator = "one queue" if self._world.one_queue else communicator
        work = Work(str(op), rank, communicator, needs, None, meetings)
        for meeting, place in zip(meetings, places, strict=True):
            meeting.works[place] = work
        return self._world.launch(work)

    def _together(self, x: Tensor, part: Part, op: Operation, channel: str, move: Any, *, message: bool) -> Pending:
        beside = not isinstance(x, OnDevice)
        communicator = f"{self._name} {channel}" + (" beside" if beside else "")
        with self._world.changed:
            count = self._world.counts[communicator, self.rank]
            self._world.counts[communicator, self.rank] += 1
            key = (communicator, count)
            meeting = self._world.meet(key, self.rank, self._members, op, move, part)
            if meeting.op != op and not message:
                raise CollectiveError(self.rank, op, f"another rank is in {meeting.op} instead")
            work = self._launch(op, communicator, [meeting], [self.rank], [part.used], beside)
        assert part.out is not None
        result = part.out if beside else OnDevice(part.out)
        return DevicePending(work, [part.used], result, x, beside=beside)

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        check_rows(x, send_rows, recv_rows, self.size)
        if self.size == 1:
            return Done(x)
        out = _awaited((sum(recv_rows), *x.shape[1:]), x.dtype)
        part = Part(Used(x, f"the input of {op}"), out, list(send_rows), list(recv_rows))
        return self._together(x, part, op, channel, _swap, message=False)

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        return self._gathered(x, op, channel, message=False)

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor:
        return self._gathered(x, op, "tokens", message=True)

    def _gathered(self, x: Tensor, op: Operation, channel: Channel, *, message: bool) -> Tensor:
        if self.size == 1:
            return x.unsqueeze(0)
        part = Part(Used(x, f"the input of {op}"), _awaited((self.size, *x.shape), x.dtype))
        return self._together(x, part, op, channel, _gather, message=message).wait()

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        communicator = f"{self._name} {channel}"
        if not sends and not recvs:
            return Done(torch.empty(0))
        meetings, places, all_used = [], [], []
        beside = not isinstance([*sends, *recvs][0][1], OnDevice)
        with self._world.changed:
            for place, messages in enumerate((sends, recvs)):
                for peer, x in messages:
                    source, target = (self.rank, peer) if place == 0 else (peer, self.rank)
                    link = (communicator, beside, source, target)
                    count = self._world.counts[link, place]
                    self._world.counts[link, place] += 1
                    name = f"what {op} {'fills' if place else 'sends'}"
                    used = Used(x, name, fills=place == 1)
                    ranks = [self._members[source], self._members[target]]
                    meetings.append(self._world.meet((link, count), place, ranks, op, _deliver, Part(used)))
                    places.append(place)
                    all_used.append(used)
            work = self._launch(op, communicator, meetings, places, all_used, beside)
        return DevicePending(work, all_used, torch.empty(0), (list(sends), list(recvs)), beside=beside)


def _awaited(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return poison(torch.empty(tuple(shape), dtype=dtype))
