"""Collectives: the same contract for threads and the recorder; time limits and errors. Processes: tests/processes."""

from __future__ import annotations

import time

import pytest
import torch

from prophet.errors import CollectiveError, CollectiveTimeout, PeerLost
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from tests.helpers.recorder import RecordingCollective

OP = Operation("dispatch", 3)


def test_operation_names_the_layer() -> None:
    assert str(OP) == "dispatch of layer 3"
    assert str(Operation("barrier")) == "barrier"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_uneven_all_to_all_delivers_every_row_to_its_rank(size: int) -> None:
    # rank r sends r + d rows, each marked (r, d), to rank d
    def body(c: ThreadCollective) -> torch.Tensor:
        send = [c.rank + d for d in range(size)]
        recv = [s + c.rank for s in range(size)]
        rows = [torch.tensor([c.rank, d]).expand(n, 2) for d, n in enumerate(send)]
        return c.all_to_all(torch.cat(rows), send, recv, op=OP).wait()

    for d, got in enumerate(ThreadWorld(size).run(body)):
        expected = [torch.tensor([s, d]).expand(s + d, 2) for s in range(size)]
        assert torch.equal(got, torch.cat(expected))


def test_channels_do_not_disturb_each_other() -> None:
    def body(c: ThreadCollective) -> float:
        early = c.all_to_all(torch.full((2,), 7.0), [1, 1], [1, 1], op=Operation("Trans"), channel="weights")
        tokens = c.all_to_all(torch.full((2,), float(c.rank)), [1, 1], [1, 1], op=OP).wait()
        assert tokens.tolist() == [0.0, 1.0]
        return float(early.wait().sum())

    assert ThreadWorld(2).run(body) == [14.0, 14.0]


def test_a_sent_tensor_may_be_overwritten_by_its_receiver_only() -> None:
    def body(c: ThreadCollective) -> list[float]:
        x = torch.full((2,), float(c.rank))
        pending = c.all_to_all(x, [1, 1], [1, 1], op=OP)
        got = pending.wait()
        assert pending.wait() is got
        got += 100.0
        return x.tolist()

    assert ThreadWorld(2, timeout_s=20.0).run(body) == [[0.0, 0.0], [1.0, 1.0]]


def test_exchange_matches_messages_in_order() -> None:
    def body(c: ThreadCollective) -> list[float]:
        peer = 1 - c.rank
        first, second = torch.empty(1), torch.empty(3)
        sends = [(peer, torch.full((1,), c.rank + 0.5)), (peer, torch.full((3,), c.rank + 0.25))]
        c.exchange(sends, [(peer, first), (peer, second)], op=OP).wait()
        return [float(first), float(second[2])]

    assert ThreadWorld(2).run(body) == [[1.5, 1.25], [0.5, 0.25]]


def test_mean_over_ranks() -> None:
    def body(c: ThreadCollective) -> tuple[list[float], list[float]]:
        a, b = torch.full((2, 2), float(c.rank)), torch.full((1,), 2.0 * c.rank)
        c.all_reduce_mean_([a, b])
        return a.flatten().tolist(), b.tolist()

    assert ThreadWorld(4).run(body) == [([1.5] * 4, [3.0])] * 4


def test_a_silent_peer_ends_in_an_error_that_names_rank_layer_and_operation() -> None:
    def body(c: ThreadCollective) -> None:
        if c.rank == 0:
            c.all_to_all(torch.zeros(2), [1, 1], [1, 1], op=OP).wait()

    began = time.monotonic()
    with pytest.raises(
        CollectiveTimeout, match=r"rank 0: dispatch of layer 3 failed: no answer from rank 1 within 0\.3 s"
    ):
        ThreadWorld(2, timeout_s=0.3).run(body)
    assert time.monotonic() - began < 10


def test_a_rank_that_raises_wakes_the_others_at_once() -> None:
    seen: list[BaseException] = []

    def body(c: ThreadCollective) -> None:
        if c.rank == 1:
            raise ZeroDivisionError("one rank broke")
        try:
            c.all_gather(torch.zeros(1), op=OP)
        except PeerLost as error:
            seen.append(error)
            raise

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="one rank broke"):
        ThreadWorld(3, timeout_s=60).run(body)
    assert time.monotonic() - began < 10
    assert len(seen) == 2


def test_ranks_in_different_operations_are_told_so() -> None:
    def body(c: ThreadCollective) -> None:
        c.all_gather(torch.zeros(1), op=Operation("dispatch" if c.rank else "combine", 0))

    with pytest.raises(CollectiveError, match=r"(dispatch|combine) of layer 0 failed: rank \d is in"):
        ThreadWorld(2).run(body)


def test_row_counts_that_disagree_are_an_error() -> None:
    def body(c: ThreadCollective) -> None:
        c.all_to_all(torch.zeros(2), [1, 1], [1, 2] if c.rank == 0 else [1, 1], op=OP).wait()

    with pytest.raises(CollectiveError, match="rank 1 sent 1 rows, expected 2"):
        ThreadWorld(2).run(body)


def test_row_counts_are_checked_before_anything_is_sent() -> None:
    c = ThreadWorld(2).collective(0)
    with pytest.raises(ValueError, match="one row count per rank"):
        c.all_to_all(torch.zeros(2), [2], [2], op=OP)
    with pytest.raises(ValueError, match="add up to 3, but there are 2 rows"):
        c.all_to_all(torch.zeros(2), [1, 2], [1, 1], op=OP)


def test_time_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        ThreadWorld(2, timeout_s=0).collective(0)


def test_recorder_remembers_operations_and_bytes() -> None:
    c = RecordingCollective(rank=1, size=3)
    out = c.all_to_all(torch.ones(4, 2), [1, 3, 0], [0, 2, 5], op=OP, channel="weights").wait()
    assert out.shape == (7, 2)
    assert out[:2].eq(1).all()
    assert out[2:].eq(0).all()
    (call,) = c.calls
    assert (call.kind, call.op, call.channel, call.sent_bytes) == ("all_to_all", OP, "weights", (8, 24, 0))


def test_without_torch_distributed_there_is_one_rank() -> None:
    c = collective_for(None)
    assert (c.rank, c.size) == (0, 1)
    assert collective_for(c) is c
