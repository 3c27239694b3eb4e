"""One block's replicas in one step: their parameters come, are used and go; their gradients go home.

| state | what it means | what ends it |
|---|---|---|
| none | no replicas: none were planned, or they were withdrawn | the step's end |
| away | their parameters have not been sent, or have changed since | the first chunk of Trans is launched |
| under way | Trans has begun | the experts need them: they have arrived |
| here | the experts can use them | the step's end, or memory that another block needs |
| dropped | their parameters were freed; they are sent again for the backward pass | the first chunk is launched |

A replica's gradient may be sent in several rounds (a layer used twice, or a backward pass that nobody announced): each
round sends what has accumulated since the last one and starts again from zero, so the sum at home is always complete.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from prophet.experts.bank import Bank
from prophet.experts.replica import Replica, ReplicaPool
from prophet.ranks.collective import Collective
from prophet.ranks.device.side_stream import SideStream
from prophet.scheduler.actions import Action, Launch, TransferKind, Window, WindowKind
from prophet.scheduler.pieces import Form, agg_chunks, trans_chunks
from prophet.scheduler.replica_transfers import Agg, Trans, Transfer
from prophet.scheduler.windows import Stopwatch
from prophet.spec import Placement

# as a chunk number: launches every chunk that is left
_ALL = sys.maxsize
# identity of no gradient
_NONE = (0, 0)


class State(Enum):
    """Where a block's replicas are; see the table above."""

    NONE = "none"
    AWAY = "away"
    UNDER_WAY = "under way"
    HERE = "here"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Carrier:
    """What all transfers of a step share.

    Attributes:
        collective: The ranks that share the experts.
        pool: Memory of the replicas.
        stopwatch: Counts waiting and launching as "exposed_trans" and "exposed_agg".
        actions: Every launch is written down here, in order.
        side: Where transfers are packed and sent.
    """

    collective: Collective
    pool: ReplicaPool
    stopwatch: Stopwatch
    actions: list[Action]
    side: SideStream


def in_backward() -> bool:
    """Whether a backward pass is running."""
    return bool(torch._C._current_graph_task_id() != -1)


def _identity(grad: Tensor | None) -> tuple[int, int]:
    """Return what changes when a gradient is replaced or written to."""
    return _NONE if grad is None else (id(grad), grad._version)


