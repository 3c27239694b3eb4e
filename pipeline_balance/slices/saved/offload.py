"""Saved tensors of passes go to the host, and are back before their backward (SlimPipe, Section 6.5).

What goes is memory, not tensors: views of the same memory go once. What somebody else holds stays: parameters and
buffers, what a stage received and what it hands on, arguments that all slices share, and keys and values, which later
slices read. A pass's tensors leave at its end, and come back before the action that the plan names.

On the CPU the host is a second pool, and its link is simulated: bytes and busy time are counted. On a device, copies
run in a stream beside training; no device has run that yet.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.layers import Activations, TrainingPass
from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.offload import Offload, hidden, offload
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.store import Chunk, ChunkStore
from prophet.errors import SpecError
from prophet.ranks.device.clocks import Mark, clock_on, seconds_between, synchronize
from prophet.ranks.device.side_stream import current_stream, new_stream

_log = logging.getLogger(__name__)
# Bytes of a copy that measures the link, and how often; the shortest counts
_TRIED_BYTES, _REPEATS = 16 << 20, 3


class Host:
    """The host's memory as seen from `device`, and the link to it.

    Attributes:
        bytes_per_s: Of the link, each way.
        sent_bytes: What has gone to the host so far.
        fetched_bytes: What has come back.

    Args:
        device: Where passes run.
        bytes_per_s: None: copies are timed.
    """

    def __init__(self, device: torch.device, bytes_per_s: float | None) -> None:
        self.device, self._stream = device, new_stream(device)
        self.sent_bytes = self.fetched_bytes = 0
        self.bytes_per_s = self._measured() if bytes_per_s is None else bytes_per_s

    @property
    def busy_s(self) -> float:
        """Seconds that the link has carried something, both directions together."""
        return (self.sent_bytes + self.fetched_bytes) / self.bytes_per_s

    def send(self, here: Tensor) -> Tensor:
        """A copy on the host; the memory of `here` may be given up at once."""
        there = torch.empty(here.shape, dtype=here.dtype, pin_memory=self._stream is not None)
        self._copy(there, here)
        self.sent_bytes += here.nbytes
        return there

    def fetch(self, there: Tensor) -> tuple[Tensor, Any]:
        """A copy on the device, and what `join` waits for."""
        # of this thread's stream, so that memory which has left is used again
        here = torch.empty(there.shape, dtype=there.dtype, device=self.device)
        self._copy(here, there)
        self.fetched_bytes += there.nbytes
        return here, None if self._stream is None else self._stream.record_event()

    def join(self, mark: Any) -> None:
        """Make what this thread launches from now on start after a fetch."""
        if mark is not None:
            current_stream(self.device).wait_event(mark)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self._stream is None:
            to.copy_(source)
            return
        self._stream.wait_event(current_stream(self.device).record_event())
        with self._stream:
            to.copy_(source, non_blocking=True)
        # the allocator must not give this memory away before the copy is done
        (source if source.device == self.device else to).record_stream(self._stream)

    def _measured(self) -> float:
        tried = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device=self.device)
        seconds = []
        for _ in range(_REPEATS):
            synchronize(self.device)
            began = time.perf_counter()
            self.fetch(self.send(tried))
            synchronize(self.device)
            seconds.append((time.perf_counter() - began) / 2)
        self.sent_bytes = self.fetched_bytes = 0
        return _TRIED_BYTES / max(min(seconds), 1e-9)


class _Memory:
    """Memory that saved tensors share, as bytes: `here` or `there`; neither once its pass has ended."""

    __slots__ = ("__weakref__", "here", "mark", "there")

    def __init__(self, there: Tensor) -> None:
        self.here: Tensor | None = None
        self.there: Tensor | None = there
        self.mark: Any = None


class Saved:
    """What autograd, or a chunk, has in place of a tensor: the tensor, or where it is in memory that goes and comes."""

    __slots__ = ("__weakref__", "memory", "shape", "tensor", "version", "whole")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.memory: _Memory | None = None
        self.shape: tuple[Any, ...] = ()
        # of a `DTensor`: makes it of what is here
        self.whole: Callable[[Tensor], Tensor] | None = None

    @property
    def here(self) -> Tensor | None:
        """What takes memory on the device now."""
        return self.tensor if self.memory is None else self.memory.here

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place; torch does not ask where it saves something else."""
        return self.tensor is not None and self.tensor._version != self.version

    def leave(self, memory: _Memory) -> None:
        """Let go of the tensor, which is in `memory` now."""
        assert self.tensor is not None
        t, self.whole = _local(self.tensor), _maker(self.tensor)
        self.shape = t.dtype, t.storage_offset(), t.size(), t.stride()
        self.tensor, self.memory = None, memory


