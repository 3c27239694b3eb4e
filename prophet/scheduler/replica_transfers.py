"""One Trans or Agg of one layer under way: packs what a chunk sends, and puts what arrives where it belongs.

`prophet.scheduler.pieces` lists what travels. A chunk that sends on what an earlier one brought waits for that first.
All ranks launch the same chunks in the same order.

On a device chunks are packed and sent in a separate stream, and so is what a second phase does with the results of
the first. Training's stream waits where it needs a result, and before it writes to what was packed.

Shape legend: R ranks, P parameters of one expert.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from prophet.experts.bank import Bank
from prophet.experts.replica import Replica
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.device.side_stream import SideStream
from prophet.ranks.operation import Operation
from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import Chunk, Exchange, Piece

# elements of float32 that a sum of half precisions takes beside its terms, before it is added at home: 4 MiB
_SUMMED_AT_ONCE = 1 << 20


class Transfer:
    """Chunks are launched in order; `finish` waits for all that was launched.

    Args:
        chunks: What this rank sends and receives, chunk by chunk.
        bank: The layer's home experts.
        replicas: What this rank holds of others.
        collective: The ranks that share the experts.
        block: The layer's place in the order of execution, for messages.
        side: Where chunks are packed and sent.

    Attributes:
        launched: How many chunks have been launched.
        window: The window in which the last of them was.
    """

    name: str

    def __init__(
        self,
        chunks: Sequence[Chunk],
        bank: Bank,
        replicas: Sequence[Replica],
        collective: Collective,
        block: int,
        side: SideStream,
    ) -> None:
        self._chunks = chunks
        self._bank = bank
        self._replicas = {r.expert: r for r in replicas}
        self._collective = collective
        self._block = block
        self._side = side
        # of the last exchange that was packed
        self._packed: Any = None
        self.launched = 0
        self.window: Window | None = None
        self._flying: deque[tuple[Exchange, Pending]] = deque()
        # brought here to be sent on: of experts without a replica here, or sums for another home
        self._for_others: list[tuple[Piece, Tensor]] = []

    def _dtype(self, exchange: Exchange) -> torch.dtype:
        """Return the dtype of what travels."""
        raise TypeError

    @property
    def complete(self) -> bool:
        """Whether all chunks have been launched."""
        return self.launched == len(self._chunks)

    @property
    def must_wait(self) -> bool:
        """Whether the next chunk sends on what one under way brings."""
        exchanges = self._chunks[self.launched]
        return bool(self._flying and exchanges and exchanges[0].sends_on)

    @property
    def ready(self) -> bool:
        """Whether nothing under way is still missing; the answer may differ from rank to rank."""
        return all(pending.ended() for _, pending in self._flying)

    def launch_next(self) -> None:
        """Launch the next chunk; waits where it sends on what is under way."""
        chunk, self.launched = self.launched, self.launched + 1
        for exchange in self._chunks[chunk]:
            # errors and timelines name the phase and the chunk
            label = self.name if exchange.phase == "direct" else f"{self.name} {exchange.phase}"
            self._collect(exchange)
            self._side.after_now(partial(self._start, exchange, Operation(f"{label} chunk {chunk}", self._block)))()
            self._packed = self._side.mark()

    def abandon(self) -> None:
        """Wait for what is under way and put it nowhere."""
        while self._flying:
            # waited for all the same: the backend still reads and writes its buffers
            self._flying.popleft()[1].wait()

    def release(self) -> None:
        """Have training's stream wait until what was launched is packed: after that it may write there again.

        `finish` and `abandon` do so as well, since what is packed comes before what they wait for.
        """
        if self._packed is not None:
            self._side.join(self._packed)
            self._packed = None

    def finish(self) -> None:
        """Wait for all that was launched and put it in place."""
        self._land()

    def _land(self) -> None:
        while self._flying:
            exchange, pending = self._flying[0]
            # left in the queue until it has arrived: a wait that fails may be repeated, or abandoned
            arrived = pending.wait()
            self._flying.popleft()
            with torch.no_grad():
                self._place(exchange, arrived)

    def _collect(self, exchange: Exchange) -> None:
        """Make sure that what an exchange sends lies where it is packed from; in training's stream."""

    def _start(self, exchange: Exchange, op: Operation) -> None:
        # what was brought before has to be in place
        if exchange.sends_on:
            self._land()
        with torch.no_grad():
            parts = [view for piece in exchange.sends for view in self._views(exchange, piece)]
            # a rank that sends nothing takes part as well: an all-to-all needs all of them
            outgoing = (
                torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype(exchange), device=self._bank.device)
            )
            self._sent(exchange)
        send, recv = exchange.counts(self._collective.size)
        pending = self._collective.all_to_all(outgoing, send, recv, op=op, channel="weights")
        self._flying.append((exchange, pending))

    def _views(self, exchange: Exchange, piece: Piece) -> list[Tensor]:
        """Return what a piece holds, as flat views."""
        raise TypeError

    def _is_home(self, expert: int) -> bool:
        """Return whether an expert lives on this rank."""
        return 0 <= expert - self._bank.first_expert < self._bank.experts

    def _sent(self, exchange: Exchange) -> None:
        """Note that an exchange's pieces have been copied into the outgoing buffer."""

    def _place(self, exchange: Exchange, arrived: Tensor) -> None:
        raise TypeError


