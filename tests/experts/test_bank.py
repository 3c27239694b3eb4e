"""The expert bank as vectors, and the replica pool."""

from __future__ import annotations

import pytest
import torch

from prophet.errors import ReplicaMemoryError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.replica import ReplicaPool
from prophet.kernels.grouped_ffn.naive import ExpertWeights, expert_ffn
from prophet.spec import Activation, Bias


def in_order(bank: FeedForwardBank) -> list[torch.nn.Parameter]:
    """The parameters as an expert's flat vector lists them; biases are flat."""
    return [p for p in (bank.w_in, bank.bias_in, bank.w_out, bank.bias_out) if p is not None]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False, "in", "out"])
@pytest.mark.parametrize("dim_out", [None, 4])
def test_flat_vector_is_the_parameters_one_after_another(
    activation: Activation, bias: Bias, dim_out: int | None
) -> None:
    bank = FeedForwardBank(3, 5, 2, activation=activation, bias=bias, dim_out=dim_out)
    whole = torch.cat(bank.flat_views(1, 0, bank.expert_numel))
    assert torch.equal(whole, torch.cat([p.view(2, -1)[1] for p in in_order(bank)]))
    for cut in range(0, bank.expert_numel + 1, 4):
        parts = torch.cat(bank.flat_views(1, 0, cut) + bank.flat_views(1, cut, bank.expert_numel))
        assert torch.equal(parts, whole)
    shape, size = bank.shape(), bank.w_in.element_size()
    assert bank.expert_numel == shape.expert_params == sum(p.numel() for p in in_order(bank)) // 2
    assert shape.forward_flops_per_token == 2 * (bank.w_in[0].numel() + bank.w_out[0].numel())
    assert 2 * shape.token_bytes == size * (bank.w_in.shape[2] + bank.w_out.shape[1])  # there and back


def test_flat_gradients_are_added_scaled_where_they_belong() -> None:
    bank = FeedForwardBank(3, 5, 2, ep_size=4)
    n = bank.expert_numel
    piece = torch.arange(float(n))
    bank.add_flat_grads([(1, 0, 7, piece[:7])])
    bank.add_flat_grads([(1, 7, n, piece[7:])])
    bank.add_flat_grads([(1, 0, n, piece)])
    got = torch.cat([p.grad.view(2, -1)[1] for p in in_order(bank) if p.grad is not None])
    assert torch.equal(got, 2 * piece / 4)
    assert all(p.grad is not None and p.grad[0].eq(0).all() for _, p in bank.named_parameters())


def test_frozen_parameters_receive_no_gradient() -> None:
    bank = FeedForwardBank(3, 5, 1)
    bank.w_in.requires_grad_(False)
    assert bank.grad_numel == bank.expert_numel - bank.w_in.numel()
    bank.add_flat_grads([(0, 0, bank.grad_numel, torch.arange(float(bank.grad_numel)))])
    assert bank.w_in.grad is None
    assert bank.bias_in is not None
    assert bank.bias_in.grad is not None
    assert bank.bias_in.grad.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]  # what trains alone is counted
    assert bank.w_out.grad is not None
    replica = bank.replica(0, ReplicaPool())
    assert (replica.params.numel(), replica.grads.numel()) == (bank.expert_numel, bank.grad_numel)


def test_expert_parameters_carry_what_frameworks_read() -> None:
    bank = FeedForwardBank(3, 5, 2, ep_size=4)
    for p in bank.parameters():
        assert p.allreduce is False  # type: ignore[attr-defined]
        assert p.group_name == "ep_size_4"  # type: ignore[attr-defined]


def test_initial_values_do_not_depend_on_the_number_of_ranks() -> None:
    torch.manual_seed(5)
    whole = FeedForwardBank(3, 5, 4, first_expert=0)
    after = torch.rand(1)
    parts = []
    for first in (0, 2):
        torch.manual_seed(5)
        parts.append(FeedForwardBank(3, 5, 2, first_expert=first))
        assert torch.equal(torch.rand(1), after)
    for name, p in whole.named_parameters():
        assert torch.equal(p, torch.cat([getattr(bank, name) for bank in parts]))
    assert not torch.equal(whole.w_in[0], whole.w_in[1])


def test_replica_is_a_leaf_whose_gradient_lands_in_its_flat_buffer() -> None:
    bank = FeedForwardBank(3, 5, 2, activation="swiglu").double()
    pool = ReplicaPool()
    replica = bank.replica(1, pool)
    with torch.no_grad():
        replica.params.copy_(torch.cat(bank.flat_views(1, 0, bank.expert_numel)))
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(2):  # accumulates
        expert_ffn(x, ExpertWeights(**replica.leaves), "swiglu").square().sum().backward()
        expert_ffn(
            x, ExpertWeights(*(None if p is None else p[1] for p in bank.weights())), "swiglu"
        ).square().sum().backward()
    expected = torch.cat([p.grad.view(2, -1)[1] for p in in_order(bank) if p.grad is not None])
    assert torch.equal(replica.grads, expected)
    # autograd may replace .grad instead of adding in place
    w_in = replica.leaves["w_in"]
    w_in.grad = torch.full_like(w_in, 3.0)
    replica.collect_grads()
    assert replica.grads[: w_in.numel()].eq(3.0).all()


def test_pool_lends_zeroed_gradients_and_reuses_memory() -> None:
    pool = ReplicaPool(budget_bytes=2 * 2 * 10 * 4)
    device = torch.device("cpu")
    a = pool.take(10, torch.float32, device)
    b = pool.take(10, torch.float32, device)
    assert pool.in_use_bytes == 160
    with pytest.raises(ReplicaMemoryError, match="a replica needs 80 bytes, but 160 of the budget's 160 are in use"):
        pool.take(10, torch.float32, device)
    a[1].fill_(7.0)
    pool.give(*a)
    again = pool.take(10, torch.float32, device)
    assert again[0].data_ptr() == a[0].data_ptr()
    assert again[1].eq(0).all()
    pool.give(*again)
    pool.give(*b)
    assert (pool.in_use_bytes, pool.held_bytes) == (0, 160)
    pool.take(20, torch.float32, device)  # another size: the free buffers make room
    assert pool.held_bytes == 160


def test_pool_refuses_a_negative_budget() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        ReplicaPool(-1)
