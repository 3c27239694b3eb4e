"""Properties of the kernels' library paths over arbitrary sizes, splits and drops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.kernels.grouped_ffn.blocked import tiles
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.split_apply import naive as split_naive
from prophet.kernels.split_apply import send_order

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def draw(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


@settings(deadline=None, max_examples=60)
@given(SIZES, st.data())
def test_grouped_ffn_agrees_with_the_definition(sizes: list[int], data: st.DataObject) -> None:
    homes = data.draw(st.integers(1, len(sizes)))
    dim, hidden = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    swiglu, bias = data.draw(st.booleans()), data.draw(st.booleans())
    units = 2 * hidden if swiglu else hidden
    shapes = [(units, dim), (dim, hidden), *([(units,), (dim,)] if bias else [])]
    home = ExpertWeights(*(draw(homes, *s, seed=i) for i, s in enumerate(shapes)))
    replicas = [
        ExpertWeights(*(draw(*s, seed=9 * r + i) for i, s in enumerate(shapes)))
        for r in range(1, len(sizes) - homes + 1)
    ]
    x = draw(sum(sizes), dim, seed=50)
    inputs = [x, *(p for w in (home, *replicas) for p in w if p is not None)]
    d_y = draw(sum(sizes), dim, seed=51).detach()
    results = []
    for impl in ("torch", "naive"):
        y = grouped_ffn(
            x,
            sizes,
            home,
            "swiglu" if swiglu else "gelu",
            replicas=replicas,
            grad_scale=0.5,
            impl=impl,  # type: ignore[arg-type]
        )
        results.append([y, *torch.autograd.grad(y, inputs, d_y, allow_unused=True, materialize_grads=True)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=100)
@given(SIZES, st.integers(1, 20), st.booleans())
def test_tiles_partition_the_rows(sizes: list[int], limit: int, split: bool) -> None:
    plan = tiles(sizes, limit, split=split)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).tolist()
    seen = [(p.group, row) for tile in plan for p in tile for row in range(p.start, p.stop)]
    assert seen == list(zip(groups, range(sum(sizes)), strict=True))
    assert all(tile for tile in plan)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 30), st.integers(1, 6), st.integers(1, 4), st.data())
def test_send_order_and_its_inverse(tokens: int, experts: int, ranks: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids = torch.rand(tokens, experts, generator=g).argsort(dim=1)[:, :top_k]
    kept = torch.rand(tokens, top_k, generator=g) < 0.7 if data.draw(st.booleans()) else None
    chosen = ids.reshape(-1) if kept is None else ids[kept]
    home = torch.randint(0, ranks, (chosen.numel(),), generator=g)
    split = torch.bincount(chosen * ranks + home, minlength=experts * ranks).view(experts, ranks)
    plan = send_order(ids, kept, split, int(split.sum()))
    assert torch.equal(plan.order, split_naive.send_order(ids, kept, split))
    # a round trip brings every token back as often as it was sent
    x = torch.randn(tokens, 3, generator=g, dtype=torch.float64)
    times = (plan.position >= 0).sum(dim=1, keepdim=True)
    torch.testing.assert_close(unpermute(permute(x, *plan), *plan), x * times)
