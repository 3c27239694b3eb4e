"""Running a plan: state moves from one layout to another, bit for bit, and the state from before stays whole.

Shape legend: P ranks. Every rank calls `transition` with what it holds under the old layout and gets what it holds
under the new one. Nothing that existed before is written to; a caller that catches an error goes on with it. Pieces
that do not change are handed over as they are, so they take no memory twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from prophet.errors import CollectiveError, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.layout import Layout, Piece
from prophet.state.plan import Plan, plan
from prophet.state.route import Route, Transfer
from prophet.state.space import Box, TensorSpec

State = Mapping[Piece, Tensor]
_Index = dict[str, list[tuple[Box, Tensor]]]


class Allocate(Protocol):
    """How memory is asked for; tests meter it and let it fail."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The new state of this rank, and what it took: bytes on the wire, memory beyond the old state, time."""

    state: dict[Piece, Tensor]
    sent_bytes: int
    received_bytes: int
    buffer_bytes: int
    new_state_bytes: int
    stages: int
    seconds: float


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
) -> Moved:
    """Move this rank from `route.before` to `route.after`; collective over `route.ranks` ranks.

    `state` has one tensor per piece of the old layout, of the piece's shape and type. `budget_bytes` is what this rank
    can spare for buffers; the least of all ranks holds. Raises `TransitionError` on every rank if the ranks do not mean
    the same route, if one holds the wrong tensors or cannot get memory (nothing has moved then), or if one is lost on
    the way.
    """
    began = time.perf_counter()
    if route.ranks != collective.size:
        raise TransitionError(f"the route is of {route.ranks} ranks, the collective of {collective.size}")
    device = device or next((t.device for t in state.values()), torch.device("cpu"))
    try:
        staged, problem = _agree(route, state, collective, budget_bytes, device)
        new_state: dict[Piece, Tensor] = {}
        buffer = torch.empty(0, dtype=torch.uint8)
        new_bytes = 0
        if not problem:
            try:
                new_state, new_bytes = _destination(route, state, collective.rank, device, allocate)
                buffer = allocate((staged.buffer_bytes(collective.rank),), torch.uint8, device)
            except (RuntimeError, MemoryError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                problem = f"no memory for the new state: {reason}"
        _vote(problem, collective, device)
        for before, after, box in route.kept(collective.rank):
            target = new_state[after][box.slices(after.box)]
            target.copy_(state[before][box.slices(before.box)])
        sent = received = 0
        sources, targets = _index(state), _index(new_state)
        for number, stage in enumerate(staged.stages):
            out, back = _run_stage(route, stage, number, sources, targets, buffer, collective)
            sent, received = sent + out, received + back
    except CollectiveError as error:
        raise TransitionError(f"{error}; the state from before the move is whole") from error
    return Moved(
        state=new_state,
        sent_bytes=sent,
        received_bytes=received,
        buffer_bytes=buffer.numel(),
        new_state_bytes=new_bytes,
        stages=len(staged.stages),
        seconds=time.perf_counter() - began,
    )


def _digest(route: Route) -> int:
    lines = [repr(t) for t in route.space.tensors]
    for layout in (route.before, route.after):
        lines += [f"{rank} {p}" for rank, row in enumerate(layout.pieces) for p in row]
    text = "\n".join([*lines, *map(str, route.transfers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _agree(
    route: Route, state: State, collective: Collective, budget_bytes: int, device: torch.device
) -> tuple[Plan, str]:
    """Compare routes, take the least budget, cut the stages; the plan, and what is wrong on this rank."""
    mine = torch.tensor([_digest(route), budget_bytes], dtype=torch.int64, device=device)
    gathered = collective.all_gather(mine, op=Operation("agreeing on a transition")).cpu()
    digests = gathered[:, 0].tolist()
    if len(set(digests)) > 1:
        differ = [r for r, d in enumerate(digests) if d != digests[0]]
        raise TransitionError(f"ranks {differ} want another transition than rank 0 does")
    # equal inputs on every rank: a budget that is too small raises on all of them
    return plan(route, int(gathered[:, 1].min())), _check_state(route.before, state, collective.rank, device)


def _check_state(before: Layout, state: State, rank: int, device: torch.device) -> str:
    pieces = before.pieces[rank]
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
    for piece in route.after.pieces[rank]:
        if piece in state:
            new_state[piece] = state[piece]
            continue
        spec = route.space[piece.name]
        new_state[piece] = allocate(piece.box.shape, torch_dtype(spec), device)
        new_bytes += piece.box.elements * spec.item_bytes
    return new_state, new_bytes


def _vote(problem: str, collective: Collective, device: torch.device) -> None:
    """Raise on every rank if any has a problem; each names its own, the others name the ranks."""
    flag = torch.tensor([int(bool(problem))], dtype=torch.int64, device=device)
    flags = collective.all_gather(flag, op=Operation("preparing a transition")).cpu().reshape(-1).tolist()
    failed = [r for r, f in enumerate(flags) if f]
    if problem:
        raise TransitionError(f"rank {collective.rank}: {problem}; nothing has moved")
    if failed:
        raise TransitionError(f"ranks {failed} could not prepare the transition; nothing has moved")


def _run_stage(
    route: Route,
    stage: Sequence[Transfer],
    number: int,
    sources: _Index,
    targets: _Index,
    buffer: Tensor,
    collective: Collective,
) -> tuple[int, int]:
    """Pack, exchange, unpack; returns bytes sent and received."""
    rank = collective.rank

    def run(t: Transfer) -> tuple[int, int, bool]:
        outgoing = t.source == rank
        return -route.space[t.name].item_bytes, t.destination if outgoing else t.source, outgoing

    # Wider elements first: every segment then starts at a multiple of its element's size without padding.
    mine = sorted((t for t in stage if rank in (t.source, t.destination)), key=run)
    sends: list[tuple[int, Tensor]] = []
    recvs: list[tuple[int, Tensor]] = []
    unpack: list[tuple[Tensor, Tensor]] = []
    offset = 0
    for (_, peer, outgoing), transfers in groupby(mine, key=run):
        start = offset
        for t in transfers:
            stop = offset + route.n_bytes(t)
            view = buffer[offset:stop].view(torch_dtype(route.space[t.name])).view(t.box.shape)
            if outgoing:
                view.copy_(_find(sources, t.name, t.box))
            else:
                unpack.append((_find(targets, t.name, t.box), view))
            offset = stop
        (sends if outgoing else recvs).append((peer, buffer[start:offset]))
    collective.exchange(sends, recvs, op=Operation(f"stage {number} of a transition")).wait()
    for target, view in unpack:
        target.copy_(view)
    return sum(part.numel() for _, part in sends), sum(part.numel() for _, part in recvs)


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
