"""Process groups of layouts: made ahead on one thread, kept while a layout uses them, numbered in its order.

torch names a group by how many were made before it. Two threads that make groups in another order on two ranks would
pair the wrong ones, without an error. So one thread of a process makes all groups of a job, in an order that the layout
gives, and nothing else in the program may call `new_group` or `init_device_mesh` while it is at work.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline_balance.pipeline.run.stages import alone
from prophet.errors import SpecError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.json_messages import reasons_text
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective, meet
from prophet.ranks.waiting import Waiter, joined
from prophet.ranks.works import all_made, host_too, like

T = TypeVar("T")
Members = tuple[int, ...]
SHARDS = "shards"
"""The purpose of groups that meshes take: torch itself talks in them, and nothing else, so they have one channel."""
# apart from the meeting after it, in which a process that is late for this one must not be counted
_COMING = Operation("coming to make process groups")
# seconds to wait for further groups once one of them could not be made
_GIVEN_UP_S = 0.5
# older versions of torch sort the members, so a rank could not have the number that a layout gives it
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


# Groups belong to a process, as torch.distributed's own registry does: for the life of the world's group.
_known: weakref.WeakKeyDictionary[Any, dict[float, Groups]] = weakref.WeakKeyDictionary()


def groups_of_world(timeout_s: float) -> Groups:
    """The groups of loops that make no job, one set per limit.

    Args:
        timeout_s: Seconds that every wait in the groups may take.

    Raises:
        SpecError: Where `torch.distributed` is not initialised.
    """
    if not dist.is_initialized():
        raise SpecError("torch.distributed is not initialised: start with torchrun, and call init_process_group")
    known = _known.setdefault(dist.group.WORLD, {})
    if timeout_s not in known:
        known[timeout_s] = Groups(timeout_s)
    return known[timeout_s]


def members_of(group: Any) -> list[int]:
    """The ranks of one of torch's groups."""
    return dist.get_process_group_ranks(group)


