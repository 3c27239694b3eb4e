"""One thing that was looked at: what was found, and the line that mends it where it is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["sound", "finding", "not checked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """said: what was seen, or why it could not be ("not checked"). mend: what to do about a finding."""

    name: str
    state: State
    said: str
    mend: str = ""


def sound(name: str, said: str) -> Check:
    """Nothing is wrong."""
    return Check(name=name, state="sound", said=said)


def finding(name: str, said: str, mend: str) -> Check:
    """Something is wrong, and `mend` is the line to run or the thing to do."""
    return Check(name=name, state="finding", said=said, mend=mend)


def unseen(name: str, why: str) -> Check:
    """What could not be looked at, and why."""
    return Check(name=name, state="not checked", said=why)


@dataclass(frozen=True, slots=True)
class Look:
    """name and mend: of the finding where `at` fails with an error or does not come back."""

    name: str
    at: Callable[[], list[Check]]
    mend: str


def look(limit_s: float, looks: Sequence[Look]) -> list[Check]:
    """What all of them find, in their order, within `limit_s` in all.

    Each has a thread: a disk, a driver or a peer that hangs holds up that thread, which is left behind, not the report.
    """
    found: list[list[Check] | None] = [None] * len(looks)

    def body(i: int) -> None:
        try:
            found[i] = looks[i].at()
        except Exception as error:
            words = " ".join(str(error).split())
            found[i] = [finding(looks[i].name, f"{type(error).__name__}: {words}".removesuffix(": "), looks[i].mend)]

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(looks))]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    checks = []
    for one, answer in zip(looks, found, strict=True):
        late = [finding(one.name, f"no answer within {limit_s:.0f} s", one.mend)]
        checks += late if answer is None else answer
    return checks


def merged(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """Checks of all ranks as one list: findings name their ranks where not all have them, the rest is rank 0's."""
    ranks: dict[Check, list[int]] = {}
    for rank, checks in enumerate(by_rank):
        for check in checks:
            ranks.setdefault(check, []).append(rank)
    found = []
    for check, which in ranks.items():
        if check.state == "finding" and len(which) < len(by_rank):
            found.append(replace(check, said=f"{named(which)}: {check.said}"))
        elif check.state == "finding" or 0 in which:
            found.append(check)
    return found


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, the first few of them."""
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
