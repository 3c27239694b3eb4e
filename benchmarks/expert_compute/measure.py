"""The experts' forward and backward pass on all ranks at once, and the dense products of as many rows.

Shape legend: G experts that a rank computes, T rows of all of them, D model dim, H hidden dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.kernels.layer import dense_passes
from prophet.experts.feed_forward import FeedForwardBank
from prophet.kernels.grouped_ffn import grouped_ffn
from prophet.machine.calibrate import shape_of
from prophet.machine.measure import Probe
from prophet.ranks.collective import Collective
from prophet.spec import Activation

PASSES = ("expert_forward", "expert_backward")
# of the largest value: what products summed in another order may differ by
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
Run = Callable[[], float | None]


def answer(bank: FeedForwardBank, x: Tensor, sizes: list[int], impl: str) -> list[Tensor]:
    """The output [T, D], and the gradients of the rows and of w_in where all outputs count alike."""
    x = x.detach().requires_grad_()
    bank.zero_grad()
    out = grouped_ffn(x, sizes, bank.weights(), bank.activation, impl=impl)  # type: ignore[arg-type]
    out.sum().backward()
    return [t.detach().clone() for t in (out, x.grad, bank.w_in.grad) if t is not None]


def wrong(bank: FeedForwardBank, x: Tensor, sizes: list[int]) -> str | None:
    """How the kernel differs from its definition, or None."""
    pairs = zip(answer(bank, x, sizes, "auto"), answer(bank, x, sizes, "naive"), strict=True)
    for name, (got, expected) in zip(("output", "gradient of rows", "gradient of w_in"), pairs, strict=True):
        gap, largest = float((got - expected).abs().max()), float(expected.abs().max())
        if not gap <= TOLERANCE[x.dtype] * max(largest, 1e-30):
            return f"{name}: differs from the definition by {gap:.3g} where the largest value is {largest:.3g}"
    return None


def passes(bank: FeedForwardBank, x: Tensor, sizes: list[int], sync: Callable[[], None]) -> tuple[Run, Run]:
    """(forward, backward), to be called; the second times itself."""
    x = x.detach().requires_grad_()

    def forward() -> None:
        bank.run(x, sizes)

    def backward() -> float:
        out = bank.run(x, sizes)
        grad = torch.ones_like(out)
        x.grad = None
        bank.zero_grad()
        sync()
        before = time.perf_counter()
        out.backward(grad)
        sync()
        return time.perf_counter() - before

    return forward, backward


def measure(
    collective: Collective,
    *,
    tokens_per_expert: Sequence[int],
    experts: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    activation: Activation,
    repeats: int,
    device: str,
) -> list[Row]:
    """Two rows, forward and backward, by type, shape (dim, hidden), number of experts and of tokens; collective."""
    probe = Probe(collective, torch.device(device), repeats)
    rows: list[Row] = []
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        for dim, hidden in shapes:
            shape = shape_of(dim, hidden, activation, dtype)
            runs: list[Run] = []
            cases: list[Row] = []
            for g in experts:
                bank = FeedForwardBank(dim, hidden, g, activation=activation).to(device, dtype)
                for tokens in tokens_per_expert:
                    x = torch.randn(g * tokens, dim, device=device).to(dtype)
                    case: Row = {"ranks": collective.size, "dim": dim, "hidden": hidden, "activation": activation}
                    case |= {"dtype": dtype_name, "experts": g, "tokens_per_expert": tokens, "tokens": g * tokens}
                    if (problem := wrong(bank, x, [tokens] * g)) is not None:
                        rows.append({**case, "wrong": problem})
                        continue
                    dense = dense_passes(g * tokens, bank.w_in[0].detach(), bank.w_out[0].detach())
                    flops = g * tokens * shape.forward_flops_per_token
                    for i, operation in enumerate(PASSES):
                        cases.append({"operation": operation, **case, "flops": flops * (i + 1)})
                        runs += [passes(bank, x, [tokens] * g, probe.sync)[i], dense[i]]
            if cases:
                rows += timed(probe, cases, runs)
    return rows


def timed(probe: Probe, cases: Sequence[Row], runs: Sequence[Run]) -> list[Row]:
    """The cases with what was measured; `runs` has two of each, the experts' and the dense one."""
    (lower, median), by_rank = probe.typical(runs)
    rows = []
    for i, case in enumerate(cases):
        seconds, dense_s = float(lower[2 * i]), float(lower[2 * i + 1])
        flops = case.pop("flops")
        rows.append(
            {
                **case,
                "seconds": seconds,
                "median_s": float(median[2 * i]),
                "seconds_by_rank": by_rank[2 * i].tolist(),
                "flops_per_s": flops / seconds,
                "dense_s": dense_s,
                "fraction_of_dense": dense_s / seconds,
            }
        )
    return rows
