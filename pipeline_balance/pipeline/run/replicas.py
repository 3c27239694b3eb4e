"""Replicas of a pipeline: which process is which, and the mean of their gradients while other stages still compute.

The processes are a grid of replicas x pipeline ranks. All replicas have one stage map and one schedule, and each has
another part of the batch. The processes with one pipeline rank, a column, hold the same layers. A process outside the
grid is spare: it holds nothing, and takes part in what all processes do around a step.

Once a stage has run its last backward action, the schedule starts the means of its layers' gradients. They run in that
order in a thread, on a communicator and on a stream that nothing else uses.

Shape legend: R replicas, P pipeline ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.measure.links import Noted
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.device.side_stream import SideStream
from prophet.ranks.gradient_means import average_gradients_
from prophet.ranks.operation import Operation
from prophet.ranks.waiting import Waiter

# torch's wrappers by name, wherever a release keeps them
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """R x P processes.

    Attributes:
        rows: [R][P] the processes of every replica, by pipeline rank.
        beside: [...][R][P] other grids of the same size, which compute the same with other shards of the tensors.
        ep: After how many replicas the same part of their layers' experts comes again: those of r and r + ep are equal.
        context: How many replicas in a row are given the same data, whose tokens they share.
    """

    rows: tuple[tuple[int, ...], ...]
    beside: tuple[tuple[tuple[int, ...], ...], ...] = ()
    ep: int = 1
    context: int = 1

    @classmethod
    def of(cls, processes: int, replicas: int) -> Grid:
        """Number the processes: process r is pipeline rank r mod P of replica r // P.

        Raises:
            SpecError: The processes do not divide into as many replicas.
        """
        if replicas < 1 or processes % replicas:
            raise SpecError(f"{processes} processes cannot be divided into {replicas} replicas of a pipeline")
        each = processes // replicas
        return cls(rows=tuple(tuple(range(r * each, (r + 1) * each)) for r in range(replicas)))

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.rows)

    @property
    def pipeline_ranks(self) -> int:
        """How many pipeline ranks a replica has."""
        return len(self.rows[0])

    def replica_of(self, process: int) -> int:
        """Return the replica of a process; R for a spare one."""
        return next((r for rows in self.every for r, row in enumerate(rows) if process in row), self.replicas)

    def pipeline_rank_of(self, process: int) -> int:
        """Return the pipeline rank of a process; P for a spare one."""
        found = (row.index(process) for rows in self.every for row in rows if process in row)
        return next(found, self.pipeline_ranks)

    @property
    def every(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The rows of this grid and of those beside it, [...][R][P], in the same order on all processes."""
        return tuple(sorted((self.rows, *self.beside)))

    def first_beside(self, process: int) -> int:
        """Return the first process that passes the same microbatches as this one."""
        number = self.replica_of(process)
        return min(r for rows in self.every for r in rows[number]) if number < self.replicas else process

    def first_with_data(self, process: int) -> int:
        """Return the first process that is given the same data as this one."""
        number = self.replica_of(process)
        if number == self.replicas:
            return process
        return self.first_beside(self.rows[number // self.context * self.context][0])

    @property
    def contexts(self) -> list[tuple[int, ...]]:
        """The processes that share tokens: of one pipeline rank, in `context` replicas in a row."""
        starts = range(0, self.replicas, self.context)
        return [self.column(p)[r : r + self.context] for p in range(self.pipeline_ranks) for r in starts]

    def first_alike(self, process: int) -> int:
        """Return the first process with the same shards of the same layers as this one."""
        number = self.pipeline_rank_of(process)
        return next((rows[0][number] for rows in self.every for row in rows if process in row), process)

    def renumbered(self, after: Grid, number: Mapping[int, int], used: Iterable[int]) -> dict[int, int]:
        """Return which pipeline rank those in use become in another grid of as many replicas.

        Args:
            after: The grid to go to.
            number: From this grid's processes that stay to their numbers there.
            used: The pipeline ranks that run stages.

        Raises:
            SpecError: A process of theirs leaves, or they do not stand in the same place in all replicas.
        """
        lost = sorted(p for rank in used for p in self.column(rank) if p not in number)
        if lost:
            # a process that leaves takes what it holds along
            raise SpecError(f"ranks {lost} still run stages and cannot leave: rebuild without them first")
        found = {}
        for rank in used:
            places = [divmod(number[p], after.pipeline_ranks) for p in self.column(rank)]
            found[rank] = places[0][1]
            if places != [(r, found[rank]) for r in range(self.replicas)]:
                now = [number[p] for p in self.column(rank)]
                raise SpecError(
                    f"ranks {list(self.column(rank))} run the same stages in all replicas, and would be {now}: "
                    "put them in the same place of all replicas; with P ranks for each, rank r is r mod P of r // P"
                )
        return found

    def replica(self, number: int) -> tuple[int, ...]:
        """Return the processes of a replica, by pipeline rank [P]; none of number R."""
        return self.rows[number] if number < self.replicas else ()

    def column(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the processes with one pipeline rank, by replica [R]; none with number P."""
        return tuple(row[pipeline_rank] for row in self.rows) if pipeline_rank < self.pipeline_ranks else ()


def check_units(units: Sequence[nn.Module], root: nn.Module | None = None) -> None:
    """Raise `SpecError` where a unit is wrapped for data parallelism by torch, or its gradients are sparse.

    `root` is the unsplit model, whose modules need not all be in units.
    """
    named = [(f"layer {number}", unit) for number, unit in enumerate(units)]
    for owner, unit in [*named, *([("the model", root)] if root is not None else [])]:
        for name, module in unit.named_modules():
            where = owner + (f" ({name})" if name else "")
            # base classes too: FSDP2 makes the module's class a subclass of `FSDPModule`
            kinds = {k.__name__ for k in type(module).__mro__ if k.__module__.startswith("torch.")}
            for kind in sorted(kinds & _WRAPPERS):
                raise SpecError(
                    f"{where} is wrapped in {kind}, which averages or cuts gradients at its own times: give the bare "
                    f"module, and replicas=R to the pipeline"
                )
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise SpecError(f"{where} has sparse gradients, which a pipeline cannot add: use sparse=False")


class ReplicaMeans:
    """Averages the gradients of this rank's layers over the replicas, in replica order, while a step goes on.

    Each microbatch's loss is weighted by R over the labels of all replicas, so that the mean is the gradient of the
    whole update. All replicas must start the same buckets in the same order: they have one stage map and one schedule.

    Args:
        column: The R processes that hold the same layers; nothing else may use its channel "weights" meanwhile.
        noted: Learns when every layer's mean began and ended (None: nobody does).
    """

    def __init__(self, column: Collective, noted: Noted | None = None) -> None:
        self.column, self._noted = column, noted
        self._thread = Waiter("averages gradients of replicas") if column.size > 1 else None
        self._under_way: list[Future[None]] = []
        # made with the first bucket, which knows the device
        self._side: SideStream | None = None

    def start(self, parameters: Iterable[nn.Parameter], layer: int) -> None:
        """Begin to average the gradients of a layer whose backward is over; returns at once.

        Frozen parameters are left out. One without a gradient here counts as zeros, and gets the mean of all.
        Where no replica has a gradient there is none afterwards.
        """
        # Called by the schedule, not by hooks on parameters: torch's split backward does not fire them, and an order
        # that differs between ranks mixes up layers in silence.
        trainable = [p for p in parameters if p.requires_grad]
        if self._thread is None or not trainable:
            return
        self._side = self._side or SideStream(trainable[0].device)
        average = partial(self._average, trainable, layer)
        self._under_way.append(self._thread.submit(self._side.after_now(average)))

    def finish(self) -> None:
        """Wait until all that was started is averaged. Raises what went wrong; every wait has the limit of `column`."""
        # emptied first: what is raised here must not be raised again by the next update
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            future.result()
        if under_way and self._side is not None:
            self._side.join()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close()

    def _average(self, parameters: Sequence[nn.Parameter], layer: int) -> None:
        began = time.perf_counter()
        average_gradients_(parameters, self.column, op=Operation("mean of gradients over replicas", layer))
        if self._noted is not None:
            self._noted.reduced(layer, began)


def start_alike(tensors: Sequence[Tensor], column: Collective) -> None:
    """Overwrite parameters and buffers by those of replica 0, in place; collective over `column`. For the start."""
    if column.size == 1:
        return
    with torch.no_grad():
        for t in tensors:
            t.copy_(column.all_gather(t.detach(), op=Operation("weights of the first replica"), channel="weights")[0])


def refuse_apart(column: Mapping[int, Mapping[str, int]]) -> None:
    """Raise `SpecError` where the processes of a column have other digests of a parameter than its first.

    `column` has digests by process and name.
    """
    # parameters are equal at the start, and so are their gradients and updates: someone changed what differs by hand
    first = next(iter(column))
    for name, digest in column[first].items():
        differ = [process for process, digests in column.items() if digests.get(name) != digest]
        if differ:
            raise SpecError(
                f"replicas have come apart: {name!r} differs on rank(s) {differ} from rank {first}; "
                f"change weights on all replicas alike"
            )
