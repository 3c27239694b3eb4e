"""Ways to take the state from one layout to the other: ours, slower variants of it, and peers.

Every way gets the old pieces of this rank and returns the new ones. It reports the bytes that passed the rank's port
each way, and the messages that the rank has sent. All of them leave the old state as it is.

Shape legend: P ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import Tensor

from benchmarks.switch.storage import Client, SocketReader, SocketWriter
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.state.checkpoint.files import LoadPlanner, SavePlanner, by_tensor
from prophet.state.layout import Piece
from prophet.state.route import Route, Transfer, route
from prophet.state.space import Box
from prophet.state.streams import kept, torch_dtype, views
from prophet.state.transition import transition

BUDGET_BYTES = 64 << 20
GATHER_BYTES = 256 << 10
ALIGNED = 16
State = Mapping[Piece, Tensor]
dcp: Any = torch.distributed.checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One rank's side of a change: the route, the old pieces, and what the ways talk through.

    direct: the route without forwarding, for ways that know none.
    """

    route: Route
    state: State
    collective: Collective
    client: Client | None = None
    folder: Path | None = None
    direct: Route = field(init=False)

    def __post_init__(self) -> None:
        way = self.route
        direct = route(way.before, way.after, nodes=way.nodes.tolist(), forward=False)
        object.__setattr__(self, "direct", direct)


@dataclass(kw_only=True, slots=True)
class Done:
    """The new pieces, and what it took. phases: bytes (out, in) of this rank's port, of parts that do not overlap."""

    state: State
    phases: list[tuple[int, int]]
    messages: int = 0
    peak_bytes: int = 0
    more: dict[str, Any] = field(default_factory=dict)


Way = Callable[[Setting], Done]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def windows(s: Setting) -> Done:
    """The library's own mover."""
    moved = transition(s.route, s.state, s.collective, budget_bytes=BUDGET_BYTES)
    peak = _bytes(list(s.state.values())) + moved.new_state_bytes + moved.buffer_bytes
    return Done(
        state=moved.state,
        phases=[(moved.sent_bytes, moved.received_bytes)],
        messages=moved.messages,
        peak_bytes=peak,
        more={"new_state_bytes": moved.new_state_bytes, "buffer_bytes": moved.buffer_bytes},
    )


# --- variants ---


def fresh(way: Route, pieces: Iterable[Piece]) -> dict[Piece, Tensor]:
    """Memory for these pieces."""
    return {p: torch.empty(p.box.shape, dtype=torch_dtype(way.space[p.name])) for p in pieces}


def _with_kept(s: Setting) -> dict[Piece, Tensor]:
    """The new pieces: those that this rank had, and memory for the others."""
    wanted = s.route.after.on(s.collective.rank)
    made = fresh(s.route, [p for p in wanted if p not in s.state])
    return {p: made[p] if p in made else s.state[p] for p in wanted}


def _prepared(s: Setting) -> dict[Piece, Tensor]:
    """The new pieces, with what this rank keeps copied already."""
    rank = s.collective.rank
    found = _with_kept(s)
    for old, new in (pair for row in kept(s.direct, rank).values() for pair in row):
        views([new], found)[0].copy_(views([old], s.state)[0])
    return found


def _finder(state: State) -> Callable[[str, Box], Tensor]:
    index: dict[str, list[tuple[Box, Tensor]]] = {}
    for piece, tensor in state.items():
        index.setdefault(piece.name, []).append((piece.box, tensor))

    def find(name: str, box: Box) -> Tensor:
        held, tensor = next((held, tensor) for held, tensor in index[name] if held.contains(box))
        return tensor[box.slices(held)]

    return find


def one_by_one(s: Setting) -> Done:
    """One message per tensor, and the next one once it has come: DynaTran's "Naive" (unbuffered, synchronous)."""
    rank, new = s.collective.rank, _prepared(s)
    source, target = _finder(s.state), _finder(new)
    sent = received = messages = 0
    for t in s.direct.transfers:
        if t.source == rank:
            part = source(t.name, t.box).contiguous()
            s.collective.exchange([(t.destination, part)], [], op=Operation("one tensor")).wait()
            sent, messages = sent + _bytes([part]), messages + 1
        elif t.destination == rank:
            view = target(t.name, t.box)
            part = torch.empty(view.shape, dtype=view.dtype)
            s.collective.exchange([], [(t.source, part)], op=Operation("one tensor")).wait()
            view.copy_(part)
            received += _bytes([part])
    return Done(state=new, phases=[(sent, received)], messages=messages)


