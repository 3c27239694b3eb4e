"""How Agg adds: half precision with one rounding in all, in either form, other precisions term by term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.replica import ReplicaPool
from prophet.ranks.collective import Collective
from prophet.ranks.device.side_stream import SideStream
from prophet.scheduler import replica_transfers
from prophet.scheduler.pieces import HALVES as CUT
from prophet.scheduler.pieces import agg_chunks
from prophet.scheduler.replica_transfers import Agg
from prophet.spec import Groups, Placement, Route, Topology, relayed
from tests.helpers.support import on_threads

RANKS = 8
HALVES = (torch.bfloat16, torch.float16)


def gradient(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def brought_home(
    group: Collective,
    dtype: torch.dtype,
    receivers: list[int],
    *,
    two_phase: bool,
    route: Route | None = None,
    cut: tuple[int, ...] = CUT,
) -> Tensor | None:
    """Rank 0 is the home of expert 0, whose replicas' gradients come home; its gradient afterwards, on rank 0."""
    bank = FeedForwardBank(4, 6, 1, bias=False, first_expert=group.rank, total_experts=RANKS, ep_size=RANKS).to(dtype)
    placement = Placement.with_replicas(tuple(range(RANKS)), RANKS, [(0, r) for r in receivers])
    replicas = [bank.replica(expert, ReplicaPool()) for expert in placement.replicas_on(group.rank)]
    for replica in replicas:
        replica.grads.copy_(gradient(group.rank, bank.grad_numel, dtype))
    for p in bank.parameters():
        p.grad = torch.zeros_like(p)
    if group.rank == 0:
        bank.add_flat_grads([(0, 0, bank.grad_numel, gradient(0, bank.grad_numel, dtype) * RANKS)])
    given = None if route is None else {0: route}
    chunks = agg_chunks(placement, group.rank, bank.grad_numel, cut, two_phase=two_phase, routes=given)
    agg = Agg(chunks, bank, replicas, group, block=0, side=SideStream(bank.device))
    while not agg.complete:
        agg.launch_next()
    agg.finish()
    return torch.cat([p.grad.flatten() for p in bank.parameters() if p.grad is not None]) if group.rank == 0 else None


def oracle(dtype: torch.dtype, groups: Groups, numel: int) -> Tensor:
    """The home's gradient and 1/R of the replicas' sum: of half precision the exact sum, rounded once.

    Other precisions are added up in every group, then over groups, both in the order of ranks.
    """
    wide = torch.float64 if dtype in HALVES else dtype

    def added(terms: list[Tensor]) -> Tensor:
        total, *others = terms
        for term in others:
            total = total + term
        return total

    total = added([added([gradient(r, numel, dtype).to(wide) for r in group]) for group in groups])
    home = (gradient(0, numel, dtype) * RANKS).mul(1 / RANKS)
    return home.to(wide).add(total, alpha=1 / RANKS).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("receivers", [[3], [1, 4], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("at_once", [5, 1 << 20])
def test_a_sum_is_rounded_once(
    dtype: torch.dtype, receivers: list[int], two_phase: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_transfers, "_SUMMED_AT_ONCE", at_once)
    found = on_threads(RANKS, lambda group: brought_home(group, dtype, receivers, two_phase=two_phase))[0]
    assert found is not None
    assert torch.equal(found, oracle(dtype, (tuple(receivers),), found.numel()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [((1, 2), (4, 5, 6, 7)), ((1,), (2, 3), (4, 5, 7)), ((5,), (6, 7))])
@pytest.mark.parametrize("cut", [(0, 512, 1024), (0, 1024), (0, 200, 512, 700, 1024)])
@pytest.mark.parametrize("at_once", [5, 1 << 20])
def test_sums_of_several_groups_are_rounded_once(
    dtype: torch.dtype, groups: Groups, cut: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of different sizes are cut at different elements, and their sums come home in different chunks."""
    monkeypatch.setattr(replica_transfers, "_SUMMED_AT_ONCE", at_once)
    receivers = [r for group in groups for r in group]
    found = on_threads(
        RANKS, lambda group: brought_home(group, dtype, receivers, two_phase=True, route=Route(groups), cut=cut)
    )[0]
    assert found is not None
    assert torch.equal(found, oracle(dtype, groups, found.numel()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ranks_per_node", [3, 4, 5])
@pytest.mark.parametrize("receivers", [[5], [1, 4, 6], [4, 5, 6], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("cut", [(0, 512, 1024), (0, 1024), (0, 200, 512, 700, 1024)])
@pytest.mark.parametrize("at_once", [5, 1 << 20])
def test_sums_that_relays_hand_over_are_rounded_once(
    dtype: torch.dtype,
    ranks_per_node: int,
    receivers: list[int],
    cut: tuple[int, ...],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks without a replica add and pass on, too; the last node may have fewer ranks than the home's."""
    monkeypatch.setattr(replica_transfers, "_SUMMED_AT_ONCE", at_once)
    route = relayed(0, receivers, Topology.uniform(RANKS, ranks_per_node=ranks_per_node))
    found = on_threads(RANKS, lambda group: brought_home(group, dtype, receivers, two_phase=True, route=route, cut=cut))
    assert found[0] is not None
    assert torch.equal(found[0], oracle(dtype, route.groups, found[0].numel()))


def test_the_oracle_tells_one_rounding_from_two() -> None:
    terms = [gradient(r, 1000, torch.bfloat16) for r in range(1, RANKS)]
    total = torch.stack([t.float() for t in terms]).sum(0).bfloat16()
    twice = gradient(0, 1000, torch.bfloat16).add(total, alpha=1 / RANKS)
    once = oracle(torch.bfloat16, (tuple(range(1, RANKS)),), 1000)
    assert (twice != once).float().mean() > 0.05
