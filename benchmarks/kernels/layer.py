"""The whole layer on one rank of a CPU: next to DeepSpeed's layer, and to the dense products that it contains.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cluster.peers import deepspeed_moe
from benchmarks.common import Row
from benchmarks.kernels.peers import activate
from benchmarks.kernels.timing import Timer, beside
from benchmarks.kernels.workload import SKEWS, Shape, experts_of, shares_of
from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.route import route
from prophet.kernels.split_apply import send_order


class Expert(nn.Module):
    """One expert, as DeepSpeed's layer wants it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w_in = nn.Linear(shape.dim, shape.units, bias=False)
        self.w_out = nn.Linear(shape.hidden, shape.dim, bias=False)
        self.activation = shape.activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_out(activate(self.w_in(x), self.activation))
        return out


def skewed_input(shape: Shape, tokens: int, shares: Any) -> tuple[Tensor, Tensor]:
    """Tokens [N, D] and gate weights [E, D]; the first E inputs are the scores, which choose experts by `shares`."""
    torch.manual_seed(0)
    x = torch.randn(tokens, shape.dim)
    noise = torch.rand(tokens, shape.experts).log_().neg_().log_().neg_()
    x[:, : shape.experts] = noise + torch.from_numpy(shares).float().clamp_min(1e-6).log()
    return x, torch.eye(shape.experts, shape.dim)


def ours(shape: Shape, x: Tensor, gate: Tensor, home: ExpertWeights) -> Tensor:
    """The ops of a layer on one rank, in the order in which it runs them."""
    routed = route(x @ gate.t(), shape.top_k)
    sizes = routed.counts.tolist()
    plan = send_order(routed.ids, None, routed.counts.unsqueeze(1))
    rows = permute(x, *plan)
    out = grouped_ffn(rows, sizes, home, shape.activation)  # type: ignore[arg-type]
    return unpermute(out, *plan, routed.weights)


def dense_passes(rows: int, w_in: Tensor, w_out: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """The products of one dense expert of so many rows, into memory that is there: two forward, and four backward.

    w_in: [H, D] (gated: [2H, D]); w_out: [D, H].
    """
    dim, hidden = w_out.shape
    x, d_y, h, a = (w_in.new_empty(rows, n).normal_() for n in (dim, dim, w_in.shape[0], hidden))
    y, d_h, d_a, d_x = torch.empty_like(x), torch.empty_like(h), torch.empty_like(a), torch.empty_like(x)
    d_in, d_out = torch.empty_like(w_in), torch.empty_like(w_out)

    def forward() -> None:
        torch.mm(x, w_in.t(), out=d_h)
        torch.mm(a, w_out.t(), out=y)

    def backward() -> None:
        torch.mm(d_y, w_out, out=d_a)
        torch.mm(h, w_in, out=d_x)
        torch.mm(h.t(), x, out=d_in)
        torch.mm(d_y.t(), a, out=d_out)

    return forward, backward


def products(sizes: list[int], home: ExpertWeights) -> Callable[[], None]:
    """The six products of every expert, forward and backward, on so many rows of its own; of the first experts."""
    weights = zip(sizes, home.w_in.detach(), home.w_out.detach(), strict=False)
    passes = [one for expert in weights for one in dense_passes(*expert)]

    def run() -> None:
        for one in passes:
            one()

    return run


def deepspeed_layer(shape: Shape, gate: Tensor, home: ExpertWeights) -> nn.Module | str:
    """DeepSpeed's layer, dropless, with our parameters; or why there is none."""
    try:
        import_module("deepspeed.moe.layer")
    except ImportError as error:
        return f"DeepSpeed cannot be imported: {error}"
    if not dist.is_initialized():
        # in memory: nobody else has to find it
        store, limit = dist.HashStore(), timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    layer = deepspeed_moe(shape, Expert(shape), 1)
    inner: Any = layer.deepspeed_moe
    with torch.no_grad():
        inner.gate.wg.weight.copy_(gate)
        for i, expert in enumerate(inner.experts.deepspeed_experts):
            expert.w_in.weight.copy_(home.w_in[i])
            expert.w_out.weight.copy_(home.w_out[i])
    return layer


def _step(shape: Shape, x: Tensor, gate: Tensor, home: ExpertWeights, d_y: Tensor) -> Callable[[], None]:
    def run() -> None:
        for p in (x, gate, home.w_in, home.w_out):
            p.grad = None
        ours(shape, x, gate, home).backward(d_y)

    return run


def _peer_step(peer: nn.Module, x: Tensor, d_y: Tensor) -> Callable[[], None]:
    def run() -> None:
        peer.zero_grad(set_to_none=True)
        x.grad = None
        peer(x.unsqueeze(0))[0].backward(d_y.unsqueeze(0))

    return run


def measure(shape: Shape, tokens: int, timer: Timer) -> Iterator[Row]:
    """Forward + backward of the layer, at every skew."""
    for skew in SKEWS:
        shares = shares_of(skew, shape.experts)
        base: Row = {"op": "layer", "shape": shape.name, "tokens": tokens, "dtype": "float32", "skew": skew}
        if shares is None:
            yield {**base, "note": "no trace: not measured"}
            continue
        x, gate = skewed_input(shape, tokens, shares)
        x.requires_grad_()
        gate.requires_grad_()
        home, _ = experts_of(shape, 0, "cpu", torch.float32)
        d_y = torch.randn_like(x)
        sizes = route(x.detach() @ gate.detach().t(), shape.top_k).counts.tolist()
        runs: dict[str, list[Callable[[], object]]] = {
            "ours": [_step(shape, x, gate, home, d_y)],
            "dense products": [products([sum(sizes)], home)],
            "products per expert": [products(sizes, home)],
        }
        peer = deepspeed_layer(shape, gate.detach(), home)
        if isinstance(peer, nn.Module):
            expected = ours(shape, x.detach(), gate.detach(), home).detach()
            got = peer(x.detach().unsqueeze(0))[0].squeeze(0).detach()
            if not torch.allclose(got, expected, rtol=1e-3, atol=1e-4):
                yield {**base, "wrong": f"DeepSpeed's layer differs by {float((got - expected).abs().max()):.3g}"}
                continue
            runs["deepspeed MoE dropless"] = [_peer_step(peer, x, d_y)]
        else:
            yield {**base, "peer": "deepspeed MoE dropless", "note": peer}
        us = timer.medians_us(runs)
        flops = 3 * shape.flops_per_row * sum(sizes)
        for name in runs:
            if name != "ours":
                yield {
                    **base,
                    "pass": "forward+backward",
                    "max_mean": max(sizes) * len(sizes) / sum(sizes),
                    **beside(us, name),
                    "tflops": flops / us["ours"] / 1e6,
                    "fraction_of_dense": us["dense products"] / us["ours"],
                }
