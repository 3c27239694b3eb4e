"""The ops of a whole layer in one compiled graph, which serves all counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.route import route
from prophet.kernels.split_apply import send_order

E, D, H, K = 6, 5, 7, 2


def layer(x: Tensor, gate: Tensor, w_in: Tensor, w_out: Tensor, bias: Tensor) -> Tensor:
    """A layer on one rank, with what is around it: an element-wise product before it and a residual after it."""
    h = x * 2
    routed = route(h @ gate.t(), K, bias=bias)
    order, position = send_order(routed.ids, None, routed.counts.unsqueeze(1))
    out = grouped_ffn(permute(h, order, position), routed.counts, ExpertWeights(w_in, w_out), "swiglu")
    return x + unpermute(out, order, position, routed.weights).tanh()


def parameters() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=g).requires_grad_() for s in ((E, D), (E, 2 * H, D), (E, D, H))]


def result(run: Callable[..., Tensor], x: Tensor, params: list[Tensor], bias: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    torch._dynamo.mark_dynamic(leaf, 0)
    y = run(leaf, *params, bias)
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *params])]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_one_graph_serves_all_counts_and_numbers_of_tokens(backend: str) -> None:
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler for inductor's loops")
    params = parameters()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(layer, fullgraph=True, backend=counter)
    for seed, tokens in enumerate((9, 9, 14, 40)):
        x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed))
        bias = torch.zeros(E)
        if seed == 1:
            bias[3] = 10.0  # every token visits one expert: others get no rows at all
        for got, want in zip(result(compiled, x, params, bias), result(layer, x, params, bias), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
