"""Queues of devices that run behind their hosts: what waits for what, what can run, and what never will.

Work runs as late as it can: when a host waits, and a collective only when all that launched it wait or have ended, and
nothing else can run. So a result that is used too early, and an input that is changed too early, are seen in every run.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from prophet.errors import CollectiveTimeout, PeerLost
from prophet.ranks import waiting
from prophet.ranks.collective import Rows
from prophet.ranks.operation import Operation
from tests.helpers.late_operators import poison
from tests.helpers.pretend_device import unwrap

# Where collectives of tensors on the host are: they wait for nothing but each other
BESIDE = "beside the device"
# So long a rank's threads may take to launch more before collectives run that one of them has launched
LULL_S = 1.0
# How often a host that waits looks whether all others do, too
LOOK_S = 0.02


class DeviceDeadlock(RuntimeError):
    """Work of the ranks' devices waits in a circle, or for a host that waits for the device."""


class DeviceHazard(RuntimeError):
    """A tensor was changed or freed while a collective was using it."""


@dataclass(eq=False)
class Work:
    """Something in a queue of a rank's device. It starts after `needs`; with its meetings it is over.

    operators: how many it is. The device's clock counts them in each queue.
    """

    name: str
    rank: int
    queue: str
    needs: list[Work]
    run: Callable[[], None] | None = None
    meetings: list[Meeting] = field(default_factory=list)
    started: bool = False
    over: bool = False
    operators: int = 0
    thread: threading.Thread = field(default_factory=threading.current_thread)

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, {self.queue})"


