"""One thing that was looked at: what was found, and the line that mends it where it is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["sound", "finding", "not checked"]
MARKS: dict[State, str] = {"sound": "ok", "finding": "!!", "not checked": "--"}
"""What stands before a line of a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What one check has found.

    Attributes:
        name: What was looked at.
        state: Whether it is sound.
        message: What was seen, or why it could not be ("not checked").
        mend: What to do about a finding.
    """

    name: str
    state: State
    message: str
    mend: str = ""


def sound(name: str, message: str) -> Check:
    """A check that has found nothing wrong."""
    return Check(name=name, state="sound", message=message)


def finding(name: str, message: str, mend: str) -> Check:
    """A check that has found something wrong.

    Args:
        name: What was looked at.
        message: What is wrong.
        mend: The line to run, or the thing to do.
    """
    return Check(name=name, state="finding", message=message, mend=mend)


def unseen(name: str, why: str) -> Check:
    """Something that could not be looked at, and why."""
    return Check(name=name, state="not checked", message=why)


@dataclass(frozen=True, slots=True)
class Look:
    """A check to be run.

    Attributes:
        name: Name of the finding where the check fails with an error or does not come back.
        at: Runs the check.
        mend: What to do about that finding.
    """

    name: str
    at: Callable[[], list[Check]]
    mend: str


def look(limit_s: float, looks: Sequence[Look]) -> list[Check]:
    """Run all checks at once, within `limit_s` in all, and return what they find in their order.

    Each has a thread: a disk, a driver or a peer that hangs holds up that thread, which is left behind, not the report.
    """
    found: list[list[Check] | None] = [None] * len(looks)

    def body(i: int) -> None:
        try:
            found[i] = looks[i].at()
        except Exception as error:
            # As one line: errors of drivers come with whole paragraphs
            text = " ".join(str(error).split())
            found[i] = [finding(looks[i].name, f"{type(error).__name__}: {text}".removesuffix(": "), looks[i].mend)]

    # Daemons, so that one that hangs does not keep the process from ending
    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(looks))]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    checks = []
    for one, answer in zip(looks, found, strict=True):
        # Read once: the thread may still put its answer in
        late = [finding(one.name, f"no answer within {limit_s:.0f} s", one.mend)]
        checks += late if answer is None else answer
    return checks


def merged(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """Merge the checks of all ranks: findings name their ranks where not all have them, the rest is rank 0's."""
    ranks: dict[Check, list[int]] = {}
    for rank, checks in enumerate(by_rank):
        for check in checks:
            ranks.setdefault(check, []).append(rank)
    found = []
    for check, which in ranks.items():
        # What is sound on some rank only, a folder's free bytes among it, would make the report as long as the job is
        # wide
        if check.state == "finding" and len(which) < len(by_rank):
            found.append(replace(check, message=f"{named(which)}: {check.message}"))
        elif check.state == "finding" or 0 in which:
            found.append(check)
    return found


def named(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence, the first few of them."""
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