def all_at_once(s: Setting) -> Done:
    """One message per tensor, all of them under way at the same time."""
    rank, new = s.collective.rank, _prepared(s)
    source, target = _finder(s.state), _finder(new)
    going = [(t.destination, source(t.name, t.box).contiguous()) for t in s.direct.sends(rank)]
    views = [target(t.name, t.box) for t in s.direct.receives(rank)]
    coming = [
        (t.source, torch.empty(v.shape, dtype=v.dtype)) for t, v in zip(s.direct.receives(rank), views, strict=True)
    ]
    s.collective.exchange(going, coming, op=Operation("all tensors")).wait()
    for view, (_, part) in zip(views, coming, strict=True):
        view.copy_(part)
    sent, received = _bytes([t for _, t in going]), _bytes([t for _, t in coming])
    return Done(state=new, phases=[(sent, received)], messages=len(going))


def _view(s: Setting, of: Piece | Transfer, memory: Tensor) -> Tensor:
    """Bytes as the tensor that a piece or a transfer is."""
    return memory.view(torch_dtype(s.route.space[of.name])).view(of.box.shape)


def _packed_views(s: Setting, stream: Sequence[Transfer], memory: Tensor) -> list[tuple[Transfer, Tensor]]:
    found, at = [], 0
    for t in stream:
        stop = at + s.direct.n_bytes(t)
        found.append((t, _view(s, t, memory[at:stop])))
        at = stop
    return found


def packed(s: Setting) -> Done:
    """One packed message per pair of ranks, all at once; unpacked when all have come ("Buffer + Sync")."""
    rank, new = s.collective.rank, _prepared(s)
    source, target = _finder(s.state), _finder(new)
    out: dict[int, list[Transfer]] = {}
    into: dict[int, list[Transfer]] = {}
    for t in s.direct.sends(rank):
        out.setdefault(t.destination, []).append(t)
    for t in s.direct.receives(rank):
        into.setdefault(t.source, []).append(t)
    for stream in (*out.values(), *into.values()):  # widest elements first, so that none needs padding
        stream.sort(key=lambda t: -s.direct.space[t.name].item_bytes)
    going, coming = [], []
    for peer, stream in out.items():
        memory = torch.empty(sum(map(s.direct.n_bytes, stream)), dtype=torch.uint8)
        for t, view in _packed_views(s, stream, memory):
            view.copy_(source(t.name, t.box))
        going.append((peer, memory))
    for peer, stream in into.items():
        coming.append((peer, torch.empty(sum(map(s.direct.n_bytes, stream)), dtype=torch.uint8)))
    s.collective.exchange(going, coming, op=Operation("packed messages")).wait()
    for peer, memory in coming:
        for t, view in _packed_views(s, into[peer], memory):
            target(t.name, t.box).copy_(view)
    sent, received = _bytes([m for _, m in going]), _bytes([m for _, m in coming])
    return Done(state=new, phases=[(sent, received)], messages=len(going))


# --- gather and cut ---


def contributions(route: Route) -> list[list[Piece]]:
    """Which rank gives which box to all others, [P]: every box of a tensor that changes, once, evenly."""
    before, after = route.before.by_tensor(), route.after.by_tensor()
    holders: dict[Piece, list[int]] = {}
    for name, held in before.items():
        if sorted(held) != sorted(after[name]):
            for rank, box in held:
                holders.setdefault(Piece(name, box), []).append(rank)
    rows: list[list[Piece]] = [[] for _ in range(route.ranks)]
    load = [0] * route.ranks
    sizes = {p: p.box.elements * route.space[p.name].item_bytes for p in holders}
    for piece in sorted(holders, key=lambda p: (len(holders[p]), -sizes[p])):
        rank = min(holders[piece], key=lambda r: (load[r], r))
        rows[rank].append(piece)
        load[rank] += sizes[piece]
    return rows


