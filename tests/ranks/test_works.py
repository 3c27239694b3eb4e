"""Groups: all are tried, whichever fails, and know the host; what is short goes to all ranks at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from prophet.errors import CollectiveError, OutOfStep
from prophet.ranks import process_group
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.ranks.works import SHORT_BYTES, abort, all_made, coming, first_calls, host_too, outlast
from tests.helpers.launch import run_gloo


def test_groups_behind_one_that_fails_are_tried_and_its_failure_is_raised() -> None:
    tried: list[int] = []

    def making(number: int) -> Callable[[], int]:
        def make() -> int:
            tried.append(number)
            if number in (1, 2):
                raise (RuntimeError if number == 2 else ValueError)(f"group {number}")
            return number

        return make

    with pytest.raises(ValueError, match="group 1"):
        all_made([making(number) for number in range(4)])
    assert tried == [0, 1, 2, 3]
    assert all_made([making(0), making(3)]) == [0, 3]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("xpu:xccl", "cpu:gloo,xpu:xccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),  # not the world's, which is torch's default
        ("cpu:gloo,cuda:gloo", None),
        ("cpu:mpi", "cpu:mpi"),
    ],
)
def test_new_groups_know_the_host(given: str, made: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {None: "cpu:gloo,cuda:gloo", "group": given}
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: configs[group])
    group: Any = "group"
    assert host_too(group) == made
    assert host_too() is None


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_all_backends_of_a_group_are_given_up(backends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = mock.Mock(**{"size.return_value": 3, "rank.return_value": 1})
    received: list[int] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(dist, "irecv", lambda *_, group_src, **__: received.append(group_src) or mock.Mock())
    abort(group)
    assert group.abort.called == ("nccl" in backends)
    assert received == ([0, 2] if "gloo" in backends else [])


@pytest.mark.parametrize("there", [True, False])
def test_new_groups_are_used_once_on_the_device_in_a_stream_of_its_own(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    stream = mock.MagicMock()
    stream.__enter__.side_effect = lambda *_: done.append("enter")
    stream.__exit__.side_effect = lambda *_: done.append("leave")
    stream.synchronize.side_effect = lambda: done.append("wait")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,meta:nccl" if "d" in group else "cpu:gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: done.append(f"{x.device} {group}"))
    groups: Any = ["d1", "d2", "host", "d1"]  # both channels may be one group
    first_calls(groups)
    assert done == (["enter", "meta d1", "meta d2", "leave", "wait"] if there else [])


def test_the_limit_of_a_backend_that_ends_processes_comes_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's ends them without a name; gloo's waits have to end at the limit itself."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl,xpu:gloo")
    group = mock.MagicMock()
    outlast([group, group], 40.0)
    group._get_backend.assert_called_once_with(torch.device("cuda"))
    group._get_backend.return_value.set_timeout.assert_called_once_with(timedelta(seconds=40))
    assert hasattr(dist.ProcessGroupGloo, "set_timeout")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_waits_on_a_device_has_ended_for_the_host_on_all_ranks_alike(device: str) -> None:
    work = mock.Mock(**{"is_completed.return_value": False})
    pending = coming([work], torch.empty(2, device=device), None, lambda works: None)
    assert pending.ended() == (device != "cpu")


def _gathered(rank: int, size: int) -> list[bool]:
    """Whether short and long tensors of several types go directly; what comes is compared."""
    collective = ProcessGroupCollective(timeout_s=20.0)
    direct: list[int] = []
    inner = process_group.gathered_at_once
    found = []
    with mock.patch.object(process_group, "gathered_at_once", lambda *given: direct.append(1) or inner(*given)):
        for shape, dtype in (
            ((), torch.int64),
            ((2, 3), torch.float64),
            ((SHORT_BYTES,), torch.uint8),
            ((3,), torch.bool),
            ((0,), torch.int64),
            ((SHORT_BYTES + 1,), torch.uint8),
        ):
            direct.clear()
            every = collective.gather_at_once(torch.full(shape, rank + 1).to(dtype), op=Operation("gathering"))
            assert every.dtype == dtype
            assert torch.equal(every, torch.stack([torch.full(shape, r + 1).to(dtype) for r in range(size)]))
            found.append(bool(direct))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_short_goes_from_each_to_all_and_what_is_long_around_the_ring(size: int) -> None:
    assert run_gloo(_gathered, size) == [[True] * 4 + [False] * 2] * size


def _messages(rank: int, size: int, receive_first: bool) -> list[bool]:
    """Whether short and long messages go around the ring."""
    collective = ProcessGroupCollective(timeout_s=20.0, receive_first=receive_first)
    ring: list[int] = []
    inner, found = process_group._all_gather_single, []
    with mock.patch.object(
        process_group, "_all_gather_single", lambda *given, **more: ring.append(1) or inner(*given, **more)
    ):
        # Twice, since messages share one tag
        for numel in (128, 128, SHORT_BYTES // 8, SHORT_BYTES // 8 + 1):
            ring.clear()
            every = collective.gather_messages(torch.arange(numel) + rank, op=Operation("message of a test"))
            assert torch.equal(every, torch.stack([torch.arange(numel) + r for r in range(size)]))
            found.append(bool(ring))
    return found


@pytest.mark.parametrize("receive_first", [False, True])
def test_short_messages_between_hosts_go_from_each_to_all(receive_first: bool) -> None:
    """Around the ring a message would wait R - 1 times behind a transfer."""
    ring = [False, False, False, True] if receive_first else [True] * 4
    assert run_gloo(_messages, 3, receive_first) == [ring] * 3


def _begun(rank: int, size: int) -> bool:
    """Gather a message while Ctrl-C would come at its second send."""
    collective = ProcessGroupCollective(timeout_s=20.0, receive_first=True)
    inner, sends = dist.isend, []

    def isend(*given: Any, **more: Any) -> Any:
        sends.append(1)
        # Python raises it in the main thread alone
        if len(sends) == 2 and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return inner(*given, **more)

    x = torch.arange(128) + rank
    with mock.patch.object(dist, "isend", isend):
        found = collective.gather_messages(x, op=Operation("message of a test"))
    return len(sends) == 2 and torch.equal(found, torch.stack([torch.arange(128) + r for r in range(size)]))


def test_ctrl_c_does_not_come_between_the_sends_of_a_message() -> None:
    """Some ranks would have the message, and others wait for it while this rank goes on."""
    assert run_gloo(_begun, 3) == [True] * 3


def _apart(rank: int, size: int) -> list[str]:
    """What a rank says that meets another one in another gather, and in an all-to-all of less."""
    found = []
    for words in ("said", "exchanged"):
        collective = ProcessGroupCollective(timeout_s=2.0)
        try:
            if rank == 0:
                collective.gather_at_once(torch.zeros(512, dtype=torch.int64), op=Operation("agreeing"))
            elif words == "said":
                collective.gather_at_once(torch.zeros(1, dtype=torch.int64), op=Operation("deciding"))
            else:
                collective.all_to_all(torch.zeros(size, 1), [1] * size, [1] * size, op=Operation("exchanging")).wait()
        except (OutOfStep, CollectiveError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_rank_that_is_elsewhere_is_named_and_no_process_ends() -> None:
    ranks = run_gloo(_apart, 2)
    for rank, op in enumerate(("agreeing", "deciding")):
        assert ranks[rank][0] == f"OutOfStep: rank {rank}: ranks [{1 - rank}] are not in {op}"
    assert [len(said) for said in ranks] == [2, 2], "an all-to-all does not take what was meant for another operation"
