"""Who is there: meetings, waits for work that take as long as it does, and what is known when a collective fails."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from prophet.ranks.failures import presence as module
from prophet.ranks.failures.presence import Lost, Presence, Pulse, _started, explained, verdict

MACHINE = 7
PATIENT_S = 20.0


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Presence]]:
    """Makes processes that share a store; all are this one, and their pulses are quick."""
    monkeypatch.setattr(module, "PULSE_S", 0.05)
    store, made = dist.HashStore(), []

    def make(rank: int, machine: int = MACHINE) -> Presence:
        made.append(Presence(lambda: store, rank, machine))
        return made[-1]

    yield make
    for one in made:
        one.close()


def another_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


other = pytest.fixture(another_process)


def belongs_to(presence: Presence, process: subprocess.Popen[bytes]) -> None:
    """Let `presence` be that of another process, whose pulse does not come by itself any more."""
    presence.close()
    presence._who = (process.pid, _started(process.pid))
    presence.beat()


def meetings(all_: list[Presence], **options: Any) -> list[Any]:
    """What each gets from a meeting that all come to at once: words or an error."""

    def come(one: Presence) -> Any:
        try:
            return one.meet("test", range(len(all_)), f"I am {one.rank}", **{"limit_s": PATIENT_S, **options})
        except Lost as lost:
            return lost

    with ThreadPoolExecutor(len(all_)) as pool:
        return list(pool.map(come, all_))


def test_all_words_arrive_again_and_again(there: Callable[..., Presence]) -> None:
    all_ = [there(r) for r in range(3)]
    for _ in range(2):
        assert meetings(all_) == [["I am 0", "I am 1", "I am 2"]] * 3


def test_the_last_may_end_before_it_has_ended_the_meeting(there: Callable[..., Presence]) -> None:
    """It has left its text and nothing else: those that wait end the meeting themselves."""
    here = there(0)
    here.store.set("prophet meeting for test of ranks [0, 1], call 1: 1", "I am 1")
    assert here.meet("test", [0, 1], "I am 0", limit_s=PATIENT_S) == ["I am 0", "I am 1"]


def test_one_that_does_not_come_is_named(there: Callable[..., Presence]) -> None:
    here, away = there(0), there(1)
    away.where = "in dispatch of layer 3"
    away.beat()
    with pytest.raises(Lost) as caught:
        here.meet("test", [0, 1], "", limit_s=0.2, hint="; call it")
    assert str(caught.value) == "rank 0 waited 0.2 s for rank(s) [1]; rank 1 was in dispatch of layer 3; call it"
    assert not caught.value.ended
    assert meetings([here, away]) == [["I am 0", "I am 1"]] * 2, "the next meeting is another one"


def test_one_that_has_gone_on_is_not_waited_for(there: Callable[..., Presence]) -> None:
    """It has begun a message that this one has to answer; messages of other groups say nothing."""
    here, away = there(0), there(1)
    here.counters = {"both": SimpleNamespace(begun=3), "others": SimpleNamespace(begun=0)}
    ours, theirs = SimpleNamespace(begun=3), SimpleNamespace(begun=9)
    away.counters, away.where = {"both": ours, "elsewhere": theirs}, "gradient norm"
    away.beat()
    with pytest.raises(Lost, match=r"rank 0 waited 0\.5 s for"):
        here.meet("test", [0, 1], "", limit_s=0.5)
    ours.begun += 1
    with pytest.raises(
        Lost, match=r"rank\(s\) \[1\] went on without this call, while rank 0 waited; rank 1 was gradient norm; hint"
    ) as caught:
        here.meet("test", [0, 1], "", limit_s=PATIENT_S, hint="; hint")
    assert not caught.value.ended


def test_threads_meet_beside_the_work_and_the_messages_of_the_main_ones(there: Callable[..., Presence]) -> None:
    here, away = there(0), there(1)
    here.counters, away.counters = {"both": SimpleNamespace(begun=3)}, {"both": SimpleNamespace(begun=4)}
    for one in (here, away):
        one.begin("writing")
    with pytest.raises(Lost, match=r"rank 0 waited 0\.5 s for rank\(s\) \[1\]; rank 1 was at work: writing"):
        here.meet("test", [0, 1], "", limit_s=0.5, beside=True)
    assert meetings([here, away], beside=True) == [["I am 0", "I am 1"]] * 2
    seen = here.pulse(0)
    assert seen is not None
    assert seen.work == "writing", "others still wait for it"


ALONE = "while rank 0 waited; rank 1 was there"


@pytest.mark.parametrize(
    ("missing", "ended", "ahead", "over", "expected"),
    [
        ([], [], [], True, ("met", "")),
        ([1], [], [], False, None),
        ([1], [], [], True, ("late", "rank 0 waited 5 s for rank(s) [1]; rank 1 was there; hint")),
        ([1], [], [1], False, ("moved on", f"rank(s) [1] went on without this call, {ALONE}; hint")),
        ([1], [1], [1], True, ("ended", f"rank(s) [1] are gone, {ALONE}")),
        ([1, 3], [1, 3], [], False, ("ended", f"rank(s) [1] are gone, {ALONE}; rank 3 was there")),
        ([3], [3], [], False, ("ended", "rank(s) [3] have given up, while rank 0 waited; rank 3 was there")),
    ],
)
def test_a_verdict(
    missing: list[int], ended: list[int], ahead: list[int], over: bool, expected: tuple[str, str] | None
) -> None:
    """Rank 3 has given up before it ended."""
    numbers: dict[str, Any] = {"count": 1, "machine": MACHINE, "process": 1, "started": 1}
    pulse = Pulse(**numbers, at="there", work="", failed=False, begun={}, blocked="", by=[], accounted=False)
    pulses = {r: replace(pulse, failed=r == 3) for r in missing}
    found = verdict(pulses, ended=ended, ahead=ahead, over=over, rank=0, limit_s=5.0, hint="; hint")
    assert found == expected


def test_work_is_waited_for_as_long_as_it_takes(there: Callable[..., Presence]) -> None:
    here, away = there(0), there(1)
    away.begin("writing")
    began = time.monotonic()

    def work() -> None:
        time.sleep(1.0)
        away.end()
        away.meet("test", [0, 1], "done", limit_s=PATIENT_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert here.meet("test", [0, 1], "", limit_s=0.1) == ["", "done"]
    assert time.monotonic() - began > 0.9
    thread.join()


def test_two_that_wait_for_each_other_do_not_do_so_for_ever(there: Callable[..., Presence]) -> None:
    """Each is at work, and in another meeting."""
    here, away = there(0), there(1)
    found = []
    for one in (here, away):
        one.begin("saving")

    def come(one: Presence) -> None:
        with pytest.raises(Lost):
            one.meet(f"meeting {one.rank}", [0, 1], "", limit_s=0.5)
        one.end()
        found.append(one.rank)

    threads = [threading.Thread(target=come, args=(one,)) for one in (here, away)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S)
    assert sorted(found) == [0, 1]


def test_work_of_a_process_that_has_ended_is_not_waited_for(
    there: Callable[..., Presence], other: subprocess.Popen[bytes]
) -> None:
    here, away = there(0), there(1)
    away.begin("writing")
    belongs_to(away, other)
    threading.Timer(0.3, other.kill).start()
    began = time.monotonic()
    with pytest.raises(
        Lost, match=r"rank\(s\) \[1\] are gone, while rank 0 waited; rank 1 was at work: writing"
    ) as caught:
        here.meet("test", [0, 1], "", limit_s=PATIENT_S)
    assert caught.value.ended
    assert time.monotonic() - began < PATIENT_S / 2


def test_work_of_a_process_that_falls_silent_is_not_waited_for(there: Callable[..., Presence]) -> None:
    here, away = there(0), there(1)
    away.begin("writing")
    away.close()
    with pytest.raises(Lost, match=r"rank 0 waited 0\.2 s for rank\(s\) \[1\]; rank 1 was at work: writing"):
        here.meet("test", [0, 1], "", limit_s=0.2)


def test_a_number_is_of_one_process_on_one_machine(
    there: Callable[..., Presence], other: subprocess.Popen[bytes]
) -> None:
    """Systems give it again to other processes, and every machine has its own."""
    here, away = there(0), there(1)
    belongs_to(away, other)
    pulse = here.pulse(1)
    assert pulse is not None
    assert not here.has_ended(pulse)
    before, elsewhere = replace(pulse, started=pulse.started - 1), replace(pulse, machine=MACHINE + 1)
    assert here.has_ended(before)
    os.kill(other.pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENT_S
    while not here.is_stopped(pulse) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [here.is_stopped(p) for p in (pulse, elsewhere)] == [True, False]
    other.kill()
    other.wait()
    assert [here.has_ended(p) for p in (pulse, elsewhere)] == [True, False]


def test_an_account_of_the_others(there: Callable[..., Presence], other: subprocess.Popen[bytes]) -> None:
    here, healthy, dead, silent, failed = (there(r, MACHINE + (r == 3)) for r in range(5))
    healthy.where = "in gradient norm"
    belongs_to(dead, other)
    other.kill()
    other.wait()
    silent.close()
    failed.account([4], grace_s=0.0)
    found = here.account(range(5), grace_s=1.0)
    assert (found.gone, found.silent, found.gave_up) == ((2,), (3,), (4,))
    assert found.at[1] == "in gradient norm"
    assert sorted(found.at) == list(range(5))


def test_one_that_ended_because_others_did_is_not_called_gone(
    there: Callable[..., Presence], other: subprocess.Popen[bytes]
) -> None:
    here, left = there(0), there(1)
    left._failed = True
    belongs_to(left, other)
    other.kill()
    other.wait()
    found = here.account([0, 1], grace_s=1.0)
    assert (found.gone, found.gave_up) == ((), (1,))


def test_a_stopped_process_is_silent_and_not_gone(
    there: Callable[..., Presence], other: subprocess.Popen[bytes]
) -> None:
    here, stopped = there(0), there(1)
    belongs_to(stopped, other)
    os.kill(other.pid, signal.SIGSTOP)
    found = here.account([0, 1], grace_s=0.2)
    assert (found.gone, found.silent) == ((), (1,))


def test_a_process_that_was_waited_for_counts_as_ended_before_it_is_collected(
    other: subprocess.Popen[bytes],
) -> None:
    started = _started(other.pid)
    assert started > 0
    other.kill()
    deadline = time.monotonic() + PATIENT_S
    while _started(other.pid) != -1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _started(other.pid) == -1, "a zombie"


def test_without_a_store_nobody_is_called_silent(
    there: Callable[..., Presence], other: subprocess.Popen[bytes]
) -> None:
    """It may have ended with its keeper, whose last place everybody remembers; of others nobody can say anything."""
    keeper, here, _ = there(0), there(1), there(2)
    keeper.where = "in combine backward"
    belongs_to(keeper, other)
    deadline = time.monotonic() + PATIENT_S
    while (0 not in here._last or not here._last[0].at) and time.monotonic() < deadline:
        time.sleep(0.01)
    other.kill()
    other.wait()
    here.find_store = lambda: None
    found = here.account([0, 1, 2], grace_s=0.1)
    assert (found.gone, found.silent, found.gave_up) == ((0,), (), ())
    assert found.at[0] == "in combine backward"
    said = explained(found, [0, 1, 2], late=True)
    assert said.startswith("rank(s) [0] are gone (last heard of: [0] in combine backward)")
    assert "sign of life" not in said


def test_the_keeper_of_the_store_stays_until_the_others_know(there: Callable[..., Presence]) -> None:
    keeper, late = there(0), there(1)
    late.where = "in comparison of placements"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(keeper.account, [0, 1], PATIENT_S)
        time.sleep(0.3)
        assert not first.done()
        known = late.account([0, 1], PATIENT_S)
        found = first.result()
    assert known.gave_up == (0,)
    assert found.gave_up == (1,)
    assert found.at[1] == "in comparison of placements"


def _later(presence: Presence, more: int = 2) -> bool:
    """Whether so many more pulses come."""
    until, deadline = presence._count + more, time.monotonic() + 5.0
    while presence._count < until and time.monotonic() < deadline:
        time.sleep(0.01)
    return presence._count >= until


def test_a_pulse_outlasts_what_goes_wrong_beside_it(there: Callable[..., Presence]) -> None:
    here, said = there(1), []

    def wrong(*_: object) -> Any:
        said.append(1)
        raise TypeError("no frame")

    here.on_pulse = wrong
    assert _later(here)
    here.find_blocked = wrong
    deadline = time.monotonic() + 5.0
    while len(said) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    here.find_blocked = lambda: ("", [])
    assert _later(here)


def test_a_store_that_is_slow_once_is_not_gone(there: Callable[..., Presence], monkeypatch: pytest.MonkeyPatch) -> None:
    here, gone = there(1), []
    here.on_pulse = lambda store_is_gone: gone.append(store_is_gone) or True  # type: ignore[func-returns-value]
    right, failures = here.store, 2

    class Slow:
        def __getattr__(self, name: str) -> Any:
            nonlocal failures
            if name == "set" and failures > 0:
                failures -= 1
                raise RuntimeError("timed out")
            return getattr(right, name)

    here.find_store = Slow
    assert _later(here, 4)
    assert not any(gone)
    failures = 10
    deadline = time.monotonic() + 5.0
    while not any(gone) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any(gone)