def on_all_processes(what: str, attempt: Callable[[], str | None], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Raise `SpecError` on all processes, with rank and reason, where `attempt` fails on one. Collective.

    Args:
        what: What is attempted, as the message names it.
        attempt: Raises, or returns a problem as text; nothing if all went well.
        timeout_s: Seconds to wait for other processes.
    """
    failed: Exception | None = None
    try:
        problem = attempt() or ""
    except Exception as error:
        # a process that raised here alone would leave the others waiting
        failed, problem = error, f"{type(error).__name__}: {error}"
    problems = meet(Operation(what), problem, timeout_s=timeout_s)
    if any(problems):
        raise SpecError(f"{what}: {reasons_text(problems)}") from failed


class Groups:
    """Collectives among processes of the world, by their members.

    All processes ask for the same members in the same order, also for groups that they are not in.

    Args:
        timeout_s: Seconds that every wait in the groups may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        # Of the next group; shorter after one could not be made
        self._limit_s = timeout_s
        # None for a group that this process is not in: it was made here, too
        self._made: dict[tuple[Members, str], Collective | None] = {}
        self._new: list[tuple[Members, str]] = []
        self._thread = Waiter("makes groups")
        # a new thread begins on the first device, and the first call of a group would be made there
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def beside(self, call: Callable[[], T]) -> Future[T]:
        """Call this on the thread that makes groups, after what it was given before."""

        def on_device() -> T:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            return call()

        return self._thread.submit(on_device)

    def idle(self) -> None:
        """Wait until the thread has done what it was given."""
        joined(self.beside(lambda: None))

    def make(self, wanted: Sequence[tuple[Members, str]]) -> str:
        """Make the groups that are not there yet.

        Args:
            wanted: Members and purpose of every group.

        Returns:
            What went wrong on this process; nothing if all went well.

        Raises:
            CollectiveError: On all processes, before any group is tried, where one does not come.
        """
        # a preparation runs on that thread: waiting for itself, it would never end
        if threading.current_thread() is self._thread.thread:
            return self._make(list(wanted))
        return joined(self.beside(lambda: self._make(list(wanted))))

    def make_everywhere(self, wanted: Sequence[tuple[Members, str]]) -> None:
        """`make` on all processes, or `SpecError` on all of them, with the groups that were there. Collective."""
        self.keep()
        try:
            on_all_processes("making process groups", lambda: self.make(wanted), self.timeout_s)
        except BaseException:
            self.undo()
            raise

    def get(self, members: Members, purpose: str) -> Collective:
        """The collective of this process among `members`; KeyError if it was not made."""
        found = self._made[members, purpose]
        if found is None:
            raise KeyError(f"this process is not one of {list(members)}")
        return found

    def process_group(self, members: Members, purpose: str) -> dist.ProcessGroup:
        """torch's own group of this process among `members`, of which there are several, as meshes take it.

        `make` must have made it.
        """
        found = self.get(members, purpose)
        assert isinstance(found, ProcessGroupCollective)
        # for SHARDS both channels are the same group
        group: dist.ProcessGroup = found.groups["tokens"]
        return group

    def keep(self) -> None:
        """Keep what has been made so far: `undo` forgets what is made from here on."""
        self._new = []

    def undo(self) -> None:
        """Forget what was made since `keep`: one of the processes could not. On all processes alike."""
        self.drop(self._new)
        self.keep()

    def drop(self, wanted: Sequence[tuple[Members, str]]) -> None:
        """Make these anew the next time; on all processes alike."""
        for key in wanted:
            found = self._made.pop(key, None)
            if isinstance(found, ProcessGroupCollective):
                # whatever still waits in it, in any thread, fails at once
                found.abort()

    def give_back(self, used: Sequence[tuple[Members, str]], turn: Callable[[], None]) -> None:
        """Destroy all groups but the `used` ones; on all processes alike.

        All of them must have left the others: a peer that still waits in a group that is destroyed fails. Groups of
        meshes stay: torch remembers meshes by their ranks, and uses an old one for another with the same ranks.

        Args:
            used: Members and purpose of the groups that stay.
            turn: Called between turns of the wait, and may raise.
        """
        left = [key for key in self._made if key not in set(used) and key[1] != SHARDS]
        # the thread that makes groups: NCCL may wait for peers here, so what it does has one order on all processes
        joined(self.beside(partial(self._destroy, left)), turn)

    def close(self) -> None:
        """End the thread; the groups stay until the process group is destroyed."""
        self._thread.close()

    def _make(self, wanted: list[tuple[Members, str]]) -> str:
        problem, self._limit_s = "", self.timeout_s
        lacking = [key for key in dict.fromkeys(wanted) if key not in self._made]
        if lacking:
            # one wait for whoever is missing: every group that is made would wait anew
            meet(_COMING, timeout_s=self.timeout_s, beside=True)
        self._new += lacking
        for members, purpose in lacking:
            try:
                self._made[members, purpose] = self._one(members, 1 if purpose == SHARDS else 2)
            # The others are tried: torch names groups by how many were made, so all processes must count alike
            except Exception as error:
                problem = problem or f"{purpose} of ranks {list(members)}: {str(error).splitlines()[0]}"
        return problem

    def _destroy(self, left: Sequence[tuple[Members, str]]) -> None:
        # all at once: whatever happens below, the processes go on counting alike
        every = [self._made.pop(key) for key in left]
        # a process alone has no group, nor has one that is not a member
        for found in (one for one in every if isinstance(one, ProcessGroupCollective)):
            try:
                found.close()
            # the step is made, and nobody uses the group: what it holds is all that is lost
            except RuntimeError as error:
                warnings.warn(f"a process group of an old layout was not given back: {error}", stacklevel=2)

    def _group(self, members: list[int], options: dict[str, Any]) -> Any:
        try:
            return dist.new_group(members, **{**like(None, timedelta(seconds=self._limit_s)), **options})
        # All that are made now are given up: waiting again for whoever is missing adds nothing
        except Exception:
            self._limit_s = min(self.timeout_s, _GIVEN_UP_S)
            raise

    def _one(self, members: Members, number: int) -> Collective | None:
        here = dist.get_rank()
        # no communicator for one process, which has nothing to send
        if len(members) == 1:
            return alone() if here in members else None
        # nothing but torch talks in a mesh's group, and that on the device alone
        options: dict[str, Any] = {} if number == 1 else {"backend": host_too()}
        if list(members) != sorted(members):
            if not _KEEPS_ORDER:
                raise SpecError("this version of torch sorts a group's members: use ranks in ascending order")
            options["sort_ranks"] = False
        # two communicators of the same members, so that tokens and weights do not queue behind each other
        made = all_made([partial(self._group, list(members), options)] * number)
        if here not in members:
            return None
        found = ProcessGroupCollective(made[0], timeout_s=self.timeout_s, channels=(made[0], made[-1]))
        # a group in another order would pair the wrong ranks without an error
        if found.rank != members.index(here):
            raise RuntimeError(f"rank {here} is number {found.rank} in a group of {list(members)}")
        return found
