"""The states of one block's replicas in a step, on the rank that holds one of them."""

from __future__ import annotations

import pytest
import torch

from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.replica import ReplicaPool
from prophet.ranks.device.side_stream import SideStream
from prophet.scheduler.actions import Launch, Window
from prophet.scheduler.pieces import Form
from prophet.scheduler.replicas import BlockReplicas, Carrier, State
from prophet.scheduler.windows import Stopwatch
from prophet.spec import Placement
from tests.helpers.recorder import RecordingCollective

FIRST = Launch("TRANS", 1, 0, Window("FEC", 0))
ALL = Launch("TRANS", 1, 1, Window("FNEC", 0))


def made(pairs: tuple[tuple[int, int], ...] = ((0, 1),)) -> tuple[BlockReplicas, Carrier, FeedForwardBank]:
    """Replicas of block 1 on rank 1 of 2, each rank home to one expert."""
    bank = FeedForwardBank(2, 2, 1, first_expert=1, total_experts=2, ep_size=2)
    carrier = Carrier(RecordingCollective(1, 2), ReplicaPool(), Stopwatch(), [], SideStream(torch.device("cpu")))
    placement = Placement.with_replicas((0, 1), 2, pairs)
    return BlockReplicas(1, bank, placement, Form(), carrier), carrier, bank


def launched(carrier: Carrier) -> list[str]:
    return [str(action) for action in carrier.actions]


def test_parameters_come_are_dropped_and_come_again() -> None:
    block, carrier, _ = made()
    assert block.state is State.AWAY
    block.launch(FIRST)
    assert block.state is State.UNDER_WAY
    assert launched(carrier) == ["TRANS(1,0)@FEC(0)"]
    assert [r.expert for r in block.arrived()] == [0]
    assert block.state is State.HERE
    block.launch(ALL)
    assert launched(carrier) == ["TRANS(1,0)@FEC(0)", "TRANS(1,1)@FEC(1)"], "nothing is left to launch"
    whole = carrier.pool.in_use_bytes
    block.drop()
    assert block.state is State.DROPPED
    assert carrier.pool.in_use_bytes == whole // 2, "the gradients stay"
    block.launch(FIRST)
    assert block.state is State.UNDER_WAY
    block.arrived()
    assert carrier.pool.in_use_bytes == whole
    block.give_back()
    assert carrier.pool.in_use_bytes == 0


def test_what_is_withdrawn_costs_nothing_more() -> None:
    block, carrier, _ = made()
    block.launch(FIRST)
    block.use(False, ())
    assert block.state is State.NONE
    assert carrier.pool.in_use_bytes == 0
    block.launch(ALL)
    assert block.arrived() == []
    assert launched(carrier) == ["TRANS(1,0)@FEC(0)"]
    block.abandon()
    block.give_back()
    assert carrier.pool.in_use_bytes == 0


@pytest.mark.parametrize("used", ["decided", "here"])
def test_what_was_used_cannot_be_withdrawn(used: str) -> None:
    block, _, _ = made()
    if used == "decided":
        block.use(True, (0, 1))
    else:
        block.arrived()
    with pytest.raises(ValueError, match="block 1: replicas can only be withdrawn before they were used"):
        block.use(False, ())


def test_without_replicas_there_is_nothing_to_do() -> None:
    block, carrier, bank = made(())
    assert block.state is State.NONE
    block.launch(ALL)
    block.refresh()
    block.backward_began()
    block.finish_gradients()
    with torch.no_grad():
        bank.w_in.add_(1.0)
    assert not block.stale
    assert block.arrived() == []
    assert carrier.actions == []


def test_parameters_that_changed_at_home_are_sent_again() -> None:
    block, carrier, bank = made()
    with torch.no_grad():
        bank.w_in.add_(1.0)
    assert not block.stale, "nothing was sent yet"
    block.arrived()
    with torch.no_grad():
        bank.w_in.add_(1.0)
    assert block.stale
    block.refresh()
    assert block.state is State.AWAY
    assert not block.stale
    block.arrived()
    assert launched(carrier).count("TRANS(1,0)@FEC(1)") == 2


def test_gradients_go_home_when_the_last_microbatch_has_run() -> None:
    block, carrier, _ = made()
    block.arrived()
    block.backward_began()
    assert [block.final(n) for n in (1, 2, None)] == [True, False, False]
    block.backward_began()
    assert block.final(2)
    block.finish_gradients()
    assert not block.unsent
    assert launched(carrier)[-2:] == ["AGG(1,0)@UPDATE", "AGG(1,1)@UPDATE"]
