"""Causal attention of one slice to itself and to the chunks before it, exact in value and gradient (SlimPipe, 4).

Shape legend: B sequences, Hq query heads, Hkv key and value heads, T tokens of the slice, S tokens of a chunk, D head
dim. Every chunk gives an output and a log-sum-exp; they are merged in float32 or better. The backward pass of torch's
attention takes the merged output and log-sum-exp, so each chunk's gradients are computed alone, nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pipeline_balance.schedules.sliced import BLOCK
from pipeline_balance.slices.store import Chunk, ChunkStore, Unit, current
from prophet.errors import SpecError

_ALL = slice(None)
CUT = 512  # tokens of a triangle from which on cutting it saves more time than further calls take

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(query: Tensor, key: Tensor, value: Tensor, *, layer: int, scale: float | None = None) -> Tensor:
    """Causal attention of the slice in work to its whole prefix, [B, Hq, T, D].

    `query` is [B, Hq, T, D], `key` and `value` [B, Hkv, T, D] of the same slice, with positions already applied; Hkv
    divides Hq. `layer` tells layers of the model apart. `scale` is D ** -0.5 unless given. A value may be narrower than
    a key. Must be called inside a pipeline's step; of fake tensors it tells the
    result's shape. Raises `SpecError` for other shapes and devices.
    """
    _check(query, key, value)
    if isinstance(query, FakeTensor):
        # somebody asks for shapes
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    store, unit = current()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide = value.shape[-1]
    if wide < query.shape[-1]:
        # the kernel takes one width; columns of zeros change neither the other ones nor the weights
        value = F.pad(value, (0, query.shape[-1] - wide))
    pending = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    place = _Place(store, layer, unit, scale, pending)
    out: Tensor = _Attend.apply(query, key, value, place)  # type: ignore[no-untyped-call]
    return out[..., :wide]


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.shape[:-1] != key.shape[:-1]:
        raise SpecError(f"attention over slices needs [B, H, T, D] queries, keys and values, got {shapes}")
    same = query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    if not same or query.shape[1] % key.shape[1] or value.shape[-1] > query.shape[-1]:
        raise SpecError(f"queries, keys and values of one slice do not fit together: {shapes}")
    if query.device.type != "cpu":
        raise SpecError(f"attention over slices runs on the CPU so far, got tensors on {query.device}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an attention stands: its chunks, layer, unit, the scale of its scores, and whether a backward will come."""

    store: ChunkStore
    layer: int
    unit: Unit
    scale: float
    pending: bool

    def blocks(self, query: Tensor) -> Iterator[_Block]:
        """What tokens of the slice attend to: its own triangle, diagonal parts ahead, then the chunks before it."""
        unit = self.unit
        *before, own = self.store.chunks(self.layer, unit.microbatch)[: unit.slice + 1]
        seen = self._seen(unit.slice)
        mask = _mask(seen.tril(), query.dtype) if seen is not None else None
        own_parts = [*_triangle(0, query.shape[2])]
        for rows, columns, diagonal in own_parts if len(own_parts) > 1 else [(_ALL, _ALL, True)]:
            part = mask[:, :, rows, columns] if mask is not None else None
            yield _Block(own, own.place, rows, columns, diagonal, part)
        for first, place, seen in self._runs(before):
            mask = _mask(seen, query.dtype) if seen is not None else None
            yield _Block(first, place, _ALL, _ALL, False, mask)

    def _runs(self, before: list[Chunk]) -> Iterator[tuple[Chunk, tuple[int, int], Tensor | None]]:
        """Chunks that lie side by side and are read at once, by the first of them and their place.

        With them comes which of their tokens are seen, if not all are. Chunks that no token sees are left out.
        """
        run: list[Chunk] = []
        start = stop = 0
        for number, chunk in enumerate(before):
            a, b = chunk.place
            seen = self._seen(number)
            whole = seen is None or bool(seen.all())
            if run and not (whole and chunk.pending == run[0].pending and (a == stop or b == start)):
                yield run[0], (start, stop), None
                run = []
            if whole:
                start, stop = (min(a, start), max(b, stop)) if run else (a, b)
                run.append(chunk)
            elif seen is not None and seen.any():
                yield chunk, chunk.place, seen
        if run:
            yield run[0], (start, stop), None

    def _seen(self, number: int) -> Tensor | None:
        """Which tokens of slice `number` are in a token's document, [B, T, S]; None without documents."""
        mine, theirs = self.unit.documents_of(self.unit.slice), self.unit.documents_of(number)
        return None if mine is None or theirs is None else mine[:, :, None] == theirs[:, None, :]


