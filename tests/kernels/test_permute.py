"""Permute, unpermute and split-apply: the library paths against the definitions."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from prophet.kernels.permute import naive as permute_naive
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.route import route
from prophet.kernels.split_apply import SendOrder, inverse, regroup, send_order
from prophet.kernels.split_apply import naive as split_naive


def routed(n: int, k: int, experts: int, *, seed: int = 0) -> Tensor:
    """k different experts for each of n tokens."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, experts, generator=g).argsort(dim=1)[:, :k].contiguous()


def split_of(ids: Tensor, kept: Tensor | None, experts: int, ranks: int, seed: int = 0) -> Tensor:
    """A random split of the kept choices over ranks, [E, D]."""
    g = torch.Generator().manual_seed(seed)
    flat = ids.reshape(-1) if kept is None else ids[kept]
    counts = torch.bincount(flat, minlength=experts)
    cuts = (torch.rand(experts, ranks - 1, generator=g) * (counts[:, None] + 1)).long().sort(dim=1).values
    edges = torch.cat([torch.zeros(experts, 1, dtype=torch.long), cuts, counts[:, None]], dim=1)
    return edges.diff(dim=1)


def plan(n: int, k: int, *, drop: bool, ranks: int = 3, experts: int = 6) -> tuple[SendOrder, Tensor]:
    ids = routed(n, k, experts)
    kept = torch.rand(n, k, generator=torch.Generator().manual_seed(5)) < 0.6 if drop else None
    split = split_of(ids, kept, experts, ranks)
    return send_order(ids, kept, split, int(split.sum())), ids


CASES = [(0, 2, False), (1, 1, False), (7, 2, False), (7, 2, True), (33, 4, False), (33, 4, True), (5, 1, True)]


@pytest.mark.parametrize(("n", "k", "drop"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("experts", [6, 300])
def test_send_order_agrees_with_the_definition(n: int, k: int, drop: bool, ranks: int, experts: int) -> None:
    ids = routed(n, k, experts)
    kept = torch.rand(n, k) < 0.6 if drop else None
    split = split_of(ids, kept, experts, ranks)
    want = split_naive.send_order(ids, kept, split)
    for rows in (None, int(split.sum())):
        order, position = send_order(ids, kept, split, rows)
        assert torch.equal(order, want)
        assert position.shape == ids.shape
        assert torch.equal(position.view(-1)[order], torch.arange(order.numel()))
        assert int((position < 0).sum()) == n * k - order.numel()
        if kept is not None:
            assert torch.equal(position >= 0, kept)
    assert torch.equal(send_order(ids, kept, split, impl="naive").position, position)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 2)])
def test_regroup_agrees_with_the_definition(shape: tuple[int, int]) -> None:
    lengths = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1))
    want = split_naive.regroup(lengths)
    assert torch.equal(regroup(lengths), want)
    assert torch.equal(regroup(lengths, int(lengths.sum())), want)
    assert torch.equal(want[inverse(want, want.numel())], torch.arange(want.numel()))


