"""Who is named where a wait has failed, and nothing else is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline_balance.pipeline.run.failures import Failures
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.spec import StageMap
from prophet.errors import CollectiveTimeout, StageFailed
from prophet.ranks.operation import Operation


class _Watch:
    """The pipeline's ranks are processes 10 to 13; nobody has reported anything."""

    presence = SimpleNamespace(where="")
    ranks = (10, 11, 12, 13)

    def begin(self) -> None: ...

    def explain(self, error: StageFailed, grace_s: float) -> StageFailed:
        return error


@pytest.mark.parametrize(("peer", "rank"), [(12, 2), (11, 1), (10, 0)])
def test_whoever_did_not_answer_is_named_wherever_its_message_was_to_go(peer: int, rank: int) -> None:
    # two stages, two replicas: messages go within a replica, a column, and all over the world
    group: Any = SimpleNamespace(rank=3, size=4, watched=lambda stages_of: _Watch())
    failures = Failures(group, lambda: None)
    failures.grid = Grid.of(4, 2)
    lost = CollectiveTimeout(0, Operation("sending"), "no answer")
    lost.peers = (peer,)
    with (
        pytest.raises(StageFailed, match=rf"rank {rank} \(stage {rank % 2}\) .* while rank 3 waited"),
        failures.during("a step", StageMap((0, 1, 2), (0, 1))),
    ):
        raise lost