def _mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, [B, 1, T, S]."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens `rows` of the slice and tokens `columns` of a place, whose first chunk is `first`.

    On the diagonal, a token attends to those up to itself; every row is in one such block. A mask is [B, 1, rows,
    columns].
    """

    first: Chunk
    place: tuple[int, int]
    rows: slice
    columns: slice
    diagonal: bool
    mask: Tensor | None

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


def _triangle(start: int, stop: int) -> Iterator[tuple[slice, slice, bool]]:
    """A slice's own triangle in triangles on the diagonal, then squares: rows, columns, and whether it is a triangle.

    torch's kernel computes the hidden half of a triangle of 512 tokens as well.
    """
    if stop - start < CUT:
        yield slice(start, stop), slice(start, stop), True
        return
    middle = start + (stop - start) // (2 * BLOCK) * BLOCK
    yield from _triangle(start, middle)
    yield from _triangle(middle, stop)
    yield slice(middle, stop), slice(start, middle), False


def _by_token(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[B, H, T, D], undefined, in the order [B, T, H, D] of memory, which kernels and layers both use."""
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=dtype)


class _Attend(torch.autograd.Function):
    """Attention of one slice; its backward adds to the gradients of earlier chunks and frees its own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, place: _Place) -> Tensor:
        store, layer, unit = place.store, place.layer, place.unit
        ctx.place = place
        ctx.save_for_backward(query)
        if torch._C._current_graph_task_id() != -1:
            for known in store.chunks(layer, unit.microbatch)[unit.slice : unit.slice + 1]:
                if known.out is not None:
                    # a layer that is computed again for its backward finds what it computed before
                    return known.out.detach()
        chunk = store.append(layer, unit, key, value, pending=place.pending)
        out, lse = _merged(query, place)
        if place.pending:
            chunk.out, chunk.lse = out.detach(), lse
            chunk.version = out._version
        store.passed(layer, unit)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        place: _Place = ctx.place
        store, layer, unit = place.store, place.layer, place.unit
        store.check_last(layer, unit)
        (query,) = ctx.saved_tensors
        own = store.chunks(layer, unit.microbatch)[unit.slice]
        if own.out is None or own.lse is None or own.out._version != own.version:
            raise SpecError(f"layer {layer}: the output of its attention was changed in place; work on a copy of it")
        grad_out = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        line = store.line(layer, unit.microbatch)
        later = line.summed(own)
        totals: list[Tensor] = []  # gradients of the query, the key and the value
        for block in place.blocks(query):
            found = _backward(
                *(block.of_rows(t) for t in (grad_out, query)),
                *block.of_columns(line.room.tokens(*block.place)),
                *(block.of_rows(t) for t in (own.out, own.lse)),
                0.0,
                block.causal,
                attn_mask=block.mask,
                scale=place.scale,
            )
            if block.alone:
                totals = [t.to(wide) for t in found]
            elif block.first is own:
                totals = totals or [_by_token(t.shape, wide) for t in (query, *line.room.tokens(*own.place))]
                for total, part, at in zip(totals, found, (block.rows, block.columns, block.columns), strict=True):
                    _gather(total[:, :, at], part, first=block.diagonal)
            else:
                sums = line.gradients(*block.place) if block.first.pending else ()
                for total, part in zip((totals[0], *sums), found, strict=False):
                    total.add_(part)
        for total, part in zip(totals[1:], later, strict=False):
            total.add_(part)
        store.pop(layer, unit)
        query_grad, key_grad, value_grad = (t.to(query.dtype) for t in totals)
        return query_grad, key_grad, value_grad, None


def _gather(total: Tensor, part: Tensor, *, first: bool) -> None:
    """Add `part` to `total`, which holds nothing yet if it is the first."""
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def _merged(query: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
    """Attention to all that the slice sees, [B, Hq, T, D], and its log-sum-exp, [B, Hq, T]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = lse = query.new_empty(0)
    room = place.store.line(place.layer, place.unit.microbatch).room
    for block in place.blocks(query):
        keys, values = block.of_columns(room.tokens(*block.place))
        part, part_lse = _forward(
            block.of_rows(query), keys, values, 0.0, block.causal, attn_mask=block.mask, scale=place.scale
        )
        if block.alone:
            out, lse = part.to(wide), part_lse.to(wide)
            continue
        if not out.numel():
            out, lse = _by_token(query.shape, wide), torch.empty(query.shape[:3], dtype=wide)
        if block.diagonal:  # every token sees itself
            block.of_rows(out).copy_(part)
            block.of_rows(lse).copy_(part_lse)
            continue
        if block.mask is not None:
            # a row without a visible token has the log-sum-exp 0 here, and must not weigh anything
            empty = torch.isinf(block.mask).all(dim=-1)
            part_lse = part_lse.masked_fill(empty, float("-inf"))
        before = block.of_rows(lse)
        # the share of this block: exp(part_lse) / (exp(before) + exp(part_lse))
        share = torch.sigmoid(part_lse - before)
        torch.logaddexp(before, part_lse, out=before)
        block.of_rows(out).lerp_(part.to(wide), share.unsqueeze(-1))
    return out.to(query.dtype), lse
