"""Ctrl-C while a rank waits for another: seen at once, and no thread of the rank goes on waiting."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from prophet.errors import CollectiveError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from tests.helpers.launch import on_processes

LIMIT_S = 20.0
AFTER_S = 0.3
SEEN_S = 3.0  # a turn of a wait, on a loaded machine


def _start(collective: ProcessGroupCollective, kind: str) -> None:
    """A wait for rank 1, which does not come."""
    x, op = torch.zeros(2), Operation("a test")
    if kind == "all_gather":
        collective.all_gather(x, op=op)
    elif kind == "gather_messages":
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
        time.sleep(AFTER_S + SEEN_S)
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
    return how, took, [t.name for t in names if t.is_alive()]


@pytest.mark.parametrize("kind", ["all_gather", "exchange"])
def test_ctrl_c_ends_a_wait(kind: str) -> None:
    how, took, waiting = on_processes(2, _interrupted, kind)[0]
    assert how == "interrupted"
    assert took < AFTER_S + SEEN_S
    assert not waiting


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gather_messages", "all_to_all", "all_to_all, receives first"])
def test_ctrl_c_ends_any_wait(kind: str) -> None:
    test_ctrl_c_ends_a_wait(kind)
