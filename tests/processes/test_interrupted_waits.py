"""Ctrl-C while a rank waits for another: seen at once, no thread of the rank goes on waiting, and ranks can go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from prophet.errors import CollectiveError, OutOfStep
from prophet.ranks import messages, process_group
from prophet.ranks.messages import COUNTS, gather_numbers
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from tests.helpers.launch import mark, on_processes, wait_for

LIMIT_S = 20.0
AFTER_S = 0.3
SEEN_S = 3.0  # a turn of a wait, on a loaded machine


def _start(collective: ProcessGroupCollective, kind: str) -> None:
    """A wait for rank 1, which does not come."""
    x, op = torch.zeros(2), Operation("a test")
    if kind == "all_gather":
        collective.all_gather(x, op=op)
    elif kind.startswith("gather_messages"):
        collective.gather_messages(x, op=op)
    elif kind.startswith("all_to_all"):
        collective.all_to_all(x, [1, 1], [1, 1], op=op).wait()
    else:
        collective.exchange([], [(1, x)], op=op).wait()


def _interrupted(kind: str) -> tuple[str, float, list[str]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first = kind.endswith("receives first")
    collective = ProcessGroupCollective(timeout_s=LIMIT_S, receive_first=first)
    if collective.rank:
        wait_for("over")
        return "", 0.0, []
    threading.Timer(AFTER_S, os.kill, [os.getpid(), signal.SIGINT]).start()
    began = time.monotonic()
    try:
        _start(collective, kind)
        how = "came"
    except KeyboardInterrupt:
        how = "interrupted"
    took = time.monotonic() - began
    collective.abort()
    with pytest.raises(CollectiveError, match="given up"):
        _start(collective, kind)
    collective.close()  # the threads that wait for gloo end with the collective, unless they still wait
    names = [t for t in threading.enumerate() if t.name.startswith("gloo")]
    for thread in names:
        thread.join(1.0)
    mark("over")
    return how, took, [t.name for t in names if t.is_alive()]


@pytest.mark.parametrize("kind", ["all_gather", "exchange"])
def test_ctrl_c_ends_a_wait(kind: str) -> None:
    how, took, waiting = on_processes(2, _interrupted, kind)[0]
    assert how == "interrupted"
    assert took < AFTER_S + SEEN_S
    assert not waiting


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gather_messages", "gather_messages, receives first", "all_to_all", "all_to_all, receives first"]
)
def test_ctrl_c_ends_any_wait(kind: str) -> None:
    test_ctrl_c_ends_a_wait(kind)


def _goes_on(how: str, receive_first: bool) -> list[str]:
    """Rank 0 leaves layer 1's counts, which are longer than the others'; then both ranks ask for something else."""
    collective = ProcessGroupCollective(timeout_s=LIMIT_S, receive_first=receive_first)

    def counts(layer: int, forward: int, numbers: int) -> None:
        collective.frames.forward, collective.frames.kind = forward, 1
        gather_numbers(collective, [0] * numbers, op=Operation(COUNTS, layer))

    def attempt(call: Callable[[], object]) -> str:
        try:
            return str(call())
        except (OutOfStep, KeyboardInterrupt, torch.OutOfMemoryError) as error:
            return type(error).__name__

    def other() -> list[list[int]]:
        return gather_numbers(collective, [collective.rank], op=Operation("evaluate")).tolist()  # type: ignore[no-any-return]

    for forward in (1, 2):
        for layer, numbers in enumerate((10, 100, 10)):
            counts(layer, forward, numbers)
    counts(0, 3, 10)
    # A length that nobody has foreseen goes in two messages, and rank 0 leaves the first of them
    left = (1, 3, 900 if how == "announced" else 100)
    if collective.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            if how == "not sent":
                patch.setattr(messages, "_frame", mock.Mock(side_effect=torch.OutOfMemoryError))
            else:
                wait = "joined" if receive_first else "in_turns"
                patch.setattr(process_group, wait, mock.Mock(side_effect=KeyboardInterrupt))
            found = [attempt(lambda: counts(*left))]
        return found + [attempt(other) for _ in range(1 if how == "sent" else 2)]
    # The other rank was interrupted before it came there, or waits there
    return [attempt(other if how == "sent" else lambda: counts(*left)), attempt(other)]


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize("how", ["sent", "not sent", "announced"])
def test_ranks_go_on_after_one_has_left_a_message(how: str, receive_first: bool) -> None:
    """The length of the next message follows from those before: a rank that is wrong about it ends gloo's process."""
    first, second = on_processes(2, _goes_on, how, receive_first)
    both = "[[0], [1]]"
    left = "OutOfMemoryError" if how == "not sent" else "KeyboardInterrupt"
    assert first == [left, *(["OutOfStep"] if how != "sent" else []), both]
    assert second == ["OutOfStep", both]
