"""State moves from one layout to another, bit for bit; the state from before stays whole, or gives way piece by piece.

Every rank calls `transition` with what it holds under the old layout and gets what it holds under the new one. Pieces
that do not change are handed over as they are, so they take no memory twice. In a safe transition nothing that existed
before is written to; a caller that catches an error goes on with it. In place, the memory of an old tensor goes back
once all have read it, so old and new state are never there at once. After a failure neither is whole.

There are no steps that all ranks take together. What one rank sends to another is a stream, cut into chunks where both
ends cut it. Every rank works through rounds, with several of them in flight: it packs a round and posts it, and unpacks
the oldest one. A round has chunks of all the rank's streams, the longer ones more often, so that all of them end at
about the same time and the fullest port never waits for a peer that is still busy elsewhere. Where few hold a box,
those who get it send it on, chunk by chunk (`prophet.state.forward`). Both ends of a stream know the round of each
chunk, so nothing has to be agreed on besides the size of a chunk and the rounds in flight.

Shape legend: P ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from prophet.errors import BudgetError, CollectiveError, StateLost, TransitionError, in_a_line
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.operation import Operation
from prophet.spec import IntArray
from prophet.state.in_place import Replacing
from prophet.state.layout import Layout, Piece
from prophet.state.route import Route
from prophet.state.route_schedule import Rounds, RouteSchedule
from prophet.state.streams import (
    CHUNK_BYTES,
    DEPTH,
    Chunk,
    Kept,
    Measures,
    Streams,
    Window,
    torch_dtype,
    views,
    window_of,
)

Mode = Literal["safe", "in-place"]

_WHOLE = "the state from before the move is whole"
_LOST = "neither the old state nor the new one is whole: take it from copies or from a checkpoint"

State = Mapping[Piece, Tensor]


class Allocate(Protocol):
    """How memory is asked for; tests count it and let it fail."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory, the usual `Allocate`.

    Args:
        shape: Lengths.
        dtype: Element type.
        device: Where the memory is.
    """
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The new state of this rank, and what the move took.

    Attributes:
        state: A tensor for every piece of the new layout.
        sent_bytes: Bytes that this rank has sent.
        received_bytes: Bytes that it has received.
        buffer_bytes: Bytes of its buffer.
        new_state_bytes: Bytes of the new state that were not handed over.
        peak_bytes: The most that state and buffers took at any time, as it was computed beforehand.
        messages: Messages that it has sent.
        seconds: Duration of the move on this rank.
        bytes_to: Bytes sent, by the rank that they went to.
    """

    state: dict[Piece, Tensor]
    sent_bytes: int
    received_bytes: int
    buffer_bytes: int
    new_state_bytes: int
    peak_bytes: int
    messages: int
    seconds: float
    bytes_to: Mapping[int, int] = field(default_factory=dict)


