"""What torch's sources say of its attention operators for NVIDIA GPUs, on the host: naive twins under their own names.

They refuse what the operators refuse, read memory as those do, and give log-sum-exps in the same form. They compute in
the type that they are given, so that float64 shows errors of what calls them. The sources are snapshots of
torch's main branch, of several ages: of `aten/src/ATen/native/transformers/cuda/`, the files `attention.cu`,
`attention_backward.cu`, `flash_attn/flash_api.cpp` and `mem_eff_attention/kernel_forward.h`, `kernel_backward.h`.

Shape legend: B sequences, Hq and Hkv heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pipeline_balance.slices import gpu, kernel
from pipeline_balance.slices.kernel import Kernel

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
_INF = float("inf")


def _require(right: bool, text: str) -> None:
    if not right:
        raise RuntimeError(text)


def _aligned(name: str, tensor: Tensor) -> None:
    """What lies in rows of 16 bytes of half precision, from the start of memory on."""
    *strides, last = tensor.stride()
    _require(last == 1, f"{name} must have contiguous last dimension")
    # the stride of a dimension of size 1 is not read
    odd = [s for s, n in zip(strides, tensor.shape[:-1], strict=True) if n > 1 and s % 8]
    _require(not odd and tensor.storage_offset() % 8 == 0, f"{name} is not correctly aligned: {tensor.stride()}")


def _scores(query: Tensor, key: Tensor, scale: float | None, hidden: Tensor | None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores if hidden is None else scores.masked_fill(hidden, -_INF)


def _attended(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output, 0 where all is hidden, and log-sum-exp, -inf there."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -_INF, 0.0)[..., None]).exp()
    return weights @ value.repeat_interleave(scores.shape[1] // value.shape[1], 1), lse


def _gradients(
    scores: Tensor, lse: Tensor, grad: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    weights = (scores - lse[..., None]).exp()
    drawn = grad @ value.repeat_interleave(group, 1).mT - (grad * out).sum(-1, keepdim=True)
    of_scores = weights * drawn * scale
    found = of_scores.mT @ query, weights.mT @ grad
    key_grad, value_grad = (t.unflatten(1, (-1, group)).sum(2) for t in found)
    return of_scores @ key.repeat_interleave(group, 1), key_grad, value_grad


def _of_tokens(tensor: Tensor) -> Tensor:
    """The same [B, H, T, D] in new memory [B, T, H, D]."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


# --- flash attention -------------------------------------------------------------------------------------------


