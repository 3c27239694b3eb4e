"""Who is there, and where: what processes tell each other through the store that they met in, beside all collectives.

Every process renews an entry of its own, its pulse, and says in it what it is doing. That is enough for three things:

- an error can name the ranks that are gone, and where the others are;
- a rank that waits for another one's work (a save, a load) goes on waiting while that rank is at work, and stops when
  it is gone, however long the work takes;
- ranks can meet, and hand each other words, without a collective that could break.

A process of the same machine is asked for by its number, so its end is noticed at once. One of another machine counts
as silent when its pulse does not come.
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
from typing import Any, Protocol

from prophet.ranks.waiting import uninterrupted

PULSE_S = 1.0
LEFT = "at the end of its program"
LEFT_AFTER = f"{LEFT} after "  # an error that the program has not caught
GRACE_S = 3.0  # in which ranks hear of each other when a collective has failed; three pulses
KEEPER = 0  # the rank that may keep the store, which ends with it then


class Store(Protocol):
    """What is needed of torch's stores; `get` waits for a key that is not there."""

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
    """What a process has said last. machine, process, started: which process it is. at: where it is. work: what others
    may have to wait for, empty where it is nothing. failed: whether a collective of it has failed. begun: how many
    messages it has begun, by the name of the group that they are for. blocked: in which call of the user's it waits for
    other processes, empty where it does not, and by: which ones. accounted: whether it knows what it asks of others
    once a collective has failed.
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

    gone: their processes have ended. silent: they give no sign of life: stopped, or cut off. gave_up: a collective has
    failed there, too, whether or not they have ended since. at: where ranks are, or were when they were last heard of.
    """

    gone: tuple[int, ...]
    silent: tuple[int, ...]
    gave_up: tuple[int, ...]
    at: dict[int, str]


