"""torch's attention for NVIDIA GPUs, called like the one for CPUs; `pipeline_balance.slices.kernel` says which is used.

Flash attention computes in half precision and takes no mask; its causal mask ends in the last row and the last column,
so both have to be as many. Memory-efficient attention takes masks and float32. It wants as many key heads as query
heads, and rows of a mask and of log-sum-exps that end at a multiple of some numbers. Both load 16 bytes at a time.

No GPU has run this yet. `tests/helpers/gpu_operators.py` computes what torch's sources say of the operators.

Shape legend: B sequences, Hq and Hkv heads, T tokens of a slice, S tokens of a part of its prefix, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
# Numbers of half precision that are loaded at once; in float32 it is half as many
_LOADED = 8
# A row of a mask ends at a multiple of so many numbers, a row of log-sum-exps too
_MASK_ROW, _LSE_ROW = 16, 32


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def flash_trains(width: int, found: tuple[int, int]) -> bool:
    """Whether flash attention computes gradients of heads of this width on a GPU of this compute capability."""
    if 192 < width <= 224 and ((8, 6) <= found <= (8, 9) or (12, 0) <= found <= (12, 1)):
        # torch's own attention leaves these to other kernels there
        return False
    return width <= 256


def mask_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in whose rows the kernels can load a mask.

    Args:
        shape: Of the mask.
        dtype: Of queries.
        device: Where.
    """
    row = -(-shape[-1] // _MASK_ROW) * _MASK_ROW
    return torch.zeros((*shape[:-1], row), dtype=dtype, device=device)[..., : shape[-1]]


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by flash attention.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        dropout: 0.
        causal: Token t sees those up to t; S is T then.
        attn_mask: None.
        scale: Of scores.

    Returns:
        [B, Hq, T, D] and [B, Hq, T].
    """
    width = query.shape[-1]
    given = (_loadable(t) for t in (query, key, value))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(*given, dropout, causal, False, scale=scale)
    return out[..., :width], lse


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """Gradients of queries, keys and values by flash attention.

    Args:
        grad: Of the output [B, Hq, T, D].
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        out: The merged output [B, Hq, T, D].
        lse: The merged log-sum-exp [B, Hq, T], in float32.
        dropout: 0.
        causal: As in `flash_forward`.
        attn_mask: None.
        scale: Of scores.
    """
    width, tokens = query.shape[-1], (query.shape[2], key.shape[2])
    given = (_loadable(t) for t in (grad, query, key, value, out))
    # the kernel knows no strides of log-sum-exps; without dropout it reads no random state
    random = lse.new_empty(2, dtype=torch.uint64)
    found = _aten._scaled_dot_product_flash_attention_backward(
        *given, lse.contiguous(), None, None, *tokens, dropout, causal, random, random, scale=scale
    )
    return [t[..., :width] for t in found]


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by memory-efficient attention.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        dropout: 0.
        causal: Token t sees those up to t.
        attn_mask: Added to scores [B or 1, 1, T, S], of the queries' type.
        scale: Of scores.

    Returns:
        [B, Hq, T, D] and [B, Hq, T]: zero, both of them, where nothing is seen.
    """
    width, rows = query.shape[-1], query.shape[2]
    mask = _mask_of_all(attn_mask, query)
    given = (_loadable(query), *(_loadable(_of_each_query_head(t, query)) for t in (key, value)))
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(*given, mask, True, dropout, causal, scale=scale)
    lse = lse[:, :, :rows]
    if mask is not None:
        # the kernel says -inf, as is right; the one for CPUs says 0
        lse = lse.masked_fill(torch.isinf(lse), 0.0)
    return out[..., :width], lse


def efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """Gradients of queries, keys and values by memory-efficient attention.

    Args:
        grad: Of the output [B, Hq, T, D].
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        out: The merged output [B, Hq, T, D].
        lse: The merged log-sum-exp [B, Hq, T], in float32.
        dropout: 0.
        causal: As in `efficient_forward`.
        attn_mask: As there.
        scale: Of scores.
    """
    width, heads = query.shape[-1], key.shape[1]
    mask = _mask_of_all(attn_mask, query)
    given = (_loadable(query), *(_loadable(_of_each_query_head(t, query)) for t in (key, value)))
    # rows behind the last one are to have weights of exp(score - inf)
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ROW), value=float("inf")).contiguous()
    # without dropout it reads no random state
    random = lse.new_empty((), dtype=torch.int64)
    grad, out = (_by_token(_loadable(t)) for t in (grad, out))
    *found, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, *given, mask, out, lse, random, random, dropout, [True, True, True, False], causal, scale=scale
    )
    query_grad, key_grad, value_grad = (t[..., :width] for t in found)
    if heads < query.shape[1]:
        key_grad, value_grad = (t.unflatten(1, (heads, -1)).sum(dim=2) for t in (key_grad, value_grad))
    return [query_grad, key_grad, value_grad]


def _loadable(tensor: Tensor) -> Tensor:
    """A tensor [B, H, T, D] as the kernels can load it: zeros up to a multiple of 8 behind D, rows begin at one."""
    short = -tensor.shape[-1] % _LOADED
    if short:
        return F.pad(tensor, (0, short))
    *strides, last = tensor.stride()
    if last == 1 and not any(at % _LOADED for at in (*strides, tensor.storage_offset())):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _by_token(tensor: Tensor) -> Tensor:
    """A tensor [B, H, T, D] in the order [B, T, H, D], which the kernel takes for granted."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _of_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values [B, Hkv, S, D] as [B, Hq, S, D]."""
    group = query.shape[1] // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _mask_of_all(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as the kernel can load it, [B, Hq, T, S]."""
    if mask is None:
        return None
    *strides, last = mask.stride()
    if last != 1 or any(at % _MASK_ROW for at in (*strides, mask.storage_offset())):
        mask = mask_memory(mask.shape, mask.dtype, mask.device).copy_(mask)
    return mask.expand(*query.shape[:3], -1)
