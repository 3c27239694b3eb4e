"""State moves from one layout to another, bit for bit; the state from before stays whole, or gives way piece by piece.

Every rank calls `transition` with what it holds under the old layout and gets what it holds under the new one. Pieces
that do not change are handed over as they are, so they take no memory twice. In a safe transition nothing that existed
before is written to; a caller that catches an error goes on with it. In place, the memory of an old tensor goes back
once all have read it, so old and new state are never there at once. After a failure neither is whole.

There are no steps that all ranks take together. What one rank sends to another is a stream, cut into chunks where both
ends cut it. Every rank works through rounds, with several of them under way: it packs a round and posts it, and unpacks
the oldest one. A round has chunks of all the rank's streams, the longer ones more often, so that all of them end at
about the same time and the fullest port never waits for a peer that is still busy elsewhere. Where few hold a box,
those who get it send it on, chunk by chunk (`prophet.state.forward`). Both ends of a stream know the round of each
chunk, so nothing has to be agreed on besides the size of a chunk and the rounds under way.

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
    """How memory is asked for; tests meter it and let it fail."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The new state of this rank, and what it took: bytes and messages on the wire, memory beyond the old state, time.

    `bytes_to` has the bytes sent, by the rank that they went to. `peak_bytes` is the most that state and buffers took
    at any time, as it was computed beforehand.
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

    `state` has one tensor per piece of the old layout, of the piece's shape and type. `budget_bytes` is what this rank
    can spare for buffers, and `chunk_bytes` the most that one message carries; the least of all ranks holds. `depth` is
    how many rounds may be under way, as far as the budget allows. Raises `TransitionError` on every rank if the ranks
    do not mean the same route, if one holds the wrong tensors or cannot get memory (nothing has moved then), or if
    something fails on the way. Raises `BudgetError` on every rank where one element for each peer does not fit.

    With `mode="in-place"` the tensors of `state` lose their memory, but for those that are handed over; reading one
    then crashes. The budget is for what this rank needs beyond the larger of its old and new state: buffers, and what
    no order of tensors saves. `BudgetError` on every rank where it is too small: nothing has moved. After a failure on
    the way `StateLost` is raised on every rank. `beside` are tensors that the caller gives up with the state, such as
    padding in the same storages.

    `problem` says, if anything, why this rank cannot go on after the move: then none begins it. `begin` is called once
    ranks have agreed, before anything moves; what it raises, this rank raises. `ahead` is what this rank has found of
    the route so far.

    A caller that has more to do on the side, and whose ranks vote on all of it afterwards, says `votes=False`: then a
    rank raises what went wrong on the way only for itself.
    """
    began = time.perf_counter()
    if route.ranks != collective.size:
        raise TransitionError(f"the route is of {route.ranks} ranks, the collective of {collective.size}")
    if mode not in get_args(Mode):
        raise TransitionError(f"expected mode {' or '.join(get_args(Mode))}, got {mode!r}")
    device = device or next((t.device for t in state.values()), torch.device("cpu"))
    rank, after = collective.rank, _WHOLE
    in_place = mode == "in-place"
    plan = ahead if ahead is not None else RouteSchedule(route, rank)
    waves, streams, measures = plan.waves(in_place=in_place), plan.streams, plan.measures(in_place=in_place)
    mover = _Mover(route, plan.kept, state, collective, device, allocate)
    # all on the side, before ranks agree: what the others wish for can only make the buffer smaller
    problem = problem or _check_state(route.before, state, rank, device)
    excess = 0
    if not problem:
        excess = mover.plan(waves, len(measures.longest), beside)
        wishes = (budget_bytes - excess, chunk_bytes, depth)
        problem = mover.prepare(_buffer_bytes(streams, measures, wishes), whole=not in_place)
    try:
        ready = _Ready(problem, mode, budget_bytes, excess, chunk_bytes, depth)
        window = _agree(plan.digest, measures, ready, collective, device)
        begin()
        after = _LOST if in_place else _WHOLE
        with torch.no_grad():  # parameters may be among the state
            mover.run(plan.rounds(window, in_place=in_place), streams.number, window)
        if votes:
            _vote(mover.problem, collective, device, after)
        elif mover.problem:
            raise _kind(after)(mover.problem)
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
    """One round under way: what has to leave, and what its messages bring."""

    pending: Pending
    unpack: list[tuple[Chunk, Tensor]]


class _Mover:
    """Runs one rank's rounds. A failure of its own is noted and messages go on, so that no peer waits in vain."""

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
        """Decide what replaces what; without `waves` nothing goes back. Bytes beyond the larger of both states."""
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
        """Get the buffer, and with `whole` all of the new state; in words why that cannot be done."""
        for piece in self.route.after.on(self.collective.rank):
            if piece in self.state:
                self.new_state[piece] = self.state[piece]
        try:
            if whole:
                for row in self.memory.takes:
                    self._get(row)
            self.buffer = self.allocate((buffer_bytes,), torch.uint8, self.device)
        except Exception as error:
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
        """All rounds, up to `window.depth` of them under way; `streams` go and come in one at most."""
        under_way: deque[_Round] = deque()
        share = streams * window.slot_bytes
        depth = min(window.depth, self.buffer.numel() // share) if share else 1
        begun = 0
        for number in range(rounds.number):
            if len(under_way) == depth:
                self._end(under_way.popleft())
            while begun < len(self.memory.takes) and window.starts[begun] <= number:
                self.memory.up_to(begun)
                begun += 1
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

    def _pack(self, chunk: Chunk, memory: Tensor) -> None:
        state = self.new_state if chunk.sent_on else self.state
        torch._foreach_copy_(chunk.packed(memory), views(chunk.places, state))

    def _unpack(self, chunk: Chunk, memory: Tensor) -> None:
        torch._foreach_copy_(views(chunk.places, self.new_state), chunk.packed(memory))


# --- agreement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ready:
    """What one rank says before a transition: its problem, if any, and what it wishes for and can spare."""

    problem: str
    mode: Mode
    budget_bytes: int
    excess_bytes: int  # in place: of the state's peak over the larger of old and new
    chunk_bytes: int
    depth: int

    def numbers(self) -> list[int]:
        wishes = (self.budget_bytes, self.excess_bytes, self.chunk_bytes, self.depth)
        return [int(self.mode == "in-place"), int(bool(self.problem)), *wishes]


def _agree(digest: int, measures: Measures, ready: _Ready, collective: Collective, device: torch.device) -> Window:
    """Whether all ranks mean the same route and are ready, and the window by what all of them can spare."""
    mine = torch.tensor([digest, *ready.numbers()], dtype=torch.int64, device=device)
    gathered = collective.gather_at_once(mine, op=Operation("agreeing on a transition")).cpu()
    meant = gathered[:, :2].tolist()
    differ = [r for r, way in enumerate(meant) if way != meant[0]]
    if differ:
        raise TransitionError(f"ranks {differ} want another transition than rank 0 does")
    failed = gathered[:, 2].nonzero().reshape(-1).tolist()
    _refuse(ready.problem, failed, collective.rank, "could not prepare the transition", "nothing has moved")
    spare = gathered[:, 3] - gathered[:, 4]
    short = int(spare.argmin())
    if spare[short] < 1 <= gathered[short, 3]:
        raise BudgetError(
            f"in place, rank {short} needs {int(gathered[short, 4])} bytes beyond the larger of its old and new state, "
            f"and buffers; its budget is {int(gathered[short, 3])} bytes; nothing has moved"
        )
    # equal inputs on every rank: what does not fit raises on all of them
    chunk, depth = (int(n) for n in gathered[:, 5:].amin(dim=0))
    return window_of(int(spare.min()), chunk, depth, measures)


def _buffer_bytes(streams: Streams, measures: Measures, wishes: tuple[int, int, int]) -> int:
    """Bytes for the window that this rank wishes for; none where it cannot be had, which ranks find out together."""
    try:
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
        expected = (piece.box.shape, torch_dtype(spec), device.type)
        if found != expected:
            return (
                f"{piece} must be {list(expected[0])} {expected[1]} on {expected[2]}, got {list(found[0])} {found[1]}"
            )
    return ""


def _vote(problem: str, collective: Collective, device: torch.device, after: str) -> None:
    """Raise on every rank if any could not unpack what came."""
    flag = torch.tensor([int(bool(problem))], dtype=torch.int64, device=device)
    flags = collective.gather_at_once(flag, op=Operation("voting on a transition")).cpu()
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