class Trans(Transfer):
    """Brings the replicas their parameters.

    Attributes:
        again: Whether the same parameters have been there before. A pass that has saved them then sees no change of
            version.
    """

    name = "Trans"
    again = False

    def _dtype(self, exchange: Exchange) -> torch.dtype:
        return self._bank.flat_dtype

    def _views(self, exchange: Exchange, piece: Piece) -> list[Tensor]:
        if self._is_home(piece.expert):
            return self._bank.flat_views(piece.expert - self._bank.first_expert, piece.start, piece.stop)
        if piece.expert in self._replicas:
            return [self._replicas[piece.expert].params[piece.start : piece.stop]]
        return _overlapping(self._for_others, piece)

    def finish(self) -> None:
        """Wait for all that was launched and put it in place."""
        super().finish()
        self._for_others.clear()

    def _place(self, exchange: Exchange, arrived: Tensor) -> None:
        with ExitStack() as stack:
            if self.again:
                written = tuple(r.params for r in self._replicas.values())
                # the graph has saved these leaves: with a new version, backward would raise that they were modified in
                # place
                stack.enter_context(_unsafe_preserve_version_counter(written))
            # one launch for all: on a device each costs more than its work
            into, found = [], []
            for piece, values in _received(exchange, arrived):
                if piece.expert in self._replicas:
                    into.append(self._replicas[piece.expert].params[piece.start : piece.stop])
                    found.append(values)
                else:
                    self._for_others.append((piece, values))
            if into:
                torch._foreach_copy_(into, found)


class Agg(Transfer):
    """Brings the replicas' gradients home; every sum runs over ranks in their order, in either form.

    Replicas' gradients in bfloat16 or float16 are summed in float32, and these sums go home unrounded. The only
    rounding is that of the home, which adds them to its own.

    Args:
        chunks: What this rank sends and receives, chunk by chunk.
        bank: The layer's home experts.
        replicas: What this rank holds of others.
        collective: The ranks that share the experts.
        block: The layer's place in the order of execution, for messages.
        side: Where chunks are packed and sent.
        visited: Experts that had rows on some rank; None for all. The others' gradients stay what they are.
    """

    name = "Agg"

    def __init__(
        self,
        chunks: Sequence[Chunk],
        bank: Bank,
        replicas: Sequence[Replica],
        collective: Collective,
        block: int,
        side: SideStream,
        visited: Collection[int] | None = None,
    ) -> None:
        super().__init__(chunks, bank, replicas, collective, block, side)
        self._visited = visited
        self._sums: list[tuple[Piece, Tensor]] = []
        # of several nodes' sums that go to another home
        self._totals: list[tuple[Piece, Tensor]] = []
        # come home, and not added yet
        self._home: list[tuple[Piece, Tensor]] = []

    def finish(self) -> None:
        """Wait for all that was launched, and add what has come home in one launch, however many chunks it came in.

        Not before: sums of several groups are cut at other elements, so that terms of one may come in several chunks.
        """
        super().finish()
        sums, self._home = _summed(self._home), []
        # adding zeros would turn a gradient of None into one, and Adam would move an expert that nobody used
        pieces = (
            (p.expert - self._bank.first_expert, p.start, p.stop, total)
            for p, total in sums
            if self._visited is None or p.expert in self._visited
        )
        if self._bank.sum_dtype == self._bank.grad_dtype:
            self._bank.add_flat_grads(pieces)
            return
        with torch.no_grad():
            # one by one, so that a sum is freed before the next is made
            for piece in pieces:
                self._bank.add_flat_grads([piece])

    def _dtype(self, exchange: Exchange) -> torch.dtype:
        return self._bank.sum_dtype if exchange.sends_on else self._bank.grad_dtype

    def _collect(self, exchange: Exchange) -> None:
        # autograd may have replaced a leaf's gradient, or keep it in another dtype
        if not exchange.sends_on:
            for replica in self._replicas.values():
                replica.collect_grads()

    def _views(self, exchange: Exchange, piece: Piece) -> list[Tensor]:
        if not exchange.sends_on:
            return [self._replicas[piece.expert].grads[piece.start : piece.stop]]
        # a sum of one term has not been widened
        found = self._sums if exchange.phase == "home" else self._added()
        return [view.to(self._bank.sum_dtype) for view in _overlapping(found, piece)]

    def _added(self) -> list[tuple[Piece, Tensor]]:
        """Return what goes from here to other homes. All of it has come: it is handed over in the second phase."""
        self._totals += _summed(self._for_others)
        self._for_others = []
        return self._totals

    def _sent(self, exchange: Exchange) -> None:
        """Zero what is on its way: later gradients start again from there, and are sent in another round."""
        if not exchange.sends_on and exchange.sends:
            torch._foreach_zero_([self._replicas[p.expert].grads[p.start : p.stop] for p in exchange.sends])

    def _place(self, exchange: Exchange, arrived: Tensor) -> None:
        terms = _received(exchange, arrived)
        if exchange.phase == "reduce":
            self._sums += _summed(terms)
            return
        for piece, values in terms:
            (self._home if self._is_home(piece.expert) else self._for_others).append((piece, values))


