"""Carries out a schedule: launches Trans and Agg in their windows and puts what arrives where it belongs.

The layers say when a window begins; the step under way launches what belongs there. Every rank launches the same
transfers in the same order, whether or not it has anything to send: the order follows from the schedule and from the
placements, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from prophet.experts.bank import Bank
from prophet.experts.replica import ReplicaPool
from prophet.ranks.collective import Collective
from prophet.ranks.device.side_stream import SideStream
from prophet.scheduler.actions import Action, Launch, Window
from prophet.scheduler.pieces import Form
from prophet.scheduler.recording import Recording
from prophet.scheduler.replicas import BlockReplicas, Carrier, GradsSeen, in_backward
from prophet.scheduler.schedules import Schedule, by_window
from prophet.scheduler.windows import Stopwatch, WindowClock
from prophet.spec import Placement


class Block(Protocol):
    """What the runtime needs of an MoE layer: its bank of experts."""

    @property
    def experts(self) -> Bank: ...


class Runtime:
    """Replicas, Trans and Agg of all MoE layers of one model on one rank.

    Args:
        blocks: The layers in execution order.
        collective: The ranks that share the experts.
        pool: Memory of the replicas.
        schedule: What to launch where.
        accumulation_steps: Microbatches of a step.
        refetch: Drop replicas' parameters after the forward pass, and fetch them again for the backward pass (the last
            block's stay).
        stopwatch: Counts seconds; None for a new one.

    Attributes:
        step: The step under way.
        sync_gradients: Whether the next backward passes bring gradients home.
        recording: Is told of every window, where there is one.
        shared: Parameters that all ranks train, by which to see what was zeroed.
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
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.collective = collective
        self.pool = pool
        self.accumulation_steps = accumulation_steps
        self.refetch = refetch
        self.stopwatch = stopwatch or Stopwatch()
        self.windows = WindowClock(self.stopwatch)
        self.table = {w: [Launch.of(a) for a in actions] for w, actions in by_window(schedule).items()}
        self.sync_gradients = True
        self.recording: Recording | None = None
        # parameters that all ranks train, by which to see what was zeroed
        self.shared: Sequence[torch.Tensor] = ()
        self.step: Step | None = None
        self._side: SideStream | None = None

    def side(self) -> SideStream:
        """Return the stream of transfers, on the device where the experts are now."""
        device = self.blocks[0].experts.device
        if self._side is None or self._side.device != device:
            self._side = SideStream(device)
        return self._side

    @property
    def running(self) -> bool:
        """Whether a step has begun and not yet ended."""
        return self.step is not None

    def begin(self, placements: Sequence[Placement], forms: Sequence[Form] | None = None) -> None:
        """Start a step, and launch what belongs to the START window.

        Args:
            placements: By block.
            forms: How each block's transfers travel and are cut; the same on all ranks. None for direct and in halves.

        Raises:
            ValueError: There are more or fewer placements than blocks.
        """
        if len(placements) != len(self.blocks):
            raise ValueError(f"expected {len(self.blocks)} placements, got {len(placements)}")
        # a step may still be under way, as after an error in the user's loop
        self.end()
        self.step = Step(self, placements, forms or [Form() for _ in placements])
        self.step.enter(Window("START"))

    def end(self, *, wait: bool = True) -> None:
        """End the step: replicas vanish. Gradients must have gone home (see `finish_gradients`).

        Args:
            wait: Wait for transfers that nobody waited for; False leaves them to themselves.
        """
        if self.step is not None:
            self.step.end(wait=wait)
            self.step = None

    def finish_gradients(self) -> bool:
        """Bring home whatever is still away; returns whether a backward pass had left anything behind."""
        return self.step is not None and self.step.finish_gradients()


