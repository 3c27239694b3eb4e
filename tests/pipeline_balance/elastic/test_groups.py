"""Groups that fail to be made: processes go on counting alike, and make again what is lacking."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pipeline_balance.elastic import groups as module
from pipeline_balance.elastic.groups import Groups


class _Group:
    """Stands for a process group: this process, rank 0, is number `rank` in it."""

    rank, given_up = 0, False

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def abort(self) -> None:
        self.given_up = True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `new_group` is asked for on process 0, by which thread; groups of rank 3 fail."""
    found: list[tuple[Any, ...]] = []

    def new_group(ranks: list[int], *, timeout: timedelta, **_: Any) -> None:
        found.append((ranks, timeout.total_seconds(), threading.current_thread().name))
        if 3 in ranks:
            raise RuntimeError(f"attempt {len(found)}")

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module, "ProcessGroupCollective", _Group)
    return found


def test_a_group_that_fails_is_tried_as_often_as_one_that_is_made(asked: list[tuple[Any, ...]]) -> None:
    groups = Groups(7.0)
    words = groups.make([((0, 3), "stages"), ((1, 3), "stages"), ((0, 1), "stages"), ((0,), "replicas")])
    assert words == "stages of ranks [0, 3]: attempt 1"
    assert [ranks for ranks, *_ in asked] == [r for r in ([0, 3], [1, 3], [0, 1]) for _ in range(2)]
    assert {tuple(how) for _, *how in asked} == {(7.0, "makes groups")}
    assert groups.get((0,), "replicas").size == 1
    made: Any = groups.get((0, 1), "stages")
    groups.undo()
    assert made.given_up
    for members, purpose in (((0, 1), "stages"), ((0,), "replicas")):
        with pytest.raises(KeyError):
            groups.get(members, purpose)
    groups.close()


def test_what_was_kept_is_not_undone(asked: list[tuple[Any, ...]]) -> None:
    groups = Groups(7.0)
    assert groups.make([((0, 1), "stages")]) == ""
    groups.keep()
    assert groups.make([((0, 1), "stages"), ((0, 2), "stages")]) == ""
    assert [ranks for ranks, *_ in asked] == [[0, 1], [0, 1], [0, 2], [0, 2]]
    groups.undo()
    groups.get((0, 1), "stages")
    with pytest.raises(KeyError):
        groups.get((0, 2), "stages")
    groups.close()


def test_members_in_another_order_than_they_were_asked_for_are_an_error(asked: list[tuple[Any, ...]]) -> None:
    groups = Groups(7.0)
    assert groups.make([((1, 0), "stages")]) == "stages of ranks [1, 0]: rank 0 is number 0 in a group of [1, 0]"
    groups.close()