class Offloader:
    """Moves what passes of one rank save.

    Attributes:
        plan: What goes and comes in the latest pass; None before it.
        why: What an automatic choice follows from; empty before it.
        host: The other pool, and the link to it; None before the first pass.
        host_peak_bytes: Most bytes there in the latest pass.
        taking: Whether a pass runs whose saved tensors will go.

    Args:
        options: Those of the slices.
    """

    def __init__(self, options: SliceOptions) -> None:
        self._share, self._bytes_per_s, self._slices = options.offload, options.host_bytes_per_s, options.slices
        self.plan: Offload | None = None
        self.why, self.host_peak_bytes, self.taking = "", 0, False
        self.host: Host | None = None
        # what the plan was made for, and how many passes have begun with it
        self._planned: tuple[Schedule, Sequence[float]] | None = None
        self._begun = 0
        # of the latest pass: when forwards and backwards began and ended, and what forwards have moved
        self._times: dict[Action, tuple[Mark, Mark]] = {}
        self._moved: dict[Action, int] = {}
        self._stages: Sequence[Sequence[int]] = ()
        self._places: dict[Action, int] = {}
        self._due: dict[int, list[Action]] = {}
        # pointers to what stays always
        self._fixed: set[int] = set()
        # what has left, and chunks with their output and log-sum-exp
        self._away: dict[Action, WeakSet[_Memory]] = {}
        self._chunks: dict[Action, list[tuple[Chunk, Saved, Saved]]] = {}
        self._enter(None)

    def _enter(self, action: Action | None) -> None:
        self._action, self.taking = action, False
        # by pointer to their memory; what a forward drops again need not leave
        self._seen: dict[int, WeakSet[Saved]] = defaultdict(WeakSet)
        self._held: list[Tensor] = []

    @property
    def host_bytes(self) -> int:
        """What is on the host now."""
        return sum(m.there.nbytes for some in self._away.values() for m in some if m.there is not None)

    # --- the plan ----------------------------------------------------------------------------------------------

    def begin(self, given: TrainingPass, store: ChunkStore, root: nn.Module) -> None:
        """Plan a training pass of this rank.

        Args:
            given: What runs.
            store: This rank's chunks.
            root: The model.
        """
        self._store, self._stages, self.host_peak_bytes = store, given.stages, 0
        self._fixed = {_pointer(t) for some in (root.parameters(), root.buffers()) for t in some}
        if self.host is None:
            self.host = Host(next(iter(given.parts[0].inputs.values())).device, self._bytes_per_s)
        sizes, rank = [part.share for part in given.parts], list(given.ranks).index(given.collective.rank)
        row = given.schedule.actions[rank]
        # the schedule is one object as long as the stages are
        if self._planned is None or self._planned[0] is not given.schedule or self._planned[1] != sizes:
            self._planned, self._begun = (given.schedule, sizes), 0
            # memory counts until it is known what is hidden
            self.plan = offload(row, self._slices, 1.0 if self._share == "auto" else float(self._share), sizes=sizes)
        elif self._share == "auto" and self._begun == 2:
            # the first pass was slower than the others
            self._choose(given.schedule, rank, sizes)
        assert self.plan is not None
        self._begun, self._due = self._begun + 1, self.plan.due()
        self._times, self._moved = {}, {}
        self._places = {action: number for number, action in enumerate(row)}

    def _choose(self, schedule: Schedule, rank: int, sizes: Sequence[float]) -> None:
        """Take what needs least memory of what the schedule hides, by what the latest pass took.

        Times of others are taken to be as here.
        """
        assert self.host is not None
        if not self._moved:
            return
        taken: dict[tuple[str, int], list[float]] = defaultdict(list)
        for action, marks in self._times.items():
            taken[action.kind, action.microbatch % self._slices].append(seconds_between(*marks))
        forward_s, backward_s = (
            [fmean(taken[kind, unit % self._slices] or [0.0]) for unit in range(schedule.units)] for kind in "FB"
        )
        whole = max(n / sizes[action.microbatch] for action, n in self._moved.items())
        link_s = [whole * size / self.host.bytes_per_s for size in sizes]
        found = hidden(schedule, rank, sizes, forward_s, backward_s, link_s)
        self.plan = found.plan
        self.why = (
            f"offload: {found.share:.0%} of what passes save goes to the host, fetched {found.plan.ahead} backwards "
            f"ahead: {whole / 2**20:.1f} MiB per microbatch and stage at {self.host.bytes_per_s / 1e9:.3g} GB/s"
        )
        if found.more is not None:
            self.why += f"; with less memory, at {found.more:.0%}, a backward would wait {found.late_s * 1e3:.3g} ms"
        _log.info("%s", self.why)

    # --- a pass ------------------------------------------------------------------------------------------------

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """Within this context an action runs: what it and later ones read is fetched, and what it saves is taken."""
        assert self.plan is not None
        self._enter(action)
        for forward in self._due.get(self._places[action], ()):
            for memory in self._away.get(forward, ()):
                self._bring(memory)
        if action.kind in "IB":
            # the output of attention is in the chunk, where its backward looks for it
            for chunk, out, lse in self._chunks.pop(Action(action.stage, "F", action.microbatch), ()):
                chunk.out, chunk.lse = self.unpack(out), self.unpack(lse)
                chunk.version = chunk.out._version
        self.taking = action in self.plan.back
        if not self.taking:
            yield
            return
        chunks: list[Chunk] = []
        self._store.appended = chunks
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._store.appended = None
        self._send(action, chunks)
        self._enter(None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within this context the action's forward or backward runs, without waits for other ranks."""
        if self._share != "auto" or self._action is None or self.host is None:
            yield
            return
        clock = clock_on(self.host.device)
        began = clock()
        yield
        self._times[self._action] = began, clock()

    def hold(self, unit: int, given: Activations, out: Activations, arguments: Iterable[Any]) -> None:
        """Note what of a unit's forward somebody else holds.

        Args:
            unit: Its number.
            given: What it got; a stage's stays until its backward.
            out: What it returned, likewise.
            arguments: What all slices share.
        """
        if not self.taking or self._action is None:
            return
        units = self._stages[self._action.stage]
        self._held += [t for t in arguments if isinstance(t, Tensor)]
        self._held += (*given,) if unit == units[0] else ()
        self._held += (*out,) if unit == units[-1] else ()

    def pack(self, tensor: Tensor) -> Saved:
        """What is saved in place of a tensor; it leaves at the end of the action."""
        saved = Saved(tensor)
        assert self.host is not None
        if tensor.device == self.host.device and (key := _pointer(tensor)):
            self._seen[key].add(saved)
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """The tensor. Raises `SpecError` where it was changed in place."""
        if saved.changed:
            raise SpecError("a tensor that was saved for a backward was changed in place; work on a copy of it")
        if saved.tensor is not None:
            return saved.tensor
        memory = saved.memory
        assert memory is not None
        assert self.host is not None
        self._bring(memory)
        if memory.here is None:
            raise SpecError("a backward reads what was saved in a pass that has ended")
        self.host.join(memory.mark)
        dtype, *place = saved.shape
        found = torch.empty(0, dtype=dtype, device=memory.here.device).set_(memory.here.untyped_storage(), *place)
        return found if saved.whole is None else saved.whole(found)

    def _send(self, action: Action, chunks: Sequence[Chunk]) -> None:
        """Move what an action has saved and nobody else holds."""
        assert self.host is not None
        found = [(c, self.pack(c.out), self.pack(c.lse)) for c in chunks if c.out is not None and c.lse is not None]
        stays = self._fixed.union(map(_pointer, self._held))
        self._away[action], self._moved[action] = WeakSet(), 0
        for key, some in self._seen.items():
            group = list(some)
            # what was changed in place stays, so that its backward says so
            if not group or key in stays or any(saved.changed for saved in group):
                continue
            assert group[0].tensor is not None
            tensor = _local(group[0].tensor)
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            memory = _Memory(self.host.send(flat))
            self._away[action].add(memory)
            self._moved[action] += flat.nbytes
            for saved in group:
                saved.leave(memory)
        self._chunks[action] = []
        for chunk, out, lse in found:
            # as long as it was not changed in place
            if chunk.out is not None and chunk.out._version == chunk.version:
                chunk.out = chunk.lse = None
                self._chunks[action].append((chunk, out, lse))
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _bring(self, memory: _Memory) -> None:
        if memory.there is not None:
            assert self.host is not None
            (memory.here, memory.mark), memory.there = self.host.fetch(memory.there), None

    def end(self) -> None:
        """Drop all that is left of a pass, in both pools."""
        for some in self._away.values():
            for memory in some:
                memory.here = memory.there = None
        self._away, self._chunks = {}, {}
        self._enter(None)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a `DTensor`, as those of tensor parallelism are; any other tensor as it is."""
    given: Any = tensor
    if not hasattr(given, "device_mesh"):
        return tensor
    with torch.no_grad():
        local: Tensor = given.to_local()
    return local


def _maker(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What makes a `DTensor` like this one of what a rank has of it; None for any other tensor."""
    t: Any = tensor
    if not hasattr(t, "device_mesh"):
        return None
    return partial(
        type(t).from_local,
        device_mesh=t.device_mesh,
        placements=t.placements,
        run_check=False,
        shape=t.shape,
        stride=t.stride(),
    )


def _pointer(tensor: Tensor) -> int:
    """Tells memory apart; 0 where a tensor is more than a view of memory, or of what is here of a `DTensor`."""
    tensor = _local(tensor)
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if plain and not (tensor.is_conj() or tensor.is_neg()) else 0