def transition(
    route: Route,
    state: State,
    collective: Collective,
    *,
    budget_bytes: int,
    mode: Mode = "safe",
    device: torch.device | None = None,
    allocate: Allocate = empty,
    chunk_bytes: int = CHUNK_BYTES,
    depth: int = DEPTH,
    beside: Sequence[Tensor] = (),
    problem: str = "",
    begin: Callable[[], None] = lambda: None,
    votes: bool = True,
    ahead: RouteSchedule | None = None,
) -> Moved:
    """Move this rank from `route.before` to `route.after`; collective over `route.ranks` ranks.

    In place, the tensors of `state` lose their memory, but for those that are handed over; reading one then crashes.

    Args:
        route: The transfers, equal on all ranks.
        state: A tensor for every piece of the old layout, of the piece's shape and type.
        collective: The ranks of the route.
        budget_bytes: Bytes that this rank can spare for buffers; the least of all ranks holds. In place, it is for all
            that the rank needs beyond the larger of its old and new state: buffers, and what no order of tensors saves.
        mode: Whether the old state stays whole ("safe"), or gives way piece by piece ("in-place").
        device: Where the state is; None: where its first tensor is, or on the CPU.
        allocate: Gives memory.
        chunk_bytes: The most bytes that one message carries; the least of all ranks holds.
        depth: Rounds in flight at once, as far as the budget allows; the least of all ranks holds.
        beside: Tensors that the caller gives up with the state, such as padding in the same storages.
        problem: Why this rank cannot go on after the move, if anything: then none begins it.
        begin: Called once ranks have agreed, before anything moves; what it raises, this rank raises.
        votes: Whether ranks vote on how the move went. A caller that has more to do, and whose ranks vote on all of it
            afterwards, passes False; then a rank raises what went wrong on the way only for itself.
        ahead: What this rank has found of the route so far; None: nothing.

    Raises:
        TransitionError: On every rank, if ranks have different routes, or if one holds the wrong tensors or cannot get
            memory; nothing has moved then. In safe mode also if something fails on the way.
        BudgetError: On every rank, where one element for each peer does not fit the budget. In place also where the
            budget is too small for the state. Nothing has moved.
        StateLost: On every rank, after a failure on the way in place.
    """
    began = time.perf_counter()
    if route.ranks != collective.size:
        raise TransitionError(f"the route is of {route.ranks} ranks, the collective of {collective.size}")
    if mode not in get_args(Mode):
        raise TransitionError(f"expected mode {' or '.join(get_args(Mode))}, got {mode!r}")
    # A rank that holds nothing yet has no tensor that shows its device
    device = device or next((t.device for t in state.values()), torch.device("cpu"))
    rank, after = collective.rank, _WHOLE
    in_place = mode == "in-place"
    plan = ahead if ahead is not None else RouteSchedule(route, rank)
    waves, streams, measures = plan.waves(in_place=in_place), plan.streams, plan.measures(in_place=in_place)
    mover = _Mover(route, plan.kept, state, collective, device, allocate)
    # A rank that lacks memory must say so before the others begin. So the buffer, and in safe mode the new state, is
    # there before ranks agree. What the others wish for can only make the buffer smaller.
    problem = problem or _check_state(route.before, state, rank, device)
    excess = 0
    if not problem:
        excess = mover.plan(waves, len(measures.longest), beside)
        wishes = (budget_bytes - excess, chunk_bytes, depth)
        problem = mover.prepare(_buffer_bytes(streams, measures, wishes), whole=not in_place)
    try:
        ready = _Ready(problem, mode, budget_bytes, excess, chunk_bytes, depth)
        window = _agree(plan.digest, measures, ready, collective)
        begin()
        after = _LOST if in_place else _WHOLE
        # Parameters may be among the state, and autograd refuses to write to a leaf in place
        with torch.no_grad():
            mover.run(plan.rounds(window, in_place=in_place), streams.number, window)
        # A rank that failed has gone on with the messages, so the others do not know of it yet
        if votes:
            _vote(mover.problem, collective, after)
        elif mover.problem:
            raise _kind(after)(mover.problem)
    # A peer has died or a wait has timed out: in place, some of the old state has gone by then
    except CollectiveError as error:
        raise _kind(after)(f"{error}; {after}") from error
    return Moved(
        state=mover.new_state,
        sent_bytes=sum(streams.out_bytes.values()),
        received_bytes=streams.in_bytes,
        buffer_bytes=mover.buffer.numel(),
        new_state_bytes=mover.memory.new_bytes,
        peak_bytes=mover.peak_bytes + mover.buffer.numel(),
        messages=mover.messages,
        seconds=time.perf_counter() - began,
        bytes_to=streams.out_bytes,
    )


@dataclass
class _Round:
    """One round in flight: what has to leave, and what its messages bring."""

    pending: Pending
    unpack: list[tuple[Chunk, Tensor]]