class Step:
    """One step under way.

    Args:
        runtime: The model's replicas and schedule.
        placements: By block.
        forms: By block.

    Attributes:
        actions: The transfers launched so far, in order.
        blocks: Replicas by block.
        forms: By block.
    """

    def __init__(self, runtime: Runtime, placements: Sequence[Placement], forms: Sequence[Form]) -> None:
        self._runtime = runtime
        self.actions: list[Action] = []
        self.forms = tuple(forms)
        carrier = Carrier(runtime.collective, runtime.pool, runtime.stopwatch, self.actions, runtime.side())
        self.blocks = [
            BlockReplicas(i, block.experts, placement, form, carrier)
            for i, (block, placement, form) in enumerate(zip(runtime.blocks, placements, forms, strict=True))
        ]
        # number, by autograd, of the backward pass whose end is being waited for; -1 for none
        self._graph_task = -1
        self._shared_grads = GradsSeen(lambda: runtime.shared)

    def enter(self, window: Window) -> None:
        """Launch the transfers that belong to `window`, which is about to start."""
        runtime = self._runtime
        # before the clock enters the window, as it may wait for parameters
        if window.kind == "BEC" and window.block is not None:
            self._backward_began(self.blocks[window.block])
        runtime.windows.enter(window)
        if runtime.recording is not None:
            runtime.recording.enter(window)
        if runtime.refetch:
            self._drop_before(window)
        for launch in runtime.table.get(window, ()):
            block = self.blocks[launch.block]
            if launch.kind != "AGG":
                block.launch(launch)
            # the gradients of earlier microbatches stay in the replicas, and go home with the last one's
            elif self._final(block):
                block.launch_gradients(launch)

    def copies_done(self, block: int) -> None:
        """Launch Agg of a block whose replicas have run backward, if the schedule has it wait for the step's end.

        Only the first block's does: no block comes before it. All ranks call this before they exchange the rows'
        gradients of that block, so both kinds of exchange begin in one order everywhere.

        Args:
            block: The block's place in the order of execution.
        """
        found = [x for x in self._runtime.table.get(Window("END"), ()) if (x.kind, x.block) == ("AGG", block)]
        if found and self._final(self.blocks[block]):
            # a second phase is left to its window: the first has just begun
            self.blocks[block].launch_gradients(replace(found[0], window=Window("BEC", block)))

    def forget(self) -> None:
        """Forget what the user has thrown away since the last pass: a forward pass begins in the middle of a step.

        That is what a failed backward pass left behind, and gradients that were zeroed at home while the replicas' part
        of them had not been sent.
        """
        # a recomputed forward pass: the backward pass around it is still adding gradients
        if in_backward():
            return
        # a backward pass that ends well leaves -1
        failed, self._graph_task = self._graph_task != -1, -1
        zeroed = self._shared_grads.zeroed() if any(block.unsent for block in self.blocks) else None
        for block in self.blocks:
            block.forget(failed=failed, zeroed=zeroed)

    def finish_gradients(self) -> bool:
        """Bring home whatever is still away; returns whether there was anything."""
        left = any(block.unsent for block in self.blocks)
        self._finish(self.blocks)
        return left

    def end(self, *, wait: bool) -> None:
        """Give all memory back; with `wait` also wait for transfers that nobody waited for."""
        with self._runtime.stopwatch("exposed_trans"):
            for block in self.blocks if wait else ():
                block.abandon()
        for block in self.blocks:
            block.give_back()

    def _drop_before(self, window: Window) -> None:
        """Free the parameters of the block that is done with them for now: its forward or its backward pass is over."""
        # the last block's stay: its backward pass comes next
        if window.kind == "FNEC" and window.block is not None and window.block < len(self.blocks) - 1:
            self.blocks[window.block].drop()
        elif window.kind == "BNEC" and window.block is not None:
            self.blocks[window.block + 1].drop()
        elif window.kind == "END":
            self.blocks[0].drop()

    def _backward_began(self, block: BlockReplicas) -> None:
        block.backward_began()
        task = torch._C._current_graph_task_id()
        # once per backward pass, whichever block comes first in it
        if task != self._graph_task:
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        """Bring gradients home when a backward pass has ended: every one is complete before the user's next line."""
        self._graph_task = -1
        runtime = self._runtime
        # the callback outlives a step that was ended inside the backward pass
        if runtime.step is not self:
            return
        runtime.windows.close()
        self._finish([block for block in self.blocks if self._final(block)])
        self._shared_grads.remember()
        for block in self.blocks:
            block.backward_ended()
        if runtime.recording is not None:
            runtime.recording.gradients()

    def _final(self, block: BlockReplicas) -> bool:
        return block.final(self._runtime.accumulation_steps if self._runtime.sync_gradients else None)

    def _finish(self, blocks: Sequence[BlockReplicas]) -> None:
        """Bring these blocks' gradients home, the last block's first."""
        # all are launched before the first is waited for, so that they travel at the same time
        for block in reversed(blocks):
            block.launch_gradients()
        for block in reversed(blocks):
            block.finish_gradients()
