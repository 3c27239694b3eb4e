"""What all moves of training state share: names and order of what ranks describe, the error of a rank that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pipeline_balance.pipeline.move.state import space_of, state_entries
from pipeline_balance.pipeline.move.transaction import Assignments, Move, run
from pipeline_balance.pipeline.move.votes import Vote
from prophet.errors import StageFailed, TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from prophet.state.layout import Piece
from prophet.state.route_schedule import RouteSchedule
from prophet.state.transition import Moved, State, empty


def test_a_space_is_in_the_order_of_layers_and_of_names_within_one() -> None:
    rows = [[name, [2], "float32", "parameter", layer] for name, layer in (("c", 2), ("a", 1), ("z", 0), ("b", 0))]
    space = space_of([*rows, *reversed(rows)])
    assert [(t.layer, t.name) for t in space.tensors] == [(0, "b"), (0, "z"), (1, "a"), (2, "c")]


def test_the_first_sign_in_a_name_divides_an_entry_from_its_parameter() -> None:
    mean = torch.ones(2)
    found = state_entries({"0.w": mean, "0.w@mean@0.9": mean}, {"0.w@count@0.9": 3, "1.w@step": None})
    assert found == {"0.w": {"mean@0.9": mean, "count@0.9": 3}, "1.w": {"step": None}}


class _Interrupted(Move):
    """A move of one rank that hears, before anything moves, that another one has failed."""

    device, budget_bytes, allocate = torch.device("cpu"), 1, staticmethod(empty)
    failure = StageFailed(1, (1,), "step 3", "its process has ended")

    def vote(self) -> Vote:
        return Vote()

    def compare(self, votes: Sequence[Vote]) -> None:
        """All votes are alike."""

    def route_schedule(self, carrier: Collective) -> RouteSchedule:
        raise self.failure

    def state(self, pieces: Sequence[Piece]) -> State:
        return {}

    def assemble(self, moved: Moved) -> Assignments:
        return []


def test_the_failure_of_a_rank_is_raised_as_it_is_where_the_others_cannot_go_on() -> None:
    world, carrier = (ThreadWorld(1).collective(0) for _ in range(2))
    with pytest.raises(StageFailed) as lost:
        run(_Interrupted(), world=world, carrier=world)
    assert lost.value is _Interrupted.failure
    # another carrier can be made
    with pytest.raises(TransitionError, match=r"its process has ended; .*the state from before the move is whole$"):
        run(_Interrupted(), world=world, carrier=carrier)
