"""Ranks that are given the same tokens take a part each to their experts: together they do what one rank does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.engine.regroup import regroup, stacked_experts
from prophet.errors import RoutingError
from prophet.layer.rows import gather, part_of, take
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.support import on_threads, seeded

DIM, EXPERTS = 6, 8
LOSSES: dict[str, Any] = {"aux_loss": "switch", "aux_loss_weight": 0.3, "z_loss_weight": 0.1}
CONFIGS = {
    "plain": prophet.GateConfig(),
    "switch": prophet.GateConfig(**LOSSES),
    "gshard": prophet.GateConfig(**{**LOSSES, "aux_loss": "gshard"}),
    "capacity": prophet.GateConfig(capacity_factor=0.6, **LOSSES),
}


def _layer(config: prophet.GateConfig, **options: Any) -> prophet.MoE:
    kind = options or {"hidden": 5, "activation": "swiglu"}
    given: dict[str, Any] = {"group": ThreadWorld(1).collective(0), "impl": "naive", "gate": config, **kind}
    with seeded(0):
        return prophet.MoE(DIM, num_experts=EXPERTS, top_k=2, **given).double()


def _rows(replica: int, tokens: int) -> Tensor:
    return torch.randn(tokens, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(replica + 1))


def _pass(layer: prophet.MoE, x: Tensor) -> tuple[Tensor, float]:
    """The gradient of the input, and the loss, which is no sum over tokens."""
    x.requires_grad_(True)
    with prophet.collect_losses(layer) as losses:
        loss = (layer(x).sin() * torch.arange(1, DIM + 1)).sum() + losses.total()
    loss.backward()
    assert x.grad is not None
    return x.grad, float(loss.detach())


@dataclass
class Found:
    """What one rank has found: gradients of the router, its experts and its input, and its loss."""

    gate: Tensor
    experts: dict[str, Tensor]
    x: Tensor
    loss: float


def _found(layer: prophet.MoE, x: Tensor) -> Found:
    grad, loss = _pass(layer, x)
    grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return Found(grads.pop("gate.weight"), grads, grad, loss)


def _apart(config: prophet.GateConfig, replicas: int, tokens: int) -> list[Found]:
    """What ranks that each have their own tokens find; they share the experts."""

    def body(world: Collective) -> Found:
        layer = _layer(config)
        _share(layer, world, None)
        return _found(layer, _rows(world.rank, tokens))

    return on_threads(replicas, body)


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


class _Part(Collective):
    """Some neighbouring ranks of a world, as `all_gather` goes."""

    def __init__(self, world: Collective, size: int) -> None:
        super().__init__(world.rank % size, size, world.timeout_s)
        self.world, self.first = world, world.rank - world.rank % size

    def _renewed(self, timeout_s: float) -> Collective:
        return _Part(self.world.with_timeout(timeout_s), self.size)

    def all_gather(self, x: Tensor, **options: Any) -> Tensor:
        return self.world.all_gather(x, **options)[self.first : self.first + self.size]

    def all_to_all(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    exchange = all_to_all


def _share(layer: nn.Module, group: Collective, alike: Collective | None) -> None:
    named = dict(layer.named_parameters())
    for name in stacked_experts(layer):
        named[name].data = named[name].data.tensor_split(group.size)[group.rank].clone()
    regroup(layer, group, None, alike)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("alike", "replicas", "tokens"), [(2, 1, 7), (4, 1, 5), (2, 2, 6), (4, 1, 2)])
def test_ranks_with_the_same_tokens_do_what_one_does(name: str, alike: int, replicas: int, tokens: int) -> None:
    def body(world: Collective) -> Found:
        layer = _layer(CONFIGS[name])
        _share(layer, world, _Part(world, alike))
        return _found(layer, _rows(world.rank // alike, tokens))

    want, every = _apart(CONFIGS[name], replicas, tokens), on_threads(alike * replicas, body)
    for rank, got in enumerate(every):
        first, apart = every[rank - rank % alike], want[rank // alike]
        assert torch.equal(got.x, first.x)
        assert torch.equal(got.gate, first.gate)
        assert got.loss == first.loss == pytest.approx(apart.loss, rel=1e-12)
        _close(got.x, apart.x)
        _close(got.gate, apart.gate)
    for n in want[0].experts:
        _close(torch.cat([got.experts[n] for got in every]), torch.cat([one.experts[n] for one in want]))


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_of_all_tokens_where_ranks_with_the_same_share_no_experts(name: str) -> None:
    def body(world: Collective) -> Found:
        layer = _layer(CONFIGS[name])
        regroup(layer, ThreadWorld(1).collective(0), world, world)
        return _found(layer, _rows(0, 7))

    (want,), every = _apart(CONFIGS[name], 1, 7), on_threads(2, body)
    for got in every:
        _close(got.gate, want.gate)
        _close(got.x, want.x)
        assert got.loss == pytest.approx(want.loss, rel=1e-12)
    for n, grad in want.experts.items():
        _close((every[0].experts[n] + every[1].experts[n]) / 2, grad)


def test_experts_that_are_modules_compute_all_tokens_on_each_rank() -> None:
    options: dict[str, Any] = {"expert": lambda: nn.Linear(DIM, DIM)}
    alone = _layer(CONFIGS["switch"], **options)
    want, loss = _pass(alone, _rows(0, 7))

    def body(world: Collective) -> tuple[Tensor, float]:
        layer = _layer(CONFIGS["switch"], **options)
        regroup(layer, ThreadWorld(1).collective(0), world, world)
        return _pass(layer, _rows(0, 7))

    for grad, value in on_threads(2, body):
        assert value == loss
        assert torch.equal(grad, want)


@pytest.mark.parametrize(("rows", "ranks"), [(0, 3), (2, 3), (5, 2), (7, 3), (9, 3)])
def test_parts_are_all_rows_once(rows: int, ranks: int) -> None:
    x = torch.arange(rows * 2, dtype=torch.float64).view(rows, 2)

    def body(world: Collective) -> tuple[Tensor, Tensor]:
        mine = x.clone().requires_grad_(True)
        part = take(mine, world, "part")
        assert torch.equal(part, x[part_of(rows, world)])
        whole = gather(part * 3, rows, world, "whole")
        (whole * x).sum().backward()
        assert mine.grad is not None
        return whole.detach(), mine.grad

    for whole, grad in on_threads(ranks, body):
        assert torch.equal(whole, x * 3)
        torch.testing.assert_close(grad, x * 3)


def test_a_rank_without_tokens_hears_that_scores_are_not_finite() -> None:
    def body(world: Collective) -> str:
        layer = _layer(CONFIGS["plain"])
        _share(layer, world, world)
        with pytest.raises(RoutingError, match="NaN or infinite on rank") as caught:
            layer(torch.full((1, DIM), torch.nan, dtype=torch.float64))
        return str(caught.value)

    assert all(on_threads(2, body))
