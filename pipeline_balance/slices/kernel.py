"""torch's attention with the log-sum-exp that merging needs: which kernel computes what, and what its calls are given.

Shape legend: B sequences, T tokens of a slice, S tokens of a part of its prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline_balance.slices import gpu
from prophet.errors import SpecError

# Rows whose scores are there at once where they are capped
_STRIP = 64


class Kernel(NamedTuple):
    """A pair of functions with the arguments of torch's attention for CPUs.

    Attributes:
        forward: Gives output and log-sum-exp, both 0 where a token sees nothing.
        backward: Takes the merged ones, and gives gradients of queries, keys and values.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


# called directly: the public function returns no log-sum-exp
CPU = Kernel(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
FLASH = Kernel(gpu.flash_forward, gpu.flash_backward)
EFFICIENT = Kernel(gpu.efficient_forward, gpu.efficient_backward)


@lru_cache(maxsize=256)
def chosen(device: torch.device, dtype: torch.dtype, width: int, plain: bool) -> Kernel:
    """The kernel that computes an attention. Scores with a soft cap need none: see `capped_forward`.

    Args:
        device: Of all tensors.
        dtype: Likewise.
        width: Head dim.
        plain: All is seen; or as many tokens as there are keys see those up to them.

    Raises:
        SpecError: Torch has none, or none whose log-sum-exps are known.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise SpecError(f"attention over slices has kernels for CPUs and NVIDIA GPUs, got tensors on {device}")
    if torch.version.hip is not None:
        raise SpecError("attention over slices has kernels for CPUs and NVIDIA GPUs; on AMD's, log-sum-exps differ")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise SpecError(
            f"no kernel of torch for GPUs computes attention with log-sum-exps in {dtype}: train slices in float32, "
            "bfloat16 or float16 there"
        )
    found = gpu.capability(device)
    if dtype == torch.bfloat16 and found < (8, 0):
        raise SpecError(
            f"attention over slices in bfloat16 needs compute capability 8.0, {device} has {found[0]}.{found[1]}: "
            "train in float16 or float32"
        )
    if plain and dtype != torch.float32 and found >= (8, 0) and gpu.flash_trains(width, found):
        return FLASH
    return EFFICIENT


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of an attention, both 0 where a token sees nothing.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        dropout: 0.
        causal: Token t sees those up to t.
        attn_mask: Added to scores [B or 1, 1, T, S].
        scale: Of scores.
    """
    computes = _kernel(query, key, causal, attn_mask).forward
    found: tuple[Tensor, Tensor] = computes(query, key, value, dropout, causal, attn_mask=attn_mask, scale=scale)
    return found


def backward(
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
) -> Sequence[Tensor]:
    """Gradients of queries, keys and values.

    Args:
        grad: Of the output [B, Hq, T, D].
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        out: The merged output [B, Hq, T, D].
        lse: The merged log-sum-exp [B, Hq, T].
        dropout: 0.
        causal: As in `forward`.
        attn_mask: As there.
        scale: As there.
    """
    computes = _kernel(query, key, causal, attn_mask).backward
    found: Sequence[Tensor] = computes(
        grad, query, key, value, out, lse, dropout, causal, attn_mask=attn_mask, scale=scale
    )
    return found


def on_device(query: Tensor) -> bool:
    """Whether queries are on a device; its kernels compute little of what a causal mask hides, the CPU's all of it."""
    return not query.is_cpu


def _kernel(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> Kernel:
    if not on_device(query):
        return CPU
    # flash attention's causal mask is that of a square
    plain = mask is None and (not causal or query.shape[2] == key.shape[2])
    return chosen(query.device, query.dtype, query.shape[3], plain)


def additive(seen: Tensor, query: Tensor) -> Tensor:
    """What is added to the scores of queries [B, 1, T, S]: zero, or -inf where a token is not seen [B, T, S]."""
    return _additive(seen, query.dtype, query.device)


def _additive(seen: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    make = torch.zeros if device.type == "cpu" else gpu.mask_memory
    mask = make(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen.to(device, non_blocking=True), float("-inf"))[:, None]


@lru_cache(maxsize=16)
def band(rows: int, columns: int, shift: int, causal: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to scores [1, 1, rows, columns] where row i sees columns from i + `shift` on.

    All layers and passes have the same few, so they are kept.

    Args:
        rows: How many.
        columns: How many.
        shift: See above.
        causal: Row i sees columns up to i only.
        dtype: Of queries.
        device: Of queries.
    """
    seen = torch.ones(1, rows, columns, dtype=torch.bool, device="cpu").triu(shift)
    return _additive(seen.tril() if causal else seen, dtype, device)


def capped_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """As `forward`, of scores c tanh(score / c), which torch's kernels for CPUs do not have.

    The scores of 64 rows are there at once, and two tensors of their size: 3 * 64 Hq S numbers for each sequence.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        causal: Token t sees those up to t.
        mask: Added to capped scores, [B or 1, 1, T, S].
        scale: Of scores.
        cap: c.

    Returns:
        Output [B, Hq, T, D], and log-sum-exp [B, Hq, T]: zero, as the output, where nothing is seen.
    """
    keys, values = (t.to(_wide(t))[:, :, None] for t in (key, value))
    outs, lses = [], []
    for at in _strips(query.shape[2]):
        _, scores = _capped(query, keys, at, causal, mask, scale, cap)
        lse = torch.logsumexp(scores, dim=-1)
        lse = lse.masked_fill(torch.isinf(lse), 0.0)
        weights = scores.sub_(lse[..., None]).exp_()
        outs.append((weights @ values).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2).to(query.dtype), torch.cat(lses, dim=2)


def capped_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward`, of capped scores.

    Args:
        grad: Of the output [B, Hq, T, D].
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: Likewise.
        out: The merged output [B, Hq, T, D].
        lse: The merged log-sum-exp [B, Hq, T].
        causal: As in `capped_forward`.
        mask: As there.
        scale: As there.
        cap: As there.

    Returns:
        Gradients of queries, keys and values.
    """
    wide = _wide(query)
    keys, values = (t.to(wide)[:, :, None] for t in (key, value))
    key_grad, value_grad = (torch.zeros_like(t, dtype=wide) for t in (key, value))
    query_grads = []
    for at in _strips(query.shape[2]):
        queries, grads, outs = (_grouped(t[:, :, at].to(wide), key.shape[1]) for t in (query, grad, out))
        bent, scores = _capped(query, keys, at, causal, mask, scale, cap)
        weights = scores.sub_(_grouped(lse[:, :, at], key.shape[1])[..., None]).exp_()
        value_grad += (weights.mT @ grads).sum(dim=2)
        drawn = (grads @ values.mT).sub_((grads * outs).sum(dim=-1, keepdim=True))
        # the derivative of c tanh(score / c) is 1 - tanh ** 2
        score_grads = drawn.mul_(weights).mul_(bent.square_().neg_().add_(1.0)).mul_(scale)
        query_grads.append((score_grads @ keys).flatten(1, 2))
        key_grad += (score_grads.mT @ queries).sum(dim=2)
    query_grad = torch.cat(query_grads, dim=2)
    return query_grad.to(query.dtype), key_grad.to(query.dtype), value_grad.to(query.dtype)


def _capped(
    query: Tensor, keys: Tensor, at: slice, causal: bool, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """tanh(score / c) of some rows [B, Hkv, Hq / Hkv, rows, S], and their scores, capped and masked."""
    bent = torch.tanh(_grouped(query[:, :, at].to(keys.dtype), keys.shape[1]) @ keys.mT * (scale / cap))
    scores = bent * cap
    if mask is not None:
        scores += mask[:, :, None, at]
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(at.start + 1)
        scores.masked_fill_(later, float("-inf"))
    return bent, scores


def _grouped(tensor: Tensor, keys: int) -> Tensor:
    """[B, Hq, ...] as [B, Hkv, Hq / Hkv, ...]."""
    grouped: Tensor = tensor.unflatten(1, (keys, -1))
    return grouped


def _strips(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _STRIP):
        yield slice(start, min(start + _STRIP, rows))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def without_blind(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The log-sum-exp [B, Hq, T], of nothing where a token sees nothing: the kernel says 0 there."""
    return lse if mask is None else lse.masked_fill(torch.isinf(mask).all(dim=-1), float("-inf"))


def half_of(place: tuple[int, int], piece: int) -> tuple[int, int]:
    """Where one of the two pieces of a chunk is, whose tokens are `place`; pieces of chunk c are 2c and 2c + 1."""
    start, stop = place
    middle = start + (stop - start) // 2
    return (middle, stop) if piece % 2 else (start, middle)


@dataclass(frozen=True, slots=True)
class Heads:
    """What one attention of a model is like, whatever the batch.

    Attributes:
        queries: How many query heads.
        keys: How many key heads.
        width: Head dim.
        dtype: Of all of them.
        scale: Of scores.
        window: How many tokens a token sees; None: all before it.
        soft_cap: Of scores; None: there is none.
    """

    queries: int
    keys: int
    width: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def wide(self) -> torch.dtype:
        """In which sums are formed."""
        return torch.promote_types(self.dtype, torch.float32)


# a stack: a trace may cause another one
_tracing: list[list[Heads]] = []


@contextmanager
def tracing() -> Iterator[list[Heads]]:
    """Within this context attentions whose shapes are asked for are noted in what it yields."""
    _tracing.append([])
    try:
        yield _tracing[-1]
    finally:
        _tracing.pop()


def note(query: Tensor, key: Tensor, scale: float, window: int | None = None, soft_cap: float | None = None) -> None:
    """Somebody asks for the shapes of an attention.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        scale: Of scores.
        window: How many tokens a token sees.
        soft_cap: Of scores.
    """
    for noted in _tracing[-1:]:
        noted.append(Heads(query.shape[1], key.shape[1], query.shape[-1], query.dtype, scale, window, soft_cap))


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one message, those with the widest numbers first."""
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])


Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor that comes in a message."""


def bytes_of(likes: Sequence[Like]) -> int:
    """What a message takes."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in likes)


def unpacked(message: Tensor, likes: Sequence[Like]) -> list[Tensor]:
    """Reverse of `packed`."""
    parts = message.split([bytes_of([like]) for like in likes])
    return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, likes, strict=True)]
