"""What others run in place of the grouped FFN, each with its backward pass by autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.workload import Shape, Tensors
from prophet.kernels.grouped_ffn import grouped_ffn

Run = Callable[[Tensors], Tensor]


def activate(h: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return F.gelu(h)
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def ours(shape: Shape) -> Run:
    def run(t: Tensors) -> Tensor:
        return grouped_ffn(
            t.x,
            t.sizes,
            t.home,
            shape.activation,  # type: ignore[arg-type]
            replicas=t.replicas,
            replica_grads=t.replica_grads,
        )

    return run


def definition(shape: Shape) -> Run:
    def run(t: Tensors) -> Tensor:
        return grouped_ffn(t.x, t.sizes, t.home, shape.activation, replicas=t.replicas, impl="naive")  # type: ignore[arg-type]

    return run


def loop_of_mm(shape: Shape) -> Run:
    """One product after another; weights are indexed out of their stack."""

    def run(t: Tensors) -> Tensor:
        pairs = [
            *zip(t.home.w_in.unbind(0), t.home.w_out.unbind(0), strict=True),
            *((r.w_in, r.w_out) for r in t.replicas),
        ]
        rows = t.x.split(t.sizes)
        return torch.cat([activate(x @ a.t(), shape.activation) @ b.t() for x, (a, b) in zip(rows, pairs, strict=True)])

    return run


def stacked(t: Tensors) -> tuple[Tensor, Tensor]:
    """All experts in one tensor, as batched products need them: replicas cost a copy."""
    if not t.replicas:
        return t.home.w_in, t.home.w_out
    w_in = torch.cat([t.home.w_in, torch.stack([r.w_in for r in t.replicas])])
    return w_in, torch.cat([t.home.w_out, torch.stack([r.w_out for r in t.replicas])])


def grouped_mm(shape: Shape) -> Run:
    """`torch.nn.functional.grouped_mm`, or `torch._grouped_mm` where it has no public name; the activation between."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def run(t: Tensors) -> Tensor:
        w_in, w_out = stacked(t)
        ends = torch.tensor(t.sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(t.x.device, non_blocking=True)
        h = product(t.x, w_in.transpose(1, 2), offs=ends)
        return product(activate(h, shape.activation), w_out.transpose(1, 2), offs=ends)

    return run


def padded_bmm(shape: Shape) -> Run:
    """Every expert padded to the largest, as layers with a capacity compute."""

    def run(t: Tensors) -> Tensor:
        w_in, w_out = stacked(t)
        most = max(t.sizes)
        rows = torch.stack([F.pad(x, (0, 0, 0, most - x.shape[0])) for x in t.x.split(t.sizes)])
        out = torch.bmm(activate(torch.bmm(rows, w_in.transpose(1, 2)), shape.activation), w_out.transpose(1, 2))
        return torch.cat([y[:n] for y, n in zip(out, t.sizes, strict=True)])

    return run


def dense(shape: Shape) -> Run:
    """All rows through one expert: the same work as one dense network. The ceiling."""

    def run(t: Tensors) -> Tensor:
        # leaves of their own: the gradient of a slice would fill that of the whole stack with zeros
        w_in, w_out = (w.detach()[0].requires_grad_() for w in (t.home.w_in, t.home.w_out))
        return activate(t.x @ w_in.t(), shape.activation) @ w_out.t()

    return run


def padded_bytes(t: Tensors, shape: Shape) -> int:
    """Memory of the padded rows' pre-activations, which decides whether `padded_bmm` can run at all."""
    return len(t.sizes) * max(t.sizes) * (shape.units + shape.dim) * t.x.element_size()


PEERS: dict[str, Callable[[Shape], Run]] = {
    "dense": dense,
    "grouped_mm": grouped_mm,
    "loop_of_mm": loop_of_mm,
    "padded_bmm": padded_bmm,
}