@pytest.mark.parametrize(("n", "k", "drop"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_permute_and_unpermute_agree_with_the_definitions(
    n: int, k: int, drop: bool, dtype: torch.dtype, weighted: bool
) -> None:
    (order, position), _ = plan(n, k, drop=drop)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 5, generator=g, dtype=dtype, requires_grad=True)
    weights = torch.rand(n, k, generator=g, dtype=dtype, requires_grad=True) if weighted else None
    results = []
    for impl in ("torch", "naive"):
        rows = permute(x, order, position, impl=impl)  # type: ignore[arg-type]
        y = unpermute(rows.sin(), order, position, weights, impl=impl)  # type: ignore[arg-type]
        inputs = [x] + ([] if weights is None else [weights])
        d_y = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
        results.append([rows, y, *torch.autograd.grad(y, inputs, d_y)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("impl", ["torch", "naive"])
def test_gradcheck(impl: Literal["torch", "naive"], drop: bool) -> None:
    (order, position), _ = plan(4, 2, drop=drop)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weights: Tensor) -> Tensor:
        rows = permute(x, order, position, impl=impl).square()
        return unpermute(rows, order, position, weights, impl=impl)

    assert torch.autograd.gradcheck(run, (x, weights))
    rows = torch.randn(order.numel(), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: unpermute(r, order, position, impl=impl), (rows,))


@pytest.mark.parametrize("drop", [False, True])
def test_memory_that_holds_nan_does_not_reach_the_result(drop: bool) -> None:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN, and integers with the largest
    try:
        (order, position), ids = plan(33, 4, drop=drop)
        x = torch.randn(33, 5, requires_grad=True)
        logits = torch.randn(33, 6, requires_grad=True)
        routed_ = route(logits, 4, score="sigmoid", normalize=False)
        y = unpermute(permute(x, order, position), order, position, routed_.weights)
        found = [y, *torch.autograd.grad(y.sum(), [x, logits])]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in found)
    assert int(position.max()) < order.numel()
    assert int(order.max()) < ids.numel()
    assert int(routed_.counts.sum()) == 33 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drop", [False, True])
def test_half_precision_sums_in_float32(dtype: torch.dtype, drop: bool) -> None:
    (order, position), _ = plan(33, 4, drop=drop)
    g = torch.Generator().manual_seed(3)
    rows = torch.randn(order.numel(), 5, generator=g).to(dtype).requires_grad_()
    weights = torch.rand(33, 4, generator=g, requires_grad=True)
    y = unpermute(rows, order, position, weights)
    exact_rows = rows.detach().double().requires_grad_()
    exact_weights = weights.detach().double().requires_grad_()
    exact = permute_naive.unpermute(exact_rows, order, exact_weights)
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=eps)  # one rounding of the result
    got = torch.autograd.grad(y.sum(), [rows, weights])
    want = torch.autograd.grad(exact.sum(), [exact_rows, exact_weights])
    torch.testing.assert_close(got[0].double(), want[0], rtol=eps, atol=eps)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)
    plain = unpermute(rows, order, position)
    torch.testing.assert_close(
        plain.double(), permute_naive.unpermute(exact_rows, order, torch.ones(33, 4)), rtol=eps, atol=eps
    )


def test_a_row_of_nan_stays_with_its_token() -> None:
    (order, position), _ = plan(7, 2, drop=True)
    rows = torch.ones(order.numel(), 3)
    rows[0] = float("nan")
    y = unpermute(rows, order, position, torch.ones(7, 2))
    assert y.isnan().any(dim=1).nonzero().view(-1).tolist() == [int(order[0]) // 2]


def test_inputs_need_not_be_contiguous() -> None:
    (order, position), _ = plan(7, 2, drop=False)
    x = torch.randn(5, 7).t()
    torch.testing.assert_close(permute(x, order, position), permute_naive.permute(x, order, 2))
    rows = torch.randn(5, 14).t()
    weights = torch.rand(2, 7).t()
    torch.testing.assert_close(unpermute(rows, order, position, weights), permute_naive.unpermute(rows, order, weights))


def test_two_runs_are_equal_bit_for_bit() -> None:
    (order, position), _ = plan(300, 4, drop=False, experts=8)
    rows = torch.randn(order.numel(), 64)
    weights = torch.rand(300, 4)
    assert torch.equal(
        unpermute(rows, order, position, weights), unpermute(rows.clone(), order, position, weights.clone())
    )


def test_bad_input_is_refused() -> None:
    (order, position), ids = plan(7, 2, drop=False)
    with pytest.raises(ValueError, match="for 6 tokens"):
        permute(torch.zeros(6, 3), order, position)
    with pytest.raises(ValueError, match="3 rows cannot be combined"):
        unpermute(torch.zeros(3, 3), order, position)
    with pytest.raises(ValueError, match="expected weights of shape"):
        unpermute(torch.zeros(14, 3), order, position, torch.zeros(7, 3))
    with pytest.raises(ValueError, match="expected ids"):
        send_order(ids.view(-1), None, torch.zeros(6, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="does not match ids"):
        send_order(ids, None, torch.zeros(6, 2, dtype=torch.long), 3)


def test_compiles_to_one_graph_that_serves_all_counts() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def body(x: Tensor, ids: Tensor, split: Tensor, weights: Tensor) -> Tensor:
        order, position = send_order(ids, None, split)
        return unpermute(permute(x, order, position).sin(), order, position, weights)

    torch._dynamo.reset()
    compiled = torch.compile(body, fullgraph=True, backend=backend)
    for n in (7, 12, 40):
        ids = routed(n, 2, 6, seed=n)
        split = split_of(ids, None, 6, 3, seed=n)
        x = torch.randn(n, 5, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(n, 2, dtype=torch.float64, requires_grad=True)
        for t in (x, ids, weights):
            torch._dynamo.mark_dynamic(t, 0)
        results = []
        for run in (compiled, body):
            y = run(x, ids, split, weights)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, weights])])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert len(graphs) == 1
