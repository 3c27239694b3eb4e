"""Liveness: each process posts a heartbeat to the rendezvous store, independently of collectives.

The heartbeat is called a pulse, and says what the process is doing. That is enough for three things:

- an error can name the ranks that are gone, and where the others are;
- a rank that waits for another one's work (a save, a load) goes on waiting while that rank is at work, and stops when
  it is gone, however long the work takes;
- ranks can meet, and exchange texts, without a collective that could break.

Processes of the same machine are looked up by their process number, so an end is noticed at once. A process of another
machine counts as silent when its pulse does not come.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from prophet.ranks.waiting import uninterrupted

PULSE_S = 1.0
LEFT = "at the end of its program"
# followed by an error that the program has not caught
LEFT_AFTER = f"{LEFT} after "
# Three pulses: when a collective has failed, every rank that lives shows it within this time
GRACE_S = 3.0
# The rank that may run the store in its process, so that the store ends with it
KEEPER = 0
# So many pulses in a row that the store did not take: it is gone
_FAILURES = 3

Outcome = Literal["met", "late", "ended", "moved on"]


class Store(Protocol):
    """The part of torch's stores that is used here; `get` waits for a key that is not there."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class Counter(Protocol):
    """Counts the messages that this process has begun."""

    begun: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last report of a process. It travels as a JSON list in the order of these fields.

    Attributes:
        count: How many pulses the process has sent; one that grows is a sign of life.
        machine: A number that the processes of one machine share.
        process: Its process number (PID).
        started: When it started, in ticks of its machine: process numbers come again.
        at: Where it is, as text.
        work: What others may have to wait for; empty where there is nothing.
        failed: Whether one of its collectives has failed.
        begun: How many messages it has begun, by the name of the group that they are for.
        blocked: The user's call in which it waits for other processes; empty where it does not.
        by: The ranks that it waits for in that call.
        accounted: Whether it has finished its account of the others after a failed collective.
    """

    count: int
    machine: int
    process: int
    started: int
    at: str
    work: str
    failed: bool
    begun: dict[str, int]
    blocked: str
    by: list[int]
    accounted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What is known of the ranks when a collective has failed.

    Attributes:
        gone: Ranks whose processes have ended.
        silent: Ranks that give no sign of life: stopped, or cut off.
        gave_up: Ranks where a collective has failed, too, whether or not they have ended since.
        at: Where each rank is, or was in its last pulse.
    """

    gone: tuple[int, ...]
    silent: tuple[int, ...]
    gave_up: tuple[int, ...]
    at: dict[int, str]


