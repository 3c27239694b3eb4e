"""What ranks that wait hear of each other: who failed first, who was killed, who has stopped, and no false alarm."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist

from prophet.errors import StageFailed
from prophet.ranks.failures import first_failure as module
from prophet.ranks.failures import presence as presence_module
from prophet.ranks.failures.first_failure import FailureWatch
from prophet.ranks.failures.presence import LEFT, LEFT_AFTER, Presence, _started
from prophet.ranks.waiting import joined

STAGES = {0: (0, 3), 1: (1,), 2: (2,), 3: ()}
OUTSIDE = "its program, outside the pipeline"
OWN = StageFailed(2, (2,), "step 7", "ValueError: too hot")


class Silent:
    """A store that does not answer, as one does whose process is stopped."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def wait(*_: object) -> object:
            self.over.wait(20)
            raise RuntimeError("too late")

        return wait


class Gone:
    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> object:
            raise RuntimeError("Connection reset by peer")

        return fail


class Ranks:
    """Four ranks that share a store; all are this process, until one is said to be another."""

    def __init__(self) -> None:
        self.stores: list[Any] = [dist.HashStore()] * 4
        self.presences = [Presence(lambda r=r: self.stores[r], r, 7) for r in range(4)]  # type: ignore[misc]
        self.watches = [FailureWatch(p, range(4), "tests", STAGES.__getitem__) for p in self.presences]

    def belongs_to(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.presences[rank].close()
        self.presences[rank]._who = (process.pid, _started(process.pid))
        self.presences[rank].where = "in step 7, forward of microbatch 3"
        self.presences[rank].beat()

    def heard(self, rank: int, *, within_s: float = 5.0) -> StageFailed:
        """What a wait of `rank` ends with that nobody answers."""
        waited: Future[None] = Future()
        with pytest.raises(StageFailed) as caught:
            joined(waited, self.watches[rank].turns(within_s))
        return caught.value


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(presence_module, "PULSE_S", 0.05)
    monkeypatch.setattr(module, "SILENT_S", 0.4)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    monkeypatch.setattr(module, "ASK_S", 0.2)
    made = Ranks()
    yield made
    for one in made.presences:
        one.close()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def said(failure: StageFailed) -> tuple[Any, ...]:
    return failure.rank, failure.stages, failure.action, failure.cause


def test_a_wait_hears_of_the_first_failure(ranks: Ranks) -> None:
    second = StageFailed(1, (1,), "step 7", "lost rank 2")
    assert said(ranks.watches[2].report(OWN)) == said(OWN)
    assert said(ranks.watches[1].report(second)) == said(OWN)
    for rank in (0, 1, 3):
        assert said(ranks.heard(rank)) == said(OWN)
        assert said(ranks.watches[rank].explain(second, 5.0)) == said(OWN)
    assert str(OWN) == "rank 2 (stage 2) failed in step 7: ValueError: too hot"


def test_a_failure_is_heard_of_in_the_middle_of_a_wait(ranks: Ranks) -> None:
    threading.Timer(0.3, ranks.watches[2].report, [OWN]).start()
    began = time.monotonic()
    assert said(ranks.heard(0)) == said(OWN)
    assert 0.3 <= time.monotonic() - began < 3


def test_what_is_waited_for_arrives(ranks: Ranks) -> None:
    coming: Future[str] = Future()
    threading.Timer(0.3, coming.set_result, ["data"]).start()
    assert joined(coming, ranks.watches[0].turns(5.0)) == "data"
    failed: Future[str] = Future()
    failed.set_exception(TimeoutError("gloo"))
    with pytest.raises(TimeoutError, match="gloo"):
        joined(failed)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
        joined(Future(), ranks.watches[0].turns(0.3))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_killed_process_is_named(ranks: Ranks, other: subprocess.Popen[bytes], rank: int) -> None:
    ranks.belongs_to(rank, other)
    threading.Timer(0.3, other.kill).start()
    failure = ranks.heard(0)
    action = "step 7, forward of microbatch 3 (when last heard of)"
    assert said(failure) == (rank, STAGES[rank], action, "its process has ended")
    assert said(ranks.watches[2].explain(OWN, 0.0)) == said(failure), "the others say the same"
    place = "no stage" if rank == 3 else "stage 1"
    assert str(failure) == f"rank {rank} ({place}) failed in {action}: its process has ended"


def test_ranks_of_a_group_go_by_their_numbers_in_it(ranks: Ranks, other: subprocess.Popen[bytes]) -> None:
    ranks.belongs_to(3, other)
    other.kill()
    watch = FailureWatch(ranks.presences[2], [3, 2], "a pair", {0: (7,), 1: (8,)}.__getitem__)
    with pytest.raises(StageFailed) as caught:
        joined(Future(), watch.turns(5.0))
    assert said(caught.value)[:2] == (0, (7,))


def test_a_program_that_ends_between_its_pulse_and_a_look_is_no_failure(
    ranks: Ranks, other: subprocess.Popen[bytes]
) -> None:
    ranks.belongs_to(1, other)
    other.kill()
    other.wait()
    assert ranks.watches[0]._look() is None
    ranks.presences[1].where = LEFT
    ranks.presences[1].beat()
    assert ranks.watches[0]._look() is None


def test_places_are_said_as_a_sentence_needs_them(ranks: Ranks, other: subprocess.Popen[bytes]) -> None:
    ranks.belongs_to(1, other)
    for at, action in (
        ("after step 6", "its program, after step 6 (when last heard of)"),
        ("", "an action that it did not tell of"),
    ):
        ranks.presences[1].where = at
        ranks.presences[1].beat()
        with pytest.raises(TimeoutError):
            joined(Future(), ranks.watches[0].turns(0.2))
        assert ranks.watches[0]._lost(1, "").action == action


@pytest.mark.parametrize("begun", [False, True])
def test_a_killed_process_is_named_without_a_store(ranks: Ranks, other: subprocess.Popen[bytes], begun: bool) -> None:
    """The store may have died with it; whoever has begun or waited before knows which process it was."""
    ranks.belongs_to(0, other)
    if begun:
        ranks.watches[1].begin()
        time.sleep(0.3)
    else:
        with pytest.raises(TimeoutError):
            joined(Future(), ranks.watches[1].turns(0.3))
    other.kill()
    ranks.stores[1] = Gone()
    assert said(ranks.heard(1))[:2] == (0, (0, 3))


def test_a_program_that_ends_by_itself_is_no_failure_of_a_wait(ranks: Ranks, other: subprocess.Popen[bytes]) -> None:
    """What it sent last may still arrive; where the wait fails, it is named."""
    ranks.belongs_to(1, other)
    ranks.presences[1].where = LEFT
    ranks.presences[1].beat()
    other.kill()
    with pytest.raises(TimeoutError):
        joined(Future(), ranks.watches[0].turns(0.4))
    ended = (1, (1,), OUTSIDE, "its program has ended")
    assert said(ranks.watches[0].explain(OWN, 5.0)) == ended
    assert said(ranks.heard(2)) == ended, "the others hear of it"


def test_a_program_that_ends_with_an_error_is_named_at_once(ranks: Ranks) -> None:
    """Its process may take a while to end."""
    ranks.presences[1].where = f"{LEFT_AFTER}KeyboardInterrupt: "
    ranks.presences[1].beat()
    assert said(ranks.heard(0)) == (1, (1,), OUTSIDE, "KeyboardInterrupt: ")


@pytest.mark.parametrize(("last", "at"), [(None, LEFT), (ValueError("no"), f"{LEFT_AFTER}ValueError: no")])
def test_a_program_says_how_it_ends(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, last: Exception | None, at: str
) -> None:
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    monkeypatch.setattr(presence_module, "_all", [ranks.presences[1]])
    presence_module._leave()
    pulse = ranks.presences[0].pulse(1)
    assert pulse is not None
    assert pulse.at == at


def test_a_stopped_process_is_named_when_a_wait_has_failed(ranks: Ranks, other: subprocess.Popen[bytes]) -> None:
    ranks.belongs_to(1, other)
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        joined(Future(), ranks.watches[0].turns(0.6))
    rank, stages, action, cause = said(ranks.watches[0].explain(OWN, 5.0))
    assert (rank, stages, cause) == (1, (1,), "its process is stopped")
    assert action == "step 7, forward of microbatch 3 (when last heard of)"


def test_a_process_elsewhere_that_is_silent_is_named(ranks: Ranks) -> None:
    """Of another machine only its pulse is known."""
    ranks.presences[1].close()
    ranks.presences[1]._machine = 8
    ranks.presences[1].beat()
    with pytest.raises(TimeoutError):
        joined(Future(), ranks.watches[0].turns(0.2))
    assert said(ranks.watches[0].explain(OWN, 5.0))[::3] == (1, "no sign of life for 0.4 s or more")


def test_ranks_that_are_well_are_not_named(ranks: Ranks) -> None:
    """The first look after a long time must not take old pulses for silence."""
    with pytest.raises(TimeoutError):
        joined(Future(), ranks.watches[0].turns(0.2))
    time.sleep(0.6)
    assert said(ranks.watches[0].explain(OWN, 0.6)) == said(OWN)
    assert said(ranks.heard(1)) == said(OWN), "the others hear of it"


@pytest.mark.parametrize("kind", [Silent, Gone])
def test_without_a_store_the_fallback_holds(ranks: Ranks, kind: Any) -> None:
    with pytest.raises(TimeoutError):
        joined(Future(), ranks.watches[0].turns(0.2))
    ranks.stores[0] = kind()
    began = time.monotonic()
    assert said(ranks.watches[0].explain(OWN, 0.5)) == said(OWN)
    assert said(ranks.watches[0].report(OWN)) == said(OWN)
    assert time.monotonic() - began < 3
    if kind is Silent:
        ranks.stores[0].over.set()
    ranks.presences[0].close()
