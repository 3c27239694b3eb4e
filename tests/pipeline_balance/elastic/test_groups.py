"""Groups that fail to be made: processes go on counting alike, and make again what is lacking."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline_balance.elastic import groups as module
from pipeline_balance.elastic.groups import SHARDS, Groups
from prophet.errors import CollectiveTimeout
from prophet.ranks.operation import Operation


class _Group:
    """Stands for a process group: this process, rank 0, is number `rank` in it."""

    rank, given_up = 0, False

    def __init__(self, *given: Any, **options: Any) -> None:
        self.made_of = given, options

    def abort(self) -> None:
        self.given_up = True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `new_group` is asked for on process 0, by which thread; groups of rank 3 fail."""
    found: list[tuple[Any, ...]] = []

    def new_group(ranks: list[int], *, timeout: timedelta, backend: str = "", **more: Any) -> str:
        given = ranks, timeout.total_seconds(), backend
        found.append((*given, threading.current_thread().name, more.get("sort_ranks", True)))
        if 3 in ranks:
            raise RuntimeError(f"attempt {len(found)}")
        return f"group {len(found)}"

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module, "host_too", lambda: "both")
    monkeypatch.setattr(module, "like", lambda group, limit: {"timeout": limit})
    monkeypatch.setattr(module, "ProcessGroupCollective", _Group)
    return found


def test_a_group_that_fails_is_tried_as_often_as_one_that_is_made(asked: list[tuple[Any, ...]]) -> None:
    groups = Groups(7.0)
    words = groups.make([((0, 3), "stages"), ((1, 3), "stages"), ((0, 1), "stages"), ((0,), "replicas")])
    assert words == "stages of ranks [0, 3]: attempt 1"
    assert [ranks for ranks, *_ in asked] == [r for r in ([0, 3], [1, 3], [0, 1]) for _ in range(2)]
    assert [how for _, *how in asked] == [[limit_s, "both", "makes groups", True] for limit_s in (7.0, *[0.5] * 5)]
    assert groups.get((0,), "replicas").size == 1
    made: Any = groups.get((0, 1), "stages")
    groups.undo()
    assert made.given_up
    for members, purpose in (((0, 1), "stages"), ((0,), "replicas")):
        with pytest.raises(KeyError):
            groups.get(members, purpose)
    groups.close()


def test_no_group_is_tried_where_a_process_does_not_come(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group would wait for it anew. All processes try none, so they go on counting alike."""
    groups, wanted = Groups(7.0), [((0, 1), "stages"), ((0, 2), "stages")]
    waits: list[float] = []

    def late(op: Operation, *, timeout_s: float, beside: bool) -> None:
        waits.append(timeout_s)
        raise CollectiveTimeout(0, op, "rank 2 does not come")

    with monkeypatch.context() as patch:
        patch.setattr(module, "meet", late)
        with pytest.raises(CollectiveTimeout, match="rank 2 does not come"):
            groups.make(wanted)
    assert (waits, asked) == ([7.0], [])
    groups.undo()
    assert groups.make(wanted) == ""
    monkeypatch.setattr(module, "meet", late)
    assert groups.make(wanted) == "", "nobody waits where nothing is to be made"
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


def test_members_in_another_order_than_they_were_asked_for_are_an_error(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = Groups(7.0)
    # torch 2.11 sorts members, which is said before any group is made
    monkeypatch.setattr(module, "_KEEPS_ORDER", False)
    assert "this version of torch sorts a group's members" in groups.make([((1, 0), "stages")])
    assert not asked
    monkeypatch.setattr(module, "_KEEPS_ORDER", True)
    assert groups.make([((1, 0), "stages")]) == "stages of ranks [1, 0]: rank 0 is number 0 in a group of [1, 0]"
    assert [row[-1] for row in asked] == [False] * 2, "not sorted"
    groups.close()


def test_a_collective_has_two_groups_and_one_for_shards_has_one(asked: list[tuple[Any, ...]]) -> None:
    groups, pair, shards = Groups(7.0), ((0, 1), "stages"), ((0, 2), SHARDS)
    assert groups.make([pair, shards, pair, ((2,), "stages")]) == ""
    assert [row[:3] for row in asked] == [([0, 1], 7.0, "both")] * 2 + [([0, 2], 7.0, "")]
    found: list[Any] = [groups.get(*key) for key in (pair, shards)]
    assert found[0].made_of == (("group 1",), {"timeout_s": 7.0, "channels": ("group 1", "group 2")})
    assert found[1].made_of == (("group 3",), {"timeout_s": 7.0, "channels": ("group 3", "group 3")})
    with pytest.raises(KeyError, match=r"this process is not one of \[2\]"):
        groups.get((2,), "stages")
    groups.close()


def test_a_group_that_cannot_be_given_back_is_a_warning(asked: list[tuple[Any, ...]]) -> None:
    """The step is made by then, and the other processes go on."""
    groups, closed = Groups(7.0), []
    assert groups.make([((0, 1), "stages"), ((0, 2), "stages"), ((0,), "replicas")]) == ""
    first, second = (groups.get(members, "stages") for members in ((0, 1), (0, 2)))

    def fail() -> None:
        raise RuntimeError("not now")

    first.close, second.close = fail, lambda: closed.append(2)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="a process group of an old layout was not given back: not now"):
        groups._destroy([((0, 1), "stages"), ((0, 2), "stages")])
    assert closed == [2]
    assert list(groups._made) == [((0,), "replicas")]
    groups.close()


def test_groups_are_made_on_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins on the first device, where all ranks would meet in a group's first call."""
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: chosen.append((index, threading.current_thread().name))
    )
    groups = Groups(timeout_s=5.0)
    try:
        assert groups.beside(lambda: 7).result(20.0) == 7
    finally:
        groups.close()
    assert chosen == [(3, "makes groups")]
