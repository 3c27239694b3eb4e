"""Gradients are averaged in buckets, in rank order, whatever the buckets' size, and in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gradient_memory.peak import Metered, PeakBytes
from prophet.ranks.collective import Channel, Collective
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.gradient_means import BUCKET_BYTES, average_gradients_
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld

OP = Operation("mean", 3)
# Elements of parameters; one is empty
SHAPES = ((7,), (), (3, 5), (0,), (2, 3, 4))
# Whole, of several parameters, and of less than one
BUCKETS = (BUCKET_BYTES, 100, 24, 1)


def gradient(rank: int, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + place)
    return (torch.randn(shape, generator=generator) * 10.0**rank).to(dtype)


def mean_of(gradients: list[Tensor]) -> Tensor:
    """One after the other, by rank."""
    total = gradients[0].clone()
    for other in gradients[1:]:
        total += other
    return total / len(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_mean_adds_in_rank_order(ranks: int, bucket_bytes: int, dtype: torch.dtype) -> None:
    def run(world: Collective) -> list[Tensor | None]:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        for place, p in enumerate(parameters):
            p.grad = gradient(world.rank, place, SHAPES[place], dtype)
        average_gradients_(parameters, world, op=OP, bucket_bytes=bucket_bytes)
        return [p.grad for p in parameters]

    expected = [mean_of([gradient(r, i, shape, dtype) for r in range(ranks)]) for i, shape in enumerate(SHAPES)]
    for found in ThreadWorld(ranks, timeout_s=20.0).run(run):
        for grad, wanted in zip(found, expected, strict=True):
            assert grad is not None
            assert torch.equal(grad, wanted)


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_gradients_that_are_missing_and_those_of_other_strides(bucket_bytes: int) -> None:
    """By parameter: float64; none on rank 1; none anywhere; transposed on rank 0; a view with gaps."""

    def run(world: Collective) -> tuple[list[Tensor | None], bool]:
        parameters = [nn.Parameter(torch.zeros(4, 6)) for _ in range(5)]
        parameters[0] = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
        for place, p in enumerate(parameters):
            p.grad = gradient(world.rank, place, (4, 6), p.dtype)
        parameters[2].grad = None
        if world.rank == 1:
            parameters[1].grad = None
        if world.rank == 0:
            parameters[3].grad = gradient(0, 3, (4, 6), torch.float32).t().contiguous().t()
        wide = torch.full((4, 12), 7.0)
        wide[:, ::2] = gradient(world.rank, 4, (4, 6), torch.float32)
        parameters[4].grad = wide[:, ::2]
        kept = [p.grad for p in parameters]
        average_gradients_(parameters, world, op=OP, bucket_bytes=bucket_bytes)
        in_place = all(p.grad is before for p, before in zip(parameters, kept, strict=True) if before is not None)
        return [p.grad for p in parameters], in_place and bool((wide[:, 1::2] == 7.0).all())

    for found, in_place in ThreadWorld(3, timeout_s=20.0).run(run):
        assert in_place
        assert found[2] is None
        for place in (0, 1, 3, 4):
            dtype = torch.float64 if place == 0 else torch.float32
            terms = [gradient(rank, place, (4, 6), dtype) for rank in range(3)]
            if place == 1:
                terms[1] = torch.zeros(4, 6)
            grad = found[place]
            assert grad is not None
            assert torch.equal(grad, mean_of(terms))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("bucket_bytes", [1 << 16, BUCKET_BYTES])
def test_memory_is_bounded_by_two_buckets_and_by_the_gradients(ranks: int, bucket_bytes: int) -> None:
    numel = 1 << 18

    def run(world: Collective) -> int:
        parameters = [nn.Parameter(torch.zeros(numel // 4)) for _ in range(4)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        peak = PeakBytes()
        with peak:
            average_gradients_(parameters, Metered(world, peak), op=OP, bucket_bytes=bucket_bytes)
        return peak.peak_bytes

    few = 100 * ranks  # the numbers that travel before the first bucket, and what fills its shards up
    for found in ThreadWorld(ranks, timeout_s=20.0).run(run):
        assert 0 < found <= min(2 * bucket_bytes, 4 * numel) + few


def test_two_buckets_are_under_way_at_most() -> None:
    """The next one has begun while means are gathered, and no other."""

    class Noted(ForwardingCollective):
        """Notes the beginnings of transfers."""

        def __init__(self, inner: Collective) -> None:
            super().__init__(inner)
            self.calls: list[str] = []

        def around(self, inner: Collective) -> Collective:
            return Noted(inner)

        def transfer(self, launch, op: Operation, channel: Channel):  # type: ignore[no-untyped-def]
            self.calls.append(f"all-to-all on {channel}")
            return launch()

        def gather(self, call, op: Operation, channel: Channel) -> Tensor:  # type: ignore[no-untyped-def]
            self.calls.append(f"all-gather on {channel}")
            found: Tensor = call()
            return found

    def run(world: Collective) -> list[str]:
        p = nn.Parameter(torch.zeros(6))
        p.grad = torch.ones(6)
        average_gradients_([p], noted := Noted(world), op=OP, bucket_bytes=16)
        return noted.calls

    sent, gathered = "all-to-all on weights", "all-gather on weights"
    assert ThreadWorld(2, timeout_s=20.0).run(run) == [[sent, sent, gathered, sent, gathered, gathered]] * 2


@pytest.mark.skipif(not hasattr(nn.Parameter(), "grad_dtype"), reason="this torch has one type for both")
def test_gradients_of_another_type_than_their_parameters_keep_it() -> None:
    """As master gradients in float32 beside parameters in sixteen bits; one rank has no gradient."""

    def run(world: Collective) -> Tensor | None:
        p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        p.grad_dtype = torch.float32
        if world.rank:
            p.grad = gradient(world.rank, 0, (4,), torch.float32)
        average_gradients_([p], world, op=OP)
        return p.grad

    wanted = mean_of([torch.zeros(4), gradient(1, 0, (4,), torch.float32)])
    for found in ThreadWorld(2, timeout_s=20.0).run(run):
        assert found is not None
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
