"""Carries out a schedule: launches Trans and Agg in their windows and puts what arrives where it belongs.

The layers call the runtime at the edges of their windows; it holds the replicas of one step, for all layers. Every rank
launches the same transfers in the same order, whether or not it has anything to send: the order follows from the
schedule and from the placements, which all ranks share.

A replica's gradient may be sent in several rounds (a layer used twice, or a backward pass that nobody announced): each
round sends what has accumulated since the last one and starts again from zero, so the sum at home is always complete.

Shape legend: R ranks, E experts, P parameters of one expert.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from prophet.comm import Collective, Operation, Pending
from prophet.experts import ExpertBank, Replica, ReplicaPool
from prophet.scheduler.actions import Action, Window
from prophet.scheduler.blockwise import Schedule, by_window
from prophet.spec import Placement


class Stopwatch:
    """Host seconds by name, summed over a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return what was measured, and start again from zero."""
        taken, self.seconds = self.seconds, {}
        return taken


class Block(Protocol):
    """What the runtime needs of an MoE layer."""

    @property
    def experts(self) -> ExpertBank: ...


@dataclass(slots=True)
class _Inflight:
    layer: int
    chunk: int
    pending: Pending


@dataclass(slots=True)
class _BlockState:
    placement: Placement
    replicas: list[Replica] = field(default_factory=list)
    trans: list[_Inflight] = field(default_factory=list)
    launched: set[int] = field(default_factory=set)
    ready: bool = False
    version: int = 0  # of the home parameters when their Trans was launched
    backward_runs: int = 0
    unsent: list[int] = field(default_factory=list)  # by chunk: backward runs whose gradients have not been sent


class Runtime:
    """Replicas, Trans and Agg of all MoE layers of one model on one rank.

    blocks: the layers' expert banks in execution order. schedule: what to launch where. chunks: how many pieces a
    transfer is cut into. on_launch, when given, is called with every action as it is launched.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        collective: Collective,
        pool: ReplicaPool,
        schedule: Schedule,
        *,
        accumulation_steps: int = 1,
        chunks: int = 2,
        stopwatch: Stopwatch | None = None,
        on_launch: Callable[[Action], None] | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.collective = collective
        self.pool = pool
        self.accumulation_steps = accumulation_steps
        self.chunks = chunks
        self.stopwatch = stopwatch or Stopwatch()
        self.sync_gradients = True
        self._on_launch = on_launch
        self._table = by_window(schedule)
        self._states: list[_BlockState] | None = None
        self._agg: list[_Inflight] = []
        self._graph_task = -1

    # --- the step ---

    def begin(self, placements: Sequence[Placement]) -> None:
        """Start a step with these placements, one per block; launches what belongs to the START window."""
        if len(placements) != len(self.blocks):
            raise ValueError(f"expected {len(self.blocks)} placements, got {len(placements)}")
        self.end()
        self._states = [_BlockState(p, unsent=[0] * self.chunks) for p in placements]
        self.enter(Window("START"))

    @property
    def running(self) -> bool:
        """Whether a step has begun and not yet ended."""
        return self._states is not None

    def end(self) -> None:
        """End the step: replicas vanish. Gradients must have gone home (see `finish_gradients`)."""
        if self._states is None:
            return
        for state in self._states:
            for flight in state.trans:
                flight.pending.wait()
            for replica in state.replicas:
                self.pool.give(replica.params, replica.grads)
        self._states = None

    def placement(self, block: int) -> Placement | None:
        """The placement in force for a block, or None outside a step."""
        return None if self._states is None else self._states[block].placement

    # --- windows: called by the layers ---

    def enter(self, window: Window) -> None:
        """Launch the transfers that belong to `window`, which is about to start."""
        if self._states is None:
            return
        for action in self._table.get(window, ()):
            if action.kind == "TRANS":
                self._launch_trans(action)
            elif self._final(self._states[action.block]):
                self._launch_agg(action)

    def replicas(self, block: int) -> list[Replica]:
        """The replicas this rank holds for a block, their parameters arrived; waits for what is still under way."""
        if self._states is None:
            return []
        state = self._states[block]
        if not state.ready:
            for chunk in range(self.chunks):
                self._launch_trans(Action("TRANS", block, chunk, Window("FEC", block)))
            self._finish_trans(block)
        return state.replicas

    def stale(self, block: int) -> bool:
        """Whether the home parameters were changed in place after their Trans was launched (as by SAM, or a load)."""
        if self._states is None:
            return False
        state = self._states[block]
        return bool(state.launched) and state.version != self._version(block)

    def refresh(self, block: int) -> None:
        """Forget that a block's Trans was launched, so that it runs again; on all ranks alike."""
        assert self._states is not None
        state = self._states[block]
        for flight in state.trans:
            flight.pending.wait()
        state.trans.clear()
        state.launched.clear()
        state.ready = False

    def _version(self, block: int) -> int:
        return sum(p._version for _, p in self.blocks[block].experts.stacked())

    def backward_ran(self, block: int) -> None:
        """The backward pass of a block's experts has started; called once per microbatch from inside autograd."""
        if self._states is None:
            return
        state = self._states[block]
        state.backward_runs += 1
        state.unsent = [n + 1 for n in state.unsent]
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    # --- Trans ---

    def _launch_trans(self, action: Action) -> None:
        block, chunk = action.block, action.chunk
        assert self._states is not None
        state = self._states[block]
        if chunk in state.launched or state.ready:
            return
        if not state.launched:
            state.version = self._version(block)
        state.launched.add(chunk)
        placement = state.placement
        if placement.is_static:
            return
        before = time.perf_counter()
        if self._on_launch:
            self._on_launch(action)
        bank, rank = self.blocks[block].experts, self.collective.rank
        if not state.replicas:
            device, dtype = bank.w_in.device, bank.w_in.dtype
            for expert in placement.replicas_on(rank):
                buffers = self.pool.take(bank.expert_numel, dtype, device)
                state.replicas.append(Replica.build(expert, bank, *buffers))
        start, stop = self._bounds(block, chunk)
        pieces, rows = [], [0] * self.collective.size
        for target in range(self.collective.size):
            for expert in placement.replicas_on(target):
                if placement.home[expert] == rank:
                    pieces.append(bank.flat_slice(expert - bank.first_expert, start, stop))
                    rows[target] += stop - start
        outgoing = torch.cat(pieces) if pieces else bank.w_in.new_empty(0)
        incoming = [0] * self.collective.size
        for replica in state.replicas:
            incoming[int(placement.home[replica.expert])] += stop - start
        op = Operation(f"Trans chunk {chunk}", block)
        pending = self.collective.all_to_all(outgoing.detach(), rows, incoming, op=op, channel="weights")
        state.trans.append(_Inflight(block, chunk, pending))
        self.stopwatch.add("exposed_trans", time.perf_counter() - before)

    def _finish_trans(self, block: int) -> None:
        assert self._states is not None
        state = self._states[block]
        before = time.perf_counter()
        for flight in state.trans:
            start, stop = self._bounds(block, flight.chunk)
            arrived = flight.pending.wait()
            # rows come ordered by home rank, then by expert
            ordered = sorted(state.replicas, key=lambda x: (int(state.placement.home[x.expert]), x.expert))
            with torch.no_grad():
                for i, replica in enumerate(ordered):
                    n = stop - start
                    replica.params[start:stop] = arrived[i * n : (i + 1) * n]
        state.trans.clear()
        state.ready = True
        self.stopwatch.add("exposed_trans", time.perf_counter() - before)

    # --- Agg ---

    def _final(self, state: _BlockState) -> bool:
        """Whether this block's experts have run backward for the last microbatch of the step."""
        return self.sync_gradients and any(state.unsent) and state.backward_runs % self.accumulation_steps == 0

    def _launch_agg(self, action: Action) -> None:
        block, chunk = action.block, action.chunk
        assert self._states is not None
        state = self._states[block]
        placement = state.placement
        bank = self.blocks[block].experts
        if not state.unsent[chunk]:
            return
        state.unsent[chunk] = 0
        if placement.is_static or not any(p.requires_grad for p in bank.parameters()):
            return
        before = time.perf_counter()
        if self._on_launch:
            self._on_launch(action)
        for replica in state.replicas:
            replica.settle_grads()
        start, stop = self._bounds(block, chunk)
        ordered = sorted(state.replicas, key=lambda x: (int(placement.home[x.expert]), x.expert))
        rows = [0] * self.collective.size
        for replica in ordered:
            rows[int(placement.home[replica.expert])] += stop - start
        with torch.no_grad():
            pieces = [replica.grads[start:stop] for replica in ordered]
            outgoing = torch.cat(pieces) if pieces else bank.w_in.new_empty(0)
            for piece in pieces:
                piece.zero_()
        incoming = [0] * self.collective.size
        for source in range(self.collective.size):
            held = placement.replicas_on(source)
            incoming[source] = sum(stop - start for e in held if placement.home[e] == self.collective.rank)
        op = Operation(f"Agg chunk {chunk}", block)
        pending = self.collective.all_to_all(outgoing, rows, incoming, op=op, channel="weights")
        self._agg.append(_Inflight(block, chunk, pending))
        self.stopwatch.add("exposed_agg", time.perf_counter() - before)

    def _end_of_backward(self) -> None:
        """Runs when a backward pass has ended: every gradient is complete before the user's next line."""
        self._graph_task = -1
        if self._states is None:
            return
        self._finish(only_final=True)

    def finish_gradients(self) -> bool:
        """Bring home whatever is still away. Returns whether there was anything a backward pass had left behind."""
        if self._states is None:
            return False
        left = any(any(s.unsent) and not s.placement.is_static for s in self._states)
        self._finish(only_final=False)
        return left

    def _finish(self, *, only_final: bool) -> None:
        assert self._states is not None
        for block in reversed(range(len(self.blocks))):
            if self._final(self._states[block]) or not only_final:
                for chunk in range(self.chunks):
                    self._launch_agg(Action("AGG", block, chunk, Window("END")))
        before = time.perf_counter()
        for flight in self._agg:
            arrived = flight.pending.wait()
            self._add_home(flight.layer, flight.chunk, arrived)
        self._agg.clear()
        self.stopwatch.add("exposed_agg", time.perf_counter() - before)

    def _add_home(self, block: int, chunk: int, arrived: Tensor) -> None:
        """Add what arrived to the home gradients, by source rank, then by expert: the same sum in every run."""
        assert self._states is not None
        placement, bank = self._states[block].placement, self.blocks[block].experts
        start, stop = self._bounds(block, chunk)
        offset, n = 0, stop - start
        for source in range(self.collective.size):
            for expert in placement.replicas_on(source):
                if placement.home[expert] == self.collective.rank:
                    piece = arrived[offset : offset + n]
                    bank.add_flat_grad(expert - bank.first_expert, start, stop, piece)
                    offset += n

    def _bounds(self, block: int, chunk: int) -> tuple[int, int]:
        numel = self.blocks[block].experts.expert_numel
        return numel * chunk // self.chunks, numel * (chunk + 1) // self.chunks