def _offsets(route: Route, pieces: Sequence[Piece]) -> list[tuple[Piece, int, int]]:
    found, at = [], 0
    for piece in pieces:
        stop = at + piece.box.elements * route.space[piece.name].item_bytes
        found.append((piece, at, stop))
        at = -(-stop // ALIGNED) * ALIGNED
    return found


def _around(s: Setting, whole: Sequence[Tensor]) -> tuple[int, int]:
    """Every rank's row of bytes goes around the ring, in chunks; returns bytes out and in.

    On the link from a rank to the next one, chunks go by their number, then by how far they have come.
    """
    rank, ranks, op = s.collective.rank, s.collective.size, Operation("gathering everything")
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks

    def on_link(start: int) -> list[tuple[int, int]]:
        most = max((-(-len(row) // GATHER_BYTES) for row in whole), default=0)
        every = [(n, d) for n in range(most) for d in range(ranks - 1)]
        return [((start - d) % ranks, n) for n, d in every if n * GATHER_BYTES < len(whole[(start - d) % ranks])]

    def chunk(origin: int, number: int) -> Tensor:
        return whole[origin][number * GATHER_BYTES : (number + 1) * GATHER_BYTES]

    coming = {key: s.collective.exchange([], [(behind, chunk(*key))], op=op) for key in on_link(behind)}
    going = []
    for key in on_link(rank):
        if key in coming:
            coming.pop(key).wait()
        going.append(s.collective.exchange([(ahead, chunk(*key))], [], op=op))
    for wait in (*coming.values(), *going):
        wait.wait()
    total = sum(len(row) for row in whole)
    return total - len(whole[ahead]), total - len(whole[rank])


def gather_and_cut(s: Setting) -> Done:
    """Every changed tensor is gathered whole on every rank, which then cuts out what it needs.

    What ranks give is packed, balanced among those that hold it, and goes around a ring in chunks without pauses.
    """
    rank = s.collective.rank
    rows = [_offsets(s.route, pieces) for pieces in contributions(s.route)]
    whole = [torch.empty(row[-1][2] if row else 0, dtype=torch.uint8) for row in rows]
    for piece, start, stop in rows[rank]:
        _view(s, piece, whole[rank][start:stop]).copy_(s.state[piece])
    through = _around(s, whole)
    new = _with_kept(s)
    missing: dict[str, list[Piece]] = {}
    for p in new:
        if p not in s.state:
            missing.setdefault(p.name, []).append(p)
    for row, memory in zip(rows, whole, strict=True):
        for piece, start, stop in row:
            view = _view(s, piece, memory[start:stop])
            for wanted in missing.get(piece.name, ()):
                common = piece.box.intersect(wanted.box)
                if common is not None:
                    new[wanted][common.slices(wanted.box)] = view[common.slices(piece.box)]
    return Done(state=new, phases=[through], messages=-(-through[0] // GATHER_BYTES))


# --- checkpoints ---


def _restarted(s: Setting) -> dict[Piece, Tensor]:
    """Memory for the new pieces: a job that was started again has nothing."""
    return fresh(s.route, s.route.after.on(s.collective.rank))


def dcp_behind_links(s: Setting) -> Done:
    """torch's distributed checkpoint, saved to and loaded from a storage host behind every host's own link."""
    assert s.client is not None
    client, space = s.client, s.route.space
    client.written_bytes = client.read_bytes = 0
    dcp.save(by_tensor(space, s.state), storage_writer=SocketWriter(client), planner=SavePlanner())
    written = client.written_bytes
    new = _restarted(s)
    dcp.load(by_tensor(space, new), storage_reader=SocketReader(client), planner=LoadPlanner())
    return Done(state=new, phases=[(written, 0), (0, client.read_bytes)])


def dcp_local(s: Setting) -> Done:
    """The same with files on this machine's tmpfs, which cross no link."""
    assert s.folder is not None
    space, new = s.route.space, _restarted(s)
    writer = dcp.FileSystemWriter(s.folder, overwrite=True)
    dcp.save(by_tensor(space, s.state), storage_writer=writer, planner=SavePlanner())
    dcp.load(by_tensor(space, new), storage_reader=dcp.FileSystemReader(s.folder), planner=LoadPlanner())
    return Done(state=new, phases=[(0, 0)])


def clear(s: Setting) -> None:
    """Forget checkpoints, on one rank."""
    if s.client is not None:
        s.client.clear()
    if s.folder is not None:
        shutil.rmtree(s.folder, ignore_errors=True)


OURS = "packed in windows"
ONE_BY_ONE, GATHER, DCP = "one message per tensor", "gather-and-cut", "DCP behind links"
DCP_LOCAL = "DCP on local tmpfs (crosses no link)"
WAYS: Mapping[str, Way] = {
    OURS: windows,
    ONE_BY_ONE: one_by_one,
    "one message per tensor (async)": all_at_once,
    "packed": packed,
    GATHER: gather_and_cut,
    DCP: dcp_behind_links,
    DCP_LOCAL: dcp_local,
}
USUAL = tuple(name for name in WAYS if name != "one message per tensor (async)")