def _received(exchange: Exchange, arrived: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Return the pieces that an exchange has brought, each with its elements."""
    return zip(exchange.recvs, arrived.split([piece.size for piece in exchange.recvs]), strict=True)


def _overlapping(parts: Iterable[tuple[Piece, Tensor]], piece: Piece) -> list[Tensor]:
    """Return views of what a piece holds of parts, in their order; chunks may have cut them at other elements."""
    found = []
    for own, values in parts:
        low, high = max(own.start, piece.start), min(own.stop, piece.stop)
        if own.expert == piece.expert and low < high:
            found.append(values[low - own.start : high - own.start])
    return found


def _summed(terms: Iterable[tuple[Piece, Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the sums of pieces of the same elements, added up in the order of their source ranks.

    In place: what has arrived belongs to the transfer. Half precisions are summed in float32, some elements at a time.
    The order of the result is by expert, then by element; no two of its pieces meet.
    """
    experts: dict[int, list[tuple[Piece, Tensor]]] = {}
    for piece, values in terms:
        experts.setdefault(piece.expert, []).append((piece, values))
    for _, found in sorted(experts.items()):
        for start, stop, covering in _stretches(found):
            # by source rank: the sum has one order in every run, so its bits are the same
            (piece, _), *_ = covering
            first, *others = (values[start - p.start : stop - p.start] for p, values in covering)
            if not others or first.dtype not in (torch.float16, torch.bfloat16):
                for other in others:
                    first.add_(other)
                yield replace(piece, start=start, stop=stop), first
                continue
            at = start
            for part, *rest in zip(*(values.split(_SUMMED_AT_ONCE) for values in (first, *others)), strict=True):
                total = part.float()
                for other in rest:
                    total += other
                yield replace(piece, start=at, stop=at + len(total)), total
                at += len(total)


def _stretches(
    pieces: Iterable[tuple[Piece, Tensor]],
) -> Iterator[tuple[int, int, list[tuple[Piece, Tensor]]]]:
    """Yield the stretches between the ends of an expert's pieces, each with those that cover it, by source rank."""
    coming = deque(sorted(pieces, key=lambda term: (term[0].start, term[0].source)))
    ends = sorted({end for piece, _ in coming for end in (piece.start, piece.stop)})
    covering: list[tuple[Piece, Tensor]] = []
    for start, stop in pairwise(ends):
        covering = [term for term in covering if term[0].stop > start]
        while coming and coming[0][0].start == start:
            covering.append(coming.popleft())
        if covering:
            covering.sort(key=lambda term: term[0].source)
            yield start, stop, covering
