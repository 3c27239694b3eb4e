"""Attention exchange at work: a rank sends parts of its attention to ranks that have less, and merges what returns.

Forward, queries, keys and values go there, outputs and log-sum-exps come back. Backward, the merged output, its
log-sum-exp and its gradient go as well; gradients of queries, keys and values come back. Which parts is planned by
`pipeline_balance.schedules.exchange`, in the same way on all ranks, so nothing has to be asked for. Keys and values of
earlier slices leave one layer ahead of the queries. Between two ranks messages have the order of slots and positions.

Shape legend: B sequences, Hq and Hkv heads, T tokens of a slice, S tokens of some pieces, D head dim. A piece is half
a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.layers import TrainingPass
from pipeline_balance.schedules.actions import Action
from pipeline_balance.schedules.exchange import Exchange, Help
from pipeline_balance.slices import kernel
from pipeline_balance.slices.kernel import Heads, Like
from pipeline_balance.slices.store import ChunkStore, SliceError, Unit
from prophet.errors import SpecError
from prophet.ranks.collective import Pending
from prophet.ranks.operation import Operation

# of a piece's memory: no type is wider
_ALIGNED = 16


class KeptMemory:
    """Memory for pieces of other ranks, taken before a step moves any data.

    Args:
        n_bytes: How much.
        device: Where.

    Raises:
        SpecError: Where there is not so much.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        try:
            self._memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise SpecError(
                f"keep_bytes={n_bytes}: there is not so much memory ({str(error).splitlines()[0]})"
            ) from None
        self._free: list[int] = []
        self._each = 0

    def cut(self, piece_bytes: int) -> int:
        """Cut all of it into pieces of that size, which are free then; how many there are."""
        self._each = -(-piece_bytes // _ALIGNED) * _ALIGNED
        self._free = [*range(self._memory.numel() // self._each)]
        return len(self._free)

    def take(self, likes: Sequence[Like]) -> tuple[int, list[Tensor]]:
        """A piece's number, and tensors in it, of undefined values."""
        number = self._free.pop()
        start = number * self._each
        return number, kernel.unpacked(self._memory[start : start + kernel.bytes_of(likes)], likes)

    def give(self, numbers: Sequence[int]) -> None:
        """Pieces are free again."""
        self._free += numbers


@dataclass(slots=True)
class _Kept:
    """A piece of another rank that is kept here: keys, values, and sums of their gradients."""

    numbers: list[int]
    tensors: list[Tensor]
    sums: list[Tensor] = field(default_factory=list)


class Exchanger:
    """One training pass of this rank.

    Attributes:
        moved_bytes: What this rank has sent to its helpers, and got from them, forward and backward.

    Args:
        store: This rank's chunks.
        given: What runs.
        plan: Who helps whom.
        heads: The attentions of every stage in forward order [S].
        units: The slices of all microbatches [U].
        rows: Sequences of every slice's microbatch [U].
        memory: For kept pieces; None: none are kept.
        device: Where ranks compute.
    """

    def __init__(
        self,
        store: ChunkStore,
        given: TrainingPass,
        plan: Exchange,
        heads: Sequence[Sequence[Heads]],
        units: Sequence[Unit],
        rows: Sequence[int],
        memory: KeptMemory | None,
        device: torch.device,
    ) -> None:
        self._store, self._ranks, self.collective = store, given.ranks, given.collective
        self.plan, self.heads, self.units, self.rows, self.memory = plan, heads, units, rows, memory
        self.device, self.ranks = device, store.ranks
        self.row = list(given.ranks).index(given.collective.rank)
        self._slot_of = {action: slot for slot, action in enumerate(given.schedule.actions[self.row])}
        self._slot = self._position = 0
        self._next: Turn | None = None
        # the number that each attention of a stage gives its chunks, as its first slice has shown
        self._layers: dict[tuple[int, int], int] = {}
        self.moved_bytes = [0, 0]
        # by direction, stage and microbatch of the donor, position and piece
        self.kept: dict[tuple[bool, int, int, int, int], _Kept] = {}

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """Within this context attention is that of this action; at its end this rank helps where it has no layer."""
        self._slot, self._position = self._slot_of[action], 0
        self._store.exchange = self
        self.begin_next()
        try:
            yield
            mine = self.plan.layers[action.stage] if action.kind != "H" else 0
            if self._position != mine:
                raise SliceError(f"{action} ran {self._position} attentions, the exchange was planned for {mine}")
            while self._position < self.plan.positions(self._slot):
                turn = self.turn(None)
                turn.work()
                turn.close()
        finally:
            self._store.exchange = self._next = None

    def begin_next(self) -> None:
        """Begin to send and receive keys and values of the next position, which are there already."""
        if self._position < self.plan.positions(self._slot):
            self._next = Turn(self, self._slot, self._position)
            self._next.ahead()

    def turn(self, layer: int | None) -> Turn:
        """This rank's part of the next position; `layer` is the number of its own attention there."""
        turn, self._next = self._next, None
        if turn is None:
            raise SliceError(f"slot {self._slot} has an attention more than the exchange was planned for")
        if layer is not None:
            turn.name(layer)
        self._position += 1
        turn.listen()
        return turn

    def name(self, stage: int, number: int, layer: int) -> None:
        """Note by which number a stage's attention keeps its chunks.

        Args:
            stage: Whose attention it is.
            number: Of the attention among those of its stage.
            layer: The number that it gives.
        """
        self._layers[stage, number] = layer

    def tokens_of(self, stage: int, number: int, unit: Unit, piece: int) -> Sequence[Tensor]:
        """Keys and values of a piece of this rank [B, Hkv, S, D].

        Args:
            stage: Whose attention it is.
            number: Of the attention among those of its stage.
            unit: The slice that attends to the piece.
            piece: Its number.
        """
        line = self._store.line(self._layers[stage, number], unit.microbatch)
        return line.room.tokens(*line.place_of(piece))

    def exchanged(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], slot: int) -> Pending:
        """Begin messages to and from rows of the schedule.

        Args:
            sends: Tensors, each with its row.
            recvs: Tensors to fill, likewise.
            slot: That of the passes.
        """
        here = self._ranks
        return self.collective.exchange(
            [(here[row], t) for row, t in sends],
            [(here[row], t) for row, t in recvs],
            op=Operation(f"attention exchange in slot {slot}"),
            # the stages' own messages are on the other channel, whose order this must not change
            channel="tokens",
        )


class Turn:
    """This rank's part of the exchange in one position of a slot.

    Attributes:
        given: The pieces that other ranks compute.

    Args:
        exchanger: The pass.
        slot: Its number.
        position: That of the layer in the pass.
    """

    def __init__(self, exchanger: Exchanger, slot: int, position: int) -> None:
        self._of, self._number, self._position = exchanger, slot, position
        self._slot = exchanger.plan.slots[slot]
        helps = exchanger.plan.at(slot, position)
        self._mine = [one for one in helps if one.donor == exchanger.row]
        self._theirs = [one for one in helps if one.helper == exchanger.row]
        self.given = frozenset(piece for one in self._mine for piece in one.pieces)
        # by donor, keys and values that come ahead
        self._came: dict[int, tuple[Help, Pending, Tensor]] = {}
        # what helpers have found, and what donors ask for
        self._found: list[tuple[Help, Pending, Tensor]] = []
        self._asked_for: list[tuple[Help, Pending, Tensor]] = []
        self._going: list[Pending] = []

    # --- what travels ------------------------------------------------------------------------------------------

    def _sent(self, one: Help) -> list[Like]:
        """What a helper gets ahead: keys and values."""
        heads = self._heads(one)
        keys: Like = ((self._rows(one), heads.keys, self._length(one, one.sent), heads.width), heads.dtype)
        return [keys, keys]

    def _asked(self, one: Help) -> list[Like]:
        """What a helper gets then: queries, or log-sum-exp, queries, output and its gradient."""
        heads, rows, tokens = self._heads(one), self._rows(one), self._tokens(one)
        query: Like = ((rows, heads.queries, tokens, heads.width), heads.dtype)
        if self._slot.forward:
            return [query]
        return [((rows, heads.queries, tokens), heads.wide), query, query, query]

    def _answered(self, one: Help) -> list[Like]:
        """What a donor gets: log-sum-exp and output, or gradients of keys, values and queries."""
        heads, rows, tokens = self._heads(one), self._rows(one), self._tokens(one)
        query: Like = ((rows, heads.queries, tokens, heads.width), heads.dtype)
        if self._slot.forward:
            return [((rows, heads.queries, tokens), heads.wide), query]
        # sums over several passes are kept, and sent, in better than half precision
        dtype = heads.wide if self._of.memory is not None else heads.dtype
        keys: Like = ((rows, heads.keys, self._length(one, one.freed), heads.width), dtype)
        return [keys, keys, query]

    def _pass(self, one: Help) -> tuple[int, int]:
        """Stage and unit of the donor."""
        found = self._slot.passes[one.donor]
        assert found is not None
        return found

    def _attention(self, stage: int) -> int:
        """Which of a stage's attentions this position is."""
        # a backward runs the last layer first
        return self._position if self._slot.forward else len(self._of.heads[stage]) - 1 - self._position

    def _heads(self, one: Help) -> Heads:
        stage = self._pass(one)[0]
        return self._of.heads[stage][self._attention(stage)]

    def name(self, layer: int) -> None:
        """Note the number by which this rank's own attention keeps its chunks."""
        mine = self._slot.passes[self._of.row]
        assert mine is not None
        self._of.name(mine[0], self._attention(mine[0]), layer)

    def _rows(self, one: Help) -> int:
        return self._of.rows[self._pass(one)[1]]

    def _unit(self, one: Help) -> Unit:
        return self._of.units[self._pass(one)[1]]

    def _tokens(self, one: Help) -> int:
        """Of queries, which are those of all ranks that share the slice."""
        unit = self._unit(one)
        return (unit.starts[unit.slice + 1] - unit.starts[unit.slice]) * self._of.ranks

    def _places(self, one: Help, pieces: Sequence[int]) -> list[tuple[int, int]]:
        """First and last tokens of pieces in the sequence."""
        starts = self._unit(one).starts
        return [kernel.half_of((starts[piece // 2], starts[piece // 2 + 1]), piece) for piece in pieces]

    def _length(self, one: Help, pieces: Sequence[int]) -> int:
        return sum(b - a for a, b in self._places(one, pieces))

    # --- as a donor --------------------------------------------------------------------------------------------

    def ahead(self) -> None:
        """Begin to send keys and values to helpers, and to receive those of donors: they wait for no queries."""
        for one in self._mine:
            (stage, _), unit = self._pass(one), self._unit(one)
            pieces = [self._of.tokens_of(stage, self._attention(stage), unit, piece) for piece in one.sent]
            if pieces:
                self._send(one, [torch.cat(some, dim=2) for some in zip(*pieces, strict=True)], self._sent(one))
        for one in self._theirs:
            if one.sent:
                self._came[one.donor] = self._receive(one, one.donor, self._sent(one))

    def ask(self, tensors: Sequence[Tensor]) -> None:
        """Send what helpers need now, and begin to receive what they find.

        Args:
            tensors: Queries; backward the log-sum-exp [B, Hq, T], queries, output and its gradient.
        """
        for one in self._mine:
            self._send(one, tensors, self._asked(one))
        # behind all of them: on a device, whose messages go in order, a helper would wait for another one's answer
        for one in self._mine:
            self._found.append(self._receive(one, one.helper, self._answered(one)))
            self._of.moved_bytes[0 if self._slot.forward else 1] += kernel.bytes_of(self._answered(one))
        if self._mine:
            self._of.begin_next()

    def _send(self, one: Help, tensors: Sequence[Tensor], likes: Sequence[Like]) -> None:
        """Begin to send to a helper."""
        message = kernel.packed([t.to(dtype) for t, (_, dtype) in zip(tensors, likes, strict=True)])
        expected = kernel.bytes_of(likes)
        if message.numel() != expected:
            raise SliceError(f"an attention sends {message.numel()} bytes, {expected} were planned")
        self._going.append(self._of.exchanged([(one.helper, message)], [], self._number))
        self._of.moved_bytes[0 if self._slot.forward else 1] += expected

    def _receive(self, one: Help, row: int, likes: Sequence[Like]) -> tuple[Help, Pending, Tensor]:
        """Begin to receive from a row."""
        message = torch.empty(kernel.bytes_of(likes), dtype=torch.uint8, device=self._of.device)
        return one, self._of.exchanged([], [(row, message)], self._number), message

    def answers(self) -> Iterator[tuple[Help, list[Tensor]]]:
        """What helpers have found, as it comes, in the order of `_answered`."""
        for one, pending, answer in self._found:
            pending.wait()
            yield one, kernel.unpacked(answer, self._answered(one))

    # --- as a helper -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Begin to receive what donors ask for."""
        self._asked_for = [self._receive(one, one.donor, self._asked(one)) for one in self._theirs]
        # between two ranks messages have one order: a helper's answers come before its next keys, a donor's queries too
        if not self._theirs and not self._mine:
            self._of.begin_next()

    def work(self) -> None:
        """Compute what donors ask for, and send it back."""
        for one, pending, message in self._asked_for:
            if one.sent:
                _, coming, sent = self._came[one.donor]
                coming.wait()
                keys, values = kernel.unpacked(sent, self._sent(one))
            else:
                at = self._of.device
                keys, values = (torch.empty(shape, dtype=dtype, device=at) for shape, dtype in self._sent(one))
            pending.wait()
            tensors = kernel.unpacked(message, self._asked(one))
            found = (self._forward if self._slot.forward else self._backward)(one, tensors, keys, values)
            likes = self._answered(one)
            sends = [t.to(dtype) for t, (_, dtype) in zip(found, likes, strict=True)]
            self._going.append(self._of.exchanged([(one.donor, kernel.packed(sends))], [], self._number))
        if self._theirs:
            self._of.begin_next()

    def close(self) -> None:
        """Wait until everything sent has left."""
        for pending in self._going:
            pending.wait()

    def _forward(self, one: Help, tensors: Sequence[Tensor], keys: Tensor, values: Tensor) -> list[Tensor]:
        keys, values = self._joined(one, keys, values)
        (query,) = tensors
        mask = self._mask(one, query)
        out, lse = kernel.forward(query, keys, values, 0.0, False, attn_mask=mask, scale=self._heads(one).scale)
        self._let_go(one)
        return [kernel.without_blind(lse, mask), out]

    def _backward(self, one: Help, tensors: Sequence[Tensor], keys: Tensor, values: Tensor) -> list[Tensor]:
        keys, values = self._joined(one, keys, values)
        lse, query, out, grad = tensors
        mask, scale = self._mask(one, query), self._heads(one).scale
        found = kernel.backward(grad, query, keys, values, out, lse, 0.0, False, attn_mask=mask, scale=scale)
        lengths = [b - a for a, b in self._places(one, one.pieces)]
        # by piece, gradients of keys and values
        parts = dict(zip(one.pieces, zip(*(t.split(lengths, dim=2) for t in found[1:]), strict=True), strict=True))
        wide = self._heads(one).wide
        freed = set(one.freed)
        total: list[Sequence[Tensor]] = []
        for piece, part in parts.items():
            kept = self._of.kept.get(self._key(one, piece))
            if kept is not None:
                for mine, new in zip(kept.sums, part, strict=True):
                    mine.add_(new)
            if piece in freed:
                total.append([t.clone() for t in kept.sums] if kept is not None else [t.to(wide) for t in part])
        self._let_go(one)
        gone = [torch.cat(some, dim=2) for some in zip(*total, strict=True)] if total else [keys[:, :, :0]] * 2
        return [*gone, found[0]]

    def _mask(self, one: Help, query: Tensor) -> Tensor | None:
        """What hides tokens of other documents; None: nothing is hidden."""
        unit = self._unit(one)
        mine = unit.asking if unit.asking is not None else unit.documents_of(unit.slice)
        if mine is None or unit.documents is None:
            return None
        theirs = torch.cat([unit.documents[:, a:b] for a, b in self._places(one, one.pieces)], dim=1)
        seen = mine[:, :, None] == theirs[:, None, :]
        return None if bool(seen.all()) else kernel.additive(seen, query)

    # --- kept pieces -------------------------------------------------------------------------------------------

    def _key(self, one: Help, piece: int) -> tuple[bool, int, int, int, int]:
        stage, number = self._pass(one)
        return self._slot.forward, stage, number // self._of.plan.slices, self._position, piece

    def _joined(self, one: Help, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all pieces of a help, in order; those that came now and are needed again are kept."""
        if self._of.memory is None:
            return keys, values
        freed, came = set(one.freed), {}
        lengths = [b - a for a, b in self._places(one, one.sent)]
        for piece, k, v in zip(one.sent, keys.split(lengths, dim=2), values.split(lengths, dim=2), strict=True):
            came[piece] = [k, v]
            if piece not in freed:
                self._keep(one, piece, k, v)
        parts = [came[piece] if piece in came else self._of.kept[self._key(one, piece)].tensors for piece in one.pieces]
        found = [torch.cat(some, dim=2) for some in zip(*parts, strict=True)]
        return found[0], found[1]

    def _keep(self, one: Help, piece: int, keys: Tensor, values: Tensor) -> None:
        memory, wide = self._of.memory, self._heads(one).wide
        assert memory is not None
        like: Like = (tuple(keys.shape), keys.dtype)
        number, tensors = memory.take([like, like])
        kept = _Kept([number], tensors)
        for mine, came in zip(tensors, (keys, values), strict=True):
            mine.copy_(came)
        if not self._slot.forward:
            sums: Like = (tuple(keys.shape), wide)
            # wider sums take a place each
            for likes in ([sums, sums],) if wide == keys.dtype else ([sums], [sums]):
                number, made = memory.take(likes)
                kept.numbers.append(number)
                kept.sums += [t.zero_() for t in made]
        self._of.kept[self._key(one, piece)] = kept

    def _let_go(self, one: Help) -> None:
        memory = self._of.memory
        for piece in one.freed if memory is not None else ():
            kept = self._of.kept.pop(self._key(one, piece), None)
            if kept is not None and memory is not None:
                memory.give(kept.numbers)


def piece_bytes(heads: Heads, rows: int, tokens: int) -> int:
    """What keys and values of a piece take.

    Args:
        heads: The attention.
        rows: Sequences.
        tokens: Of the slice, of which a piece has half.
    """
    return 2 * rows * heads.keys * -(-tokens // 2) * heads.width * heads.dtype.itemsize


def visible(unit: Unit) -> Sequence[int]:
    """The pieces of earlier chunks that a slice sees any token of."""
    mine = unit.asking if unit.asking is not None else unit.documents_of(unit.slice)
    if mine is None or unit.documents is None:
        return range(2 * unit.slice)
    # documents are numbered in order, so a row sees a piece where its last token's document reaches the slice's first
    first = mine.amin(dim=1)
    found = []
    for piece in range(2 * unit.slice):
        start, stop = kernel.half_of((unit.starts[piece // 2], unit.starts[piece // 2 + 1]), piece)
        if stop > start and bool((unit.documents[:, stop - 1] >= first).any()):
            found.append(piece)
    return found


def turn_of(store: ChunkStore, layer: int) -> Turn | None:
    """This rank's part of the exchange in the attention that runs now; None where nothing is exchanged."""
    exchanger: Any = store.exchange
    found: Turn | None = exchanger.turn(layer) if exchanger is not None else None
    return found