class Presence:
    """This process among those that share a store.

    Args:
        find_store: Returns the store, or None once nobody uses it.
        rank: This process among all of them.
        machine: A number that processes on one machine share, and no others.

    Attributes:
        where: Where this process is. Another thread takes its text.
        counters: Message counters by the name of a group. All ranks of a group begin the same messages, so one that has
            begun more than another has left that one behind.
        find_blocked: Returns the user's call in which this process waits for others, and for which ranks. Called from
            another thread.
        on_pulse: Called after every pulse by the thread that sends them, with whether the store is gone. Returns
            whether it is to be called without a store, too.
    """

    def __init__(self, find_store: Callable[[], Store | None], rank: int, machine: int) -> None:
        self.rank = rank
        self.find_store = find_store
        self.where: object = ""
        self.counters: dict[str, Counter] = {}
        self.find_blocked: Callable[[], tuple[str, list[int]]] = lambda: ("", [])
        self.on_pulse: Callable[[bool], bool] = lambda store_is_gone: False
        self._machine = machine
        self._who = (os.getpid(), _started(os.getpid()))
        self._work: list[str] = []
        self._failed = self._accounted = False
        # The last pulse read of each rank: all that is left to go by once the store is gone
        self._last: dict[int, Pulse] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._calls: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        # The first pulse is out before the constructor returns, so ranks that meet right away can find each other
        self.beat()
        # The thread holds a weak reference, or this object would live until the end of the program
        self._thread = threading.Thread(target=_renew, args=(weakref.ref(self), self._stop), daemon=True)
        self._thread.name = f"pulse of rank {rank}"
        _all.add(self)
        self._thread.start()

    @property
    def store(self) -> Store:
        store = self.find_store()
        if store is None:
            raise RuntimeError("the process group was destroyed")
        return store

    def beat(self) -> None:
        """Write a pulse: what this process is doing now."""
        # A thread that writes a pulse is not waiting; only the pulse thread can see the main one wait
        blocked = self.find_blocked() if threading.current_thread() is self._thread else ("", [])
        with self._lock:
            self._count += 1
            values: list[Any] = [
                self._count,
                self._machine,
                *self._who,
                str(self.where),
                self._work[-1] if self._work else "",
            ]
            values += [self._failed, self.begun_messages(), *blocked, self._accounted]
            self.store.set(_pulse_key(self.rank), json.dumps(values))

    def begun_messages(self) -> dict[str, int]:
        """How many messages this process has begun, by the name of the group that they are for."""
        # A copy of the items: the main thread may add a group while the pulse thread is here
        return {name: counter.begun for name, counter in list(self.counters.items())}

    def close(self) -> None:
        """End the pulse; other processes see this one as silent from then on."""
        self._stop.set()
        # The pulse thread itself may close the last reference, and a thread cannot join itself
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * PULSE_S)

    # --- work that others wait for ---

    def begin(self, work: str) -> None:
        """Report from now on that this process is at `work`, for which others wait without a limit."""
        self._work.append(work)
        self._announce()

    def end(self) -> None:
        """Take back the work that was begun last."""
        self._work.pop()
        self._announce()

    def _announce(self) -> None:
        # The store may be gone; a save or a load must not fail because nobody could be informed of it
        with suppress(RuntimeError):
            self.beat()

    # --- the others ---

    def pulse(self, rank: int) -> Pulse | None:
        """Read the last pulse of that process; None where it has never sent one."""
        # `get` waits for a key that is not there, so look first
        if not self.store.check([_pulse_key(rank)]):
            return None
        values = json.loads(self.store.get(_pulse_key(rank)))
        found = self._last[rank] = Pulse(**dict(zip(_PULSE, values, strict=True)))
        return found

    def has_ended(self, pulse: Pulse) -> bool:
        """Whether the process is known to have ended; never known of a process on another machine."""
        return pulse.machine == self._machine and not _runs(pulse.process, pulse.started)

    def keeper_has_ended(self) -> bool:
        """Whether the process that may keep the store is known to have ended, by its last pulse."""
        last = self._last.get(KEEPER)
        return last is not None and self.has_ended(last)

    def ended(self, ranks: Sequence[int]) -> bool:
        """Whether the process of one of `ranks` is known to have ended."""
        pulses = [self.pulse(r) for r in ranks if r != self.rank]
        return any(pulse is not None and self.has_ended(pulse) for pulse in pulses)

    def is_stopped(self, pulse: Pulse) -> bool:
        """Whether the process is known to be stopped (SIGSTOP); never known of a process on another machine."""
        return pulse.machine == self._machine and (_stat(pulse.process) or [""])[0] == "T"

    def account(self, ranks: Sequence[int], grace_s: float = GRACE_S) -> Account:
        """Find out, within `grace_s`, what has become of `ranks` after a collective of this process has failed.

        The keeper of the store waits for the others to fail and to ask as well: the store may end with it.
        """
        # Others that take account see by this that the process has given up, and is not at fault
        self._failed = True
        self._announce()
        at = {self.rank: str(self.where)}
        found: dict[str, list[int]] = {"gone": [], "silent": [], "gave_up": []}
        others = [r for r in ranks if r != self.rank]
        deadline = time.monotonic() + grace_s
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            first = {r: self.pulse(r) for r in others}
            while others:
                # Read once per round, so that all ranks of a round are judged alike
                over = time.monotonic() >= deadline
                for r in tuple(others):
                    now = self.pulse(r)
                    state = self._state(first[r], now, over=over)
                    # A rank that lives and has not finished its own account still needs the store
                    asks = now is not None and not now.accounted and not self.has_ended(now)
                    if state is not None and (over or not asks or self.rank != KEEPER):
                        others.remove(r)
                        found.get(state, []).append(r)
                        at[r] = "" if now is None else now.at
                if others:
                    time.sleep(0.05)
        # Left over where the store went away in between: only the last pulses and the process numbers remain
        for r in others:
            last = self._last.get(r)
            if last is None:
                continue
            while not (last.failed or self.has_ended(last)) and time.monotonic() < deadline:
                time.sleep(0.05)
            state = "gave_up" if last.failed else "gone" if self.has_ended(last) else "alive"
            found.get(state, []).append(r)
            at[r] = last.at
        self._accounted = True
        self._announce()
        return Account(**{name: tuple(sorted(some)) for name, some in found.items()}, at=at)

    def _state(self, first: Pulse | None, now: Pulse | None, *, over: bool) -> str | None:
        """Judge a process by two of its pulses; None while that is open, unless time is over."""
        # Before its end is asked for: a rank that gave up and then ended is a victim, not the cause
        if now is not None and now.failed:
            return "gave_up"
        if now is not None and self.has_ended(now):
            return "gone"
        if now is not None and (first is None or now.count > first.count):
            return "alive"
        return "silent" if over else None

    def stuck(self, ranks: Sequence[int], name: str) -> dict[int, Pulse]:
        """Find ranks that can never answer: they wait for this process in a call of the user's.

        Returns:
            Pulses of those of `ranks` that have not begun this process's last message of the group `name`. Empty unless
            each of them waits for this process, among others, in a call of the user's.
        """
        mine = self.begun_messages()[name]
        found: dict[int, Pulse] = {}
        for r in ranks:
            pulse = self.pulse(r) if r != self.rank else None
            if pulse is None or pulse.begun.get(name, 0) >= mine:
                # Nothing is known of a rank without a pulse: it may be on its way
                if pulse is None and r != self.rank:
                    return {}
                continue
            # One that computes, or waits for others, may still come: then nobody is stuck for good
            if self.rank not in pulse.by:
                return {}
            found[r] = pulse
        return found

    # --- the first failure ---

    def report_failure(self, key: str, text: str) -> str:
        """Report a failure under `key`, unless another process was first; the report that stands there."""
        self._failed = True
        first = self.settle(key, text)
        self._announce()
        return first

    def settle(self, key: str, text: str) -> str:
        """Write `text` under `key` unless another process was first; the text that stands there."""
        # torch's stores take an expected "" for "where the key is not there"
        return self.store.compare_set(key, "", text).decode()

    def first_failure(self, key: str) -> str | None:
        """Read the failure that was reported first under `key`; None where there was none."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    # --- meeting ---

    def meet(
        self, what: str, ranks: Sequence[int], text: str, *, limit_s: float, hint: str = "", beside: bool = False
    ) -> list[str]:
        """Exchange texts among `ranks`, once all of them have called this.

        Args:
            what: What the meeting is for; a part of its name in the store.
            ranks: All that take part, this process among them.
            text: This process's text for the others.
            limit_s: Seconds to wait for ranks that are not at work.
            hint: Ends the message where ranks do not come although they live.
            beside: Whether threads meet beside the main ones, whose messages and work then say nothing of who comes.

        Returns:
            All ranks' texts, in the order of `ranks`.

        Raises:
            Lost: With the same text on all that wait, when the time is up. Soon where one that is missing has ended, or
                has gone on to another message of a group that it shares with this process.
        """
        store = self.store
        name = f"prophet meeting for {what} of ranks {list(ranks)}"
        while True:
            number = self._calls[name] = self._calls.get(name, 0) + 1
            key = f"{name}, call {number}"
            # A number that has a result is one that others gave up, or one of an earlier process of this rank
            if not store.check([f"{key}: result"]):
                break
        # The text first, then the count: whoever brings the count to its end finds all texts in the store
        store.set(f"{key}: {self.rank}", text)
        if store.add(f"{key}: count", 1) == len(ranks):
            result = self._end(key, ranks)
        elif beside:
            result = self._result(key, ranks, limit_s, hint, beside=True)
        else:
            self.begin("")  # whoever waits is not at work: two that wait for each other must not do so for ever
            try:
                result = self._result(key, ranks, limit_s, hint)
            finally:
                self.end()
        outcome, *texts = json.loads(result)
        if outcome != "met":
            self._failed = True
            self._announce()
            raise Lost(texts[0], ended=outcome == "ended")
        return [str(text) for text in texts]

    def _end(self, key: str, ranks: Sequence[int]) -> bytes:
        """Write the result of a meeting to which all have come, with their texts; the result that holds."""
        texts = [self.store.get(f"{key}: {r}").decode() for r in ranks]
        # Compared and set, since another one may have ended or given up this meeting a moment ago
        return self.store.compare_set(f"{key}: result", "", json.dumps(["met", *texts]))

    def _result(self, key: str, ranks: Sequence[int], limit_s: float, hint: str, *, beside: bool = False) -> bytes:
        """Wait for the result of a meeting that others are missing from, or write it where they cannot come."""
        store, result = self.store, f"{key}: result"
        deadline = time.monotonic() + limit_s
        # The result is polled often, the pulses of all ranks seldom: many ranks share one store
        pause_s, every_s = 0.002, max(0.25, len(ranks) / 200)
        next_check = time.monotonic() + every_s
        extended_at: dict[int, int] = {}  # by rank, the pulse that has moved the deadline last
        while not store.check([result]):
            now = time.monotonic()
            if now >= min(next_check, deadline):
                next_check = now + every_s
                missing = {r: self.pulse(r) for r in ranks if not store.check([f"{key}: {r}"])}
                others = {} if beside else {r: pulse for r, pulse in missing.items() if pulse is not None}
                # Only a new pulse counts as work: one that has fallen silent at work must not be waited for
                for r, pulse in others.items():
                    if pulse.work and extended_at.get(r) != pulse.count:
                        extended_at[r] = pulse.count
                        deadline = max(deadline, now + max(limit_s, 5 * PULSE_S))
                found = verdict(
                    missing,
                    ended=[r for r, pulse in missing.items() if pulse is not None and self.has_ended(pulse)],
                    ahead=[r for r, pulse in others.items() if self._is_ahead(pulse)],
                    over=now >= deadline,
                    rank=self.rank,
                    limit_s=limit_s,
                    hint=hint,
                )
                # The last that came ends the meeting, but its process may have ended before it could
                if found is not None and found[0] == "met":
                    return self._end(key, ranks)
                if found is not None:
                    return store.compare_set(result, "", json.dumps(found))
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.1)
        return store.get(result)

    def _is_ahead(self, pulse: Pulse) -> bool:
        """Whether a process cannot come to a meeting any more: it waits for a message that this one has not begun."""
        mine = self.begun_messages()
        return any(begun > mine[name] for name, begun in pulse.begun.items() if name in mine)


def verdict(
    missing: Mapping[int, Pulse | None],
    *,
    ended: Sequence[int],
    ahead: Sequence[int],
    over: bool,
    rank: int,
    limit_s: float,
    hint: str = "",
) -> tuple[Outcome, str] | None:
    """Judge a meeting by the ranks that are missing from it.

    Args:
        missing: The last pulse of each rank that has not come; None of one that has never sent any.
        ended: Those of them whose processes have ended.
        ahead: Those of them that went on without the meeting.
        over: Whether the time to wait is over.
        rank: The rank that waits.
        limit_s: Seconds that it was willing to wait.
        hint: Ends the text where no process has ended.

    Returns:
        "met" where nobody is missing, "ended", "moved on" or "late" where those that are missing will not come, each
        with the text for errors; None while they still may.
    """
    if not missing:
        return "met", ""
    # An end explains the most: those that moved on, or are late, may be so because of it
    if ended:
        outcome: Outcome = "ended"
        # A process that ended after a collective of it had failed is a victim; another one is the cause
        causes = [r for r in ended if (pulse := missing[r]) is not None and not pulse.failed]
        how = f"{causes} are gone" if causes else f"{list(ended)} have given up"
        text = f"rank(s) {how}, while rank {rank} waited"
    elif ahead:
        outcome = "moved on"
        text = f"rank(s) {list(ahead)} went on without this call, while rank {rank} waited"
    elif over:
        outcome = "late"
        text = f"rank {rank} waited {limit_s:g} s for rank(s) {list(missing)}"
    else:
        return None
    text += "".join(f"; rank {r} {_doing(pulse)}" for r, pulse in missing.items() if pulse)
    return outcome, text if ended else text + hint


def explained(account: Account, ranks: Sequence[int], *, late: bool) -> str:
    """Describe the other ranks of a group for an error.

    Args:
        account: What is known of them, by their numbers among all processes.
        ranks: The group's ranks among all processes; the text has their numbers in the group.
        late: Whether the collective failed because time was up.
    """
    number = {r: i for i, r in enumerate(ranks)}

    def named(some: Sequence[int]) -> list[int]:
        return sorted(number[r] for r in some)

    # Ranks at one place stand together, the largest crowd first: the odd ones then come last
    def places(some: Sequence[int]) -> list[tuple[list[int], str]]:
        by_place: dict[str, list[int]] = {}
        for r in some:
            by_place.setdefault(account.at.get(r) or "not heard of yet", []).append(r)
        groups = sorted(by_place.items(), key=lambda item: (-len(item[1]), item[1]))
        return [(named(there), at) for at, there in groups]

    absent = [*account.gone, *account.silent]
    parts = []
    for some, how in ((account.gone, "are gone"), (account.silent, "give no sign of life")):
        if some:
            last = ", ".join(f"{there} {at}" for there, at in places(some))
            parts.append(f"rank(s) {named(some)} {how} (last heard of: {last})")
    # Those that gave up did so because of the absent ones, or because of the same time limit
    if account.gave_up and not absent and not late:
        parts.append(f"rank(s) {named(account.gave_up)} have given up")
    present = places([r for r in ranks if r not in absent])
    text = "; ".join([*parts, *(f"rank(s) {there} {at}" for there, at in present)])
    # With everybody there, but at several places, ranks do not run the same program
    if len(present) > 1 and not absent:
        text += ". Did a rank skip or repeat a step, a pass or a layer?"
    return text


def crossed(others: Mapping[int, Pulse], rank: int) -> str:
    """Describe for an error that `others` wait for `rank` in calls of the user's, while it waits for them."""
    calls = ", ".join(sorted({pulse.blocked for pulse in others.values()}))
    return (
        f"rank(s) {sorted(others)} wait for rank {rank} in {calls}, while it waits for them. Every rank must run every "
        f"forward pass: give all ranks as many batches, as DistributedSampler does, and call evaluate(model) on every "
        f"rank, with nothing but its result under `if rank == 0:`"
    )