class Used:
    """A tensor that a collective uses, from its place in the stream until it is over; `values`: those at that place.

    fills: whether the collective writes to it.
    """

    def __init__(self, x: Tensor, name: str, *, fills: bool = False) -> None:
        host = unwrap(x.detach())
        self._host: Tensor | None = host
        self._view = (host.storage_offset(), host.shape, host.stride())
        self._dtype, self._storage = host.dtype, StorageWeakRef(host.untyped_storage())
        self.name, self.fills = name, fills
        self.values = torch.empty(0)
        self._held: Any = None

    def take(self) -> None:
        if self._host is not None:
            self.values = (poison(self._host) if self.fills else self._host).clone()
        self._host = None

    def hold(self) -> None:
        """A stream waits: the memory may be freed, since only what comes after that in the stream gets it."""
        self._held = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)

    def memory(self) -> Tensor:
        """The tensor; raises `DeviceHazard` where it has changed, or was freed before anybody waited."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise DeviceHazard(f"{self.name} was freed before the collective was over or waited for")
        found = torch.empty(0, dtype=self._dtype).set_(storage, *self._view)  # type: ignore[call-overload]
        if not torch.equal(_bytes(found), _bytes(self.values)):
            raise DeviceHazard(f"{self.name} was changed before the collective was over")
        return found  # type: ignore[no-any-return]


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class Part:
    """What a rank brings to a meeting: a tensor with the rows for each rank, and where the result goes."""

    used: Used
    out: Tensor | None = None
    send_rows: Rows = ()
    recv_rows: Rows = ()


@dataclass(eq=False)
class Meeting:
    """Works that have to run at the same time; `ranks` of those expected. Then `move` moves what they have brought."""

    op: Operation
    ranks: Sequence[int]
    move: Callable[[Operation, list[Part]], None]
    works: dict[int, Work] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    over: bool = False

    def missing(self) -> list[int]:
        return [rank for place, rank in enumerate(self.ranks) if place not in self.works]

    def complete(self) -> bool:
        return not self.over and not self.missing() and all(work.started for work in self.works.values())


class Queues:
    """The queues of R ranks' devices.

    Args:
        size: R, the number of ranks.
        timeout_s: Seconds that a host waits at most, where it waits for a host that waits beside the device.
        side: When what lies in other streams than a rank's default one runs: as early as it can, as late, or by chance
            with this seed.

    Attributes:
        changed: To be held while something is launched.
        last: The work at the end of each rank's queues.
        operators: How many have run in each rank's queues.
        threads: Those of each rank that may launch work.
    """

    def __init__(self, size: int, timeout_s: float, side: Literal["early", "late"] | int = "early") -> None:
        self.size, self.timeout_s, self.side = size, timeout_s, side
        self._chance = random.Random(side)
        self.changed = threading.Condition(threading.RLock())
        self.last: dict[tuple[int, str], Work] = {}
        self.operators: dict[tuple[int, str], int] = defaultdict(int)
        self.threads: dict[int, set[threading.Thread]] = {rank: set() for rank in range(size)}
        self.failure: BaseException | None = None
        self._meetings: dict[Hashable, Meeting] = {}
        self._ahead: list[Work] = []
        self._blocked: dict[threading.Thread, Work] = {}
        self._launched_at: dict[threading.Thread, float] = {}

    def fail(self, error: BaseException) -> None:
        """Wake all ranks: they raise."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def launch(self, work: Work) -> Work:
        """Put `work` at the end of its queue. Failures are raised by `read`, as a backward pass must not raise here."""
        with self.changed:
            if work.queue != BESIDE:
                before = self.last.get((work.rank, work.queue))
                work.needs = [w for w in (*work.needs, before) if w is not None and not w.over]
                self.last[work.rank, work.queue] = work
            self._ahead.append(work)
            self._launched_at[work.thread] = time.monotonic()
            if work.meetings:
                self.changed.notify_all()
            return work

    def meet(self, key: Hashable, place: int, ranks: Sequence[int], op: Operation, move: Any, part: Part) -> Meeting:
        """Bring `part` to the meeting that `key` names, at one of its places."""
        meeting = self._meetings.setdefault(key, Meeting(op, ranks, move))
        meeting.parts[place] = part
        return meeting

    def read(self, work: Work) -> None:
        """Block this thread until `work` is over, as the host does that needs its result."""
        me, deadline = threading.current_thread(), time.monotonic() + self.timeout_s
        with self.changed:
            self._blocked[me] = work
            try:
                while not work.over:
                    self._raise_failure(work)
                    self._advance()
                    if not work.over:
                        self._find_deadlock()
                    if not work.over and self.failure is None:
                        self.changed.wait(LOOK_S)
                        if time.monotonic() > deadline:
                            raise CollectiveTimeout(work.rank, Operation(work.name), f"not over in {self.timeout_s} s")
            finally:
                del self._blocked[me]

    def _raise_failure(self, work: Work) -> None:
        if self.failure is not None:
            if isinstance(self.failure, DeviceDeadlock | DeviceHazard):
                raise type(self.failure)(str(self.failure))
            raise PeerLost(work.rank, Operation(work.name), f"a peer ended ({self.failure})") from self.failure

    def _advance(self) -> None:
        """Run what can run: first all operators, then one meeting."""
        try:
            # Tensors may be those of inference mode, which only that mode can fill
            with torch.inference_mode():
                while self._pass():
                    self.changed.notify_all()
        except Exception as error:
            self.fail(error)

    def _pass(self) -> bool:
        moved = False
        # What one stream must not overtake, and has no event for, is overtaken in one of the two orders
        beside = [work for work in self._ahead if work.queue.startswith("stream ")]
        others = [work for work in self._ahead if not work.queue.startswith("stream ")]
        by_chance = isinstance(self.side, int)
        early = self._chance.random() < 0.5 if by_chance else self.side == "early"
        first, then = (beside, others) if early else (others, beside)
        for i, work in enumerate([*first, *then]):
            # As soon as anything has run, those that come first may be able to
            if moved and first and (by_chance or i >= len(first)):
                break
            if not work.started and all(need.over for need in work.needs):
                work.started = moved = True
                work.needs = []
                if work.run is not None:
                    work.run()
                    work.run = None
                self.operators[work.rank, work.queue] += work.operators
            if work.started and all(meeting.over for meeting in work.meetings):
                work.over = moved = True
        self._ahead = [work for work in self._ahead if not work.over]
        meetings = () if moved else (m for w in self._ahead for m in w.meetings if m.complete())
        ready = next((m for m in meetings if not any(map(self._goes_on, m.works.values()))), None)
        if ready is not None:
            parts = [ready.parts[place] for place in range(len(ready.ranks))]
            ready.move(ready.op, parts)
            for part in parts:
                part.used.memory()
            ready.over = moved = True
            ready.parts.clear()
        return moved

    def _goes_on(self, work: Work) -> bool:
        """Whether the thread that has launched `work` may launch more before it, or all threads of its rank, wait."""
        if work.queue == BESIDE or work.thread in self._blocked or not work.thread.is_alive():
            return False
        mine = self.threads[work.rank]
        if work.thread not in mine or time.monotonic() - self._launched_at[work.thread] >= LULL_S:
            return False
        return not all(thread in self._blocked or _is_idle(thread) for thread in mine)

    # --- deadlocks ---

    def _find_deadlock(self) -> None:
        """Fail where a thread waits for work that can never be over, whatever the threads that run may launch."""
        starts: set[Work] = set()
        ends: set[Work] = set()

        def comes(rank: int) -> bool:
            return any(t not in self._blocked or _over(self._blocked[t], ends) for t in self.threads[rank])

        def can_end(meeting: Meeting) -> bool:
            return meeting.over or (
                all(w.started or w in starts for w in meeting.works.values()) and all(map(comes, meeting.missing()))
            )

        count = -1
        while count != len(starts) + len(ends):
            count = len(starts) + len(ends)
            for work in self._ahead:
                if work not in starts and all(_over(need, ends) for need in work.needs):
                    starts.add(work)
                if work in starts and work not in ends and all(map(can_end, work.meetings)):
                    ends.add(work)
        stuck = next((w for w in self._blocked.values() if not _over(w, ends)), None)
        if stuck is not None:
            self.fail(DeviceDeadlock("\n  which waits for ".join(self._circle(stuck, starts, ends))))

    def _circle(self, work: Work, starts: set[Work], ends: set[Work]) -> list[str]:
        path: list[Work] = []
        while work not in path:
            path.append(work)
            meetings = [m for m in work.meetings if not m.over]
            late = [n for n in work.needs if not _over(n, ends)]
            late += [w for m in meetings for w in m.works.values() if not w.started and w not in starts]
            absent = [rank for m in meetings for rank in m.missing()]
            late += [w for rank in absent for t, w in self._blocked.items() if t in self.threads[rank]]
            if not late:
                return [*map(str, path), f"rank(s) {absent}, which have ended"]
            work = late[0]
        return [*map(str, path[path.index(work) :]), str(work)]


def _is_idle(thread: threading.Thread) -> bool:
    """Whether a thread waits for another one of its rank, or for a call that it is to run."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return False
    code = frame.f_code
    return code is waiting._serve.__code__ or (code.co_name == "wait" and code.co_filename == threading.__file__)


def _over(work: Work, ends: set[Work]) -> bool:
    return work.over or work in ends
