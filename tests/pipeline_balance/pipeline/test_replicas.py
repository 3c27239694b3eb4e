"""Gradients of replicas are averaged bucket by bucket, in replica order, and nothing else is touched."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gradient_memory.peak import Metered, PeakBytes
from pipeline_balance.pipeline.run.replicas import Grid, ReplicaMeans, check_units, start_alike
from prophet.errors import OutOfStep, SpecError
from prophet.ranks.collective import Channel, Collective, Pending, Rows
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld


def test_processes_form_a_grid() -> None:
    grid = Grid.of(6, 2)
    assert [grid.replica(r) for r in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert [grid.column(p) for p in range(3)] == [(0, 3), (1, 4), (2, 5)]
    for process in range(6):
        assert grid.replica(grid.replica_of(process))[grid.pipeline_rank_of(process)] == process
    for processes, replicas in ((6, 4), (4, 0), (2, 3)):
        with pytest.raises(SpecError, match=f"{processes} processes cannot be divided into {replicas} replicas"):
            Grid.of(processes, replicas)


def layers() -> list[nn.Linear]:
    """Three layers: one with two dtypes, one that is frozen, one without gradients on one replica or on all."""
    torch.manual_seed(1)
    made = [nn.Linear(3, 2) for _ in range(3)]
    made[0].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    made[1].requires_grad_(False)
    return made


def gradient(replica: int, layer: int, p: nn.Parameter) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * replica + layer), dtype=p.dtype)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_layers_are_averaged_in_the_order_they_are_started(replicas: int) -> None:
    def run(column: Collective) -> list[list[Tensor | None]]:
        mine, means = layers(), ReplicaMeans(column)
        for i, layer in enumerate(mine):
            for p in layer.parameters():
                p.grad = gradient(column.rank, i, p)
        mine[2].bias.grad = None
        if column.rank == 1:
            mine[2].weight.grad = None
        for i in (2, 0, 1):
            means.start(mine[i].parameters(), i)
        means.finish()
        means.finish()  # nothing is left
        means.close()
        return [[p.grad for p in layer.parameters()] for layer in mine]

    def expected(i: int, p: nn.Parameter, giving: list[int]) -> Tensor:
        total = torch.zeros_like(p)
        for r in giving:
            total += gradient(r, i, p)
        return total / replicas

    everyone, reference = list(range(replicas)), layers()
    for rank, got in enumerate(ThreadWorld(replicas, timeout_s=20.0).run(run)):
        for p, grad in zip(reference[0].parameters(), got[0], strict=True):
            assert grad is not None
            torch.testing.assert_close(grad, expected(0, p, everyone), rtol=0, atol=0)
        for p, grad in zip(reference[1].parameters(), got[1], strict=True):
            assert grad is not None
            assert torch.equal(grad, gradient(rank, 1, p))
        weight, bias = got[2]
        assert weight is not None
        assert bias is None
        assert torch.equal(weight, expected(2, reference[2].weight, [r for r in everyone if r != 1]))


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_layers_mean_takes_less_memory_than_its_gradients(replicas: int) -> None:
    def run(column: Collective) -> tuple[int, bool]:
        parameters = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(4)]
        for p in parameters:
            p.grad = torch.full_like(p, float(column.rank))
        peak = PeakBytes()
        means = ReplicaMeans(Metered(column, peak))
        with peak:
            means._average(parameters, 0)  # in this thread, whose operators are counted
        means.close()
        return peak.peak_bytes, all(
            p.grad is not None and bool((p.grad == (replicas - 1) / 2).all()) for p in parameters
        )

    for found, right in ThreadWorld(replicas, timeout_s=20.0).run(run):
        assert right
        assert 0 < found <= 4 * 4 * (1 << 16)


def test_starting_does_not_wait_for_the_other_replica() -> None:
    """Rank 0 starts a bucket and goes on; rank 1 comes once rank 0 says that it has."""
    went_on = threading.Event()

    def run(column: Collective) -> float:
        p, means = nn.Parameter(torch.ones(4)), ReplicaMeans(column)
        p.grad = torch.full((4,), 1.0 + column.rank)
        if column.rank == 1:
            assert went_on.wait(20.0)
        means.start([p], 0)
        went_on.set()
        means.finish()
        return float(p.grad[0])

    assert ThreadWorld(2, timeout_s=20.0).run(run) == [1.5, 1.5]


def test_another_order_of_layers_is_an_error_and_not_a_mixed_mean() -> None:
    def run(column: Collective) -> None:
        ps, means = [nn.Parameter(torch.ones(2)) for _ in range(2)], ReplicaMeans(column)
        for i in (0, 1) if column.rank else (1, 0):
            ps[i].grad = torch.ones(2)
            means._average([ps[i]], 7 + i)  # in this thread: operations of threads carry names, processes' do not

    class Unnamed(ForwardingCollective):  # what a process group does: names of operations are not compared
        def around(self, inner: Collective) -> Collective:
            return Unnamed(inner)

        def all_to_all(
            self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
        ) -> Pending:
            return super().all_to_all(x, send_rows, recv_rows, op=Operation("any"), channel=channel)

    with pytest.raises(OutOfStep, match=r"another layer: \[8, 7\]"):
        ThreadWorld(2, timeout_s=20.0).run(lambda column: run(Unnamed(column)))


def test_an_error_comes_out_of_finish() -> None:
    means = ReplicaMeans(ThreadWorld(2, timeout_s=0.2).collective(0))
    p = nn.Parameter(torch.ones(2))
    means.start([p], 4)
    with pytest.raises(RuntimeError, match="mean of gradients over replicas of layer 4 failed: no answer from rank 1"):
        means.finish()


def test_replicas_start_alike() -> None:
    def run(column: Collective) -> list[float]:
        module = nn.BatchNorm1d(2)
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                t.fill_(5 + column.rank)
        start_alike([*module.parameters(), *module.buffers()], column)
        return [float(t.detach().reshape(-1)[0]) for t in (*module.parameters(), *module.buffers())]

    assert ThreadWorld(3, timeout_s=20.0).run(run) == [[5.0] * 5] * 3


def test_wrapped_layers_are_refused_by_name() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2))
    check_units([bare, bare])
    wrapped = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(SpecError, match=r"layer 1 \(0\) is wrapped in DataParallel, .* bare module, and replicas=R"):
        check_units([bare, wrapped])
    with pytest.raises(SpecError, match=r"layer 0 \(1\) has sparse gradients"):
        check_units([nn.Sequential(nn.ReLU(), nn.Embedding(2, 2, sparse=True))])
