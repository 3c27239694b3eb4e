"""Causal attention of one slice to itself and to the chunks before it, exact in value and gradient (SlimPipe, 4).

Shape legend: B sequences, Hq query heads, Hkv key and value heads, T tokens of the slice, S tokens of a chunk, D head
dim. Every chunk gives an output and a log-sum-exp; they are merged in float32 or better. The backward pass of torch's
attention takes the merged output and log-sum-exp, so each chunk's gradients are computed alone, nothing is recomputed.

With a window a token sees the last tokens up to itself only. Chunks behind it are not read; where its edge cuts through
one, that part is masked. A sink is one more token that all see and that has no value: it is merged like a chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pipeline_balance.schedules.sliced import BLOCK
from pipeline_balance.slices import kernel
from pipeline_balance.slices.kernel import additive, band, half_of, without_blind
from pipeline_balance.slices.memory import Room
from pipeline_balance.slices.sharing.exchange import Turn, turn_of
from pipeline_balance.slices.store import Chunk, ChunkStore, Unit, current
from prophet.errors import SpecError

_ALL = slice(None)
# Tokens of a triangle from which on cutting it saves more time than further calls take
CUT = 512
# The log-sum-exp of nothing: finite, as the difference of two infinite ones is no number
_NOTHING = -1e30

_forward, _backward = kernel.forward, kernel.backward


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layer: int,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of the slice in work to its whole prefix.

    Must be called inside a pipeline's step. Of fake tensors it returns one of the result's shape.

    Args:
        query: [B, Hq, T, D], with positions already applied.
        key: [B, Hkv, T, D] of the same slice, likewise; Hkv divides Hq.
        value: [B, Hkv, T, D]; it may be narrower than a key.
        layer: Tells attentions of the model apart.
        scale: Of scores; None: D ** -0.5.
        window: How many tokens a token sees, up to itself; None: all.
        sinks: [Hq], the score of one more token without a value for each head; None: there is none.
        soft_cap: What no score gets above or below, by c tanh(score / c); None: scores are as they are.

    Returns:
        [B, Hq, T, width of a value].

    Raises:
        SpecError: For other shapes, and on devices that have no kernel for it.
    """
    _check(query, key, value)
    _check_more(query, window, sinks, soft_cap)
    if soft_cap is None:
        # where there is a kernel for masks, there is one without
        kernel.chosen(query.device, query.dtype, query.shape[-1], False)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(query, FakeTensor):
        # somebody asks for shapes
        kernel.note(query, key, scale, window, soft_cap)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    store, unit = current()
    if window is not None and unit.starts and window >= unit.starts[-1]:
        # it hides nothing
        window = None
    wide = value.shape[-1]
    if wide < query.shape[-1]:
        # the kernel takes one width; columns of zeros change neither the other ones nor the weights
        value = F.pad(value, (0, query.shape[-1] - wide))
    # without a backward to come, chunks go after the microbatch's last slice
    pending = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, sinks))
    place = _Place(store, layer, unit, scale, pending, window, soft_cap)
    out: Tensor = _Attend.apply(query, key, value, sinks, place)  # type: ignore[no-untyped-call]
    return out if wide == query.shape[-1] else out[..., :wide]


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.shape[:-1] != key.shape[:-1]:
        raise SpecError(f"attention over slices needs [B, H, T, D] queries, keys and values, got {shapes}")
    same = query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    if not same or query.shape[1] % key.shape[1] or value.shape[-1] > query.shape[-1]:
        raise SpecError(f"queries, keys and values of one slice do not fit together: {shapes}")


