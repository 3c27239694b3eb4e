"""Giving ranks back and calling them in again: the process group shrinks and grows while the pipeline goes on training.

Words: a member is a process whose number never changes; its rank is its place in the group of the day. A generation is
one such group. gloo can neither split nor shrink a group, and NCCL's communicators cannot be resized, so every
generation is a fresh process group, met for under the generation's prefix in a store that outlives them all. A member
that is left out either ends or waits in the store for the next generation that names it.

Where processes cannot outlive the change (another number of pods, another machine), the state travels through a
checkpoint instead: see `checkpoint`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.pipeline.trainer import ElasticPipeline
from prophet.errors import SpecError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S


class MembershipError(RuntimeError):
    """Members could not meet; the message names generation and members."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One group: its number, counted from 0, and its members by rank. No members: training has ended."""

    number: int
    members: tuple[int, ...]

    def rank_of(self, member: int) -> int | None:
        """The member's rank in this generation; None for one that is not in it."""
        return self.members.index(member) if member in self.members else None


class Membership:
    """One process's view of the changing group.

    Args:
        store: Must outlive every generation, so it may not be hosted by a member that leaves.
        member: This process's number, which never changes.
        backend: torch's name of the backend.
        timeout_s: Seconds that meeting, and every exchange, may take.
    """

    def __init__(
        self, store: Store, member: int, *, backend: str = "gloo", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if member < 0:
            raise SpecError(f"a member's number must not be negative, got {member}")
        self.store = store
        self.member = member
        self.backend = backend
        self.timeout_s = timeout_s
        # before the first one: `wait_for_call` then waits for generation 0
        self.generation = Generation(-1, ())

    def start(self, members: Sequence[int]) -> Generation:
        """Found generation 0; called by all its members with the same list."""
        first = self._checked(0, members)
        if self.member not in first.members:
            raise SpecError(f"member {self.member} is not among the first members {list(first.members)}")
        self._publish(first)
        self._enter(first)
        return first

    def switch(self, pipeline: ElasticPipeline, members: Sequence[int]) -> bool:
        """Go from the present generation to one of `members`, between steps; called by all present members.

        Members that run a stage must stay: `rebuild` without them first. Newcomers must be waiting (`wait_for_call`).
        Replicas stay as many: with P members for each, the first P are replica 0's, and so on.
        Returns whether this process is still a member; if not, its process group is gone.
        """
        before = self.generation
        after = self._checked(before.number + 1, members)
        grid = pipeline.groups.grid
        used = {before.members[p] for rank in pipeline.stage_map.used_ranks for p in grid.column(rank)}
        if not used <= set(after.members):
            raise SpecError(f"members {sorted(used - set(after.members))} still run stages and cannot leave")
        pipeline.experts.check_static("change its group")
        # from old ranks to new ones, for the stage map
        number = {r: after.members.index(m) for r, m in enumerate(before.members) if m in after.members}
        grid.renumbered(Grid.of(len(after.members), grid.replicas), number, pipeline.stage_map.used_ranks)
        # All present members are between steps when the first of them gets past this.
        dist.barrier()
        if before.rank_of(self.member) == 0:
            self._publish(after)
        # before the group is destroyed: the pipeline has communicators in it
        pipeline.leave_group()
        dist.destroy_process_group()
        if self.member not in after.members:
            self.generation = after
            return False
        self._enter(after)
        pipeline.change_group(None, number)
        return True

    def wait_for_call(self, *, timeout_s: float | None = None) -> bool:
        """Wait, outside any group, until a later generation names this member; False once training has ended.

        After True, enter the pipeline: `pipeline.change_group(None, None)` where there is one from before, else
        `ElasticPipeline(model, joins=True, ...)`. Raises `MembershipError` after `timeout_s` without news.
        """
        limit = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        while True:
            # one by one: a generation that leaves this member out must be passed, not missed
            key = _key(self.generation.number + 1)
            try:
                self.store.wait([key], limit)
            except (RuntimeError, dist.DistStoreError) as error:
                raise MembershipError(
                    f"member {self.member} was not called within {limit.total_seconds():g} s "
                    f"after generation {self.generation.number}"
                ) from error
            members = json.loads(self.store.get(key))
            self.generation = Generation(self.generation.number + 1, tuple(int(m) for m in members))
            if not self.generation.members:
                return False
            if self.member in self.generation.members:
                self._enter(self.generation)
                return True

    def end(self) -> None:
        """Leave the last generation; called by all its members. Those that wait for a call learn that there is none."""
        dist.barrier()
        if self.generation.rank_of(self.member) == 0:
            # no members: those that wait learn that training has ended
            self._publish(Generation(self.generation.number + 1, ()))
        dist.destroy_process_group()

    def _checked(self, number: int, members: Sequence[int]) -> Generation:
        found = tuple(int(m) for m in members)
        if not found or len(set(found)) != len(found) or min(found) < 0:
            raise SpecError(f"a generation needs one or more different members, got {list(found)}")
        return Generation(number, found)

    def _publish(self, generation: Generation) -> None:
        self.store.set(_key(generation.number), json.dumps(list(generation.members)))

    def _enter(self, generation: Generation) -> None:
        try:
            dist.init_process_group(
                self.backend,
                # keys of the generation before are still in the store
                store=PrefixStore(f"generation/{generation.number}/group", self.store),
                rank=generation.members.index(self.member),
                world_size=len(generation.members),
                timeout=timedelta(seconds=self.timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise MembershipError(
                f"generation {generation.number} of members {list(generation.members)} did not meet: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.generation = generation


def _key(number: int) -> str:
    return f"generation/{number}/members"


def released(
    membership: Membership, pipeline: ElasticPipeline, on_release: Callable[[Sequence[int]], None] | None = None
) -> bool:
    """Let all members without a stage go. Collective over the present members, between steps.

    Args:
        membership: This process's view of the group.
        pipeline: Trains on it.
        on_release: Called on the first rank that stays, with the members that went.

    Returns:
        Whether this process is still a member.
    """
    before = membership.generation
    used = pipeline.stage_map.used_ranks
    stay = tuple(before.members[row[rank]] for row in pipeline.groups.grid.rows for rank in used)
    gone = tuple(m for m in before.members if m not in stay)
    if not gone:
        return True
    still = membership.switch(pipeline, stay)
    if still and on_release is not None and membership.generation.rank_of(membership.member) == 0:
        on_release(gone)
    return still