class Presence:
    """This process among those that share a store.

    find_store: the store, None once nobody uses it. machine: a number that processes on one machine have in common.
    where: where this process is; its text is asked for from another thread. counters: by the name of a group. Its ranks
    all tell each other the same messages, so one that has begun more of them than another has left that one behind.
    find_blocked: the call of the user's in which this process waits for others, and for which; from another thread.
    """

    def __init__(self, find_store: Callable[[], Store | None], rank: int, machine: int) -> None:
        self.rank = rank
        self.find_store = find_store
        self.where: object = ""
        self.counters: dict[str, Counter] = {}
        self.find_blocked: Callable[[], tuple[str, list[int]]] = lambda: ("", [])
        self._machine = machine
        self._who = (os.getpid(), _started(os.getpid()))
        self._work: list[str] = []
        self._failed = self._accounted = False
        self._last: dict[int, Pulse] = {}  # by rank, when it was asked for
        self._count = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._calls: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self.beat()
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
        """Say what this process is doing now."""
        with self._lock:
            self._count += 1
            said: list[Any] = [
                self._count,
                self._machine,
                *self._who,
                str(self.where),
                self._work[-1] if self._work else "",
            ]
            blocked = self.find_blocked() if threading.current_thread() is self._thread else ("", [])
            said += [self._failed, self._begun_messages(), *blocked, self._accounted]
            self.store.set(_pulse_key(self.rank), json.dumps(said))

    def _begun_messages(self) -> dict[str, int]:
        return {name: counter.begun for name, counter in list(self.counters.items())}

    def close(self) -> None:
        """Fall silent."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * PULSE_S)

    # --- work that others wait for ---

    def begin(self, work: str) -> None:
        """From now on this process is at `work`."""
        self._work.append(work)
        self._say()

    def end(self) -> None:
        """The work that was begun last is done."""
        self._work.pop()
        self._say()

    def _say(self) -> None:
        with suppress(RuntimeError):  # the store may be gone; what is being done is worth more than the news of it
            self.beat()

    # --- the others ---

    def pulse(self, rank: int) -> Pulse | None:
        """What that process has said last; None where it never has."""
        if not self.store.check([_pulse_key(rank)]):
            return None
        said = json.loads(self.store.get(_pulse_key(rank)))
        found = self._last[rank] = Pulse(**dict(zip(_PULSE, said, strict=True)))
        return found

    def has_ended(self, pulse: Pulse) -> bool:
        """Whether it is known that the process has ended; never, of one on another machine."""
        return pulse.machine == self._machine and not _runs(pulse.process, pulse.started)

    def is_stopped(self, pulse: Pulse) -> bool:
        """Whether it is known that the process was stopped (SIGSTOP); never, of one on another machine."""
        return pulse.machine == self._machine and (_stat(pulse.process) or [""])[0] == "T"

    def account(self, ranks: Sequence[int], grace_s: float = GRACE_S) -> Account:
        """A collective of this process has failed: what is known of `ranks`, within `grace_s`.

        The keeper of the store waits for the others to fail and to ask as well: the store may end with it.
        """
        self._failed = True
        self._say()
        at = {self.rank: str(self.where)}
        found: dict[str, list[int]] = {"gone": [], "silent": [], "gave_up": []}
        others = [r for r in ranks if r != self.rank]
        deadline = time.monotonic() + grace_s
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            first = {r: self.pulse(r) for r in others}
            while others:
                over = time.monotonic() >= deadline
                for r in tuple(others):
                    now = self.pulse(r)
                    state = self._state(first[r], now, over=over)
                    asks = now is not None and not now.accounted and not self.has_ended(now)
                    if state is not None and (over or not asks or self.rank != KEEPER):
                        others.remove(r)
                        found.get(state, []).append(r)
                        at[r] = "" if now is None else now.at
                if others:
                    time.sleep(0.05)
        for r in others:  # nobody can be asked any more
            last = self._last.get(r)
            if last is None:
                continue
            while not (last.failed or self.has_ended(last)) and time.monotonic() < deadline:
                time.sleep(0.05)
            state = "gave_up" if last.failed else "gone" if self.has_ended(last) else "heard"
            found.get(state, []).append(r)
            at[r] = last.at
        self._accounted = True
        self._say()
        return Account(**{name: tuple(sorted(some)) for name, some in found.items()}, at=at)

    def _state(self, first: Pulse | None, now: Pulse | None, *, over: bool) -> str | None:
        """What a process is to an account, from two of its pulses; None while that is open, unless time is over."""
        if now is not None and now.failed:
            return "gave_up"
        if now is not None and self.has_ended(now):
            return "gone"
        if now is not None and (first is None or now.count > first.count):
            return "heard"
        return "silent" if over else None

    def stuck(self, ranks: Sequence[int], name: str) -> dict[int, Pulse]:
        """Those of `ranks` that have not begun this process's last message of the group `name`, by their pulses, where
        each of them waits, in a call of the user's, for this process among others; nothing otherwise.
        """
        mine = self._begun_messages()[name]
        found: dict[int, Pulse] = {}
        for r in ranks:
            pulse = self.pulse(r) if r != self.rank else None
            if pulse is None or pulse.begun.get(name, 0) >= mine:
                if pulse is None and r != self.rank:
                    return {}
                continue
            if self.rank not in pulse.by:
                return {}
            found[r] = pulse
        return found

    # --- the first failure ---

    def report_failure(self, key: str, words: str) -> str:
        """Say under `key` what has failed, and what is said there: that of the first who has."""
        self._failed = True
        said = self.settle(key, words)
        self._say()
        return said

    def settle(self, key: str, words: str) -> str:
        """The words of the first process that has said any under `key`; these, if this is the one."""
        return self.store.compare_set(key, "", words).decode()

    def first_failure(self, key: str) -> str | None:
        """What was said first under `key`; None where nothing was."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    # --- meeting ---

    def meet(self, what: str, ranks: Sequence[int], words: str, *, limit_s: float, hint: str = "") -> list[str]:
        """All `ranks`' words, by their order, once all have called this.

        limit_s: how long ranks are waited for that are not at work. hint: ends the message of such a wait. Raises
        `Lost` with the same text on all that wait, as soon as one that is missing has ended, or has gone on to another
        message of a group that it shares with this process, or the time is up.
        """
        store = self.store
        name = f"prophet meeting for {what} of ranks {list(ranks)}"
        while True:
            number = self._calls[name] = self._calls.get(name, 0) + 1
            key = f"{name}, call {number}"
            if not store.check([f"{key}: result"]):  # one that others gave up, or an earlier life of this process
                break
        store.set(f"{key}: {self.rank}", words)
        if store.add(f"{key}: count", 1) == len(ranks):
            everyone = [store.get(f"{key}: {r}").decode() for r in ranks]
            result = store.compare_set(f"{key}: result", "", json.dumps(["met", *everyone]))
        else:
            self.begin("")  # whoever waits is not at work: two that wait for each other must not do so for ever
            try:
                result = self._result(key, ranks, limit_s, hint)
            finally:
                self.end()
        outcome, *said = json.loads(result)
        if outcome != "met":
            self._failed = True
            self._say()
            raise Lost(said[0], ended=outcome == "ended")
        return [str(words) for words in said]

    def _result(self, key: str, ranks: Sequence[int], limit_s: float, hint: str) -> bytes:
        """What becomes of a meeting that others are missing from."""
        store, result = self.store, f"{key}: result"
        deadline = time.monotonic() + limit_s
        pause_s, every_s = 0.002, max(0.25, len(ranks) / 200)
        look_at = time.monotonic() + every_s
        heard: dict[int, int] = {}
        while not store.check([result]):
            now = time.monotonic()
            if now >= min(look_at, deadline):
                look_at = now + every_s
                missing = {r: self.pulse(r) for r in ranks if not store.check([f"{key}: {r}"])}
                ended = {r: pulse for r, pulse in missing.items() if pulse is not None and self.has_ended(pulse)}
                causes = [r for r, pulse in ended.items() if not pulse.failed]
                for r, pulse in missing.items():
                    if pulse is not None and pulse.work and heard.get(r) != pulse.count:
                        heard[r] = pulse.count
                        deadline = max(deadline, now + max(limit_s, 5 * PULSE_S))
                ahead = [r for r, pulse in missing.items() if pulse is not None and self._is_ahead(pulse)]
                if ended or ahead or (now >= deadline and missing):
                    text = f"rank {self.rank} waited {limit_s:g} s for rank(s) {list(missing)}"
                    if ended:
                        how = f"{causes} are gone" if causes else f"{list(ended)} have given up"
                        text = f"rank(s) {how}, while rank {self.rank} waited"
                    elif ahead:
                        text = f"rank(s) {ahead} went on without this call, while rank {self.rank} waited"
                    text += "".join(f"; rank {r} {_doing(pulse)}" for r, pulse in missing.items() if pulse)
                    text += "" if ended else hint
                    return store.compare_set(result, "", json.dumps(["ended" if ended else "late", text]))
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.1)
        return store.get(result)

    def _is_ahead(self, pulse: Pulse) -> bool:
        """Whether a process that is missing from a meeting cannot come to it any more: it waits for this one's word."""
        mine = self._begun_messages()
        return any(begun > mine[name] for name, begun in pulse.begun.items() if name in mine)


