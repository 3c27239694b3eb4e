"""Causal attention of one slice to itself and to the chunks before it, exact in value and gradient (SlimPipe, 4).

Shape legend: B sequences, Hq query heads, Hkv key and value heads, T tokens of the slice, S tokens of a chunk, D head
dim. Every chunk gives an output and a log-sum-exp; they are merged in float32 or better. The backward pass of torch's
attention takes the merged output and log-sum-exp, so each chunk's gradients are computed alone, nothing is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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

    def visible(self, query: Tensor) -> list[tuple[int, Chunk, Tensor | None]]:
        """Chunks that some token of the slice may attend to, with masks [B, 1, T, S] where not all may."""
        unit = self.unit
        mine = unit.documents_of(unit.slice)
        found: list[tuple[int, Chunk, Tensor | None]] = []
        for number, chunk in sorted(self.store.chunks(self.layer, unit.microbatch).items()):
            if number > unit.slice:
                break
            mask = None
            theirs = unit.documents_of(number)
            if mine is not None and theirs is not None:
                same = mine[:, :, None] == theirs[:, None, :]
                if number == unit.slice:
                    same = same.tril()
                elif not same.any():
                    continue
                if number == unit.slice or not same.all():
                    mask = torch.zeros(same.shape, dtype=query.dtype).masked_fill_(~same, float("-inf"))[:, None]
            found.append((number, chunk, mask))
        return found


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
        if own.out is None or own.out._version != own.version:
            raise SpecError(f"layer {layer}: the output of its attention was changed in place; work on a copy of it")
        grad_out = grads[0].contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        query_grad = torch.zeros(query.shape, dtype=wide)
        own_grads: tuple[Tensor, Tensor] | None = None
        for number, chunk, mask in place.visible(query):
            causal = number == unit.slice and mask is None
            of_query, of_key, of_value = _backward(
                grad_out,
                query,
                chunk.key,
                chunk.value,
                own.out,
                own.lse,
                0.0,
                causal,
                attn_mask=mask,
                scale=place.scale,
            )
            query_grad += of_query
            if number == unit.slice:
                own_grads = of_key, of_value
            elif chunk.pending:
                key_grad, value_grad = store.gradients(chunk)
                key_grad += of_key
                value_grad += of_value
        assert own_grads is not None, "a slice sees itself"
        key_grad, value_grad = own_grads
        if own.key_grad is not None and own.value_grad is not None:
            key_grad, value_grad = own.key_grad + key_grad, own.value_grad + value_grad
        store.pop(layer, unit)
        return query_grad.to(query.dtype), key_grad.to(query.dtype), value_grad.to(query.dtype), None


def _merged(query: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
    """Attention to all visible chunks, [B, Hq, T, D], and its log-sum-exp, [B, Hq, T]."""
    out: Tensor | None = None
    lse: Tensor | None = None
    for number, chunk, mask in place.visible(query):
        causal = number == place.unit.slice and mask is None
        part, part_lse = _forward(query, chunk.key, chunk.value, 0.0, causal, attn_mask=mask, scale=place.scale)
        if mask is not None:
            # a row without a visible token has the log-sum-exp 0 here, and must not weigh anything
            empty = torch.isinf(mask).all(dim=-1)
            part_lse = part_lse.masked_fill(empty, float("-inf"))
        if out is None or lse is None:
            out, lse = part.to(part_lse.dtype), part_lse
            continue
        # the share of this chunk, exp(part_lse) / (exp(lse) + exp(part_lse)), and 0 where neither has seen anything
        share = torch.sigmoid(part_lse - lse)
        if mask is not None:
            share.nan_to_num_(0.0)
        lse = torch.logaddexp(lse, part_lse)
        out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
    assert out is not None, "a slice sees itself"
    assert lse is not None, "a slice sees itself"
    return out.to(query.dtype), lse
