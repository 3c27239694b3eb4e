"""One decision of all ranks: yes where every one is ready, no where one is not or does not come."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from prophet.errors import CollectiveTimeout, OutOfStep
from prophet.ranks.collective import Collective
from prophet.ranks.failures.presence import Presence
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import mark, run_gloo, wait_for

OP = Operation("deciding")
CPU = torch.device("cpu")


def _against(collective: Collective, name: str, *, ready: bool = True) -> str:
    return collective.decide(OP, name, ready=ready).against


@pytest.mark.parametrize("unready", [None, 0, 2])
def test_threads_decide_alike(unready: int | None) -> None:
    found = ThreadWorld(3, timeout_s=20.0).run(lambda c: _against(c, "one", ready=c.rank != unready))
    assert found == ["" if unready is None else f"ranks [{unready}] were not ready"] * 3


def _decisions(rank: int, size: int) -> list[str]:
    collective = ProcessGroupCollective(timeout_s=4.0)
    found = [_against(collective, "first"), _against(collective, "second", ready=rank != 1)]
    if rank == 1:
        wait_for("0 gave up", "2 gave up")  # a late yes changes nothing
    found.append(_against(collective, "third"))
    mark(f"{rank} gave up")
    return [*found, _against(collective, "fourth")]


def test_processes_decide_alike_also_where_one_comes_too_late() -> None:
    for first, second, *others in run_gloo(_decisions, 3):
        assert (first, second) == ("", "ranks [1] were not ready")
        assert all(others)


def _deaf(rank: int, size: int, slow: int) -> list[str]:
    """Rank 1 tells the others that it is ready, and does not hear them; it says so late, or the others say yes late."""
    collective, found = ProcessGroupCollective(timeout_s=20.0), []
    gather, settle = collective.gather_at_once, collective.settle

    def deaf(x: torch.Tensor, *, op: Operation) -> torch.Tensor:
        gather(x, op=op)
        raise CollectiveTimeout(rank, op, "no answer")

    def late(name: str, word: str) -> str:
        time.sleep(1.0)
        return settle(name, word)

    if rank == 1:
        collective.gather_at_once = deaf  # type: ignore[method-assign]
    if (rank == 1) == (slow == 1):
        collective.settle = late  # type: ignore[method-assign]
    for name in ("one", "two"):
        found.append(_against(collective, f"{name} of {slow}"))
    return found


@pytest.mark.parametrize(("slow", "goes"), [(1, True), (0, False)])
def test_the_first_word_holds_where_ranks_have_not_heard_the_same(slow: int, goes: bool) -> None:
    every = run_gloo(_deaf, 3, slow)
    for rank, said in enumerate(every):
        assert [not words for words in said] == [goes] * 2
        if not goes:
            assert all(("no answer" if rank == 1 else "another rank has not heard") in words for words in said)


def _unanswered(rank: int, size: int) -> int:
    collective, answer, asked = ProcessGroupCollective(timeout_s=20.0), threading.Event(), list[str]()

    def settle(_: Presence, key: str, word: str) -> str:
        asked.append(key)
        return str(answer.wait(20.0))

    with pytest.MonkeyPatch.context() as patch:
        # as where the process that keeps the store is stopped
        patch.setattr(Presence, "settle", settle)
        try:
            for _ in range(2):
                with pytest.raises(CollectiveTimeout, match="the store has not answered within 2 s"):
                    collective.settle("one", "no")
        finally:
            answer.set()
    return len(asked)


def test_a_store_that_does_not_answer_is_waited_for_once_and_with_a_limit() -> None:
    assert run_gloo(_unanswered, 2) == [1, 1]


def _elsewhere(rank: int, size: int) -> str:
    collective = ProcessGroupCollective(timeout_s=20.0)
    if rank == 0:
        return _against(collective, "out of step")
    with pytest.raises(OutOfStep):
        collective.gather_at_once(torch.zeros(2), op=Operation("agreeing"))
    return ""


def test_a_rank_that_is_in_another_operation_stands_against_a_decision() -> None:
    first, _ = run_gloo(_elsewhere, 2)
    assert "ranks [1] are not in" in first