def _check_flash(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
    for tensor in (query, key, value):
        _require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    _require(query.shape[-1] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    _require(query.shape[-1] <= 256, "FlashAttention only supports head dimension at most 256")
    _require(query.shape[1] % key.shape[1] == 0, "Number of heads in key/value must divide number of heads in query")
    same = key.shape == value.shape and key.shape[0] == query.shape[0] and key.shape[-1] == query.shape[-1]
    _require(same, f"shapes {query.shape}, {key.shape}, {value.shape}")
    _require(dropout == 0.0, "no test draws random numbers")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _aligned(name, tensor)


def _later(rows: int, columns: int, causal: bool) -> Tensor | None:
    # bottom right; one query sees all
    return torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1) if causal and rows > 1 else None


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    _check_flash(query, key, value, dropout_p)
    rows, columns = query.shape[2], key.shape[2]
    out, lse = _attended(_scores(query, key, scale, _later(rows, columns, is_causal)), value)
    # inf, and not -inf, where all is hidden
    lse = lse.masked_fill(lse == -_INF, _INF)
    random = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return torch.empty_like(query).copy_(out), lse, None, None, rows, columns, *random, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_flash(query, key, value, dropout_p)
    rows, columns = query.shape[2], key.shape[2]
    _require(cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (rows, columns), "not of one length")
    _require(grad_out.shape == out.shape == query.shape, f"shapes {grad_out.shape}, {out.shape}, {query.shape}")
    # whatever its strides are
    lse = logsumexp.as_strided(query.shape[:3], (query.shape[1] * rows, rows, 1))
    scores = _scores(query, key, scale, _later(rows, columns, is_causal))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    found = _gradients(scores, lse, grad_out, out, query, key, value, factor)
    first, second, third = (torch.empty_like(t).copy_(g) for t, g in zip((query, key, value), found, strict=True))
    return first, second, third


# --- memory-efficient attention --------------------------------------------------------------------------------


def _check_efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> None:
    _require(query.shape[1] == key.shape[1] == value.shape[1], "query.size(2) == key.size(2)")
    same = key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and key.shape[-1] == query.shape[-1]
    _require(same, f"shapes {query.shape}, {key.shape}, {value.shape}")
    _require(dropout == 0.0, "no test draws random numbers")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require(tensor.shape[-1] % 8 == 0, f"{name}: last dimension must be divisible by 8")
        _aligned(name, tensor)
    if bias is not None:
        _require(bias.dtype == query.dtype, "invalid dtype for bias - should match query's dtype")
        _require(bias.shape == (*query.shape[:3], key.shape[2]), f"attn_bias: wrong shape {bias.shape}")
        _aligned("attn_bias", bias)
        # rows are loaded 16 bytes at a time, the last one too
        end = bias.storage_offset() + sum(s * (n - 1) for s, n in zip(bias.stride(), bias.shape, strict=True)) + 1
        _require(bias.untyped_storage().size() // bias.itemsize >= -(-end // 8) * 8, "attn_bias: read out of bounds")


def _hidden_above(rows: int, columns: int, causal: bool) -> Tensor | None:
    # top left
    return torch.ones(rows, columns, dtype=torch.bool).triu(1) if causal else None


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_efficient(query, key, value, attn_bias, dropout_p)
    _require(compute_log_sumexp, "no log-sum-exp is asked for")
    rows = query.shape[2]
    scores = _scores(query, key, scale, _hidden_above(rows, key.shape[2], is_causal))
    out, lse = _attended(scores if attn_bias is None else scores + attn_bias, value)
    lse = torch.nn.functional.pad(lse, (0, -rows % 32), value=_INF)
    return _of_tokens(out), lse, torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    _check_efficient(query, key, value, attn_bias, dropout_p)
    _, heads, rows, width = query.shape
    _require(list(grad_input_mask) == [True, True, True, False], "no mask learns")
    for stride, size in zip(logsumexp.stride()[:2], logsumexp.shape[:2], strict=True):
        _require(size == 1 or stride % 8 == 0, "LSE is not correctly aligned")
    _require(logsumexp.stride(2) == 1 and logsumexp.shape[2] == rows + -rows % 32, "LSE is read up to 32 rows")
    _require(bool((logsumexp[:, :, rows:] == _INF).all()), "LSE is read behind its rows")
    _aligned("output", out)
    # its rows are as far apart as those of memory [B, T, H, D], whatever its strides are
    out = out.as_strided(out.shape, (out.stride(0), out.stride(1), heads * width, 1))
    scores = _scores(query, key, scale, _hidden_above(rows, key.shape[2], is_causal))
    scores = scores if attn_bias is None else scores + attn_bias
    factor = width**-0.5 if scale is None else scale
    found = _gradients(scores, logsumexp[:, :, :rows], grad_out_, out, query, key, value, factor)
    first, second, third = (_of_tokens(t) for t in found)
    return first, second, third, None


# --- in force --------------------------------------------------------------------------------------------------


@contextmanager
def chosen_for(dtype: torch.dtype) -> Iterator[None]:
    """Within this context kernels are those of a GPU and for these numbers, whatever is computed, wherever it is."""
    rule = kernel.chosen.__wrapped__

    def chosen(device: torch.device, given: torch.dtype, width: int, plain: bool) -> Kernel:
        found: Kernel = rule(torch.device("cuda"), dtype, width, plain)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "capability", lambda device: (9, 0))
        patch.setattr(kernel, "chosen", chosen)
        patch.setattr(kernel, "on_device", lambda query: True)
        yield


@contextmanager
def on_a_gpu(dtype: torch.dtype) -> Iterator[Counter[str]]:
    """Within this context attention over slices of tensors on the host calls the GPU's operators, which are the twins.

    Args:
        dtype: See `chosen_for`.

    Yields:
        How often each operator was called.
    """
    calls: Counter[str] = Counter()
    twins = {
        FLASH: flash,
        f"{FLASH}_backward": flash_backward,
        EFFICIENT: efficient,
        f"{EFFICIENT}_backward": efficient_backward,
    }

    def counted(name: str) -> object:
        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return twins[name](*args, **kwargs)  # type: ignore[operator]

        return call

    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        for name in twins:
            library.impl(name, counted(name))
        with chosen_for(dtype):
            yield calls
    finally:
        library._destroy()
