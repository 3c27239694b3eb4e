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

from pipeline_balance.schedules.sliced import BLOCK, LONG
from pipeline_balance.slices.store import Chunk, ChunkStore, Unit, current
from prophet.errors import SpecError

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
        """What tokens of the slice attend to, chunk by chunk; chunks that none may attend to are left out."""
        unit = self.unit
        mine = unit.documents_of(unit.slice)
        for number, chunk in sorted(self.store.chunks(self.layer, unit.microbatch).items()):
            if number > unit.slice:
                break
            own = number == unit.slice
            mask = None
            theirs = unit.documents_of(number)
            if mine is not None and theirs is not None:
                same = mine[:, :, None] == theirs[:, None, :]
                if own:
                    same = same.tril()
                elif not same.any():
                    continue
                if own or not same.all():
                    mask = torch.zeros(same.shape, dtype=query.dtype).masked_fill_(~same, float("-inf"))[:, None]
            parts = _triangle(0, query.shape[2]) if own else [(slice(None), slice(None), False)]
            for rows, columns, causal in parts:
                part = mask[:, :, rows, columns] if mask is not None else None
                yield _Block(chunk, own, rows, columns, causal and mask is None, part)


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens `rows` of the slice and tokens `columns` of a chunk that some of them attend to.

    Not all of them may attend to all where it is `causal` or has a mask [B, 1, rows, columns].
    """

    chunk: Chunk
    own: bool
    rows: slice
    columns: slice
    causal: bool
    mask: Tensor | None

    def of_rows(self, tensor: Tensor) -> Tensor:
        """Of a tensor [B, Hq, T, ...], the part of the slice's tokens."""
        return tensor[:, :, self.rows]

    def of_columns(self, tensor: Tensor) -> Tensor:
        """Of a tensor [B, Hkv, S, D], the part of the chunk's tokens."""
        return tensor[:, :, self.columns]


def _triangle(start: int, stop: int) -> Iterator[tuple[slice, slice, bool]]:
    """A slice's own triangle in two triangles and a square: rows, columns, and whether the block is a triangle.

    torch's kernel computes the hidden half of a triangle of 512 tokens as well.
    """
    middle = start + (stop - start) // (2 * BLOCK) * BLOCK
    if stop - start < LONG:
        yield slice(start, stop), slice(start, stop), True
        return
    yield from _triangle(start, middle)
    yield slice(middle, stop), slice(start, middle), False
    yield from _triangle(middle, stop)


def _by_token(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros [B, H, T, D] in the order [B, T, H, D] of memory, which kernels and layers both use."""
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=dtype).zero_()


class _Attend(torch.autograd.Function):
    """Attention of one slice; its backward adds to the gradients of earlier chunks and frees its own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, place: _Place) -> Tensor:
        store, layer, unit = place.store, place.layer, place.unit
        ctx.place = place
        ctx.save_for_backward(query)
        known = store.chunks(layer, unit.microbatch).get(unit.slice)
        if known is not None and known.out is not None and torch._C._current_graph_task_id() != -1:
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
        query_grad = _by_token(query.shape, wide)
        own_grads = _by_token(own.key.shape, wide), _by_token(own.value.shape, wide)
        if own.key_grad is not None and own.value_grad is not None:
            own_grads[0].copy_(own.key_grad)
            own_grads[1].copy_(own.value_grad)
        for block in place.blocks(query):
            found = _backward(
                *(block.of_rows(t) for t in (grad_out, query)),
                *(block.of_columns(t) for t in (block.chunk.key, block.chunk.value)),
                *(block.of_rows(t) for t in (own.out, own.lse)),
                0.0,
                block.causal,
                attn_mask=block.mask,
                scale=place.scale,
            )
            block.of_rows(query_grad).add_(found[0])
            if block.own or block.chunk.pending:
                sums = own_grads if block.own else store.gradients(block.chunk)
                for total, part in zip(sums, found[1:], strict=True):
                    block.of_columns(total).add_(part)
        store.pop(layer, unit)
        key_grad, value_grad = own_grads
        return query_grad.to(query.dtype), key_grad.to(query.dtype), value_grad.to(query.dtype), None


def _merged(query: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
    """Attention to all that the slice sees, [B, Hq, T, D], and its log-sum-exp, [B, Hq, T]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = _by_token(query.shape, wide)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=wide)
    for block in place.blocks(query):
        key, value = block.of_columns(block.chunk.key), block.of_columns(block.chunk.value)
        part, part_lse = _forward(
            block.of_rows(query), key, value, 0.0, block.causal, attn_mask=block.mask, scale=place.scale
        )
        if block.mask is not None:
            # a row without a visible token has the log-sum-exp 0 here, and must not weigh anything
            empty = torch.isinf(block.mask).all(dim=-1)
            part_lse = part_lse.masked_fill(empty, float("-inf"))
        before = block.of_rows(lse)
        # the share of this block, exp(part_lse) / (exp(before) + exp(part_lse)), and 0 where neither has seen anything
        share = torch.sigmoid(part_lse - before)
        if block.mask is not None:
            share.nan_to_num_(0.0)
        torch.logaddexp(before, part_lse, out=before)
        block.of_rows(out).lerp_(part.to(wide), share.unsqueeze(-1))
    return out.to(query.dtype), lse
