"""The grouped FFN against the definition first, and then, if it is right, against its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.kernels import peers
from benchmarks.kernels.timing import Timer, beside
from benchmarks.kernels.workload import SKEWS, Shape, Tensors, group_sizes, shares_of, tensors_of


class WrongResult(RuntimeError):
    """A kernel disagrees with its definition; it is not timed."""


def forward(run: peers.Run, t: Tensors) -> Callable[[], object]:
    def go() -> Tensor:
        with torch.no_grad():
            return run(t)

    return go


def both(run: peers.Run, t: Tensors) -> Callable[[], object]:
    def go() -> None:
        for p in t.inputs():
            p.grad = None
        run(t).backward(t.d_y)

    return go


def compare(name: str, got: Tensor, want: Tensor) -> None:
    """Raise WrongResult unless `got` is within the rounding of a few stored intermediates of `want`."""
    eps = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[want.dtype]
    if want.numel() == 0:
        return
    error = float((got.detach().float() - want.detach().float()).abs().max())
    limit = eps * max(float(want.detach().float().abs().max()), 1e-3)
    if not error <= limit:
        raise WrongResult(f"{name}: off by {error:.3g}, at most {limit:.3g} was expected")


def check(shape: Shape, t: Tensors) -> None:
    """Outputs and gradients of ours against the definition, with fresh memory full of NaN."""
    for w in t.replica_grads:
        w.w_in.zero_()
        w.w_out.zero_()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        both(peers.ours(shape), t)()
        got = [t.x.grad, *(p.grad for p in t.home if p is not None)]
        got += [g for w in t.replica_grads for g in w if g is not None]
        with torch.no_grad():
            y = peers.ours(shape)(t)
    finally:
        torch.use_deterministic_algorithms(False)
    both(peers.definition(shape), t)()
    want = [p.grad for p in t.inputs()]
    with torch.no_grad():
        compare(f"{shape.name} output", y, peers.definition(shape)(t))
    for i, (g, w_) in enumerate(zip(got, want, strict=True)):
        if g is not None and w_ is not None:
            compare(f"{shape.name} gradient {i}", g, w_)


def measure(
    shapes: list[Shape],
    tokens_of: Callable[[Shape], list[int]],
    replicas_of: tuple[int, ...],
    dtype: torch.dtype,
    timer: Timer,
) -> Iterator[Row]:
    """One row for each shape, number of tokens, skew, number of replicas, pass and peer."""
    for shape in shapes:
        for tokens in tokens_of(shape):
            for skew in SKEWS:
                shares = shares_of(skew, shape.experts)
                if shares is None:
                    yield {"op": "grouped_ffn", "shape": shape.name, "skew": skew, "note": "no trace: not measured"}
                    continue
                for replicas in replicas_of:
                    if replicas and skew == "uniform":
                        continue  # nothing is hot
                    sizes = group_sizes(shares, tokens * shape.top_k, replicas)
                    try:
                        yield from _case(shape, tokens, skew, sizes, dtype, timer)
                    except torch.OutOfMemoryError:
                        note = f"{tokens} tokens do not fit in memory: not measured"
                        yield {"op": "grouped_ffn", "shape": shape.name, "skew": skew, "note": note}


def _case(shape: Shape, tokens: int, skew: str, sizes: list[int], dtype: torch.dtype, timer: Timer) -> Iterator[Row]:
    base: Row = {
        "op": "grouped_ffn",
        "shape": shape.name,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "skew": skew,
        "replicas": len(sizes) - shape.experts,
    }
    sets = tensors_of(shape, sizes, timer.device, dtype, sets=2)
    try:
        check(shape, sets[0])
    except WrongResult as wrong:
        yield {**base, "wrong": str(wrong)}
        return
    limit = (6 << 30) if timer.device == "cuda" else (1 << 30)
    runs, absent = {"ours": peers.ours(shape)}, {}
    for name, make in peers.PEERS.items():
        if name == "padded_bmm" and peers.padded_bytes(sets[0], shape) > limit:
            absent[name] = "padding does not fit in memory"
            continue
        try:
            both(make(shape), sets[0])()
        except (RuntimeError, AttributeError) as error:  # the other peers are still worth measuring
            absent[name] = f"does not run here: {str(error).splitlines()[0]}"
            continue
        runs[name] = make(shape)
    for kind, wrap, passes in (("forward", forward, 1), ("forward+backward", both, 3)):
        us = timer.medians_us({name: [wrap(run, t) for t in sets] for name, run in runs.items()})
        flops = shape.flops_per_row * sum(sizes) * passes
        for peer in peers.PEERS:
            if peer not in us:
                yield {**base, "pass": kind, "peer": peer, "note": absent[peer]}
                continue
            yield {
                **base,
                "pass": kind,
                **beside(us, peer),
                "tflops": flops / us["ours"] / 1e6,
                "fraction_of_dense": us["dense"] / us["ours"] if "dense" in us else None,
            }
    for t in sets:
        for p in t.inputs():
            p.grad = None