def explained(account: Account, ranks: Sequence[int], *, late: bool) -> str:
    """What an error says of the others; `ranks` are the group's, by their numbers in it. late: that time was up."""
    number = {r: i for i, r in enumerate(ranks)}

    def named(some: Sequence[int]) -> list[int]:
        return sorted(number[r] for r in some)

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
    if account.gave_up and not absent and not late:
        parts.append(f"rank(s) {named(account.gave_up)} have given up")
    present = places([r for r in ranks if r not in absent])
    text = "; ".join([*parts, *(f"rank(s) {there} {at}" for there, at in present)])
    if len(present) > 1 and not absent:
        text += ". Did a rank skip or repeat a step, a pass or a layer?"
    return text


def crossed(others: Mapping[int, Pulse], rank: int) -> str:
    """What an error says where `others` wait for this rank in calls of the user's, while it waits for them."""
    calls = ", ".join(sorted({pulse.blocked for pulse in others.values()}))
    return (
        f"rank(s) {sorted(others)} wait for rank {rank} in {calls}, while it waits for them. Every rank must run every "
        f"forward pass: give all ranks as many batches, as DistributedSampler does, and call evaluate(model) on every "
        f"rank, with nothing but its result under `if rank == 0:`"
    )


class Lost(RuntimeError):
    """A meeting did not come about. ended: because a process has ended, and not for the time it took."""

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended


_PULSE = tuple(field.name for field in fields(Pulse))


def _doing(pulse: Pulse) -> str:
    return f"was at work: {pulse.work}" if pulse.work else f"was {pulse.at or 'not heard of yet'}"


def _pulse_key(rank: int) -> str:
    return f"prophet pulse of rank {rank}"


def _renew(presence: weakref.ref[Presence], stop: threading.Event) -> None:
    while not stop.wait(PULSE_S):
        here = presence()
        if here is None:
            return
        try:
            here.beat()
            if here.rank != KEEPER:
                here.pulse(KEEPER)  # once it is gone, nobody can be asked where it was
        except Exception:  # the store is gone, and with it whoever could read this
            return
        del here
    here = presence()
    if here is not None and str(here.where).startswith(LEFT):
        here._say()


def _stat(process: int) -> list[str] | None:
    """What the system tells of a process, its state first; empty where it does not tell, None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else []
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _started(process: int) -> int:
    """When a process has started, in the machine's ticks; 0 where the system does not tell, -1 if it has ended."""
    fields = _stat(process)
    if not fields:
        return -1 if fields is None else 0
    return -1 if fields[0] in "ZX" else int(fields[19])


def _runs(process: int, started: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return _started(process) == started


_all: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """A thread that comes back from a library while the interpreter goes down aborts the process."""
    error = getattr(sys, "last_value", None)
    with uninterrupted():
        for presence in list(_all):
            presence.where = LEFT if error is None else f"{LEFT_AFTER}{type(error).__name__}: {error}"[:500]
            presence.close()