class _Mover:
    """Runs one rank's rounds. A local failure is noted and messages go on, so that no peer waits in vain."""

    memory: Replacing
    peak_bytes: int

    def __init__(
        self,
        route: Route,
        kept: Kept,
        state: State,
        collective: Collective,
        device: torch.device,
        allocate: Allocate,
    ) -> None:
        self.route, self.state, self.collective = route, state, collective
        self.device, self.allocate = device, allocate
        self.new_state: dict[Piece, Tensor] = {}
        self.kept = kept
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.problem = ""
        self.messages = 0

    def plan(self, waves: IntArray | None, many: int, beside: Sequence[Tensor]) -> int:
        """Decide what replaces what; without `waves` nothing goes back.

        Returns:
            Bytes that the peak is beyond the larger of old and new state; 0 without `waves`.
        """
        space, after = self.route.space, self.route.after.on(self.collective.rank)
        wave = [0] * len(space.tensors) if waves is None else waves.tolist()
        wave_of = dict(zip(space.number, wave, strict=True))
        sizes = dict(zip(space.number, space.item_bytes.tolist(), strict=True))
        self.memory = Replacing.of(
            self.state, after, wave_of, many, sizes, self._begin_wave, beside, in_place=waves is not None
        )
        self.peak_bytes = self.memory.peak_bytes()
        if waves is None:
            return 0
        return self.peak_bytes - max(self.memory.old_bytes, sum(map(self.memory.piece_bytes, after)))

    def prepare(self, buffer_bytes: int, *, whole: bool) -> str:
        """Get the buffer, and with `whole` all of the new state.

        Returns:
            Why there is no memory; an empty string where there is.
        """
        for piece in self.route.after.on(self.collective.rank):
            if piece in self.state:
                # The same box before and after: the tensor itself is handed over
                self.new_state[piece] = self.state[piece]
        try:
            if whole:
                for row in self.memory.takes:
                    self._get(row)
            self.buffer = self.allocate((buffer_bytes,), torch.uint8, self.device)
        except Exception as error:
            # Returned and not raised: the other ranks learn of it when all agree, and none of them waits for this one
            return f"no memory for the new state: {in_a_line(error)}"
        return ""

    def _get(self, pieces: Sequence[Piece]) -> None:
        """Memory for new pieces, where there is none yet."""
        for piece in pieces:
            if piece not in self.new_state:
                self.new_state[piece] = self.allocate(
                    piece.box.shape, torch_dtype(self.route.space[piece.name]), self.device
                )

    def attempt(self, call: Callable[[], None]) -> None:
        """Run `call` unless something has failed; what it raises is this rank's problem."""
        # After a failure this rank's bytes are worthless. The first problem is kept, as later ones follow from it
        if self.problem:
            return
        try:
            call()
        except Exception as error:
            self.problem = in_a_line(error)

    def _begin_wave(self, pieces: list[Piece]) -> None:
        def begin() -> None:
            self._get(pieces)
            self._keep(pieces)

        self.attempt(begin)

    def _keep(self, pieces: list[Piece]) -> None:
        """Copy what stays on this rank into these new pieces."""
        stays = [pair for piece in pieces for pair in self.kept.get(piece, ())]
        if stays:
            old, new = zip(*stays, strict=True)
            torch._foreach_copy_(views(new, self.new_state), views(old, self.state))

    def run(self, rounds: Rounds, streams: int, window: Window) -> None:
        """Run all rounds, up to `window.depth` of them in flight; at most `streams` go and come in one."""
        under_way: deque[_Round] = deque()
        share = streams * window.slot_bytes
        # The buffer was made for this rank's wish; others may have wished for fewer rounds or smaller slots
        depth = min(window.depth, self.buffer.numel() // share) if share else 1
        begun = 0
        for number in range(rounds.number):
            if len(under_way) == depth:
                self._end(under_way.popleft())
            while begun < len(self.memory.takes) and window.starts[begun] <= number:
                self.memory.up_to(begun)
                begun += 1
            # A round takes the part of the buffer that the round `depth` before it has left, which has ended by now
            start = number % depth * share
            place = self.buffer[start : start + share]
            going, coming = rounds.going.get(number, []), rounds.coming.get(number, [])
            under_way.append(self._begin(going, coming, place, window.slot_bytes))
        self.memory.end()
        while under_way:
            self._end(under_way.popleft())

    def _begin(
        self, going: list[tuple[int, Chunk]], coming: list[tuple[int, Chunk]], place: Tensor, slot_bytes: int
    ) -> _Round:
        """Pack what goes and post the round."""
        slots = iter(place.split(slot_bytes))
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        unpack: list[tuple[Chunk, Tensor]] = []
        # What comes gets its slots first and needs no packing. Failed packing still sends: a peer waits for these bytes
        for peer, chunk in coming:
            memory = next(slots)[: chunk.n_bytes]
            receives.append((peer, memory))
            unpack.append((chunk, memory))
        for peer, chunk in going:
            memory = next(slots)[: chunk.n_bytes]
            self.attempt(lambda chunk=chunk, memory=memory: self._pack(chunk, memory))  # type: ignore[misc]
            sends.append((peer, memory))
        self.messages += len(sends)
        pending = self.collective.exchange(sends, receives, op=Operation("chunks of a transition"))
        return _Round(pending, unpack)

    def _end(self, under_way: _Round) -> None:
        """Wait for a round and unpack what came."""
        under_way.pending.wait()
        for chunk, memory in under_way.unpack:
            self.attempt(lambda chunk=chunk, memory=memory: self._unpack(chunk, memory))  # type: ignore[misc]

    # `foreach` copies all boxes of a chunk in few kernels; one by one, small boxes would cost a launch each
    def _pack(self, chunk: Chunk, memory: Tensor) -> None:
        state = self.new_state if chunk.sent_on else self.state
        torch._foreach_copy_(chunk.packed(memory), views(chunk.places, state))

    def _unpack(self, chunk: Chunk, memory: Tensor) -> None:
        torch._foreach_copy_(views(chunk.places, self.new_state), chunk.packed(memory))


# --- agreement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ready:
    """What one rank passes on before a transition: its problem, if any, and how much memory it can spare.

    Attributes:
        problem: Why it cannot go on; empty where it can.
        mode: Safe or in place.
        budget_bytes: Bytes for buffers.
        excess_bytes: In place, bytes of the state's peak beyond the larger of old and new.
        chunk_bytes: The most that a message carries.
        depth: Rounds in flight at once.
    """

    problem: str
    mode: Mode
    budget_bytes: int
    excess_bytes: int
    chunk_bytes: int
    depth: int

    def numbers(self) -> list[int]:
        """The same as integers, for a gather."""
        wishes = (self.budget_bytes, self.excess_bytes, self.chunk_bytes, self.depth)
        return [int(self.mode == "in-place"), int(bool(self.problem)), *wishes]


def _agree(digest: int, measures: Measures, ready: _Ready, collective: Collective) -> Window:
    """Check that all ranks have the same route and are ready; choose the window by what all of them can spare."""
    mine = torch.tensor([digest, *ready.numbers()], dtype=torch.int64)
    gathered = collective.gather_at_once(mine, op=Operation("agreeing on a transition"))
    # Columns: digest, mode, whether there is a problem, then the wishes. Digest and mode must be equal everywhere
    transitions = gathered[:, :2].tolist()
    differ = [r for r, wanted in enumerate(transitions) if wanted != transitions[0]]
    if differ:
        raise TransitionError(f"ranks {differ} want another transition than rank 0 does")
    failed = gathered[:, 2].nonzero().reshape(-1).tolist()
    _refuse(ready.problem, failed, collective.rank, "could not prepare the transition", "nothing has moved")
    spare = gathered[:, 3] - gathered[:, 4]
    short = int(spare.argmin())
    # A budget below 1 is a mistake of another kind, which `window_of` names
    if spare[short] < 1 <= gathered[short, 3]:
        raise BudgetError(
            f"in place, rank {short} needs {int(gathered[short, 4])} bytes beyond the larger of its old and new state, "
            f"and buffers; its budget is {int(gathered[short, 3])} bytes; nothing has moved"
        )
    # Inputs are equal on every rank, so what does not fit raises on all of them
    chunk, depth = (int(n) for n in gathered[:, 5:].amin(dim=0))
    return window_of(int(spare.min()), chunk, depth, measures)


def _buffer_bytes(streams: Streams, measures: Measures, wishes: tuple[int, int, int]) -> int:
    """Bytes of the buffer for the window that this rank wishes for."""
    try:
        # Where it does not fit, ranks find out together when they agree
        window = window_of(*wishes, measures)
    except BudgetError:
        return 0
    return window.depth * streams.number * window.slot_bytes


def _check_state(before: Layout, state: State, rank: int, device: torch.device) -> str:
    pieces = before.on(rank)
    if state.keys() != set(pieces):
        differ = sorted(str(p) for p in set(pieces) ^ set(state))
        return f"the state and the layout differ in {', '.join(differ[:4])}"
    for piece, tensor in state.items():
        spec = before.space[piece.name]
        found = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
        # Types of devices are compared: "cuda" and "cuda:0" name the same one
        expected = (piece.box.shape, torch_dtype(spec), device.type)
        if found != expected:
            return (
                f"{piece} must be {list(expected[0])} {expected[1]} on {expected[2]}, got {list(found[0])} {found[1]}"
            )
    return ""


def _vote(problem: str, collective: Collective, after: str) -> None:
    """Raise on every rank if any could not unpack what came."""
    flag = torch.tensor([int(bool(problem))], dtype=torch.int64)
    flags = collective.gather_at_once(flag, op=Operation("voting on a transition"))
    failed = flags.reshape(-1).nonzero().reshape(-1).tolist()
    _refuse(problem, failed, collective.rank, "could not unpack what came", after)


def _refuse(problem: str, failed: Sequence[int], rank: int, what: str, after: str) -> None:
    """Raise if any rank has `failed`; each names its own problem, the others name the ranks."""
    if not problem and not failed:
        return
    error = _kind(after)(f"rank {rank}: {problem}; {after}" if problem else f"ranks {failed} {what}; {after}")
    if isinstance(error, TransitionError):
        error.own = problem
    raise error


def _kind(after: str) -> type[RuntimeError]:
    return StateLost if after == _LOST else TransitionError


def transition_naive(states: Sequence[State], after: Layout) -> list[dict[Piece, Tensor]]:
    """The naive twin, for all ranks at once: put every tensor together, then cut it up again."""
    whole = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec)) for spec in after.space.tensors}
    for state in states:
        for piece, tensor in state.items():
            whole[piece.name][piece.box.slices(after.space[piece.name].box)] = tensor
    return [{p: whole[p.name][p.box.slices(after.space[p.name].box)].clone() for p in row} for row in after.pieces]