class Lost(RuntimeError):
    """A meeting that did not come about. `ended`: because a process has ended, not because time was up."""

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended


# The order in which a pulse's values are written and read
_PULSE = tuple(field.name for field in fields(Pulse))


def _doing(pulse: Pulse) -> str:
    return f"was at work: {pulse.work}" if pulse.work else f"was {pulse.at or 'not heard of yet'}"


def _pulse_key(rank: int) -> str:
    return f"prophet pulse of rank {rank}"


def _renew(presence: weakref.ref[Presence], stop: threading.Event) -> None:
    failed = 0
    while not stop.wait(PULSE_S):
        here = presence()
        if here is None:
            return
        try:
            if failed < _FAILURES:
                here.beat()
                if here.rank != KEEPER:
                    # Remember where the keeper is: once it is gone, so may be the store that knows
                    here.pulse(KEEPER)
                failed = 0
        except RuntimeError:  # what torch's stores raise
            # One that is slow is asked again
            failed = _FAILURES if here.keeper_has_ended() else failed + 1
        # What the process is at could not be told; the next pulse may
        except Exception:
            pass
        gone = failed >= _FAILURES
        goes_on = gone
        # A device may not let itself be asked; the pulse is not to end for that
        with suppress(Exception):
            if here.find_store() is None:
                return
            goes_on = here.on_pulse(gone)
        # The store is gone, and with it whoever could read a pulse
        if gone and not goes_on:
            return
        # No strong reference while the thread sleeps, or the object would never be collected
        del here
    here = presence()
    if here is not None and str(here.where).startswith(LEFT):
        here._announce()


def _stat(process: int) -> list[str] | None:
    """The system's fields of a process, its state first; empty where there are none to read, None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else []
    except OSError:
        return []
    # The name before the last bracket may hold blanks and brackets itself
    return text.rpartition(")")[2].split()


def _started(process: int) -> int:
    """When a process started, in the machine's ticks; 0 where the system has no record, -1 if it has ended."""
    fields = _stat(process)
    if not fields:
        return -1 if fields is None else 0
    # Z, X: it has ended, but its parent has not collected it. Field 22 of `man 5 proc_pid_stat` is the start.
    return -1 if fields[0] in "ZX" else int(fields[19])


def _runs(process: int, started: int) -> bool:
    # No permission to signal a process is a sign that it is there, of another user
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return _started(process) == started


_all: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """End all pulses: a thread that comes back from a library while the interpreter goes down aborts the process."""
    # Where an error ended the program, the last pulse says so, and other ranks can name it
    error = getattr(sys, "last_value", None)
    with uninterrupted():
        for presence in list(_all):
            presence.where = LEFT if error is None else f"{LEFT_AFTER}{type(error).__name__}: {error}"[:500]
            presence.close()
