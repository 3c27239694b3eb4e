"""Pipelines whose ranks are threads: on the host over `ThreadWorld`, or on devices over `DeviceWorld`.

Threads of one process share torch's generators. So no layer may draw random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from pipeline_balance.elastic import balance, groups, job, own_loop, rank_assignment, switching, trainable
from pipeline_balance.elastic.groups import Groups
from pipeline_balance.elastic.shards import new_model
from pipeline_balance.pipeline import trainer
from pipeline_balance.pipeline.model import added_loss
from pipeline_balance.pipeline.model.ownership import attributes_of
from pipeline_balance.pipeline.run.failures import Failures
from pipeline_balance.pipeline.run.stages import PipelineGroups, alone
from pipeline_balance.slices import kernel, store
from prophet.errors import StageFailed
from prophet.ranks.collective import Channel, Collective, Messages, Pending
from prophet.ranks.json_messages import gather_json
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from tests.helpers.device_ranks import DeviceWorld
from tests.helpers.pretend_device import NAME, OnDevice

T = TypeVar("T")
LIMIT_S = 60.0


_current = threading.local()


@dataclass(frozen=True)
class Rank:
    """One rank of a world of threads, which a pipeline takes for its group.

    Attributes:
        world: Its collective over all ranks.
        device: Where it computes.
        make: Makes its collective of a name and of some ranks.
    """

    world: Collective
    device: torch.device
    make: Callable[[str, Sequence[int]], Collective]
    _made: dict[str, Collective] = field(default_factory=dict)

    def part(self, name: str, members: Sequence[int]) -> Collective:
        """Return the one collective of this name, which says who its members are."""
        if name not in self._made:
            self._made[name] = alone() if len(members) == 1 else self.make(name, members)
        return self._made[name]

    def run(self, body: Callable[[Rank], T]) -> T:
        """Call `body`, in whose thread this is the present rank."""
        _current.rank = self
        return body(self)


class _HostCollective(ThreadCollective):
    """A sender's message may have another name than the receiver's, as over a process group."""

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        return super().exchange(sends, recvs, op=Operation("message"), channel=channel)


def on_host(size: int, body: Callable[[Rank], T]) -> list[T]:
    """Call `body` on ranks whose tensors are the host's."""
    made: dict[tuple[str, tuple[int, ...]], ThreadWorld] = {}
    lock = threading.Lock()

    def of(rank: int, name: str, members: Sequence[int]) -> Collective:
        with lock:
            among = made.setdefault((name, tuple(members)), ThreadWorld(len(members), timeout_s=LIMIT_S))
        return _HostCollective(among, list(members).index(rank))

    def on_rank(c: Collective) -> T:
        whole = of(c.rank, "world", range(size))
        try:
            return Rank(whole, torch.device("cpu"), lambda name, members: of(c.rank, name, members)).run(body)
        except BaseException as error:
            for among in list(made.values()):
                among.abort(error)
            raise

    return ThreadWorld(size).run(on_rank)


def on_devices(world: DeviceWorld, body: Callable[[Rank], T]) -> list[T]:
    """Call `body` on the ranks of `world`."""

    def on_rank(c: Any) -> T:
        return Rank(c, torch.device(NAME), lambda name, members: world.collective(c.rank, name, members)).run(body)

    return world.run(on_rank)


class ThreadGroups(PipelineGroups):
    """The communicators of a pipeline whose group is a `Rank`."""

    def enter(self, group: Any) -> None:
        # a job names none, as it is over all processes
        self.group, self._of = group, cast(Rank, group or _current.rank)
        self.world = self._of.world
        watched: Any = SimpleNamespace(
            rank=self.world.rank, size=self.world.size, watched=lambda stages_of: _Unwatched()
        )
        self.failures = Failures(watched, self.abort)
        self._included = []
        self._side = None
        self._parts = 0
        self.arrange(1)

    def _part(self, parts: list[tuple[int, ...]]) -> Collective:
        mine = next(part for part in parts if self.world.rank in part)
        self._parts += 1
        return self._of.part(f"part {self._parts} of {list(mine)}", mine)

    def side(self) -> Collective:
        if self._side is None:
            self._side = self._of.part("side", range(self.world.size))
        return self._side


