"""Carries out a schedule: launches Trans and Agg in their windows and puts what arrives where it belongs.

The layers call the runtime at the edges of their windows; it holds the replicas of one step, for all layers. Every rank
launches the same transfers in the same order, whether or not it has anything to send: the order follows from the
schedule and from the placements, which all ranks share.

A replica's gradient may be sent in several rounds (a layer used twice, or a backward pass that nobody announced): each
round sends what has accumulated since the last one and starts again from zero, so the sum at home is always complete.

Shape legend: R ranks, E experts, P parameters of one expert.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from prophet.experts.bank import ExpertBank, Replica, ReplicaPool
from prophet.ranks.collective import Collective
from prophet.scheduler.actions import Action, Launch, Window
from prophet.scheduler.pieces import Form, agg_chunks, trans_chunks
from prophet.scheduler.recording import Recording
from prophet.scheduler.schedules import Schedule, by_window
from prophet.scheduler.transfers import Agg, Trans, Transfer
from prophet.scheduler.windows import Stopwatch, WindowClock
from prophet.spec import Placement


def _identity(grad: Tensor | None) -> tuple[int, int]:
    """Changes when a gradient is replaced or written to."""
    return (0, 0) if grad is None else (id(grad), grad._version)


class Block(Protocol):
    """What the runtime needs of an MoE layer."""

    @property
    def experts(self) -> ExpertBank: ...


@dataclass(slots=True)
class _BlockState:
    placement: Placement
    form: Form
    replicas: list[Replica] | None = None  # None: not made yet
    trans: Trans | None = None  # under way
    held: Launch | None = None  # of the second phase of Trans, which had to wait for the first in the same window
    ready: bool = False
    decided: bool = False  # whether the replicas are used, now that the counts are known
    arrived: bool = False  # whether these parameters have been here before, in this step
    launched: bool = False
    version: int = 0  # of the home parameters when their Trans was launched
    backward_runs: int = 0
    agg: Agg | None = None  # under way
    unsent: bool = False  # gradients of a backward run that no Agg has taken along
    grads_seen: list[tuple[int, int]] = field(default_factory=list)  # the home gradients as the last pass left them


class Runtime:
    """Replicas, Trans and Agg of all MoE layers of one model on one rank.

    blocks: the layers' expert banks in execution order. schedule: what to launch where. form: which form a block's
    transfers take, and how they are cut (`Form`); the same on all ranks. refetch: drop replicas' parameters after the
    forward pass and fetch them again for the backward pass (the last block's stay). on_launch, when given, is called
    with every action as it is launched.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        collective: Collective,
        pool: ReplicaPool,
        schedule: Schedule,
        *,
        accumulation_steps: int = 1,
        refetch: bool = False,
        form: Callable[[int, Placement], Form] | None = None,
        stopwatch: Stopwatch | None = None,
        on_launch: Callable[[Action], None] | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.collective = collective
        self.pool = pool
        self.accumulation_steps = accumulation_steps
        self.stopwatch = stopwatch or Stopwatch()
        self.windows = WindowClock(self.stopwatch)
        self.sync_gradients = True
        self._refetch = refetch
        self._form = form or (lambda block, placement: Form())
        self._on_launch = on_launch
        self._table = {w: [Launch.of(a) for a in actions] for w, actions in by_window(schedule).items()}
        self._states: list[_BlockState] | None = None
        self._left: list[Trans] = []  # under way, for replicas that were withdrawn
        self.forms: tuple[Form, ...] = ()  # by block, of the step under way or the last one
        self.recording: Recording | None = None
        self._graph_task = -1

    # --- the step ---

    def begin(self, placements: Sequence[Placement]) -> None:
        """Start a step with these placements, one per block; launches what belongs to the START window."""
        if len(placements) != len(self.blocks):
            raise ValueError(f"expected {len(self.blocks)} placements, got {len(placements)}")
        self.end()
        self.forms = tuple(self._form(i, p) for i, p in enumerate(placements))
        self._states = [_BlockState(p, form) for p, form in zip(placements, self.forms, strict=True)]
        self.enter(Window("START"))

    def resume(self) -> None:
        """A forward pass begins in the middle of a step: forget what the user has thrown away since the last one.

        That is what a failed backward pass left behind, and gradients that were zeroed at home while the replicas'
        part of them had not been sent.
        """
        if self._states is None or torch._C._current_graph_task_id() != -1:
            return
        failed = self._graph_task != -1  # a pass that ends well leaves -1
        self._graph_task = -1
        for block, state in enumerate(self._states):
            if failed and state.agg is not None:
                state.agg.abandon()
                state.agg = None
            if failed or (state.unsent and self._zeroed(block)):
                for replica in state.replicas or ():
                    replica.settle_grads()
                    replica.grads.zero_()
                state.backward_runs, state.unsent = 0, False

    def _zeroed(self, block: int) -> bool:
        """Whether the home gradients were set to None or to zero since the last backward pass."""
        assert self._states is not None
        grads = [p.grad for p in self.blocks[block].experts.parameters()]
        seen = self._states[block].grads_seen
        return all(g is None or (_identity(g) != was and not g.any()) for g, was in zip(grads, seen, strict=False))

    @property
    def running(self) -> bool:
        """Whether a step has begun and not yet ended."""
        return self._states is not None

    def end(self, *, wait: bool = True) -> None:
        """End the step: replicas vanish. Gradients must have gone home (see `finish_gradients`).

        Transfers that nobody waited for are waited for now; with `wait` False they are left to themselves.
        """
        if self._states is None:
            return
        left, self._left = self._left, []
        before = time.perf_counter()
        if wait:
            for trans in (*left, *(s.trans for s in self._states if s.trans is not None)):
                trans.abandon()
        self.stopwatch.add("exposed_trans", time.perf_counter() - before)
        for state in self._states:
            # what Agg has sent is zero again
            zeroed = not state.unsent and state.agg is None
            for replica in state.replicas or ():
                self.pool.give(replica.params, replica.grads, zeroed=zeroed)
        self._states = None

    def placement(self, block: int) -> Placement | None:
        """The placement in force for a block, or None outside a step."""
        return None if self._states is None else self._states[block].placement

    # --- windows: called by the layers ---

    def enter(self, window: Window) -> None:
        """Launch the transfers that belong to `window`, which is about to start."""
        if self._states is None:
            return
        self.windows.enter(window)
        if self._refetch:
            self._drop_before(window)
        for launch in self._table.get(window, ()):
            if launch.kind != "AGG":
                self._launch_trans(launch)
            elif self._final(self._states[launch.block]):
                self._launch_agg(launch)

    def counted(self, block: int) -> None:
        """The block's counts are known, and its replicas worth the rest of Trans: what was held back follows.

        A second phase follows if the first has arrived. Where it has not on some rank, that rank launches it when it
        needs the replicas. Nothing else is launched in between, so the ranks' transfers keep one order.
        """
        state = None if self._states is None else self._states[block]
        if state is None or state.trans is None:
            return
        before, trans = time.perf_counter(), state.trans
        while not trans.complete and (not trans.must_wait or trans.ready):
            held, state.held = state.held or Launch("TRANS", block, sys.maxsize, Window("FEC", block)), None
            trans.window = None
            self._advance(trans, replace(held, chunk=trans.launched))
        self.stopwatch.add("exposed_trans", time.perf_counter() - before)

    def decided(self, block: int) -> bool:
        """Whether this step has gone on with or without the block's replicas already; the same on all ranks."""
        return self._states is None or self._states[block].decided

    def decide(self, block: int, placement: Placement) -> None:
        """Go on with the placement in force, or withdraw the block's replicas for the rest of the step.

        placement: the one in force, or one without replicas. In the second case nothing more of them is sent; what is
        under way is waited for when the step ends.
        """
        assert self._states is not None
        state = self._states[block]
        state.decided = True
        if placement is state.placement:
            self.counted(block)
            return
        if not placement.is_static or state.ready:
            raise ValueError(f"block {block}: replicas can only be withdrawn, and only before they were used")
        if state.trans is not None:
            self._left.append(state.trans)
        for replica in state.replicas or ():
            self.pool.give(replica.params, replica.grads, zeroed=True)
        state.placement, state.trans, state.held, state.replicas = placement, None, None, None

    def replicas(self, block: int) -> list[Replica]:
        """The replicas this rank holds for a block, their parameters arrived; waits for what is still under way."""
        if self._states is None:
            return []
        state = self._states[block]
        if not state.ready:
            self._finish_trans(block)
        return state.replicas or []

    def _drop_before(self, window: Window) -> None:
        """Free the parameters of the block that is done with them for now: its forward or its backward pass is over."""
        assert self._states is not None
        if window.kind == "FNEC" and window.block is not None and window.block < len(self.blocks) - 1:
            block = window.block
        elif window.kind == "BNEC" and window.block is not None:
            block = window.block + 1
        elif window.kind == "END":
            block = 0
        else:
            return
        state = self._states[block]
        if state.ready and state.replicas is not None:
            for replica in state.replicas:
                self.pool.release(replica.params)
            state.launched = state.ready = False

    def stale(self, block: int) -> bool:
        """Whether the home parameters were changed in place after their Trans was launched (as by SAM, or a load)."""
        if self._states is None:
            return False
        state = self._states[block]
        return state.launched and state.version != self._version(block)

    def refresh(self, block: int) -> None:
        """Forget that a block's Trans was launched, so that it runs again; on all ranks alike."""
        assert self._states is not None
        state = self._states[block]
        if state.trans is not None:
            state.trans.abandon()
        state.trans, state.launched, state.ready, state.arrived = None, False, False, False

    def _version(self, block: int) -> int:
        return sum(p._version for _, p in self.blocks[block].experts.stacked())

    def backward_ran(self, block: int) -> None:
        """The backward pass of a block's experts has started; called once per microbatch from inside autograd."""
        if self._states is None:
            return
        state = self._states[block]
        if state.agg is not None and not state.agg.complete:
            # a layer used twice: what is under way carries the gradients so far, whole, wherever it was cut
            self._launch_rest(state.agg, Launch("AGG", block, sys.maxsize, Window("BEC", block)))
        state.backward_runs += 1
        state.unsent = True
        if not state.ready and state.replicas is not None:
            self._finish_trans(block)
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    # --- Trans ---

    def _launch_trans(self, action: Launch) -> None:
        """Launch a block's Trans up to the action's chunk, where that has not happened yet."""
        block = action.block
        assert self._states is not None
        state = self._states[block]
        if state.ready:
            return
        if not state.launched:
            state.launched = True
            state.version = self._version(block)
        if state.placement.is_static:
            return
        before = time.perf_counter()
        if state.trans is None:
            form, rank = state.form, self.collective.rank
            numel = self.blocks[block].experts.expert_numel
            cut = form.fetch_cut if action.kind == "FETCH" else form.trans_cut
            chunks = trans_chunks(state.placement, rank, numel, cut, two_phase=form.two_phase_trans)
            self._restore(state)
            state.trans = Trans(chunks, *self._parties(block), again=state.arrived)
        self._advance(state.trans, action)
        state.held = None if state.trans.launched > action.chunk or state.trans.complete else action
        self.stopwatch.add("exposed_trans", time.perf_counter() - before)

    def _parties(self, block: int) -> tuple[ExpertBank, list[Replica], Collective, int]:
        """Who takes part in a block's transfers; makes the replicas where there are none yet."""
        assert self._states is not None
        state, bank = self._states[block], self.blocks[block].experts
        if state.replicas is None:
            device, dtype = bank.w_in.device, bank.w_in.dtype
            # the buffers outlive this forward pass, which may be one in inference mode
            with torch.inference_mode(False):
                state.replicas = [
                    Replica.build(expert, bank, *self.pool.take(bank.expert_numel, dtype, device))
                    for expert in state.placement.replicas_on(self.collective.rank)
                ]
        return bank, state.replicas, self.collective, block

    def _restore(self, state: _BlockState) -> None:
        """Memory for parameters that were dropped."""
        for replica in state.replicas or ():
            if replica.params.numel() and not replica.params.untyped_storage().size():
                self.pool.restore(replica.params)

    def _advance(self, transfer: Transfer, action: Launch) -> None:
        """Launch a transfer's chunks up to the action's, but none that would wait for one of the same window."""
        while transfer.launched <= action.chunk and not transfer.complete:
            if transfer.must_wait and transfer.window == action.window:
                return
            transfer.window = action.window
            if self._on_launch:
                self._on_launch(replace(action, chunk=transfer.launched).action())
            transfer.launch_next()

    def _launch_rest(self, transfer: Transfer, action: Launch) -> None:
        """Launch all chunks that are left, even those that wait for one another."""
        while not transfer.complete:
            transfer.window = None
            self._advance(transfer, action)

    def _finish_trans(self, block: int) -> None:
        assert self._states is not None
        state = self._states[block]
        backward = torch._C._current_graph_task_id() != -1
        if state.arrived and backward:
            last = Launch("FETCH", block, sys.maxsize, Window("BEC", block))
        else:
            last = Launch("TRANS", block, sys.maxsize, Window("FEC", block))
        self._launch_trans(last)  # counts its own time
        before = time.perf_counter()
        if state.trans is not None:
            self._launch_rest(state.trans, last)
            state.trans.finish()
            state.trans = None
        state.ready = state.arrived = True
        self.stopwatch.add("exposed_trans", time.perf_counter() - before)

    # --- Agg ---

    def _final(self, state: _BlockState) -> bool:
        """Whether this block's experts have run backward for the last microbatch of the step, or Agg has begun."""
        if state.agg is not None:
            return True
        return self.sync_gradients and state.unsent and state.backward_runs % self.accumulation_steps == 0

    def _launch_agg(self, action: Launch) -> None:
        """Launch a block's Agg up to the action's chunk; a new one where there are gradients to send."""
        block = action.block
        assert self._states is not None
        state = self._states[block]
        bank = self.blocks[block].experts
        if state.agg is None:
            if not state.unsent:
                return
            if state.placement.is_static or not any(p.requires_grad for p in bank.parameters()):
                state.unsent = False
                return
            form, rank = state.form, self.collective.rank
            cut, two_phase = form.agg_cut, form.two_phase_agg
            chunks = agg_chunks(state.placement, rank, bank.expert_numel, cut, two_phase=two_phase)
            state.agg = Agg(chunks, *self._parties(block))
            state.unsent = False
        before = time.perf_counter()
        self._advance(state.agg, action)
        self.stopwatch.add("exposed_agg", time.perf_counter() - before)

    def _finish_agg(self, block: int) -> None:
        """Send what has not been sent, wait, and add to the home gradients; once more for what came in between."""
        assert self._states is not None
        state = self._states[block]
        while state.agg is not None or state.unsent:
            end = Launch("AGG", block, sys.maxsize, Window("UPDATE"))
            self._launch_agg(end)
            if state.agg is None:
                continue
            before = time.perf_counter()
            self._launch_rest(state.agg, end)
            state.agg.finish()
            state.agg = None
            self.stopwatch.add("exposed_agg", time.perf_counter() - before)

    def _end_of_backward(self) -> None:
        """Runs when a backward pass has ended: every gradient is complete before the user's next line."""
        self._graph_task = -1
        if self._states is None:
            return
        self.windows.close()
        self._finish(only_final=True)
        for block, state in zip(self.blocks, self._states, strict=True):
            state.grads_seen = [_identity(p.grad) for p in block.experts.parameters()]
        if self.recording is not None:
            self.recording.gradients()

    def finish_gradients(self) -> bool:
        """Bring home whatever is still away. Returns whether there was anything a backward pass had left behind."""
        if self._states is None:
            return False
        left = any(s.unsent and not s.placement.is_static for s in self._states)
        self._finish(only_final=False)
        return left

    def _finish(self, *, only_final: bool) -> None:
        assert self._states is not None
        blocks = [b for b in reversed(range(len(self.blocks))) if not only_final or self._final(self._states[b])]
        for block in blocks:
            self._launch_agg(Launch("AGG", block, sys.maxsize, Window("UPDATE")))
        for block in blocks:
            self._finish_agg(block)
