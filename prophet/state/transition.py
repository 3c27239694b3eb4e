"""State moves from one layout to another, bit for bit, and the state from before stays whole.

Every rank calls `transition` with what it holds under the old layout and gets what it holds under the new one. Nothing
that existed before is written to; a caller that catches an error goes on with it. Pieces that do not change are handed
over as they are, so they take no memory twice.

There are no steps that all ranks take together. What one rank sends to another is a stream, cut into chunks where both
ends cut it. Every rank works through rounds, with several of them under way: it packs a round and posts it, and unpacks
the oldest one. A round has chunks of all the rank's streams, the longer ones more often, so that all of them end at
about the same time and the fullest port never waits for a peer that is still busy elsewhere. Between two ranks chunks
go in the stream's order, so nothing has to be agreed on besides the size of a chunk.

Shape legend: P ranks.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from prophet.errors import BudgetError, CollectiveError, TransitionError
from prophet.ranks.collective import Collective, Operation, Pending
from prophet.state.layout import Layout, Piece
from prophet.state.route import Route, Transfer
from prophet.state.space import Box, Space, TensorSpec, flat_boxes

CHUNK_BYTES = 2 << 20  # a message takes its time whatever it carries, where links are fast more than the bytes do
SMALL_CHUNK_BYTES = 128 << 10  # above this, memory is better spent on rounds than on their size
DEPTH = 4  # rounds under way
_WHOLE = "the state from before the move is whole"

State = Mapping[Piece, Tensor]
Conclude = Callable[[State, str], None]
"""Takes the new state and, in words, what went wrong on this rank on the way (nothing: empty)."""

_Index = dict[str, list[tuple[Box, Tensor]]]


class Allocate(Protocol):
    """How memory is asked for; tests meter it and let it fail."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The new state of this rank, and what it took: bytes and messages on the wire, memory beyond the old state, time.

    `bytes_to` has the bytes sent, by the rank that they went to.
    """

    state: dict[Piece, Tensor]
    sent_bytes: int
    received_bytes: int
    buffer_bytes: int
    new_state_bytes: int
    messages: int
    seconds: float
    bytes_to: Mapping[int, int] = field(default_factory=dict)


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The tensor's element type in torch; TypeError where it has none."""
    dtype = getattr(torch, spec.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{spec.dtype} is no element type of torch")
    return dtype


def transition(
    route: Route,
    state: State,
    collective: Collective,
    *,
    budget_bytes: int,
    device: torch.device | None = None,
    allocate: Allocate = empty,
    chunk_bytes: int = CHUNK_BYTES,
    depth: int = DEPTH,
    conclude: Conclude | None = None,
) -> Moved:
    """Move this rank from `route.before` to `route.after`; collective over `route.ranks` ranks.

    `state` has one tensor per piece of the old layout, of the piece's shape and type. `budget_bytes` is what this rank
    can spare for buffers, and `chunk_bytes` the most that one message carries; the least of all ranks holds. `depth` is
    how many rounds may be under way, as far as the budget allows. Raises `TransitionError` on every rank if the ranks
    do not mean the same route, if one holds the wrong tensors or cannot get memory (nothing has moved then), or if
    something fails on the way. Raises `BudgetError` on every rank where one element for each peer does not fit.

    A caller that has more to do on the side gives `conclude`, so that ranks agree once, on all of it. It is called in
    place of the last vote, and raises on all ranks what went wrong on any.
    """
    began = time.perf_counter()
    if route.ranks != collective.size:
        raise TransitionError(f"the route is of {route.ranks} ranks, the collective of {collective.size}")
    device = device or next((t.device for t in state.values()), torch.device("cpu"))
    rank = collective.rank
    streams = _Streams.of(route, rank)
    measures = _Measures.of(route)
    wishes = (budget_bytes, chunk_bytes, depth)
    new_state: dict[Piece, Tensor] = {}
    buffer = torch.empty(0, dtype=torch.uint8)
    new_bytes = 0
    # all on the side, before ranks agree: what the others wish for can only make the buffer smaller
    problem = _check_state(route.before, state, rank, device)
    if not problem:
        try:
            new_state, new_bytes = _destination(route, state, rank, device, allocate)
            buffer = allocate((_buffer_bytes(streams, measures, wishes),), torch.uint8, device)
        except (RuntimeError, MemoryError) as error:
            problem = f"no memory for the new state: {_words(error)}"
    try:
        window = _agree(route, measures, problem, collective, wishes, device)
        mover = _Mover(route.space, _index(state), _index(new_state), buffer, collective)
        mover.attempt(lambda: _keep(route, rank, state, new_state))
        mover.run(streams, window)
        if conclude is not None:
            conclude(new_state, mover.problem)
        else:
            _vote(mover.problem, collective, device)
    except CollectiveError as error:
        raise TransitionError(f"{error}; {_WHOLE}") from error
    return Moved(
        state=new_state,
        sent_bytes=sum(streams.out_bytes.values()),
        received_bytes=streams.in_bytes,
        buffer_bytes=buffer.numel(),
        new_state_bytes=new_bytes,
        messages=mover.messages,
        seconds=time.perf_counter() - began,
        bytes_to=streams.out_bytes,
    )


# --- streams, chunks, rounds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Streams:
    """What one rank sends and receives, by peer; each stream has its widest elements first, so none needs padding."""

    sends: Mapping[int, list[Transfer]]
    receives: Mapping[int, list[Transfer]]
    out_bytes: Mapping[int, int]
    in_bytes: int

    @classmethod
    def of(cls, route: Route, rank: int) -> _Streams:
        sends: dict[int, list[Transfer]] = {}
        receives: dict[int, list[Transfer]] = {}
        for t in route.sends(rank):
            sends.setdefault(t.destination, []).append(t)
        for t in route.receives(rank):
            receives.setdefault(t.source, []).append(t)
        for stream in (*sends.values(), *receives.values()):
            stream.sort(key=lambda t: -route.space[t.name].item_bytes)
        sizes = {peer: sum(route.n_bytes(t) for t in stream) for peer, stream in sends.items()}
        return cls(sends, receives, sizes, sum(route.n_bytes(t) for row in receives.values() for t in row))

    @property
    def number(self) -> int:
        return len(self.sends) + len(self.receives)


@dataclass(frozen=True)
class _Measures:
    """Of all ranks: most streams of one, bytes of the widest element that travels, bytes of the longest stream."""

    number: int
    widest: int
    longest: int

    @classmethod
    def of(cls, route: Route) -> _Measures:
        pairs = route.stream_bytes()
        ends = Counter(end for pair in pairs for end in pair)
        return cls(max(ends.values(), default=0), route.widest_item_bytes(), max(pairs.values(), default=0))


@dataclass(frozen=True)
class _Window:
    """What all ranks agree on: bytes of a chunk, bytes that its place in the buffer takes, rounds, those under way."""

    chunk_bytes: int
    slot_bytes: int
    rounds: int
    depth: int


_Chunk = list[tuple[TensorSpec, Box]]
_ALIGNED = 16  # bytes; no element is wider


def _chunks(space: Space, stream: Sequence[Transfer], chunk_bytes: int) -> list[_Chunk]:
    """The stream cut into chunks of at most `chunk_bytes`; alike at both ends."""
    chunks: list[_Chunk] = [[]]
    left = chunk_bytes
    for t in stream:
        spec = space[t.name]
        first, total = 0, t.box.elements
        while first < total:
            if left < spec.item_bytes:
                chunks.append([])
                left = chunk_bytes
            last = min(total, first + left // spec.item_bytes)
            if last - first == total:
                chunks[-1].append((spec, t.box))
            else:
                chunks[-1] += [(spec, box.shift(t.box.start)) for box in flat_boxes(t.box.shape, first, last)]
            left -= (last - first) * spec.item_bytes
            first = last
    return [chunk for chunk in chunks if chunk]


def _by_round(streams: Iterable[tuple[int, list[_Chunk]]], rounds: int) -> list[list[tuple[int, _Chunk]]]:
    """Every stream's chunks spread evenly over the rounds, at most one in each: [rounds][...] of peer and chunk."""
    found: list[list[tuple[int, _Chunk]]] = [[] for _ in range(rounds)]
    for peer, chunks in streams:
        for i, chunk in enumerate(chunks):
            found[i * rounds // len(chunks)].append((peer, chunk))
    return found


@dataclass
class _Round:
    """One round under way: what has to leave, and what its messages bring."""

    pending: Pending
    unpack: list[tuple[_Chunk, Tensor]]


class _Mover:
    """Runs one rank's rounds. A failure of its own is noted and messages go on, so that no peer waits in vain."""

    def __init__(self, space: Space, sources: _Index, targets: _Index, buffer: Tensor, collective: Collective) -> None:
        self.space, self.sources, self.targets = space, sources, targets
        self.buffer, self.collective = buffer, collective
        self.problem = ""
        self.messages = 0

    def attempt(self, call: Callable[[], None]) -> None:
        """Run `call` unless something has failed; what it raises is this rank's problem."""
        if self.problem:
            return
        try:
            call()
        except (RuntimeError, MemoryError, TransitionError) as error:
            self.problem = _words(error)

    def run(self, streams: _Streams, window: _Window) -> None:
        """All rounds, up to `window.depth` of them under way."""
        sends = [(p, _chunks(self.space, s, window.chunk_bytes)) for p, s in streams.sends.items()]
        receives = [(p, _chunks(self.space, s, window.chunk_bytes)) for p, s in streams.receives.items()]
        going, coming = _by_round(sends, window.rounds), _by_round(receives, window.rounds)
        under_way: deque[_Round] = deque()
        share = streams.number * window.slot_bytes
        depth = min(window.depth, self.buffer.numel() // share) if share else 1
        for number in range(window.rounds):
            if len(under_way) == depth:
                self._end(under_way.popleft())
            start = number % depth * share
            place = self.buffer[start : start + share]
            under_way.append(self._begin(going[number], coming[number], place, window.slot_bytes))
        while under_way:
            self._end(under_way.popleft())

    def _begin(
        self, going: list[tuple[int, _Chunk]], coming: list[tuple[int, _Chunk]], place: Tensor, slot_bytes: int
    ) -> _Round:
        """Pack what goes and post the round."""
        slots = iter(place.split(slot_bytes))
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        unpack: list[tuple[_Chunk, Tensor]] = []
        for peer, chunk in coming:
            memory = next(slots)[: _chunk_bytes(chunk)]
            receives.append((peer, memory))
            unpack.append((chunk, memory))
        for peer, chunk in going:
            memory = next(slots)[: _chunk_bytes(chunk)]
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

    def _pack(self, chunk: _Chunk, memory: Tensor) -> None:
        for (spec, box), view in zip(chunk, _views(chunk, memory), strict=True):
            view.copy_(_find(self.sources, spec.name, box))

    def _unpack(self, chunk: _Chunk, memory: Tensor) -> None:
        for (spec, box), view in zip(chunk, _views(chunk, memory), strict=True):
            _find(self.targets, spec.name, box).copy_(view)


def _chunk_bytes(chunk: _Chunk) -> int:
    return sum(box.elements * spec.item_bytes for spec, box in chunk)


def _views(chunk: _Chunk, memory: Tensor) -> Iterable[Tensor]:
    """The parts of a chunk within the memory that carries it."""
    offset = 0
    for spec, box in chunk:
        stop = offset + box.elements * spec.item_bytes
        yield memory[offset:stop].view(torch_dtype(spec)).view(box.shape)
        offset = stop


def _keep(route: Route, rank: int, state: State, new_state: State) -> None:
    """Copy what stays on this rank in another piece."""
    for before, after, box in route.kept(rank):
        new_state[after][box.slices(after.box)].copy_(state[before][box.slices(before.box)])


# --- agreement ----------------------------------------------------------------------------------------------------


def _words(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _agree(
    route: Route,
    measures: _Measures,
    problem: str,
    collective: Collective,
    wishes: tuple[int, int, int],
    device: torch.device,
) -> _Window:
    """Whether all ranks mean the same route and are ready, and the window by what all of them can spare."""
    mine = torch.tensor([route.digest(), int(bool(problem)), *wishes], dtype=torch.int64, device=device)
    gathered = collective.all_gather(mine, op=Operation("agreeing on a transition")).cpu()
    digests = gathered[:, 0].tolist()
    if len(set(digests)) > 1:
        differ = [r for r, d in enumerate(digests) if d != digests[0]]
        raise TransitionError(f"ranks {differ} want another transition than rank 0 does")
    budget, chunk, depth = (int(n) for n in gathered[:, 2:].amin(dim=0))
    # equal inputs on every rank: what does not fit raises on all of them
    window = _window(budget, chunk, depth, measures)
    failed = gathered[:, 1].nonzero().reshape(-1).tolist()
    _refuse(problem, failed, collective.rank, "could not prepare the transition", "nothing has moved")
    return window


def _buffer_bytes(streams: _Streams, measures: _Measures, wishes: tuple[int, int, int]) -> int:
    """Bytes for the window that this rank wishes for; none where it cannot be had, which ranks find out together."""
    try:
        window = _window(*wishes, measures)
    except BudgetError:
        return 0
    return window.depth * streams.number * window.slot_bytes


def _window(budget: int, chunk: int, depth: int, of: _Measures) -> _Window:
    """The largest chunks of which a few rounds fit the streams of every rank, then the most rounds that fit.

    A smaller budget or chunk never makes a larger slot.
    """
    if min(budget, chunk, depth) < 1:
        raise BudgetError(f"budget, chunk and depth must be at least one, got {budget}, {chunk} and {depth}")
    if not of.longest:
        return _Window(chunk, 0, 0, 1)
    wish, fair = chunk, budget // of.number
    chunk = min(chunk, max(fair // DEPTH, SMALL_CHUNK_BYTES))
    slot = min(_aligned(chunk), _aligned(of.longest), fair)
    slot = slot // _ALIGNED * _ALIGNED or slot // of.widest * of.widest
    chunk = min(chunk, slot) // of.widest * of.widest  # wider elements come first, so all chunks but a last are full
    if not chunk:
        raise BudgetError(
            f"a budget of {budget} bytes in chunks of {wish} cannot hold one element of {of.widest} bytes for each "
            f"of {of.number} streams to and from peers"
        )
    rounds = -(-of.longest // chunk)
    return _Window(chunk, slot, rounds, max(min(depth, rounds, budget // (of.number * slot)), 1))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _check_state(before: Layout, state: State, rank: int, device: torch.device) -> str:
    pieces = before.on(rank)
    if set(pieces) != set(state):
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


def _destination(
    route: Route, state: State, rank: int, device: torch.device, allocate: Allocate
) -> tuple[dict[Piece, Tensor], int]:
    new_state: dict[Piece, Tensor] = {}
    new_bytes = 0
    for piece in route.after.on(rank):
        if piece in state:
            new_state[piece] = state[piece]
            continue
        spec = route.space[piece.name]
        new_state[piece] = allocate(piece.box.shape, torch_dtype(spec), device)
        new_bytes += piece.box.elements * spec.item_bytes
    return new_state, new_bytes


def _vote(problem: str, collective: Collective, device: torch.device) -> None:
    """Raise on every rank if any could not unpack what came."""
    flag = torch.tensor([int(bool(problem))], dtype=torch.int64, device=device)
    flags = collective.all_gather(flag, op=Operation("voting on a transition")).cpu()
    failed = flags.reshape(-1).nonzero().reshape(-1).tolist()
    _refuse(problem, failed, collective.rank, "could not unpack what came", _WHOLE)


def _refuse(problem: str, failed: Sequence[int], rank: int, what: str, after: str) -> None:
    """Raise if any rank has `failed`; each names its own problem, the others name the ranks."""
    if problem:
        raise TransitionError(f"rank {rank}: {problem}; {after}")
    if failed:
        raise TransitionError(f"ranks {failed} {what}; {after}")


def _index(state: State) -> _Index:
    found: _Index = {}
    for piece, tensor in state.items():
        found.setdefault(piece.name, []).append((piece.box, tensor))
    return found


def _find(index: _Index, name: str, box: Box) -> Tensor:
    """The part of a held tensor that is `box`; the route has made sure that there is one."""
    for held, tensor in index[name]:
        if held.contains(box):
            return tensor[box.slices(held)]
    raise TransitionError(f"no piece holds all of {name}{box}")


def transition_naive(states: Sequence[State], after: Layout) -> list[dict[Piece, Tensor]]:
    """The naive twin, for all ranks at once: put every tensor together, then cut it up again."""
    whole = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec)) for spec in after.space.tensors}
    for state in states:
        for piece, tensor in state.items():
            whole[piece.name][piece.box.slices(after.space[piece.name].box)] = tensor
    return [{p: whole[p.name][p.box.slices(after.space[p.name].box)].clone() for p in row} for row in after.pieces]
