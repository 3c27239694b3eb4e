"""What all moves of training state share: names and order of what ranks describe, the error of a rank that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pipeline_balance.pipeline.move.state import space_of, state_entries
from pipeline_balance.pipeline.move.transaction import Assignments, Move, run
from pipeline_balance.pipeline.move.votes import Vote
from prophet.errors import CollectiveError, CollectiveTimeout, StageFailed, TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld
from prophet.state.layout import Piece, whole_tensors
from prophet.state.route import route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import Space, TensorSpec
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


class _Ready(_Interrupted):
    """A move of one rank, where nothing fails."""

    budget_bytes = 1 << 10

    def __init__(self) -> None:
        self.in_force = "old"

    def route_schedule(self, carrier: Collective) -> RouteSchedule:
        layout = whole_tensors(Space((TensorSpec(name="w", shape=(2,), layer=0),)), 1, [[0]])
        return RouteSchedule(route(layout, layout), 0)

    def state(self, pieces: Sequence[Piece]) -> State:
        return {piece: torch.ones(2) for piece in pieces}

    def assemble(self, moved: Moved) -> Assignments:
        return [lambda: setattr(self, "in_force", "new")]


@pytest.mark.parametrize("word", ["yes", "no"])
def test_the_first_word_decides_where_ranks_have_lost_each_other(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, move = ThreadWorld(1).collective(0), _Ready()

    def lost(*given: object, **options: object) -> None:
        raise CollectiveTimeout(0, Operation("deciding"), "no answer")

    monkeypatch.setattr(world, "decide", lost)
    monkeypatch.setattr(world, "settle", lambda name, mine: word)
    if word == "yes":
        run(move, world=world, carrier=world)
        assert move.in_force == "new"
    else:
        with pytest.raises(TransitionError, match=r"no answer; the state from before the move is whole$") as failed:
            run(move, world=world, carrier=world)
        assert move.in_force == "old"
        # these communicators are of no use any more
        assert isinstance(failed.value.__cause__, CollectiveError)
