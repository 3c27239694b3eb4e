"""Dynamic models: loads, pruning and freezing, each on its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline_balance.dynamics.freezing import Freezer, FreezingRule, freeze_prefix, gradient_rates
from pipeline_balance.dynamics.pruning import (
    PrunedLinear,
    PruningSchedule,
    global_top_k,
    prune_globally,
    store_sparse,
)
from pipeline_balance.spec import LayerCost
from prophet.errors import SpecError
from prophet.ranks.threads import ThreadWorld
from tests.helpers import pipeline_loads as loads
from tests.helpers.pipeline_naive import global_top_k_naive

COST = LayerCost(
    forward_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    activation_bytes=100,
    parameter_bytes=1000,
    gradient_bytes=1000,
    optimizer_bytes=2000,
)


def test_a_frozen_layer_is_not_free() -> None:
    now = loads.frozen([COST] * 4, [True, False, True, False])
    assert [c.total_s for c in now] == [1.0, 2.0, 2.0, 3.0]
    assert [c.optimizer_bytes for c in now] == [0, 2000, 0, 2000]
    assert [c.activation_bytes for c in now] == [0, 100, 100, 100]
    assert all(c.parameter_bytes == 1000 for c in now)


def test_loads_follow_their_layer_alone() -> None:
    assert loads.mixture_of_experts(COST, [1, 1, 1, 5]).forward_s == 2.5
    assert loads.mixture_of_experts(COST, [2, 2]).total_s == 3.0
    assert loads.pruned(COST, 0.5) == COST
    assert loads.pruned(COST, 0.125).forward_s == 0.5
    assert loads.pruned(COST, 0.1).parameter_bytes == 300
    assert loads.sparse_attention(COST, 0.5, attention_share=0.4).forward_s == pytest.approx(0.8)
    assert loads.mixture_of_depths(COST, 0.25).activation_bytes == 25
    assert [c.forward_s for c in loads.early_exit([COST] * 3, [1.0, 0.5, 0.25])] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: loads.early_exit([COST] * 2, [0.5, 0.6]), "cannot come back"),
        (lambda: loads.frozen([COST], []), "1 layers and 0 flags"),
        (lambda: loads.pruned(COST, 1.5), "kept"),
        (lambda: loads.mixture_of_experts(COST, []), "rank_loads"),
        (lambda: PruningSchedule(final=1.0), "final < 1"),
        (lambda: FreezingRule(share=1.0), "share"),
        (lambda: Freezer(0), "at least 1"),
    ],
)
def test_wrong_figures_are_refused(call, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError, match=text):
        call()


def test_pruning_schedule_is_cubic() -> None:
    schedule = PruningSchedule(initial=0.0, final=0.8, first_step=100, prunings=4, every_steps=50)
    at = {s: schedule.sparsity(s) for s in (0, 99, 100, 149, 150, 200, 300, 10_000)}
    assert at[0] == at[99] == at[100] == at[149] == 0.0
    assert at[150] == pytest.approx(0.8 * (1 - 0.75**3))
    assert at[200] == pytest.approx(0.8 * (1 - 0.5**3))
    assert at[300] == at[10_000] == pytest.approx(0.8)
    assert [s for s in range(0, 400) if schedule.due(s)] == [100, 150, 200, 250, 300]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_distributed_top_k_is_exact(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    few = bool(rng.integers(2))  # few distinct magnitudes: ties decide
    parts = []
    for _ in range(ranks):
        n = int(rng.integers(0, 60))
        values = rng.integers(-2, 3, size=n) if few else rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, size=n)
        parts.append(torch.tensor(values, dtype=torch.float32))
    keep = int(rng.integers(0, sum(p.numel() for p in parts) + 1))
    masks = ThreadWorld(ranks).run(lambda c: global_top_k(parts[c.rank], keep, c))
    for mask, expected in zip(masks, global_top_k_naive(parts, keep), strict=True):
        assert torch.equal(mask, expected)
    assert sum(int(m.sum()) for m in masks) == keep


def test_top_k_keeps_special_values_in_order() -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, -3.0, float("inf"), float("-inf"), 2.0])
    mask = ThreadWorld(1).run(lambda c: global_top_k(values, 4, c))[0]
    assert mask.tolist() == [False, False, False, True, True, True, True]
    with pytest.raises(SpecError, match="cannot keep 8 of 7"):
        ThreadWorld(1).run(lambda c: global_top_k(values, 8, c))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_products_equal_dense_ones() -> None:
    torch.manual_seed(0)
    dense = PrunedLinear(12, 9).double()
    dense.prune(torch.rand(9, 12) < 0.2)
    sparse = PrunedLinear(12, 9, sparse_below=0.5).double()
    sparse.load_state_dict(dense.state_dict())
    store_sparse([sparse], ())
    assert sparse.stored_sparse
    grads = []
    for layer in (dense, sparse):
        x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
        out = layer(x)
        (out * torch.arange(9)).sum().backward()
        assert layer.bias is not None
        assert layer.weight.grad is not None
        grads.append([out.detach(), x.grad, layer.dense_state("weight", layer.weight.grad), layer.bias.grad])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_pruned_weights_stay_pruned_under_momentum() -> None:
    torch.manual_seed(0)
    layer = PrunedLinear(6, 6)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    x = torch.randn(4, 6)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).pow(2).sum().backward()
        optimizer.step()
    layer.prune(torch.rand(6, 6) < 0.5)
    kept = layer.mask.clone()
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).pow(2).sum().backward()
        optimizer.step()
    # whatever the optimizer does to a pruned weight, the layer computes without it
    expected = nn.functional.linear(x, torch.where(kept, layer.weight, 0.0), layer.bias)
    assert torch.equal(layer(x), expected)


def test_pruning_is_global_and_does_not_depend_on_the_ranks() -> None:
    def models() -> list[nn.Module]:
        torch.manual_seed(3)
        built: list[nn.Module] = [nn.Sequential(PrunedLinear(8, 8), nn.ReLU()) for _ in range(4)]
        with torch.no_grad():
            built[3][0].weight.mul_(10)  # type: ignore[index, operator]
        return built

    def masks(model: list[nn.Module]) -> list[list[bool]]:
        return [m[0].mask.reshape(-1).tolist() for m in model]  # type: ignore[index, union-attr]

    one = models()
    for sparsity in (0.4, 0.7):
        ThreadWorld(1).run(lambda c, s=sparsity: prune_globally(one, s, c))  # type: ignore[misc]
    spread = models()
    cuts = [spread[:1], spread[1:], []]
    for sparsity in (0.4, 0.7):
        ThreadWorld(3).run(lambda c, s=sparsity: prune_globally(cuts[c.rank], s, c))  # type: ignore[misc]
    assert masks(spread) == masks(one)
    left = [sum(m) for m in masks(one)]
    assert sum(left) == round(256 * 0.3)
    # the layer with large weights keeps nearly all of its own: load is unequal
    assert left[3] > 2 * max(left[:3])


def test_only_a_prefix_freezes_and_only_when_the_loss_is_quiet() -> None:
    rule = FreezingRule(share=0.5, loss_rate=0.1, patience=2, smoothing=0.0)
    freezer = Freezer(4, rule)
    assert freezer.update([1.0, 1.0, 1.0, 1.0], 10.0) == 0
    # layers 0 and 2 have calmed down, but the loss still falls fast
    assert freezer.update([0.1, 1.0, 0.1, 1.0], 5.0) == 0
    assert freezer.update([0.1, 1.0, 0.1, 1.0], 4.9) == 0
    assert freezer.update([0.1, 1.0, 0.1, 1.0], 4.8) == 1
    # layer 2 waits for layer 1
    assert freezer.update([0.0, 0.1, 0.1, 0.1], 4.7) == 1
    assert freezer.update([0.0, 0.1, 0.1, 0.1], 4.7) == 3
    # the last layer goes on training
    assert freezer.update([0.0, 0.0, 0.0, 0.0], 4.7) == 3
    assert Freezer(2, FreezingRule(most=0)).update([0.0, 0.0], 1.0) == 0
    with pytest.raises(SpecError, match="one figure per layer"):
        freezer.update([1.0], 1.0)


def test_layers_may_freeze_in_turn() -> None:
    rule = FreezingRule(share=0.5, loss_rate=0.1, patience=2, smoothing=0.0, in_turn=True)
    freezer = Freezer(4, rule)
    freezer.update([1.0] * 4, 10.0)
    # all are quiet, and each is judged for two updates once those before it are frozen
    assert [freezer.update([0.1] * 4, 10.0) for _ in range(7)] == [0, 1, 1, 2, 2, 3, 3]


def test_rates_come_from_all_ranks_and_freezing_drops_gradients() -> None:
    torch.manual_seed(0)
    layers: dict[int, nn.Module] = {i: nn.Linear(3, 3) for i in range(3)}
    for i, layer in layers.items():
        (layer(torch.ones(2, 3)).sum() * i).backward()
    split = [{0: layers[0], 2: layers[2]}, {1: layers[1]}]
    rates = ThreadWorld(2).run(lambda c: gradient_rates(split[c.rank], 3, c))
    assert rates[0] == rates[1]
    assert rates[0][0] == 0.0 < rates[0][1] < rates[0][2]
    # with zero=1 the gradients of a layer lie with the owners of its tensors, on several ranks
    parted = copy.deepcopy(layers)
    rest = copy.deepcopy(layers)
    for i, layer in layers.items():
        parted[i].weight.grad, rest[i].bias.grad = layer.weight.grad, layer.bias.grad  # type: ignore[assignment]
    owners = [{0: layers[0], 1: parted[1]}, {1: rest[1], 2: layers[2]}]
    assert ThreadWorld(2).run(lambda c: gradient_rates(owners[c.rank], 3, c))[0] == pytest.approx(rates[0])
    freeze_prefix(layers, 2)
    assert [all(p.requires_grad for p in layer.parameters()) for layer in layers.values()] == [False, False, True]
    assert all(p.grad is None for i in (0, 1) for p in layers[i].parameters())