def _check_more(query: Tensor, window: int | None, sinks: Tensor | None, soft_cap: float | None) -> None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise SpecError(f"a window must be a number of tokens from 1 on, got {window!r}")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise SpecError(f"sinks must be one number for each of {query.shape[1]} heads, got {list(sinks.shape)}")
    if soft_cap is not None and not soft_cap > 0:
        raise SpecError(f"a soft cap must be above 0, got {soft_cap!r}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an attention stands.

    Attributes:
        store: Has its chunks.
        layer: Its number.
        unit: The slice in work.
        scale: Of scores.
        pending: A backward will come.
        window: How many tokens a token sees; None: all before it.
        soft_cap: Of scores; None: there is none.
    """

    store: ChunkStore
    layer: int
    unit: Unit
    scale: float
    pending: bool
    window: int | None
    soft_cap: float | None

    def forward(self, block: _Block, query: Tensor, room: Room) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a block, both of its rows.

        Args:
            block: What is computed.
            query: Of the slice.
            room: Has keys and values.
        """
        query, causal, mask = block.of_rows(query), block.causal, block.mask
        keys, values = block.of_columns(room.tokens(*block.place))
        if self.soft_cap is not None:
            return kernel.capped_forward(query, keys, values, causal, mask, self.scale, self.soft_cap)
        part, lse = _forward(query, keys, values, 0.0, causal, attn_mask=mask, scale=self.scale)
        return part, lse

    def backward(
        self, block: _Block, grad: Tensor, query: Tensor, room: Room, own: tuple[Tensor, Tensor]
    ) -> Sequence[Tensor]:
        """Gradients of a block's queries, keys and values.

        Args:
            block: What is computed.
            grad: Of the slice's output.
            query: Of the slice.
            room: Has keys and values.
            own: The slice's merged output and log-sum-exp.
        """
        grad, query, out, lse = (block.of_rows(t) for t in (grad, query, *own))
        keys, values = block.of_columns(room.tokens(*block.place))
        causal, mask = block.causal, block.mask
        if self.soft_cap is not None:
            cap = self.soft_cap
            return kernel.capped_backward(grad, query, keys, values, out, lse, causal, mask, self.scale, cap)
        found: Sequence[Tensor] = _backward(
            grad, query, keys, values, out, lse, 0.0, causal, attn_mask=mask, scale=self.scale
        )
        return found

    def blocks(self, query: Tensor, given: frozenset[int] = frozenset()) -> Sequence[_Block]:
        """What tokens of the slice attend to: its own triangle, diagonal parts ahead, then the chunks before it.

        What other ranks' tokens see of the slice comes behind the triangle.

        Args:
            query: Of the slice, on all ranks that share its tokens.
            given: Pieces of those chunks that other ranks compute.
        """
        unit, plans, context = self.unit, self.store.plans, self.store.context
        # the slice's own chunk is the last of these
        chunks = self.store.chunks(self.layer, unit.microbatch)[: unit.slice + 1]
        # layers mostly lie alike, forward and backward: what they read is found once
        here = tuple([(c.place, c.pending) for c in chunks])
        key = (here, self.window, context, query.dtype, query.device, given)
        # documents are a batch's own, and many
        known = plans.get(key) if unit.documents is None else None
        if known is None:
            known = [*self._blocks(chunks[:-1], chunks[-1], query, given)]
            if unit.documents is None:
                plans[key] = known
        return known

    def _blocks(self, before: list[Chunk], own: Chunk, query: Tensor, given: Collection[int]) -> Iterator[_Block]:
        kind, seen = (query.dtype, query.device), self._seen(self.unit.slice)
        if seen is not None:
            seen = seen.tril() if self.window is None else seen.tril().triu(1 - self.window)
        mask, context = additive(seen, query) if seen is not None else None, self.store.context
        own_parts: list[tuple[slice, slice, bool]] = [(slice(0, own.tokens), slice(0, own.tokens), True)]
        if self.window is not None or not kernel.on_device(query):
            own_parts = [*_triangle(0, own.tokens, self.window)]
        for rows, columns, diagonal in own_parts:
            part: Tensor | None = None
            shift = _shift(rows, columns, self.window)
            if mask is not None:
                part = mask[:, :, rows, columns]
            elif shift is not None:
                part = band(_length(rows), _length(columns), shift, diagonal, *kind)
            # one part alone needs no cutting
            at = (rows, columns) if len(own_parts) > 1 or context is not None else (_ALL, _ALL)
            yield _Block(own.place, *at, diagonal, part)
        for rows, columns in context.rectangles(own.tokens) if context is not None else ():
            yield _Block(own.place, rows, columns, False, mask[:, :, rows, columns] if mask is not None else None)
        for first, place, rows, mask in self._runs(before, own, query, given):
            yield _Block(place, rows, _ALL, False, mask, before=True, pending=first.pending)

    def _runs(
        self, before: list[Chunk], own: Chunk, query: Tensor, given: Collection[int]
    ) -> Iterator[tuple[Chunk, tuple[int, int], slice, Tensor | None]]:
        """Chunks that lie side by side and are read at once, by the first of them and their place.

        With them come the slice's tokens that read them, and what is added to scores, if not all are seen. Chunks that
        no token sees are left out.
        """
        run: list[Chunk] = []
        start, stop, kind = 0, 0, (query.dtype, query.device)
        for number, chunk, place in _left(before, given):
            documents = self._seen(number)
            for rows, (a, b), shift in _met(chunk, place, own, self.window):
                seen = None
                if documents is not None:
                    seen = documents[:, rows, a - chunk.place[0] : b - chunk.place[0]]
                    seen = seen if shift is None else seen.triu(shift)
                whole = rows == _ALL and shift is None and (seen is None or bool(seen.all()))
                # the kernel takes one stretch of memory, and gradients of one run are kept together
                if run and not (whole and chunk.pending == run[0].pending and (a == stop or b == start)):
                    yield run[0], (start, stop), _ALL, None
                    run = []
                if whole:
                    start, stop = (min(a, start), max(b, stop)) if run else (a, b)
                    run.append(chunk)
                elif seen is not None:
                    if seen.any():
                        yield chunk, (a, b), rows, additive(seen, query)
                else:
                    tokens = len(range(own.tokens)[rows])
                    yield chunk, (a, b), rows, band(tokens, b - a, shift, False, *kind) if shift is not None else None
        if run:
            yield run[0], (start, stop), _ALL, None

    def _seen(self, number: int) -> Tensor | None:
        """Which tokens of slice `number` are in a token's document, [B, T, S]; None without documents."""
        mine, theirs = self.unit.asking, self.unit.documents_of(number)
        mine = self.unit.documents_of(self.unit.slice) if mine is None else mine
        return None if mine is None or theirs is None else mine[:, :, None] == theirs[:, None, :]


def _left(before: list[Chunk], given: Collection[int]) -> Iterator[tuple[int, Chunk, tuple[int, int]]]:
    """Chunks and halves of chunks that nobody else computes, by number, and where they are."""
    for number, chunk in enumerate(before):
        mine = [piece for piece in (2 * number, 2 * number + 1) if piece not in given]
        for place in [chunk.place] if len(mine) == 2 else [half_of(chunk.place, piece) for piece in mine]:
            yield number, chunk, place


@dataclass(frozen=True, slots=True)
class _Block:
    """Part of a slice's attention that one call of the kernel computes.

    On the diagonal, a token attends to those up to itself; every row of this rank's tokens is in one such block.

    Attributes:
        place: Where its tokens, and those of the chunks beside it, are in the room.
        rows: Tokens of the slice.
        columns: Tokens of the place.
        diagonal: See above.
        mask: [B or 1, 1, rows, columns]; None: nothing is hidden.
        before: It is not of the slice itself, but of chunks before it.
        pending: A backward will come for those.
    """

    place: tuple[int, int]
    rows: slice
    columns: slice
    diagonal: bool
    mask: Tensor | None
    before: bool = False
    pending: bool = False

    @property
    def causal(self) -> bool:
        """Whether the kernel is to hide what comes later; a mask does so itself."""
        return self.diagonal and self.mask is None

    @property
    def alone(self) -> bool:
        """Whether this is all of the slice's attention to itself."""
        return self.diagonal and self.rows == _ALL

    def of_rows(self, tensor: Tensor) -> Tensor:
        """Of a tensor [B, Hq, T, ...], the part of the slice's tokens."""
        return tensor if self.rows == _ALL else tensor[:, :, self.rows]

    def of_columns(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of tensors [B, Hkv, S, D], the part of the tokens that are attended to."""
        return [*tensors] if self.columns == _ALL else [t[:, :, self.columns] for t in tensors]


def _triangle(start: int, stop: int, window: int | None = None) -> Iterator[tuple[slice, slice, bool]]:
    """A slice's own triangle in triangles on the diagonal, then squares: rows, columns, and whether it is a triangle.

    torch's kernel computes the hidden half of a triangle of 512 tokens as well.
    """
    if stop - start < CUT:
        yield slice(start, stop), slice(start, stop), True
        return
    # half, at a multiple of BLOCK: other lengths are slower
    middle = start + (stop - start) // (2 * BLOCK) * BLOCK
    yield from _triangle(start, middle, window)
    yield from _triangle(middle, stop, window)
    for rows, columns in _below(slice(middle, stop), slice(start, middle), window):
        yield rows, columns, False


def _below(rows: slice, columns: slice, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Rectangles of rows and columns, of a rectangle below the diagonal, that have all that the rows see.

    Where the window's edge cuts through, they are about as small as those of `_triangle`.
    """
    if window is None:
        yield rows, columns
        return
    # columns that the first row sees, and rows that see the last column
    first, last = max(columns.start, rows.start - window + 1), columns.stop + window - 1
    if first >= columns.stop or rows.start >= last:
        return
    seen = slice(first, columns.stop)
    # from here on all rows see all columns, unless some rows see none
    edge = columns.stop if last < rows.stop else max(first, rows.stop - window)
    rows = slice(rows.start, min(rows.stop, last))
    if edge == first or max(_length(rows), _length(seen)) < CUT:
        yield rows, seen
    elif edge < columns.stop:
        yield from _below(rows, slice(first, edge), window)
        # the last one, as the next chunk may be read with it
        yield rows, slice(edge, columns.stop)
    else:
        # half, as in `_triangle`
        middle = rows.start + _length(rows) // (2 * BLOCK) * BLOCK
        yield from _below(slice(rows.start, middle), seen, window)
        yield from _below(slice(middle, rows.stop), seen, window)


def _shift(rows: slice, columns: slice, window: int | None) -> int | None:
    """The s by which row i of a block sees its columns from i + s on; None where all rows see all columns."""
    if window is None or rows.stop - columns.start <= window:
        return None
    shift: int = rows.start - columns.start + 1 - window
    return shift


def _met(
    chunk: Chunk, place: tuple[int, int], own: Chunk, window: int | None
) -> Iterator[tuple[slice, tuple[int, int], int | None]]:
    """What a slice's window meets of a chunk: rows that see it, where it is in the room, and its `_shift`.

    Args:
        chunk: An earlier one.
        place: It, or a part of it.
        own: That of the slice.
        window: How many tokens a token sees.
    """
    if window is None:
        yield _ALL, place, None
        return
    # from tokens of the room to those of the sequence
    on = chunk.start - chunk.place[0]
    every = slice(own.start, own.start + own.tokens)
    for rows, columns in _below(every, slice(place[0] + on, place[1] + on), window):
        mine = _ALL if rows == every else slice(rows.start - own.start, rows.stop - own.start)
        yield mine, (columns.start - on, columns.stop - on), _shift(rows, columns, window)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _by_token(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Undefined memory [B, H, T, D] in the order [B, T, H, D], which kernels and layers both use."""
    return torch.empty_permuted(like.shape, (0, 2, 1, 3), dtype=dtype, device=like.device)


class _Attend(torch.autograd.Function):
    """Attention of one slice; its backward adds to the gradients of earlier chunks and frees its own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, place: _Place) -> Tensor:
        store, layer, unit = place.store, place.layer, place.unit
        ctx.place = place
        ctx.save_for_backward(query, sinks)
        # inside a backward: a checkpoint runs its layer again
        if torch._C._current_graph_task_id() != -1:
            for known in store.chunks(layer, unit.microbatch)[unit.slice : unit.slice + 1]:
                if known.out is not None:
                    # a layer that is computed again for its backward finds what it computed before
                    return known.out.detach()
        chunk = store.append(layer, unit, key, value, pending=place.pending, window=place.window)
        out, lse = _merged(query, sinks, place, turn_of(store, layer))
        if place.pending:
            chunk.out, chunk.lse = out.detach(), lse
            # the backward reads `out`, which the layer must not change in place
            chunk.version = out._version
        # nothing may be pending, as in evaluation
        store.passed(layer, unit)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        place: _Place = ctx.place
        store, layer, unit = place.store, place.layer, place.unit
        # its gradients are complete only if all later slices have gone backward
        store.check_last(layer, unit)
        query, sinks = ctx.saved_tensors
        own = store.chunks(layer, unit.microbatch)[unit.slice]
        if own.out is None or own.lse is None or own.out._version != own.version:
            raise SpecError(f"layer {layer}: the output of its attention was changed in place; work on a copy of it")
        # in the order [B, T, H, D] of memory, as the output
        grad_out = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        line = store.line(layer, unit.microbatch)
        # what later slices have added for this slice's keys and values
        later = line.summed(own)
        lse, out, grad, context = own.lse, own.out, grad_out, store.context
        if context is not None:
            # all ranks' tokens from here on
            lse, query, out, grad = context.gather([lse, query, out, grad], layer)
        if turn := turn_of(store, layer):
            turn.ask([lse, query, out, grad])
        # Gradients of the query, the key and the value
        totals: list[Tensor] = []
        for block in place.blocks(query, turn.given if turn else frozenset()):
            # with the merged output and log-sum-exp each block's gradients are exact alone (SlimPipe, 4)
            found = place.backward(block, grad, query, line.room, (out, lse))
            if block.alone:
                totals = [t.to(wide) for t in found]
            elif not block.before:
                if not totals:
                    totals = [_by_token(t, wide) for t in (query, *line.room.tokens(*own.place))]
                    if context is not None:
                        # others' tokens are in no diagonal block
                        totals[0][:, :, own.tokens :].zero_()
                for total, part, at in zip(totals, found, (block.rows, block.columns, block.columns), strict=True):
                    _gather(total[:, :, at], part, first=block.diagonal)
            else:
                block.of_rows(totals[0]).add_(found[0])
                # chunks that no backward will come for, as of frozen layers, need no gradients
                if block.pending:
                    line.add_there(block.place, found[1:])
        if turn:
            turn.work()
            for one, (*found, query_part) in turn.answers():
                totals[0].add_(query_part)
                line.add(one.freed, found)
            turn.close()
        if context is not None:
            others = context.give([totals[0].to(query.dtype)], layer)
            totals[0] = totals[0][:, :, : own.tokens]
            for (query_part,) in others:
                totals[0].add_(query_part)
        for total, part in zip(totals[1:], later, strict=False):
            total.add_(part)
        store.pop(layer, unit)
        query_grad, key_grad, value_grad = (t.to(query.dtype) for t in totals)
        sinks_grad = _of_sinks(sinks, own.lse, own.out, grad_out) if ctx.needs_input_grad[3] else None
        return query_grad, key_grad, value_grad, sinks_grad, None


def _gather(total: Tensor, part: Tensor, *, first: bool) -> None:
    """Add `part` to `total`, which holds nothing yet if it is the first."""
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def _of_sinks(sinks: Tensor, lse: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """The gradient of sinks [Hq] by a slice.

    Args:
        sinks: Their scores [Hq].
        lse: The log-sum-exp with them [B, Hq, T].
        out: The output [B, Hq, T, D].
        grad: Its gradient.
    """
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    # the gradient of any score is its weight times (its value less the output) times the output's; sinks have no value
    drawn = (grad.to(lse.dtype) * out).sum(dim=-1)
    return -(weight * drawn).sum(dim=(0, 2)).to(sinks.dtype)


def _merged(query: Tensor, sinks: Tensor | None, place: _Place, turn: Turn | None) -> tuple[Tensor, Tensor]:
    """Attention to all that the slice sees, [B, Hq, T, D], and its log-sum-exp, [B, Hq, T].

    Args:
        query: Of the slice.
        sinks: [Hq], or none.
        place: Where its attention stands.
        turn: What other ranks do of it, and this one of theirs.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    out = lse = query.new_empty(0)
    tokens, context = query.shape[2], place.store.context
    if context is not None:
        # all ranks' tokens from here on
        (query,) = context.gather([query], place.layer)
    room = place.store.line(place.layer, place.unit.microbatch).room
    if turn:
        turn.ask([query])
    for block in place.blocks(query, turn.given if turn else frozenset()):
        part, part_lse = place.forward(block, query, room)
        if block.alone:
            out, lse = part.to(wide), part_lse.to(wide)
            continue
        if not out.numel():
            out, lse = _by_token(query, wide), query.new_empty(query.shape[:3], dtype=wide)
            if context is not None:
                # other ranks' tokens may see nothing here
                out[:, :, tokens:], lse[:, :, tokens:] = 0.0, _NOTHING
        # Every token sees itself, so the first block of its row is never empty
        if block.diagonal:
            block.of_rows(out).copy_(part)
            block.of_rows(lse).copy_(part_lse)
            continue
        _merge(block.of_rows(out), block.of_rows(lse), part, without_blind(part_lse, block.mask))
    if turn:
        turn.work()
        for _, (part_lse, part) in turn.answers():
            _merge(out, lse, part, part_lse)
        turn.close()
    if context is not None:
        others = context.give([lse, out.to(query.dtype)], place.layer)
        # copies: what is kept must not keep all ranks' memory
        out, lse = out[:, :, :tokens].clone(), lse[:, :, :tokens].clone()
        for part_lse, part in others:
            _merge(out, lse, part, part_lse)
    if sinks is not None:
        sink = sinks.detach().to(wide)[:, None]
        # one more token, whose value is zero
        out.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
        lse = torch.logaddexp(lse, sink)
    return out.to(query.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention to further tokens into an output and its log-sum-exp, in place."""
    # the share of this part: exp(part_lse) / (exp(lse) + exp(part_lse))
    share = torch.sigmoid(part_lse - lse)
    torch.logaddexp(lse, part_lse, out=lse)
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
