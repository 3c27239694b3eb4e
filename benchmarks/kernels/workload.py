"""What is measured: expert shapes, how many rows each expert gets, and tensors for both.

Shape legend: T rows of all groups, E experts, G groups = experts + replicas, D model dim, H hidden dim, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.traces.npz import read_trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "smartmoe-gpt-32e-dev.npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One model's expert layer, as one rank sees it."""

    name: str
    dim: int
    hidden: int
    experts: int
    top_k: int
    activation: str = "swiglu"

    @property
    def units(self) -> int:
        """Rows of w_in; a gate has as many again."""
        return self.hidden * (2 if self.activation == "swiglu" else 1)

    @property
    def flops_per_row(self) -> int:
        """Of one forward pass; the backward pass takes twice as many."""
        return 2 * self.dim * (self.units + self.hidden)


GPU_SHAPES = [
    Shape(name="mixtral-8x7b", dim=4096, hidden=14336, experts=8, top_k=2),
    Shape(name="qwen3-30b-a3b", dim=2048, hidden=768, experts=128, top_k=8),
    Shape(name="deepseek-v3-ep8", dim=7168, hidden=2048, experts=32, top_k=8),  # 256 experts over 8 ranks
    Shape(name="moe-gpt-m", dim=1024, hidden=2048, experts=16, top_k=2, activation="gelu"),
]
CPU_SHAPES = [
    Shape(name="mixtral-8x7b/8", dim=512, hidden=1792, experts=8, top_k=2),
    Shape(name="qwen3-30b-a3b/8", dim=256, hidden=96, experts=128, top_k=8),
    Shape(name="moe-gpt-m/4", dim=256, hidden=512, experts=16, top_k=2, activation="gelu"),
]
SKEWS = ("uniform", "trace", "one-expert-90%")


def trace_counts() -> npt.NDArray[np.float64]:
    """Choices of all ranks by expert in every step and layer of the real trace, [steps * layers, E]."""
    counts = read_trace(TRACE).counts.sum(axis=2)
    return counts.reshape(-1, counts.shape[-1]).astype(np.float64)


def trace_shares(experts: int) -> npt.NDArray[np.float64] | None:
    """Expert shares, falling, of the real trace's step and layer of median skew, resampled; None without the file."""
    if not TRACE.exists():
        return None
    flat = trace_counts()
    skew = flat.max(axis=1) / flat.mean(axis=1)
    chosen = np.sort(flat[np.argsort(skew)[skew.size // 2]])[::-1]
    at = (np.arange(experts) + 0.5) / experts * chosen.size - 0.5
    shares = np.interp(at, np.arange(chosen.size), chosen)
    normal: npt.NDArray[np.float64] = shares / shares.sum()
    return normal


def shares_of(skew: str, experts: int) -> npt.NDArray[np.float64] | None:
    """Each expert's share of the rows; None where the trace is not there."""
    if skew == "uniform":
        return np.full(experts, 1 / experts)
    if skew == "one-expert-90%":
        return np.array([0.9] + [0.1 / (experts - 1)] * (experts - 1))
    return trace_shares(experts)


def group_sizes(shares: npt.NDArray[np.float64], rows: int, replicas: int) -> list[int]:
    """Rows of every group, homes first: integers that sum to `rows`; each replica shares a hottest expert."""
    exact = np.floor(np.cumsum(shares) * rows + 1e-9).astype(np.int64)
    exact[-1] = rows
    load = np.diff(exact, prepend=0)
    copies = np.ones(load.size, dtype=np.int64)
    extra = []
    for _ in range(replicas):
        hottest = int(np.argmax(load / copies))
        copies[hottest] += 1
        extra.append(hottest)
    home = load // copies + load % copies
    return [*home.tolist(), *(int(load[e] // copies[e]) for e in extra)]


@dataclass(slots=True)
class Tensors:
    """One input set: rows, the gradient of the result, and the experts."""

    x: Tensor
    d_y: Tensor
    sizes: list[int]
    home: ExpertWeights
    replicas: list[ExpertWeights]
    replica_grads: list[ExpertWeights]

    def inputs(self) -> list[Tensor]:
        return [self.x, *(p for w in (self.home, *self.replicas) for p in w if p is not None)]


def experts_of(
    shape: Shape, replicas: int, device: str, dtype: torch.dtype
) -> tuple[ExpertWeights, list[ExpertWeights]]:
    """Home parameters, stacked, and replicas' parameters, each where it is; no biases."""

    def draw(*size: int) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype).normal_(std=size[-1] ** -0.5).requires_grad_()

    home = ExpertWeights(draw(shape.experts, shape.units, shape.dim), draw(shape.experts, shape.dim, shape.hidden))
    return home, [ExpertWeights(draw(shape.units, shape.dim), draw(shape.dim, shape.hidden)) for _ in range(replicas)]


def tensors_of(
    shape: Shape, sizes: list[int], device: str, dtype: torch.dtype, *, sets: int, seed: int = 0
) -> list[Tensors]:
    """`sets` input sets that share their experts."""
    torch.manual_seed(seed)
    home, replicas = experts_of(shape, len(sizes) - shape.experts, device, dtype)
    grads = [ExpertWeights(torch.zeros_like(w.w_in), torch.zeros_like(w.w_out)) for w in replicas]
    rows = sum(sizes)

    def draw() -> Tensor:
        return torch.randn(rows, shape.dim, device=device, dtype=dtype)

    return [Tensors(draw().requires_grad_(), draw(), sizes, home, replicas, grads) for _ in range(sets)]
