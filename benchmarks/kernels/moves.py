"""Permute, unpermute, the gate and the send order: checked, and timed against a copy of the bytes they must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.common import Row
from benchmarks.kernels.ffn import WrongResult, compare
from benchmarks.kernels.timing import Timer, beside
from benchmarks.kernels.workload import Shape, shares_of
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.route import route
from prophet.kernels.split_apply import send_order


def measure(
    shapes: list[Shape], tokens_of: Callable[[Shape], list[int]], dtype: torch.dtype, timer: Timer
) -> Iterator[Row]:
    """Rows for each op, shape and number of tokens, at the trace's skew, or uniform without it."""
    device = timer.device
    for shape in shapes:
        shares = shares_of("trace", shape.experts)
        skew = "uniform" if shares is None else "trace"
        for tokens in tokens_of(shape):
            base: Row = {"shape": shape.name, "tokens": tokens, "skew": skew}
            base["dtype"] = str(dtype).removeprefix("torch.")
            torch.manual_seed(0)
            logits = torch.rand(tokens, shape.experts, device=device).log_().neg_().log_().neg_()
            if shares is not None:
                logits += torch.from_numpy(shares).to(device, torch.float32).clamp_min(1e-6).log()
            for op, moved_bytes, ours, peer in _ops(shape, tokens, logits, device, dtype):
                try:
                    _check(op, ours(), peer(), logits)
                except WrongResult as wrong:
                    yield {**base, "op": op, "wrong": str(wrong)}
                    continue
                half = torch.empty(max(moved_bytes // 2, 16), dtype=torch.int8, device=device)
                target = torch.empty_like(half)
                runs: dict[str, list[Callable[[], object]]] = {
                    "ours": [ours],
                    "definition": [peer],
                    "copy": [partial(target.copy_, half)],
                }
                us = timer.medians_us(runs)
                yield {
                    **base,
                    "op": op,
                    **beside(us, "definition"),
                    "gb_per_s": moved_bytes / us["ours"] / 1e3,
                    "fraction_of_copy": us["copy"] / us["ours"],
                }


def _check(op: str, got: object, want: object, logits: torch.Tensor) -> None:
    a = got if isinstance(got, tuple) else (got,)
    b = want if isinstance(want, tuple) else (want,)
    if op == "route":  # of experts whose scores round alike, either may be chosen
        a, b = ((logits.gather(1, ids), weights, counts.sum()) for ids, weights, counts in (a, b))
    for i, (g, w) in enumerate(zip(a, b, strict=True)):
        if g.dtype.is_floating_point:
            compare(f"{op} {i}", g, w)
        elif not torch.equal(g, w):
            raise WrongResult(f"{op} {i}: indices differ")


def _ops(
    shape: Shape, tokens: int, logits: torch.Tensor, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, int, Callable[[], object], Callable[[], object]]]:
    """Name, bytes that must be read and written, ours and the definition, for each op and pass."""
    k, dim = shape.top_k, shape.dim
    ids = logits.topk(k, dim=-1).indices
    split = torch.bincount(ids.reshape(-1), minlength=shape.experts).unsqueeze(1)
    plan = send_order(ids, None, split)
    x = torch.randn(tokens, dim, device=device, dtype=dtype)
    rows = torch.randn(tokens * k, dim, device=device, dtype=dtype)
    weights = torch.rand(tokens, k, device=device)
    token_bytes, row_bytes = x.numel() * x.element_size(), rows.numel() * rows.element_size()
    index_bytes = 8 * tokens * k

    def backward_of(y: torch.Tensor, inputs: list[torch.Tensor], d_y: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(y, inputs, d_y, retain_graph=True)

    yield (
        "route",
        logits.numel() * 4 + tokens * k * 12,
        lambda: tuple(route(logits, k)),
        lambda: tuple(route(logits, k, impl="naive")),
    )
    yield (
        "send_order",
        index_bytes * 3,
        lambda: tuple(send_order(ids, None, split)),
        lambda: tuple(send_order(ids, None, split, impl="naive")),
    )
    moved = token_bytes + row_bytes + index_bytes
    yield "permute", moved, lambda: permute(x, *plan), lambda: permute(x, *plan, impl="naive")
    yield (
        "unpermute",
        moved + weights.numel() * 4,
        lambda: unpermute(rows, *plan, weights),
        lambda: unpermute(rows, *plan, weights, impl="naive"),
    )
    x.requires_grad_()
    yield (
        "permute backward",
        moved,
        backward_of(permute(x, *plan), [x], rows),
        backward_of(permute(x, *plan, impl="naive"), [x], rows),
    )
    leaf, w = rows.clone().requires_grad_(), weights.requires_grad_()
    d_y = x.detach()
    yield (
        "unpermute backward",
        moved + row_bytes + 2 * w.numel() * 4,
        backward_of(unpermute(leaf, *plan, w), [leaf, w], d_y),
        backward_of(unpermute(leaf, *plan, w, impl="naive"), [leaf, w], d_y),
    )