class GradsSeen:
    """Gradients as the last backward pass left them, to see whether somebody has thrown them away since.

    Args:
        parameters: Returns those that are looked at.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._seen: list[tuple[int, int]] = []

    def remember(self) -> None:
        """Take the gradients as they are now: a backward pass has ended."""
        self._seen = [_identity(p.grad) for p in self._parameters()]

    def zeroed(self) -> bool | None:
        """Return whether all gradients that there were are None or zero now; None where there was none."""
        there = [(p.grad, was) for p, was in zip(self._parameters(), self._seen, strict=False) if was != _NONE]
        if not there:
            return None
        # the identity is asked first: reading values makes the host wait for a device
        return all(g is None or (_identity(g) != was and not g.any()) for g, was in there)


class BlockReplicas:
    """The replicas that this rank holds of one block's experts, and its part of their transfers.

    Args:
        block: The block's place in the order of execution.
        bank: Its home experts.
        placement: Where its experts are in this step.
        form: How its transfers are cut and travel; equal on all ranks.
        carrier: What all transfers of the step share.

    Attributes:
        state: Where the replicas are, see the table above.
        in_use: Whether the step has gone on with them, its counts known; the same on all ranks.
        unsent: Whether there are gradients of a backward pass that no Agg has taken along.
    """

    def __init__(self, block: int, bank: Bank, placement: Placement, form: Form, carrier: Carrier) -> None:
        self.state = State.NONE if placement.is_static else State.AWAY
        self.in_use = False
        self.placement = placement
        # experts that had rows, on any rank; not known before the counts
        self._visited: set[int] | None = None
        self._block, self._bank, self._form, self._carrier = block, bank, form, carrier
        # None: not made yet
        self._replicas: list[Replica] | None = None
        self._trans: Trans | None = None
        # of the second phase, which had to wait for the first in the same window
        self._held: Launch | None = None
        # of the home parameters when their Trans began
        self._version = 0
        self._agg: Agg | None = None
        self.unsent = False
        self._backward_runs = 0
        self._home_grads = GradsSeen(bank.parameters)
        self._agg_rest = Launch("AGG", block, _ALL, Window("UPDATE"))

    # --- parameters ---

    def launch(self, action: Launch) -> None:
        """Launch Trans up to the action's chunk, unless the parameters are here."""
        if self.state in (State.NONE, State.HERE):
            return
        with self._carrier.stopwatch("exposed_trans"):
            trans = self._trans or self._begin_trans(fetch=action.kind == "FETCH")
            self._advance(trans, action)
            # a chunk that `_advance` left out is remembered, with its window, for when the counts are known
            self._held = None if trans.launched > action.chunk or trans.complete else action

    def _begin_trans(self, *, fetch: bool) -> Trans:
        # before anything is packed, so that a later change in place shows as stale
        self._version = self._bank.version()
        form, rank = self._form, self._carrier.collective.rank
        cut = form.fetch_cut if fetch else form.trans_cut
        chunks = trans_chunks(
            self.placement, rank, self._bank.expert_numel, cut, two_phase=form.two_phase_trans, routes=form.trans_routes
        )
        for replica in self._replicas or ():
            # `drop` has taken the memory, and kept the tensor that leaves are views of
            if replica.params.numel() and not replica.params.untyped_storage().size():
                self._carrier.pool.restore(replica.params)
        self._trans = Trans(chunks, self._bank, self._made(), self._carrier.collective, self._block, self._carrier.side)
        # sent again the values are the same: autograd must not take them for a change in place
        self._trans.again = self.state is State.DROPPED
        self.state = State.UNDER_WAY
        return self._trans

    def _made(self) -> list[Replica]:
        """Return the replicas, made where there are none yet."""
        if self._replicas is None:
            # the buffers outlive this forward pass, which may be one in inference mode
            with torch.inference_mode(False):
                self._replicas = [
                    self._bank.replica(expert, self._carrier.pool)
                    for expert in self.placement.replicas_on(self._carrier.collective.rank)
                ]
        return self._replicas

    def launch_all(self) -> None:
        """Launch what is left of Trans; waits only where that sends on what is under way."""
        if self.state in (State.NONE, State.HERE):
            return
        # for the second time in the backward pass the launch is a FETCH of the schedule, before that a TRANS
        again = self.state is State.DROPPED or (self._trans is not None and self._trans.again)
        fetch = again and in_backward()
        last = self._rest("FETCH", "BEC") if fetch else self._rest("TRANS", "FEC")
        # outside of the stopwatch below, as it starts one
        self.launch(last)
        with self._carrier.stopwatch("exposed_trans"):
            if self._trans is not None:
                self._launch_rest(self._trans, last)

    def arrived(self) -> list[Replica]:
        """Return the replicas with their parameters; waits for what is still under way."""
        if self.state not in (State.NONE, State.HERE):
            self.launch_all()
            with self._carrier.stopwatch("exposed_trans"):
                if self._trans is not None:
                    self._trans.finish()
            self._trans, self.state = None, State.HERE
        return self._replicas or []

    def use(self, keep: bool, visited: Iterable[int], *, apart: bool = False) -> None:
        """Go on with the replicas, or withdraw them for the rest of the step: the block's counts are known.

        What was held back of Trans follows, a second phase only if the first has arrived. Where it has not on some
        rank, that rank launches it when it needs the replicas. Nothing else is launched in between, so the ranks'
        transfers keep one order. Where replicas run apart, all of it waits for `launch_all`: it would slow down the
        exchange of rows, and the experts at home hide it afterwards. Of withdrawn replicas nothing more is sent; what
        is under way is waited for when the step ends.

        Args:
            keep: Whether to go on with them; the same on all ranks.
            visited: The experts that have rows, on any rank.
            apart: Whether they run after the experts at home; the same on all ranks.

        Raises:
            ValueError: They are withdrawn after they were used.
        """
        if keep:
            self.in_use = True
            # over all passes of the step: Agg runs once for all microbatches
            self._visited = (self._visited or set()) | set(visited)
            if self.state is State.UNDER_WAY and self._trans is not None and not apart:
                with self._carrier.stopwatch("exposed_trans"):
                    self._launch_held_back(self._trans)
            return
        if self.in_use or self.state is State.HERE:
            raise ValueError(f"block {self._block}: replicas can only be withdrawn before they were used")
        self.state = State.NONE
        if self._trans is not None:
            # what has begun is not waited for, but their memory is about to be others', and the optimizer will write
            # where it was packed
            self._trans.release()
        for replica in self._replicas or ():
            replica.vanish()
            # they never ran, so their gradients are as they were lent: zero
            self._carrier.pool.give(replica.params, replica.grads, zeroed=True)
        self._replicas = None

    def _launch_held_back(self, trans: Trans) -> None:
        """Launch what is left of Trans, as far as that waits for nothing."""
        while not trans.complete and (not trans.must_wait or trans.ready):
            held, self._held = self._held or self._rest("TRANS", "FEC"), None
            trans.window = None
            self._advance(trans, replace(held, chunk=trans.launched))

    def drop(self) -> None:
        """Free the parameters' memory until they are sent again."""
        # parameters under way are not freed: what arrives is written into their memory
        if self.state is State.HERE:
            for replica in self._replicas or ():
                self._carrier.pool.release(replica.params)
            self.state = State.DROPPED

    @property
    def stale(self) -> bool:
        """Whether the home parameters were changed in place after their Trans began (as by SAM, or a load)."""
        return self.state in (State.UNDER_WAY, State.HERE) and self._version != self._bank.version()

    def refresh(self) -> None:
        """Forget that the parameters were sent, so that they are sent again; on all ranks alike."""
        if self.state is not State.NONE:
            if self._trans is not None:
                # what is under way carries old values: waited for, since buffers are in flight, and put nowhere
                self._trans.abandon()
            self._trans, self.state = None, State.AWAY

    # --- gradients ---

    def backward_began(self) -> None:
        """Note that the experts' backward pass begins; once per microbatch."""
        if self.state is State.NONE:
            return
        if self._agg is not None and not self._agg.complete:
            # a layer used twice: what is under way carries the gradients so far, whole, wherever it was cut
            self._launch_rest(self._agg, self._rest("AGG", "BEC"))
        if self._agg is not None:
            # gradients are about to be added where it was packed
            self._agg.release()
        self._backward_runs += 1
        self.unsent = True
        # fetched parameters must be there before the first product reads them
        if self._replicas is not None:
            self.arrived()

    def final(self, accumulation_steps: int | None) -> bool:
        """Return whether the experts have run backward for the last microbatch of the step, or Agg has begun.

        Args:
            accumulation_steps: Microbatches of a step; None where the gradients are to stay.
        """
        if self._agg is not None:
            return True
        return accumulation_steps is not None and self.unsent and self._backward_runs % accumulation_steps == 0

    def launch_gradients(self, action: Launch | None = None) -> None:
        """Launch Agg up to the action's chunk, by default all; a new Agg where there are gradients to send."""
        if self._agg is None:
            if not self.unsent:
                return
            # from here on new gradients belong to the next round, even where this one is not finished
            self.unsent = False
            bank, form, collective = self._bank, self._form, self._carrier.collective
            cut, numel = form.agg_cut, bank.grad_numel
            # every parameter is frozen, on all ranks
            if numel == 0:
                return
            chunks = agg_chunks(
                self.placement, collective.rank, numel, cut, two_phase=form.two_phase_agg, routes=form.agg_routes
            )
            self._agg = Agg(chunks, bank, self._made(), collective, self._block, self._carrier.side, self._visited)
        with self._carrier.stopwatch("exposed_agg"):
            self._advance(self._agg, action or self._agg_rest)

    def finish_gradients(self) -> None:
        """Send what has not been sent, wait, and add to the home gradients; once more for what came in between."""
        while self._agg is not None or self.unsent:
            self.launch_gradients()
            if self._agg is None:
                continue
            with self._carrier.stopwatch("exposed_agg"):
                self._launch_rest(self._agg, self._agg_rest)
                self._agg.finish()
                self._agg = None

    def backward_ended(self) -> None:
        """Remember the home gradients as they are now."""
        self._home_grads.remember()

    def forget(self, *, failed: bool, zeroed: bool | None) -> None:
        """Forget gradients that the user has thrown away: of a failed backward pass, or zeroed at home since.

        Args:
            failed: Whether the last backward pass has not ended.
            zeroed: What is known of other gradients, for where no home expert has had rows and nothing is to be seen
                here.
        """
        if failed and self._agg is not None:
            self._agg.abandon()
            self._agg = None
        if self.unsent and not failed:
            here = self._home_grads.zeroed()
            zeroed = zeroed if here is None else here
        if failed or (self.unsent and zeroed):
            for replica in self._replicas or ():
                # first, so that gradients which autograd keeps beside `grads` are thrown away too
                replica.collect_grads()
                replica.grads.zero_()
            self._backward_runs, self.unsent = 0, False

    # --- the step's end ---

    def abandon(self) -> None:
        """Wait for parameters that nobody waited for."""
        if self._trans is not None:
            self._trans.abandon()
            self._trans = None
        if self._agg is not None:
            # left behind by a backward pass that failed: their memory is about to be others'
            self._agg.release()

    def give_back(self) -> None:
        """Return the replicas' memory."""
        # what Agg has sent is zero again
        zeroed = not self.unsent and self._agg is None
        for replica in self._replicas or ():
            replica.vanish()
            self._carrier.pool.give(replica.params, replica.grads, zeroed=zeroed)

    # --- chunks ---

    def _rest(self, kind: TransferKind, window: WindowKind) -> Launch:
        """Return a launch of all chunks of a transfer that are left, in a window of this block."""
        return Launch(kind, self._block, _ALL, Window(window, self._block))

    def _advance(self, transfer: Transfer, action: Launch) -> None:
        """Launch a transfer's chunks up to the action's, but none that would wait for one of the same window."""
        while transfer.launched <= action.chunk and not transfer.complete:
            # the window has just begun, so the chunk in it cannot have arrived: waiting would hide nothing
            if transfer.must_wait and transfer.window == action.window:
                return
            transfer.window = action.window
            self._carrier.actions.append(Action(action.kind, action.block, transfer.launched, action.window))
            transfer.launch_next()

    def _launch_rest(self, transfer: Transfer, action: Launch) -> None:
        """Launch all chunks that are left, even those that wait for one another."""
        while not transfer.complete:
            # no window to compare with, so `_advance` leaves nothing out
            transfer.window = None
            self._advance(transfer, action)