class _Unwatched:
    """Stands for the watch over processes: the world itself wakes threads where one of them fails."""

    presence = SimpleNamespace(where="")

    def begin(self) -> None: ...

    def report(self, error: StageFailed) -> StageFailed:
        return error

    def explain(self, error: StageFailed, grace_s: float) -> StageFailed:
        return error

    def places(self) -> str:
        return ""

    def turns(self, limit_s: float) -> Callable[[], None]:
        return lambda: None


class _JobGroups(Groups):
    """The groups of a job's layouts among threads."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._rank, self._count = cast(Rank, _current.rank), 0

    def beside(self, call: Callable[[], T]) -> Future[T]:
        return super().beside(lambda: self._rank.run(lambda _: call()))

    def _one(self, members: tuple[int, ...], number: int) -> Collective | None:
        # All ranks count all groups, as torch does
        self._count += 1
        if self._rank.world.rank not in members:
            return None
        return self._rank.part(f"group {self._count} of {list(members)}", members)


def _groups_of_rank(timeout_s: float) -> Groups:
    if not hasattr(_current, "groups"):
        _current.groups = _JobGroups(timeout_s)
    return cast(Groups, _current.groups)


def _meet(op: Operation, text: str = "", *, beside: bool = False, **_: Any) -> list[str]:
    rank = cast(Rank, _current.rank)
    # Meetings beside training need not come in the same order as those of training
    return gather_json(text, rank.part(f"meetings {beside}", range(rank.world.size)), op)


_swap = torch._C._swap_tensor_impl


def _swap_with_type(a: Any, b: Any) -> None:
    """Exchange what two parameters hold; on the pretended device its type and values are parts of that."""
    _swap(a, b)
    if type(a) is type(b) is not OnDevice:
        return
    kinds, hosts = (type(a), type(b)), (vars(a).pop("host", None), vars(b).pop("host", None))
    for x, kind, host in zip((a, b), reversed(kinds), reversed(hosts), strict=True):
        x.__class__ = kind
        vars(x).pop("_is_param", None)
        if kind is OnDevice:
            x.host, x._is_param = host, True


class _PerThread(threading.local):
    """Stands for a list that a process has once: a rank's passes append to it and pop from it in its own thread."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, place: int) -> Any:
        return self.found[place]

    def append(self, value: Any) -> None:
        self.found.append(value)

    def pop(self) -> Any:
        return self.found.pop()


@contextmanager
def threads_for_groups() -> Iterator[None]:
    """Pipelines take a `Rank` for their group, jobs the present one. Attention over slices takes any device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(added_loss, "_in_force", _PerThread())
        patch.setattr(store, "_active", _PerThread())
        patch.setattr(kernel, "_tracing", _PerThread())
        # The kernel is that of the host, as all others here; a GPU has others
        patch.setattr(kernel, "chosen", lambda *given: kernel.CPU)
        patch.setattr(trainer, "PipelineGroups", ThreadGroups)
        patch.setattr(torch._C, "_swap_tensor_impl", _swap_with_type)
        for module in (job, switching, rank_assignment, balance, own_loop):
            patch.setattr(module, "process_rank", lambda: _current.rank.world.rank)
        for module in (job, switching, own_loop):
            patch.setattr(module, "processes", lambda: _current.rank.world.size)
        for module in (groups, trainable, own_loop):
            patch.setattr(module, "meet", _meet)
        patch.setattr(job, "Groups", _JobGroups)
        patch.setattr(own_loop, "groups_of_world", _groups_of_rank)
        patch.setattr(new_model, "attributes_of", lambda p: {n: x for n, x in attributes_of(p).items() if n != "host"})
        yield
